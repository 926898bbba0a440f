"""Unstable communication and anomalous units (sections E.1 and E.2 of the supplement of Chung and Al Kontar 2024).

The extrapolation problem with twenty units, of which unit 1 has lost (0, 1]. Units drop out of rounds with a
probability; or some units send a signal of their own that has nothing to do with the others'. `ft.fedmgp` sums sites,
so it has no robust rule: an anomalous unit is another output whose amplitude on the shared process becomes small.
FedAvg of the same model is averaged by the mean, the median and the trimmed mean. The supplement's figures are not part
of the article, so there is nothing published beside ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, fedmgp_models as fm
from fedtorch.trust import robust

DROPOUTS = (0.0, 0.3, 0.6)
ANOMALOUS = (0, 2, 4)


def problem(units: int, anomalous: int, seed: int) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """(inputs, outputs, unit 1's lost inputs, its lost outputs); the last units' signals are others'."""
    drawn, strange = fm.signals(units, 60, (2, 10), seed), fm.signals(units, 60, (2, 10), seed + 1000)
    x, y = list(drawn.x), list(drawn.y)
    for k in range(units - anomalous, units):
        x[k], y[k] = strange.x[k], 2 * fm.signals(units, 60, (2, 10), seed + 2000 + k).y[k]
    lost = x[0] > 0
    at, truth = x[0][lost], y[0][lost]
    x[0], y[0] = x[0][~lost], y[0][~lost]
    return x, y, at, truth


def error(
    algorithm: ft.Algorithm, problem: tuple[list[Tensor], list[Tensor], Tensor, Tensor], rounds: int, drop: float
) -> float:
    """Unit 1's mean squared error in the lost range."""
    x, y, at, truth = problem
    faults = ft.dropouts(drop) if drop else None
    run = ft.run(algorithm, ft.InProcess(fm.federated(x, y)), faults=faults, rounds=rounds)
    return float((fm.predict(run.client_module(0), at).mean - truth).square().mean())


def algorithms(units: int) -> dict[str, ft.Algorithm]:
    """The exact sums, and FedAvg of the same model with three ways of averaging."""
    inducing = fm.inducing()
    rules = {"median": robust.median(), "trimmed mean, 25 %": robust.trimmed_mean(0.25)}
    ways = {"mean": None, **{name: robust.star(rule) for name, rule in rules.items()}}
    found = {"fedmgp": ft.fedmgp(fm.model(inducing), accept_disclosure=True)}
    for name, exchange in ways.items():
        found[f"FedAvg, {name}"] = ft.fedmgp_average(fm.published(inducing), units=units, lr=0.03, exchange=exchange)
    return found


def draw(columns: dict[str, dict[str, list[float]]]) -> Figure:
    """The mean errors by setting and method, with two standard errors over seeds."""
    figure, axes = common.subplots(figsize=(8, 3.8))
    names = list(next(iter(columns.values())))
    for i, name in enumerate(names):
        at = np.arange(len(columns)) + 0.2 * (i - 1.5)
        errors = [column[name] for column in columns.values()]
        means, bars = [float(np.mean(e)) for e in errors], [2 * (common.standard_error(e) or 0.0) for e in errors]
        axes.bar(at, means, 0.2, yerr=bars, ecolor="0.3", label=name, color=f"C{i}")
    axes.axhline(fm.NOISE**2, color="0.5", linestyle="--", linewidth=1, label="noise alone")
    axes.set_yscale("log")
    axes.set_xticks(
        range(len(columns)), [name.replace(" drop", "\ndrop").replace(" anom", "\nanom") for name in columns]
    )
    axes.set_ylabel("MSE in the lost range")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every method in every setting, prints a table and draws it."""
    options = common.arguments(__doc__).parse_args(argv)
    units, rounds, slow = (5, 10, 10) if options.smoke else (20, 60, 600)
    settings = {f"{p:.0%} drop out": (p, 0) for p in DROPOUTS}
    settings |= {f"{count} of {units} anomalous": (0.0, count) for count in ANOMALOUS[1:]}
    if options.smoke:
        settings = {name: settings[name] for name in list(settings)[1:4:2]}
    rows, columns = [], {}
    for setting, (drop, anomalous) in settings.items():
        columns[setting] = {}
        for name, algorithm in algorithms(units).items():
            count = rounds if name == "fedmgp" else slow
            values = [error(algorithm, problem(units, anomalous, s), count, drop) for s in range(options.seeds)]
            columns[setting][name] = values
            rows.append(common.row(setting, f"{name} MSE", values))
    lines = [
        [setting, *(common.mean_with_error(e, ".4f") for e in found.values())] for setting, found in columns.items()
    ]
    title = f"Unit 1's lost half, {units} units of 60 points, {options.seeds} seeds, {rounds} rounds (FedAvg {slow})"
    common.show(title, ["MSE ± standard error", *algorithms(units)], lines)
    common.finish("fedmgp_faults", rows, options, lambda: {"fedmgp_faults": draw(columns)})


if __name__ == "__main__":
    main()
