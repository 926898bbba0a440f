"""Unstable communication and anomalous units (sections E.1 and E.2 of the supplement of Chung and Al Kontar 2024).

The extrapolation problem with twenty units, of which unit 1 has lost (0, 1]. Units drop out of rounds with a
probability; or some units send a signal of their own that has nothing to do with the others'. `ft.fedmgp` sums sites:
an anomalous unit is another output, whose amplitude on the shared process becomes small. Where everybody answers, the
sum is also replaced by a robust one, of which the geometric median keeps precisions positive definite. FedMGP-avg is
the source's Algorithm 2 with the rules of supplement D: changes of the shared parameters by the mean, the median and
the trimmed mean. The supplement's figures are not part of the article, so there is nothing published beside ours.
Seeds run side by side.

From its own start Algorithm 2 has not come to the noise after a thousand rounds of twenty steps
(`fedmgp.extrapolation`), and rules that are compared on the way there tell of the way. Here it begins with the shared
hyperparameters and the posterior of the latent process that the exact sums of the same setting have found with
everybody there; units' own parameters begin at their data. A rule that keeps what it was given goes back to the noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.fedmgp import models as fm
from experiments.side_by_side import Joined, side_by_side
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.tree import Tree
from fedtorch.trust import robust

DROPOUTS = (0.0, 0.3, 0.6)
ANOMALOUS = (0, 2, 4)
EXACT, ROBUST = "fedmgp", "fedmgp, geometric median"
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


def fitted(
    algorithm: ft.Algorithm, starts: Sequence[Tree], problems: Sequence[Problem], rounds: int, drop: float
) -> list[ConvolvedGP]:
    """Unit 1's model after so many rounds, of every problem; they run side by side."""
    units = len(problems[0][0])
    population = Joined([fm.federated(x, y) for x, y, _, _ in problems])
    run = ft.Run(side_by_side(algorithm, starts, units), population, faults=ft.dropouts(drop) if drop else None)
    for _ in run.rounds(rounds):
        pass
    return [fm.unit_model(run, r * units) for r in range(len(problems))]


def errors(models: Sequence[ConvolvedGP], problems: Sequence[Problem]) -> list[float]:
    """Unit 1's mean squared error in the lost range, of every problem."""
    predicted = [fm.predict(model, at).mean for model, (_, _, at, _) in zip(models, problems)]
    return [float((f - truth).square().mean()) for f, (_, _, _, truth) in zip(predicted, problems)]


def after(start: Tree, exact: ConvolvedGP) -> Tree:
    """The start of averages with the shared hyperparameters and the posterior that exact sums have found."""
    own = fm.published(fm.inducing())
    own.rebase()
    with torch.no_grad():
        here, there = own.basis.reshape(own.points, -1), exact.basis.reshape(own.points, -1)
        change = torch.linalg.solve_triangular(here, there, upper=False)  # the same latent values, white at the start
        mean, root = change @ exact.posterior_mean.flatten(), change @ exact.posterior_root.reshape(own.points, -1)
    shared = {name: value.detach() for name, value in exact.named_parameters() if name in own.shared_names}
    found = {**shared, "posterior_mean": mean, "posterior_root": root}
    return {name: found[name].reshape(value.shape).clone() if name in found else value for name, value in start.items()}


def algorithms(units: int) -> dict[str, ft.Algorithm]:
    """The exact sums, a robust one, and averages of the same model by three rules."""
    inducing = fm.inducing()
    rules = {"median": robust.median(), "trimmed mean, 25 %": robust.trimmed_mean(0.25)}
    exact = ft.fedmgp(fm.published(inducing), accept_disclosure=True)
    found = {EXACT: exact, ROBUST: exact | robust.rule(robust.geometric_median())}
    average = ft.fedmgp_average(fm.published(inducing), units=units, steps=20, lr=0.01)
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
    parser.add_argument("--average", type=int, default=100, metavar="ROUNDS", help="of Algorithm 2 (default 100)")
    options = parser.parse_args(argv)
    units, fast, slow = (5, 10, 5) if options.smoke else (20, 60, options.average)
    settings = {f"{p:.0%} drop out": (p, 0) for p in DROPOUTS}
    settings |= {f"{count} of {units} anomalous": (0.0, count) for count in ANOMALOUS[1:]}
    if options.smoke:
        settings = {name: settings[name] for name in list(settings)[1:4:2]}
    rows = []
    columns: dict[str, dict[str, list[float]]] = {}
    for setting, (drop, anomalous) in settings.items():
        problems = [problem(units, anomalous, seed) for seed in range(options.seeds)]
        columns[setting] = {}
        ways = algorithms(units)
        exact = fitted(ways[EXACT], [ways[EXACT].start] * len(problems), problems, fast, 0.0)
        for name, algorithm in ways.items():
            if drop and name == ROBUST:  # its messages are kept, and as many of every problem can be side by side
                continue
            summed = name in (EXACT, ROBUST)
            starts = [algorithm.start if summed else after(algorithm.start, model) for model in exact]
            rounds = fast if summed else slow
            models = exact if name == EXACT and not drop else fitted(algorithm, starts, problems, rounds, drop)
            columns[setting][name] = errors(models, problems)
            rows.append(common.row(setting, f"{name} MSE, {rounds} rounds", columns[setting][name]))
    names = list(algorithms(units))
    cell = lambda found, name: common.mean_with_error(found[name], ".4f") if name in found else ""
    lines = [[setting, *(cell(found, name) for name in names)] for setting, found in columns.items()]
    title = f"Unit 1's lost half, {units} units of 60 points, {options.seeds} seeds, {fast} rounds (averages {slow})"
    common.show(title, ["MSE ± standard error", *names], lines)
    common.finish("fedmgp.faults", rows, options, lambda: {"fedmgp_faults": draw(columns)})


if __name__ == "__main__":
    main()
