"""A cost model of rounds: constants measured here, checked here, and what they say of machines that are not here.

The formulas and all that is assumed are in `cost_formulas`. Constants come from one process, from two ranks, and from
sites over gRPC: one, six in a process each, and thirty in one; the model is then compared with rounds that it has not
seen. Rounds are the quickest of many, for the machine may have other work. `--write` puts the tables into
`results/cost_model.md`.

`--kernels` is another table alone: what every program of `fedtorch.programs` can save on an H100 and on this processor.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import fedtorch as ft
from experiments import common
from experiments.benchmarks import remote
from experiments.benchmarks.parts import cost_formulas as formulas, cpu_programs, kernel_bounds, measure, scaling_ranks
from experiments.benchmarks.parts.cost_formulas import Cluster, Here, Wide
from experiments.benchmarks.parts.remote_problem import averaged
from fedtorch.sites import Policy, Remote, SiteConfiguration
from fedtorch.sites.rounds.site import Site

FIT = (100, 10_000)  # clients of the rounds that give a and b
SEEN = (1000, 30_000)  # of those that check them
SHARED = 30  # sites of the process that gives c′
MESSAGE = 1_000_000  # parameters, for the work that a byte makes
RESULTS = Path(__file__).parents[1] / "results" / "cost_model.md"
KERNELS = RESULTS.with_name("kernel_bounds.md")
PARAMETERS = 9  # of the linear model over ranks
ASSUMED_OF_GPUS = """
Assumed, not measured: no such machine was at hand. An H100 SXM at 30 % of its published float32 rate (67 Tflop/s) and
70 % of its memory's bandwidth (3.35 TB/s), 60 kernels of 10 µs a stacked step; NVLink 4 (450 GB/s each way) at 70 %,
3 µs a hop; a 400 Gbit/s InfiniBand adapter for each GPU at 80 %, 8 µs a hop. What Python takes in a round is measured
here, on a processor. Clients are equal, and stacked on each GPU as many at once as fit.
"""
ASSUMED_OF_SITES = """
Assumed, not measured: a line of 50 ms there and back, sites with 20 Mbit/s up and 100 Mbit/s down and a processor ten
times slower than this one, a server's link of 10 Gbit/s. The server's work is that of one processor, measured here;
parameters travel in float32. Sites are those that answer in a round: of a million, the cohort.
"""
LIMITS = """
What the software adds: a hub has a thread for every connection, and takes 256 of them unless its limits say more; more
than 200 have not been tried over TLS. A tree of servers is not built: its rows say what it would be worth. A site may
hold many clients, so that a million clients at a thousand sites are the rows of a thousand.

A process lets as many of its sites compute at once as it has processors: where all
do, their threads wait for each other at every operation, and 60 sites took twice the processor time.
"""


class Sites(NamedTuple):
    """Seconds of a round over sites."""

    round: float
    server: float  # processor time
    sites: float  # of all of them


class Direct:
    """A hub whose sites answer at once and in this thread, so that a server's own work can be told from theirs."""

    def __init__(self, offers: dict[str, SiteConfiguration]) -> None:
        self.sites = {name: Site(configuration) for name, configuration in offers.items()}
        self.connected = frozenset(self.sites)
        self.came = deque((name, site.hello()) for name, site in self.sites.items())
        self.spent = 0.0  # seconds of the sites

    def send(self, peer: str, frame: bytes, answers: int = 1) -> None:
        """To a site, which answers."""
        began = time.perf_counter()
        answer = self.sites[peer].answer(frame)
        self.spent += time.perf_counter() - began
        if answer is not None:
            self.came.append((peer, answer))

    def receive(self, seconds: float) -> tuple[str, bytes]:
        """The next answer."""
        if not self.came:
            raise TimeoutError
        return self.came.popleft()

    def drop(self, peer: str, reason: str) -> None:
        """Not here."""
        raise RuntimeError(reason)


def server_work(parameters: int, sites: int, rounds: int = 7) -> float:
    """Seconds of a server's work for a site with a model of so many parameters, without a transport."""
    module = torch.nn.Linear(parameters, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    names, rows = [str(k) for k in range(sites)], (torch.ones(1, parameters), torch.ones(1))
    make = lambda: ft.fedavg(ft.gradient_descent(module, steps=1, loss=_loss, optimizer=_sgd))
    offers = {
        name: SiteConfiguration(ft.data.from_tensors([rows], [name]), {"it": make}, Policy(minimum=1)) for name in names
    }
    host = Direct(offers)
    run = ft.Run(make(), Remote(host, names, "it", quorum=1.0), seed=0)  # type: ignore[arg-type]
    found = []
    for _ in range(rounds):
        host.spent, began = 0.0, time.perf_counter()
        run.step()
        found.append((time.perf_counter() - began - host.spent) / sites)
    return min(found)


def over_sites(processes: Sequence[Sequence[str]], rounds: int) -> Sites:
    """What a round over real processes takes."""
    with remote.serving(processes) as (host, names, numbers):
        run = ft.Run(averaged(), remote.population(host, names, "averaged"), seed=0)
        measure.round_seconds(run, 3)
        before = [remote.processor_seconds(each) for each in ([os.getpid()], numbers)]
        seconds = measure.round_seconds(run, rounds)
        after = [remote.processor_seconds(each) for each in ([os.getpid()], numbers)]
        server, sites = ((b - a) / rounds for a, b in zip(before, after))
    return Sites(min(seconds), server, sites)


def alone(count: int) -> list[list[str]]:
    """So many sites, each in a process of its own."""
    return [[str(k)] for k in range(count)]


def line(rounds: int) -> float:
    """Seconds of a short frame to a site and back."""
    with remote.serving(alone(1)) as (host, names, _):
        remote.population(host, names, "averaged")
        return min(common.seconds(lambda: remote.echo(host, names[0])) for _ in range(rounds))


def constants(small: bool) -> tuple[Here, dict[int, dict[str, float]]]:
    """(what the formulas need, rounds over one and two ranks)."""
    ranks = scaling_ranks.least(1 if small else 5, sorted({*FIT, *SEEN}))
    low, high = (ranks[1][scaling_ranks.titled(count)] for count in FIT)
    client = (high - low) / (FIT[1] - FIT[0])
    short, long = (ranks[2][f"sum of {numbers}"] for numbers in scaling_ranks.SUMS)
    few, many = (over_sites(alone(count), 50 if small else 600) for count in (1, 6))
    shared = over_sites([[str(k) for k in range(SHARED)]], 20 if small else 100)
    asked = (many.server - few.server) / 5
    light, heavy = (server_work(parameters, 2 if small else 10) for parameters in (10, MESSAGE))
    here = Here(
        round=low - client * FIT[0],
        client=client,
        meet=0.0,
        hop=short / 2,
        pace=8 * scaling_ranks.SUMS[1] / (long - short),
        line=line(50 if small else 500),
        server=few.server - asked,
        asked=asked,
        site=many.sites / 6,
        shared=shared.sites / SHARED,
        byte=(heavy - light) / (2 * 4 * MESSAGE),
    )
    met = ranks[2][scaling_ranks.titled(FIT[0])] - formulas.over_ranks(here, FIT[0], 2, 8 * PARAMETERS)
    return here._replace(meet=max(met, 0.0)), ranks


def checks(here: Here, ranks: dict[int, dict[str, float]], small: bool) -> list[list[str]]:
    """Lines of (what, predicted, measured, ratio), of rounds that gave no constants."""
    lines = []
    for count, processes in [*((k, 1) for k in SEEN), *((k, 2) for k in sorted({*FIT[1:], *SEEN}))]:
        seconds = ranks[processes][scaling_ranks.titled(count)]
        told = formulas.over_ranks(here, count, processes, 8 * PARAMETERS)
        lines.append(_line(f"{count} clients over {processes} process{'es' * (processes > 1)}", told, seconds))
    cores = len(os.sched_getaffinity(0))
    for sites, each in ((3, 1), (20, 1), (180, 180)) if not small else ((3, 1), (6, 6)):
        names = alone(sites) if each == 1 else [[str(k) for k in range(sites)]]
        seconds = over_sites(names, 600 if sites == 3 and not small else 30).round
        where = "each in a process" if each == 1 else "all in one process"
        lines.append(_line(f"{sites} sites, {where}", formulas.over_sites(here, sites, each, cores), seconds))
    return lines


def gpus(here: Here, cluster: Cluster) -> list[list[str]]:
    """Lines of (work, a round on one GPU, on one node, on all, of that sums, efficiency)."""
    lines = []
    for work in formulas.WORKS:
        one, node, every = (formulas.on_gpus(work, cluster, here, n) for n in (1, cluster.gpus, cluster.ranks))
        kept = one.seconds / (cluster.ranks * every.seconds)
        seconds = [f"{each:.3g}" for each in (one.seconds, node.seconds, every.seconds, every.talk)]
        lines.append([work.name, *seconds, f"{100 * kept:.0f} %"])
    return lines


def world(here: Here, wide: Wide) -> list[list[str]]:
    """Lines of (sites that answer, parameters, servers, seconds, what takes most of it and its part)."""
    lines = []
    for sites, servers in ((100, 1), (1000, 1), (10_000, 1), (10_000, 100), (1_000_000, 1), (1_000_000, 1000)):
        for parameters in (10_000, 1_000_000, 10_000_000):
            parts = formulas.over_the_world(here, wide, sites, 4.0 * parameters, servers)
            seconds, most = sum(parts.values()), max(parts, key=lambda name: parts[name])
            share = f"{100 * parts[most] / seconds:.0f} %"
            lines.append([f"{sites}", f"{parameters}", f"{servers}", f"{seconds:.3g}", most, share])
    return lines


def markdown(here: Here, lines: dict[str, list[list[str]]], before: float) -> str:
    """All tables."""
    command = "`python -m experiments.benchmarks.cost_model --write`"
    text = ["# What a round costs: a model", "", f"Measured with {command} on", *measure.circumstances(before), ""]
    text += ["## Formulas", "", *(formulas.__doc__ or "").strip().splitlines()[2:], ""]
    text += ["## Constants measured here", "", *measure.table(["", "value"], named(here)), ""]
    text += ["## The model beside rounds that it has not seen", ""]
    text += [*measure.table(["", "predicted, ms", "measured, ms", "predicted / measured"], lines["checks"]), ""]
    text += ["## 16 nodes of 8 GPUs", "", *ASSUMED_OF_GPUS.strip().splitlines(), ""]
    columns = ["work", "s a round, one GPU", "one node", "all", "of that, meeting", "efficiency"]
    text += [*measure.table(columns, lines["gpus"]), ""]
    text += ["## A million sites", "", *ASSUMED_OF_SITES.strip().splitlines(), ""]
    columns = ["sites", "parameters", "servers below it", "s a round", "most of it", "its part"]
    text += [*measure.table(columns, lines["world"]), "", *LIMITS.strip().splitlines(), ""]
    return "\n".join(text)


def named(here: Here) -> list[list[str]]:
    """The constants in words."""
    return [
        ["a, a round in one process (linear model, 8 features, 40 rows, 5 steps)", f"{1e3 * here.round:.3g} ms"],
        ["b, a client in it", f"{1e6 * here.client:.3g} µs"],
        ["h, Python's part in a round's sum over ranks", f"{1e3 * here.meet:.3g} ms"],
        ["α, a step of a sum between two processes (gloo, loopback)", f"{1e6 * here.hop:.3g} µs"],
        ["β, the pace of a sum between them", f"{here.pace / 1e9:.3g} GB/s"],
        ["L, a short frame to a site and back (gRPC with TLS, loopback)", f"{1e3 * here.line:.3g} ms"],
        ["r, processor time of the server in a round", f"{1e3 * here.server:.3g} ms"],
        ["s, processor time of the server for a site", f"{1e3 * here.asked:.3g} ms"],
        ["c, processor time of a site in a round", f"{1e3 * here.site:.3g} ms"],
        ["c′, the same in a process that has other sites, too", f"{1e3 * here.shared:.3g} ms"],
        ["w, the server's work for a byte of a message", f"{1e9 * here.byte:.3g} ns"],
    ]


def of_kernels(options: argparse.Namespace, before: float) -> None:
    """Show and write what programs can save."""
    lines = kernel_bounds.lines(options.smoke)
    ratios = {"H100": 7, "here": 10}
    rows = [
        common.Row(line[0], f"ratio, {name}", float(line[place])) for line in lines for name, place in ratios.items()
    ]
    common.show_rows(f"kernels ({common.machine()})", rows, ".4g")
    common.finish("benchmarks.kernel_bounds", rows, options)
    if options.write:
        command = "`python -m experiments.benchmarks.cost_model --kernels --write`"
        text = ["# What programs can save: bounds", "", f"By {command} on", *measure.circumstances(before), ""]
        text += [*(kernel_bounds.__doc__ or "").strip().splitlines()[2:], ""]
        text += [*measure.table(kernel_bounds.COLUMNS, lines), "", "## As C++ by torch.compile", ""]
        cpp = [kernel_bounds.compiled(name, options.smoke) for name in kernel_bounds.CASES]
        text += [*kernel_bounds.ABOUT_COMPILED.strip().splitlines(), "", *measure.table(kernel_bounds.COMPILED, cpp)]
        text += ["", "## As programs of the CPU by numba", "", *(cpu_programs.__doc__ or "").strip().splitlines(), ""]
        text += measure.table(
            cpu_programs.COLUMNS, [cpu_programs.line(name, options.smoke) for name in cpu_programs.WORK]
        )
        common.write_results(KERNELS, "\n".join([*text, ""]))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the constants, checks the model and prints what it says."""
    parser = common.arguments(__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into results/cost_model.md")
    parser.add_argument("--kernels", action="store_true", help="bounds of the programs only; with --write their page")
    options = parser.parse_args(argv)
    before = os.getloadavg()[0]
    if options.kernels:
        of_kernels(options, before)
        return
    with common.quiet():
        here, ranks = constants(options.smoke)
        lines = {"checks": checks(here, ranks, options.smoke)}
    lines |= {"gpus": gpus(here, Cluster()), "world": world(here, Wide())}
    rows = [common.Row("constants", name, value) for name, value in here._asdict().items()]
    rows += [common.Row(line[0], "predicted / measured", float(line[-1])) for line in lines["checks"]]
    common.show_rows(f"cost_model ({common.machine()})", rows, ".4g")
    common.finish("benchmarks.cost_model", rows, options)
    if options.write:
        common.write_results(RESULTS, markdown(here, lines, before))


def _line(what: str, told: float, seconds: float) -> list[str]:
    return [what, f"{1000 * told:.3g}", f"{1000 * seconds:.3g}", f"{told / seconds:.2f}"]


def _loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - y).square().mean()


def _sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-9)


if __name__ == "__main__":
    main()
