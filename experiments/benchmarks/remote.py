"""Sites in processes of their own over gRPC with TLS on both sides: what a round costs beyond its computation.

Three sites of two clients each, on this machine's loopback, do FedAvg of a linear model; blocks of rounds take turns
with rounds of the same clients in one process, so that the difference of each pair is what sites cost. Where sites
share few processors, the three computations that a round has in place of one are part of that difference. The same
bytes over bare streams of gRPC, in the same turns, are the part of it that no library over gRPC can spare.

`vertical` has a server and three parties that send each other what a split network's iteration does, and compute
nothing, so that an iteration's time is that of its messages.

`latency` trains a split network of three parties over lines on which every message takes 50 ms, by parties that run
ahead of the server by so many iterations (`party_half(…, delay=)`) and, with 0, by parties that wait.

`many` has 20 sites in a process each and 180 more in one, every one with a connection of its own.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import bare_streams, measure
from experiments.benchmarks.parts.bare_streams import BareServer
from experiments.benchmarks.parts.forked import fork
from experiments.benchmarks.parts.launched import authority, end_with_parent, started
from experiments.benchmarks.parts.proxy import Proxy
from experiments.benchmarks.parts.remote_problem import ALGORITHMS, averaged, clients
from fedtorch.protocol.halves import Half, Receive, Send, together
from fedtorch.sites import Hub, Remote, Roster, SiteConfiguration, connect, join, serve
from fedtorch.sites.identity import identity
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.streams.hub import Limits
from fedtorch.sites.vertical.remote import over_hub, over_link
from fedtorch.vfl.model import likelihoods, split_nn
from fedtorch.vfl.nodes.iteration import party_half, server_half
from fedtorch.vfl.nodes.node import Iteration, PartyNode, ServerNode

LIMITS = Limits(seconds=300.0)
BLOCK = 20  # rounds that take turns
VALUE = torch.ones(1000, dtype=torch.float64)  # of each row, in a vertical iteration
WARM, ITERATIONS = 20, 500
FAR = 0.05  # seconds that a message takes on a slow line
AHEAD = (0, 1, 4)  # iterations
WIDTH = 10  # features of a party


def sites(folder: Path, address: str, names: Sequence[str]) -> None:
    """Takes part as several sites, a thread and a connection each, until their run is over."""

    def one(name: str) -> None:
        dial = partial(connect, address, identity.read(folder / name), LIMITS)
        join(dial, SiteConfiguration(clients([name]), ALGORITHMS), folder / name, timeout=600.0)

    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def party(folder: Path, address: str, names: Sequence[str]) -> None:
    """Takes part as one party of `vertical`."""
    link = connect(address, identity.read(folder / names[0]), LIMITS)
    over_link(sends(), link)
    link.close()


def sends() -> Half:
    """A party's messages: up what it contributes of each row, down the gradient of it."""
    for _ in range(WARM + ITERATIONS):
        yield Send(0, VALUE)
        yield Receive(0, VALUE)


def answers(parties: int) -> Half:
    """The server's messages; returns the seconds of the iterations after the first few."""
    began = 0.0
    for step in range(WARM + ITERATIONS):
        if step == WARM:
            began = time.perf_counter()
        for rank in range(1, parties + 1):
            yield Receive(rank, VALUE)
        for rank in range(1, parties + 1):
            yield Send(rank, VALUE)
    return time.perf_counter() - began


def network() -> ft.vfl.SplitNetwork:
    """A plain split network of three parties, the same in any process."""
    bottoms = [split_nn.mlp(WIDTH, [16], 1) for _ in range(3)]
    return ft.vfl.SplitNetwork(bottoms, likelihoods.bernoulli())


def runs_ahead(folder: Path, address: str, names: Sequence[str], iterations: int) -> None:
    """Takes part as one party of `latency`."""
    link, index = connect(address, identity.read(folder / names[0]), LIMITS), int(names[0])
    x = ft.random.normal(ft.random.key(index), (len(VALUE), WIDTH))
    for ahead in AHEAD:
        own = ft.vfl.VerticalData((x,), torch.full((len(x),), torch.nan))
        node = PartyNode(network().parties[index - 1], own, optimizer=split_adam, per_row=True)
        over_link(party_half(node, [Iteration(step=step) for step in range(WARM + iterations)], delay=ahead), link)
    link.close()


def split_adam(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of every node."""
    return torch.optim.Adam(parameters, lr=1e-3)


@contextmanager
def serving(
    processes: Sequence[Sequence[str]], role: str = "--sites", far: float = 0.0
) -> Iterator[tuple[Hub, list[str], list[int]]]:
    """(a server, the names of its sites, the numbers of their processes); sites of each item run in one.

    Every message takes `far` seconds.
    """
    names = [name for each in processes for name in each]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        own, roster = authority(folder, names), Roster(folder / "roster.json")
        for name in names:
            roster.add(name, identity.fingerprint(identity.read(folder / name).certificate))
        host = serve("127.0.0.1:0", own, roster, LIMITS)
        try:
            with started(role, folder, Proxy(host.port, far).port if far else host.port, processes) as numbers:
                yield host, names, numbers
        finally:
            host.close()


@contextmanager
def bare(count: int, up: int, down: int) -> Iterator[tuple[Callable[[], None], list[int]]]:
    """(a round over bare streams of gRPC, with so many bytes each way for each of `count` sites, their processes)."""
    names = [str(k + 1) for k in range(count)]
    with tempfile.TemporaryDirectory() as temporary:
        server = BareServer(authority(Path(temporary), names), LIMITS, count)
        try:
            with started(f"--bare={up}", Path(temporary), server.port, [[name] for name in names]) as numbers:
                server.meet()
                yield partial(server.round, [bytes(down)] * count), numbers
        finally:
            server.close()


def population(host: Hub, names: Sequence[str], algorithm: str) -> Remote:
    """The sites, once all are there."""
    return Remote(host, names, algorithm, timeout=600.0, seconds=120.0, quorum=1.0)


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds a round of each way, of blocks that take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds // BLOCK):
        for name, work in ways.items():
            began = time.perf_counter()
            for _ in range(BLOCK):
                work()
            found[name].append(1000 * (time.perf_counter() - began) / BLOCK)
    return found


def processor_seconds(processes: Sequence[int]) -> float:
    """That these processes and their threads have used, where the system says it."""
    ticks = 0
    for number in processes:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def processor_milliseconds(work: Callable[[], object], count: int, others: Sequence[int] = ()) -> float:
    """That this process and others use for a call, of so many."""
    numbers = [os.getpid(), *others]
    before = processor_seconds(numbers)
    for _ in range(count):
        work()
    return 1000 * (processor_seconds(numbers) - before) / count


def echo(host: Hub, name: str) -> None:
    """A short frame to a site and back."""
    host.send(name, frames.encode("who"))
    host.receive(60.0)


def rounds(small: bool) -> list[common.Row]:
    """Rounds over three sites beside rounds in one process, and frames alone."""
    count, names = (2 * BLOCK if small else 1000), ["1", "2", "3"]
    with serving([[name] for name in names]) as (host, _, numbers):
        rows = []
        for algorithm, make in ALGORITHMS.items():
            there = ft.Run(make(), population(host, names, algorithm), seed=0)
            here = ft.Run(make(), ft.InProcess(clients(names)), seed=0)
            there.step(), here.step()
            assert there.last is not None
            with bare(len(names), there.last.bytes_up // len(names), there.last.bytes_down // len(names)) as streams:
                ways: dict[str, Callable[[], object]] = {
                    "three sites": there.step,
                    "one process": here.step,
                    "bare streams": streams[0],
                }
                used = processor_milliseconds(there.step, count, numbers)
                alone = processor_milliseconds(here.step, count)
                floor = processor_milliseconds(streams[0], count, streams[1])
                found = in_turns(ways, count)
            extra = [a - b for a, b in zip(found["three sites"], found["one process"])]
            setting = (
                f"{(make.__doc__ or algorithm).split()[0]}, three sites, {len(found['one process']) * BLOCK} rounds"
            )
            rows += [
                common.Row(setting, "ms a round", statistics.median(found["three sites"])),
                common.Row(setting, "ms a round in one process", statistics.median(found["one process"])),
                common.Row(setting, "ms a round beyond that", statistics.median(extra)),
                common.Row(
                    setting,
                    "ms a round of the same bytes over bare streams of gRPC",
                    statistics.median(found["bare streams"]),
                ),
                common.Row(setting, "ms of processor time a round, server and sites together", used),
                common.Row(setting, "ms of processor time a round in one process", alone),
                common.Row(setting, "ms of processor time a round over bare streams", floor),
                common.Row(setting, "bytes down a round", there.last.bytes_down),
                common.Row(setting, "bytes up a round", there.last.bytes_up),
            ]
        echoes = in_turns({"echo": partial(echo, host, "1")}, count)["echo"]
    return [*rows, common.Row("a short frame to a site and back", "ms", statistics.median(echoes))]


def vertical() -> list[common.Row]:
    """Messages of a vertical iteration among three parties, over the transport and in one process."""
    names = ["1", "2", "3"]
    with serving([[name] for name in names], "--parties") as (host, _, _):
        there, traffic = over_hub(answers(len(names)), host, names, timeout=600.0)
    halves = {0: answers(len(names)), **{rank: sends() for rank in range(1, len(names) + 1)}}
    here = together(halves)[0][0]
    setting = f"messages of a vertical iteration, three parties, {len(VALUE)} rows each way"
    return [
        common.Row(setting, "ms", 1000 * there / ITERATIONS),
        common.Row(setting, "ms in one process", 1000 * here / ITERATIONS),
        common.Row(setting, "bytes up", traffic.up / (WARM + ITERATIONS)),
    ]


def latency(iterations: int) -> list[common.Row]:
    """Iterations of a split network over slow lines, by parties that wait and by parties that run ahead."""
    names, seconds, y = ["1", "2", "3"], [], torch.arange(float(len(VALUE))) % 2
    with serving([[name] for name in names], f"--ahead={iterations}", FAR) as (host, _, _):
        for _ in AHEAD:
            made = network()
            node = ServerNode(made.server, ft.vfl.VerticalData((), y), optimizer=split_adam, per_row=True)
            half = clocked(node, [Iteration(step=step) for step in range(WARM + iterations)])
            seconds.append(over_hub(half, host, names, timeout=600.0)[0])
    setting = f"a split network's iteration, three parties, {1000 * FAR:.0f} ms a message, {iterations} iterations"
    each = [common.Row(setting, f"ms, {ahead} ahead", 1000 * s / iterations) for ahead, s in zip(AHEAD, seconds)]
    times = [common.Row(setting, f"times as fast, {a} ahead", seconds[0] / s) for a, s in zip(AHEAD[1:], seconds[1:])]
    return [*each, *times]


def clocked(node: ServerNode, iterations: Sequence[Iteration]) -> Half:
    """The server's half; returns the seconds of the iterations after the first few."""
    yield from server_half(node, iterations[:WARM])
    began = time.perf_counter()
    yield from server_half(node, iterations[WARM:])
    return time.perf_counter() - began


def many(alone: int, together: int) -> list[common.Row]:
    """Rounds of so many sites in processes of their own, and so many in one."""
    names = [str(k) for k in range(alone + together)]
    with serving([*([name] for name in names[:alone]), names[alone:]]) as (host, _, _):
        run = ft.Run(averaged(), population(host, names, "averaged"), seed=0)
        first, later = measure.round_seconds(run, 1), measure.round_seconds(run, 5)
        wanted = ft.run(averaged(), ft.InProcess(clients(names)), rounds=6, seed=0)
        off = max(float((a - b).abs().max()) for a, b in zip(run.server.values(), wanted.server.values()))
    setting = f"{alone} sites in processes of their own and {together} in one"
    return [
        common.Row(setting, "s of the first round", first[0]),
        common.Row(setting, "s of a later round", statistics.median(later)),
        common.Row(setting, "largest difference from one process", off),
    ]


def parts(small: bool) -> measure.Parts:
    """The parts by name."""
    return {
        "rounds": partial(rounds, small),
        "vertical": vertical,
        "latency": partial(latency, 10 if small else 100),
        "many": partial(many, *((2, 4) if small else (20, 180))),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures; or, as `--sites`, `--parties`, `--ahead` or `--bare`, takes part in a measurement."""
    given = list(sys.argv[1:] if argv is None else argv)
    role, _, number = (given or [""])[0].partition("=")
    bodies: dict[str, Callable[..., None]] = {
        "--sites": sites,
        "--parties": party,
        "--ahead": partial(runs_ahead, iterations=int(number or 0)),
        "--bare": partial(bare_streams.site, limits=LIMITS, size=int(number or 0)),
    }
    if role in bodies:
        body = bodies[role]
        numbers = [fork(partial(body, Path(given[1]), given[2], each.split(","))) for each in given[3:]]
        print(*numbers, flush=True)
        threading.Thread(target=end_with_parent, daemon=True).start()
        for each in numbers:
            os.waitpid(each, 0)
    else:
        measure.run("remote", __doc__, parts, given)


if __name__ == "__main__":
    main()
