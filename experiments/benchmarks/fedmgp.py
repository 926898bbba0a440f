"""Exact federated multi-output Gaussian processes beside FedAvg of the same model, to the same bound.

FedAvg is Algorithm 2 of Chung and Al Kontar (2024), at the best of three learning rates, and its goal is set by itself:
the best bound it reaches in its rounds, the bound being that of its own q(g) (the ELBO of all units). Time and floats
are those until a run is first at that bound; both run in this process, in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

import fedtorch as ft
from experiments import common
from experiments.fedmgp import models as fm

RATES = (0.01, 0.03, 0.1)


class Curve(NamedTuple):
    """A run, by round."""

    bound: list[float]
    seconds: list[float]  # so far, without computing the bound
    floats: list[float]  # so far, up and down


def exact(data: ft.data.FederatedData, inducing: torch.Tensor, rounds: int) -> Curve:
    """`ft.fedmgp`, whose server knows the bound."""
    algorithm = ft.fedmgp(fm.model(inducing), accept_disclosure=True)
    return _follow(algorithm, data, rounds, lambda run: float(run.server.bound))


def averaged(data: ft.data.FederatedData, inducing: torch.Tensor, rounds: int, lr: float) -> Curve:
    """`ft.fedmgp_average`, whose bound is computed centrally from its parameters."""
    units = len(data)
    algorithm = ft.fedmgp_average(fm.published(inducing), units=units, steps=5, lr=lr)
    block = data.stack(range(units))
    whole = fm.model(inducing, units=units)
    own = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}

    def bound(run: ft.Run) -> float:
        for name, value in run.tensors().items():
            own[name].data = (value if name in whole.unit_names else value[0]).detach().clone()
        with torch.no_grad():
            part = whole.expected_log_likelihood(block.batch[0], block.batch[1], block.mask)
            return float(part.sum() - whole.divergence())

    return _follow(algorithm, data, rounds, bound)


def _follow(
    algorithm: ft.Algorithm, data: ft.data.FederatedData, rounds: int, bound: Callable[[ft.Run], float]
) -> Curve:
    curve, spent, began = Curve([], [], []), 0.0, time.perf_counter()
    run = ft.Run(algorithm, ft.InProcess(data))
    for _ in run.rounds(rounds):
        spent += time.perf_counter() - began
        curve.bound.append(bound(run))
        curve.seconds.append(spent)
        curve.floats.append((run.bytes_up + run.bytes_down) / 8)
        began = time.perf_counter()
    return curve


def until(curve: Curve, goal: float) -> tuple[float, float]:
    """(seconds, floats) until the bound is first at the goal; infinite if it never is."""
    first = next((i for i, value in enumerate(curve.bound) if value >= goal), None)
    return (float("inf"), float("inf")) if first is None else (curve.seconds[first], curve.floats[first])


def draw(runs: dict[str, Curve]) -> Figure:
    """The bound against floats and against seconds."""
    figure, axes = common.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for name, curve in runs.items():
        axes[0].plot(curve.floats, curve.bound, label=name)
        axes[1].plot(curve.seconds, curve.bound, label=name)
    for axis, label in zip(axes, ("floats up and down so far", "seconds so far")):
        axis.set_xscale("log")
        axis.set_xlabel(label)
    best = max(max(curve.bound) for curve in runs.values())
    axes[0].set_ylim(best - 4000, best + 200)
    axes[0].set_ylabel("bound of the marginal likelihood")
    axes[1].legend(frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run both in turns, print the medians of the ratios and draw the bound against floats and time."""
    options = common.arguments(__doc__).parse_args(argv)
    rounds, most, repeats = (10, 20, 1) if options.smoke else (40, 1500, 3)
    drawn = fm.signals(5, 60 if options.smoke else 200, (2, 10), 0)
    data = fm.federated(drawn.x, drawn.y)
    inducing = fm.inducing()
    tried = {lr: averaged(data, inducing, most, lr) for lr in RATES}
    rate = max(tried, key=lambda lr: max(tried[lr].bound))
    ratios, runs = [], {}
    for _ in range(repeats):
        ours, theirs = exact(data, inducing, rounds), averaged(data, inducing, most, rate)
        goal = max(theirs.bound)
        (fast, few), (slow, many) = until(ours, goal), until(theirs, goal)
        ratios.append((fast, slow, slow / fast, few, many, many / few, max(ours.bound), goal))
        runs = {"sums of sites (ft.fedmgp)": ours, f"FedAvg, lr {rate}": theirs}
    labels = (
        "fedmgp, s",
        "FedAvg, s",
        "times faster (target 20)",
        "fedmgp, floats",
        "FedAvg, floats",
        "times fewer floats (target 2)",
        "best bound of fedmgp, nats",
        "best bound of FedAvg, nats",
    )
    values = [statistics.median(column) for column in zip(*ratios)]
    rows = [common.Row("to the same bound", label, value) for label, value in zip(labels, values)]
    title = f"5 units of {len(drawn.x[0])} points, 30 inducing inputs, FedAvg at lr {rate} ({common.machine()})"
    common.show_rows(title, rows, ".4g")
    common.finish("benchmarks.fedmgp", rows, options, lambda: {"fedmgp_benchmark": draw(runs)})


if __name__ == "__main__":
    main()
