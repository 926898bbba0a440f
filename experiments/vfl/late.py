"""A server that goes on by its clock in seconds, over gRPC, while one of two parties is late.

The regression of `vfl.clock`, its nodes over streams with certificates on both sides, on one machine. The second party
waits before each of its messages. A server that waits for all takes the time of the slowest; one with a tick of 20 ms
(`ft.vfl.server_half(…, tick=0.02)`) goes on without. Each fit has the same seconds, from zero, at Adam's rate 0.02:
"answers" count how often the server has moved and how often the late party, "seconds to come within one sd" until all
means stay within one of the posterior's sds, the seconds of the fit where they do not; "error of means" is that of the
average over the last half, in sds. Seconds depend on the machine, and so do the other numbers.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import common, result_pages
from experiments.vfl import clock, oracles
from fedtorch import random, vfl
from fedtorch.sites.vertical import over_hub, over_link
from fedtorch.vfl.model import likelihoods

NAMES, TICK, RATE = ("prompt", "late"), 0.02, 0.02
DELAYS = (0.0, 0.05, 0.2)  # seconds
READING = result_pages.Reading(smaller="error|seconds", larger="answers")


class Course(NamedTuple):
    """Means of all coefficients when the server moved, and when; and how often the late party did."""

    means: Tensor  # (moves, d)
    seconds: Tensor  # (moves,)
    late: int


def nodes(data: vfl.VerticalData, seed: int) -> tuple[vfl.ServerNode, list[vfl.PartyNode]]:
    """Nodes with modules of their own."""
    model = vfl.augmented(
        likelihoods.gaussian(clock.SD), [vfl.linear(w) for w in clock.WIDTHS], clock.RHO, intercept=False
    )
    adam = partial(torch.optim.Adam, lr=RATE)
    return oracles.nodes(model, vfl.Guide(vfl.sums(skewed=False)), data, random.key(seed), adam)


def fit(data: vfl.VerticalData, seed: int, delay: float, tick: float | None, seconds: float) -> Course:
    """A fit of so many seconds."""
    (server, _), parties = nodes(data, seed), [nodes(data, seed)[1][j] for j in range(len(NAMES))]
    means, times, late = [], [], [0]
    begin = time.monotonic()

    def iterations(reading: bool) -> Iterator[vfl.Iteration]:
        for step in itertools.count():
            if reading:  # the server, before each move
                means.append(torch.cat([node.q["theta"]["mean"][0].detach().clone() for node in parties]))
                times.append(time.monotonic() - begin)
                if times[-1] > seconds:
                    return
            yield vfl.Iteration(step=step)

    prompt, other = (
        vfl.party_half(party, iterations(False), clocked=True, accept_disclosure=True) for party in parties
    )
    halves = [prompt, oracles.delayed(other, delay, late)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(NAMES)) as pool:
        hub, links = oracles.connected(Path(folder), NAMES)
        try:
            futures = [pool.submit(over_link, half, links[name]()) for half, name in zip(halves, NAMES)]
            over_hub(vfl.server_half(server, iterations(True), tick=600.0 if tick is None else tick), hub, NAMES)
            for future in futures:
                future.result()
        finally:
            hub.close()
    return Course(torch.stack(means), torch.tensor(times), late[0])


def figures(of: Course, mean: Tensor, sd: Tensor) -> dict[str, float]:
    """What the table shows of a fit."""
    away = ((of.means - mean) / sd).abs().amax(1)
    last = int((away > 1).nonzero().max()) if bool((away > 1).any()) else 0
    half = of.means[of.seconds > of.seconds[-1] / 2].mean(0)
    return {
        "seconds to come within one sd": float(of.seconds[min(last + 1, len(of.seconds) - 1)]),
        "error of means, in sds": float(((half - mean) / sd).abs().max()),
        "answers, server": float(len(of.seconds) - 1),
        "answers, late party": float(of.late - 1),
    }


def draw(courses: dict[tuple[float, float | None], Course], mean: Tensor, sd: Tensor) -> Figure:
    """The largest distance of a mean by second, of each server and delay."""
    figure, axes = common.subplots(1, len(DELAYS), figsize=(11, 3.3))
    for axis, delay in zip(axes, DELAYS):
        for tick, label in ((None, "waits for all"), (TICK, f"tick of {1000 * TICK:g} ms")):
            of = courses[delay, tick]
            axis.plot(of.seconds, ((of.means - mean) / sd).abs().amax(1), label=label)
        axis.axhline(1.0, color="0.6", linewidth=0.8)
        axis.set(xlabel="seconds", ylabel="largest distance of a mean, sds", yscale="log")
        axis.set_title(f"one party {1000 * delay:g} ms late", fontsize="medium")
        axis.legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Fit with each server and delay, and draw the courses of the first seed."""
    parser = common.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each fit (default 12)")
    options = parser.parse_args(argv)
    rows, seconds = (20, 0.5) if options.smoke else (clock.ROWS, options.seconds)
    table: dict[tuple[float, float | None], list[dict[str, float]]] = {}
    first: dict[tuple[float, float | None], Course] = {}
    for seed in range(options.seeds):
        data, mean, sd = clock.regression(seed, rows)
        for delay, tick in itertools.product(DELAYS, (None, TICK)):
            course = fit(data, seed, delay, tick, seconds)
            table.setdefault((delay, tick), []).append(figures(course, mean, sd))
            if seed == 0:
                first[delay, tick], drawn = course, (mean, sd)
    made = []
    for (delay, tick), runs in table.items():
        server = "waits for all" if tick is None else f"tick of {1000 * tick:g} ms"
        made += common.over_seeds(f"{server}, one party {1000 * delay:g} ms late", runs)
    common.show_rows("A server by its clock in seconds, over gRPC", made, ".3f")
    common.finish("vfl.late", made, options, lambda: {"vfl_late": draw(first, *drawn)})


if __name__ == "__main__":
    main()
