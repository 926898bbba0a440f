"""Unstable communication and anomalous units (sections E.1 and E.2 of the supplement of Chung and Al Kontar 2024).

The extrapolation problem with twenty units, of which unit 1 has lost (0, 1]. Units drop out of rounds with a
probability; or some units send a signal of their own that has nothing to do with the others'. `ft.fedmgp` sums sites:
an anomalous unit is another output, whose amplitude on the shared process becomes small. Where everybody answers, the
sum is also replaced by a robust one, of which the geometric median keeps precisions positive definite. FedMGP-avg is
the source's Algorithm 2 with the rules of its supplement D: changes of the shared parameters by the mean, the median
and the trimmed mean, from a lengthscale of the inducing inputs' distance (`fedmgp.extrapolation` says why). "Arrived"
is the share of seeds whose error is at most a tenth above that of the exact sums of the same setting. The supplement's
figures are not part of the article, so there is nothing published beside ours. Seeds run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.fedmgp import models as fm
from experiments.side_by_side import Joined, side_by_side
from fedtorch.trust import robust

DROPOUTS = (0.0, 0.3, 0.6)
ANOMALOUS = (0, 2, 4)
EXACT, ROBUST = "fedmgp", "fedmgp, geometric median"
ARRIVED = 1.1  # times the error of the exact sums
Problem = tuple[list[Tensor], list[Tensor], Tensor, Tensor]  # of `problem`


def problem(units: int, anomalous: int, seed: int) -> Problem:
    """(inputs, outputs, unit 1's lost inputs, its lost outputs); the last units' signals are others'."""
    drawn, strange = fm.signals(units, 60, (2, 10), seed), fm.signals(units, 60, (2, 10), seed + 1000)
    x, y = list(drawn.x), list(drawn.y)
    for k in range(units - anomalous, units):
        x[k], y[k] = strange.x[k], 2 * fm.signals(units, 60, (2, 10), seed + 2000 + k).y[k]
    lost = x[0] > 0
    at, truth = x[0][lost], y[0][lost]
    x[0], y[0] = x[0][~lost], y[0][~lost]
    return x, y, at, truth


def errors(
    algorithm: ft.Algorithm, problems: Sequence[Problem], rounds: Sequence[int], drop: float
) -> list[list[float]]:
    """Unit 1's mean squared error in the lost range after so many rounds, of every problem; they run side by side."""
    units = len(problems[0][0])
    population = Joined([fm.federated(x, y) for x, y, _, _ in problems])
    together = side_by_side(algorithm, [algorithm.start] * len(problems), units)
    run, found = ft.Run(together, population, faults=ft.dropouts(drop) if drop else None), []
    for count in rounds:
        for _ in run.rounds(count):
            pass
        models = [fm.unit_model(run, r * units) for r in range(len(problems))]
        predicted = [fm.predict(model, at).mean for model, (_, _, at, _) in zip(models, problems)]
        found.append([float((f - truth).square().mean()) for f, (_, _, _, truth) in zip(predicted, problems)])
    return found


def algorithms(units: int) -> dict[str, ft.Algorithm]:
    """The exact sums, a robust one, and averages of the same model by three rules."""
    inducing = fm.inducing()
    rules = {"median": robust.median(), "trimmed mean, 25 %": robust.trimmed_mean(0.25)}
    exact = ft.fedmgp(fm.model(inducing), accept_disclosure=True)
    found = {EXACT: exact, ROBUST: exact | robust.rule(robust.geometric_median())}
    module = fm.published(inducing, lengthscale=fm.spacing(inducing))
    average = ft.fedmgp_average(module, units=units, steps=20, lr=0.01)
    found["FedMGP-avg, mean"] = average
    found.update({f"FedMGP-avg, {name}": average | robust.rule(rule) for name, rule in rules.items()})
    return found


def draw(columns: dict[str, dict[str, list[float]]]) -> Figure:
    """The mean errors by setting and method, with two standard errors over seeds."""
    figure, axes = common.subplots(figsize=(8, 3.8))
    names = max(map(list, columns.values()), key=len)
    for i, name in enumerate(names):
        at = [place + 0.16 * (i - 2) for place, column in enumerate(columns.values()) if name in column]
        errors = [column[name] for column in columns.values() if name in column]
        means, bars = [float(np.mean(e)) for e in errors], [2 * (common.standard_error(e) or 0.0) for e in errors]
        axes.bar(at, means, 0.16, yerr=bars, ecolor="0.3", label=name, color=f"C{i}")
    axes.axhline(fm.NOISE**2, color="0.5", linestyle="--", linewidth=1, label="noise alone")
    axes.set_yscale("log")
    axes.set_xticks(
        range(len(columns)), [name.replace(" drop", "\ndrop").replace(" anom", "\nanom") for name in columns]
    )
    axes.set_ylabel("MSE in the lost range")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run every method in every setting, print a table and draw it."""
    parser = common.arguments(__doc__)
    parser.add_argument("--average", type=int, default=200, metavar="ROUNDS", help="of Algorithm 2 (default 200)")
    options = parser.parse_args(argv)
    last = options.average
    units, fast, slow = (5, (10,), (5, 10)) if options.smoke else (20, (60,), (last // 2, last))
    settings = {f"{p:.0%} drop out": (p, 0) for p in DROPOUTS}
    settings |= {f"{count} of {units} anomalous": (0.0, count) for count in ANOMALOUS[1:]}
    if options.smoke:
        settings = {name: settings[name] for name in list(settings)[1:4:2]}
    rows = []
    columns: dict[str, dict[str, list[float]]] = {}
    for setting, (drop, anomalous) in settings.items():
        problems = [problem(units, anomalous, seed) for seed in range(options.seeds)]
        columns[setting] = {}
        for name, algorithm in algorithms(units).items():
            if drop and name == ROBUST:  # its messages are kept, and as many of every problem can be side by side
                continue
            rounds = fast if name.startswith("fedmgp") else slow
            for count, values in zip(rounds, errors(algorithm, problems, rounds, drop)):
                rows.append(common.row(setting, f"{name} MSE, {count} rounds", values))
            columns[setting][name] = values
            if name not in (EXACT, ROBUST):
                there = [error <= ARRIVED * exact for error, exact in zip(values, columns[setting][EXACT])]
                rows.append(common.Row(setting, f"{name}, share that arrived", sum(there) / len(there)))
    names = list(algorithms(units))
    cell = lambda found, name: common.mean_with_error(found[name], ".4f") if name in found else ""
    lines = [[setting, *(cell(found, name) for name in names)] for setting, found in columns.items()]
    counts = f"{options.seeds} seeds, {fast[-1]} rounds (averages {slow[-1]})"
    title = f"Unit 1's lost half, {units} units of 60 points, {counts}"
    common.show(title, ["MSE ± standard error", *names], lines)
    common.finish("fedmgp.faults", rows, options, lambda: {"fedmgp_faults": draw(columns)})


if __name__ == "__main__":
    main()
