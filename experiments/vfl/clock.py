"""A server that goes on by its clock while one of two parties is late: what it costs in time, and in bias.

The augmented Gaussian regression whose posterior is known: two parties with two columns each, ρ = σ = 1. Its guide has
an encoder at the server (`sums`) and an own q for each party, whose means are exact at the optimum. One party answers
at once, the other's messages are late by 0 to 16 ticks of the server (`ft.vfl.NodesRun(…, delays=…)`).

From zero, at Adam's rate 0.02, "ticks to come within one sd" counts those until all means stay within one of the
posterior's sds of its means; a server that waits would take those of no delay times delay + 1. Then, from where the fit
without delay has arrived, as many ticks again with each delay and at two rates: "error of means" is the largest of the
time average of q's means over the last half less the posterior's, in its sds, which without delay is the noise of the
average and the floor of what can be seen; "fluctuation" is the sd over these ticks and no bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import common, result_pages
from experiments.vfl import oracles
from fedtorch import random, vfl
from fedtorch.vfl.model import likelihoods

WIDTHS, ROWS, RHO, SD = (2, 2), 60, 1.0, 1.0
DELAYS, RATES = (0, 1, 4, 16), (0.02, 0.005)
READING = result_pages.Reading(smaller="error|ticks|fluctuation")


class Course(NamedTuple):
    """Means of all coefficients by tick, the sds of q at the end, and where it ended."""

    means: Tensor  # (ticks, d)
    sds: Tensor  # (d,)
    end: vfl.Parameters


def late(ticks: int, party: int, number: int) -> int:
    """The second party's messages are so many ticks late."""
    return ticks if party == 1 else 0


def regression(seed: int, rows: int) -> tuple[vfl.VerticalData, Tensor, Tensor]:
    """Data, and mean and sd of the posterior of their coefficients."""
    keys = [random.fold_in(random.key(seed), i) for i in range(3)]
    width = sum(WIDTHS)
    x = random.normal(keys[0], (rows, width), torch.float64)
    noise = SD * random.normal(keys[2], (rows,), torch.float64)
    y = x @ random.normal(keys[1], (width,), torch.float64) + noise
    variance = SD**2 + len(WIDTHS) * RHO**2
    covariance = torch.linalg.inv(x.mT @ x / variance + torch.eye(width, dtype=x.dtype))
    return vfl.VerticalData(x.split(WIDTHS, 1), y), covariance @ x.mT @ y / variance, covariance.diagonal().sqrt()


def fit(
    data: vfl.VerticalData, delay: int, lr: float, ticks: int, seed: int, start: vfl.Parameters | None = None
) -> Course:
    """A fit among nodes, by the server's clock."""
    model = vfl.augmented(likelihoods.gaussian(SD), [vfl.linear(w) for w in WIDTHS], RHO, intercept=False)
    guide, key = vfl.Guide(vfl.sums(skewed=False)), random.fold_in(random.key(seed), 0 if start is None else 1)
    whole, nodes = oracles.nodes(model, guide, data, key, partial(torch.optim.Adam, lr=lr), start)
    run = vfl.NodesRun(whole, nodes, delays=partial(late, delay))
    means = []
    for _ in run.rounds(ticks):
        means.append(torch.cat([node.q["theta"]["mean"][0].detach().clone() for node in nodes]))
    sds = [guide.theta.covariance(node.q["theta"])[0].diagonal().sqrt().detach() for node in nodes]
    return Course(torch.stack(means), torch.cat(sds), vfl.Parameters(None, whole.q, tuple(node.q for node in nodes)))


def figures(of: Course, mean: Tensor, sd: Tensor) -> dict[str, float]:
    """What the table shows of a fit that has arrived."""
    tail = of.means[len(of.means) // 2 :]
    return {
        "error of means, in sds": float(((tail.mean(0) - mean) / sd).abs().max()),
        "fluctuation of means, in sds": float((tail.std(0) / sd).max()),
        "ratio of sds to the posterior's": float((of.sds / sd).mean()),
    }


def arrival(of: Course, mean: Tensor, sd: Tensor) -> float:
    """How many ticks it takes until all means stay within one sd."""
    away = ((of.means - mean) / sd).abs().amax(1) > 1
    return float(away.nonzero().max() + 2) if bool(away.any()) else 1.0


def draw(found: dict[tuple[float, int], list[dict[str, float]]], ticks: dict[int, list[float]]) -> Figure:
    """Error and fluctuation against the delay for each rate, and the ticks that it takes."""
    figure, axes = common.subplots(1, 3, figsize=(11, 3.3))
    for axis, name in zip(axes, ("error of means, in sds", "fluctuation of means, in sds")):
        for lr in RATES:
            each = [[run[name] for run in found[lr, delay]] for delay in DELAYS]
            errors = [common.standard_error(values) or 0.0 for values in each]
            axis.errorbar(range(len(DELAYS)), [sum(v) / len(v) for v in each], errors, marker="o", label=f"rate {lr:g}")
        axis.set(ylabel=name, ylim=(0, None))
    means = [sum(ticks[delay]) / len(ticks[delay]) for delay in DELAYS]
    axes[2].plot(range(len(DELAYS)), means, "o-", label="by the clock")
    axes[2].plot(range(len(DELAYS)), [means[0] * (delay + 1) for delay in DELAYS], "o--", label="if the server waited")
    axes[2].set(ylabel="ticks to come within one sd", yscale="log")
    for axis in axes:
        axis.set_xticks(range(len(DELAYS)), [str(delay) for delay in DELAYS])
        axis.set_xlabel("delay of one party, ticks")
        axis.legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Fit with all delays and rates, print the distances from the posterior and draw them."""
    parser = common.arguments(__doc__)
    parser.add_argument("--ticks", type=int, default=1500, help="of a fit, half of them from zero (default 1500)")
    options = parser.parse_args(argv)
    rows, ticks = (20, 10) if options.smoke else (ROWS, options.ticks // 2)
    found: dict[tuple[float, int], list[dict[str, float]]] = {}
    arrivals: dict[int, list[float]] = {delay: [] for delay in DELAYS}
    for seed in range(options.seeds):
        data, mean, sd = regression(seed, rows)
        courses = {delay: fit(data, delay, RATES[0], ticks, seed) for delay in DELAYS}
        for delay, course in courses.items():
            arrivals[delay].append(arrival(course, mean, sd))
        for lr, delay in itertools.product(RATES, DELAYS):
            there = fit(data, delay, lr, ticks, seed, courses[0].end)
            found.setdefault((lr, delay), []).append(figures(there, mean, sd))
    made = [
        row
        for (lr, delay), runs in found.items()
        for row in common.over_seeds(f"rate {lr:g}, one party {delay} ticks late", runs)
    ]
    name = f"from zero, rate {RATES[0]:g}, one party {{}} ticks late"
    made += [common.row(name.format(delay), "ticks to come within one sd", v) for delay, v in arrivals.items()]
    common.show_rows("A server that goes on by its clock", made, ".4f")
    common.finish("vfl.clock", made, options, lambda: {"vfl_clock": draw(found, arrivals)})


if __name__ == "__main__":
    main()
