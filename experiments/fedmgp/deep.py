"""Deep Gaussian processes of units that share a warp of the input, beside processes of one layer.

Batches go through one recipe: something happens to all of them at the same four moments, which nobody has noted, and
takes each to a level of its own. A Gaussian process of one layer has one lengthscale and rounds every step off. A deep
one (`DeepGP`) bends the axis of time first: the inner layer is what units share, the outer process is the unit's own.

Compared are one and two layers, each trained by every unit alone and by all together, on new inputs: root mean squared
errors from the curves without noise, the mean log density of outputs measured there, and how many of these the central
95 % of the predictive distribution hold. A unit has few rows, so that none could find the four moments alone. Nothing
is published of these. What came out is in `results/fedmgp_deep.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.fedmgp import models as fm
from fedtorch.models.gaussian_process import DeepGP

UNITS, ROWS, GRID = 12, 20, 200
MOMENTS = (0.18, 0.42, 0.55, 0.83)
STEPS = 10  # of a round
TAIL = 0.025


class Recipe(NamedTuple):
    """Units' rows, their curves without noise on a grid, and outputs measured there."""

    rows: ft.data.FederatedData
    grid: Tensor  # (GRID, 1)
    curves: Tensor  # (UNITS, GRID)
    measured: Tensor  # (UNITS, GRID)


def recipe(seed: int) -> Recipe:
    """Batches that change their level at four common moments."""
    key = ft.random.fold_in(ft.random.key(seed), torch.arange(4))
    levels = ft.random.normal(key[0], (UNITS, len(MOMENTS) + 1), fm.DTYPE)
    x = ft.random.uniform(key[1], (UNITS, ROWS), fm.DTYPE)
    grid = (torch.arange(GRID, dtype=fm.DTYPE) + 0.5) / GRID
    moments = torch.tensor(MOMENTS, dtype=fm.DTYPE)
    y = levels.gather(1, torch.bucketize(x, moments)) + fm.NOISE * ft.random.normal(key[2], x.shape, fm.DTYPE)
    curves = levels[:, torch.bucketize(grid, moments)]
    rows = ft.data.from_tensors([(a[:, None], b) for a, b in zip(x, y)])
    return Recipe(rows, grid[:, None], curves, curves + fm.NOISE * ft.random.normal(key[3], curves.shape, fm.DTYPE))


def ways() -> dict[str, ft.Algorithm]:
    """One layer and two, of every unit alone and of all together."""
    made = {}
    inducing = torch.linspace(0, 1, 20, dtype=fm.DTYPE)[:, None]
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.02)
    for layers, words in ((1, "one layer"), (2, "two layers")):
        for rows, name in ((ROWS, "each unit alone"), (ROWS * UNITS, "shared")):
            module = DeepGP(inducing, rows, layers=layers)
            local = ft.gradient_descent(module, steps=STEPS, loss=DeepGP.loss, optimizer=adam, reset="never")
            alone = rows == ROWS
            made[f"{words}, {name}"] = ft.separate(local) if alone else ft.personal_layers(local, DeepGP.own)
    return made


def trained(algorithm: ft.Algorithm, data: ft.data.FederatedData, rounds: int, seed: int) -> list[DeepGP]:
    """Each unit's process."""
    run = ft.run(algorithm, ft.InProcess(data), rounds=rounds, seed=seed)
    return [run.client_module(k) for k in range(len(data))]  # type: ignore[misc]


def scores(units: Sequence[DeepGP], made: Recipe) -> dict[str, float]:
    """Errors, log densities and coverage, over all units."""
    found = [unit.predict(made.grid) for unit in units]
    gaps = torch.stack([q.mean for q in found]) - made.curves
    density = torch.stack([q.log_prob(y) for q, y in zip(found, made.measured)])
    place = torch.stack([q.cdf(y) for q, y in zip(found, made.measured)])
    inside = ((place > TAIL) & (place < 1 - TAIL)).double().mean()
    rmse = math.sqrt(float(gaps.square().mean()))
    return {"rmse": rmse, "mean log density": float(density.mean()), "95 % intervals cover": float(inside)}


def draw(made: Recipe, found: dict[str, list[DeepGP]]) -> Figure:
    """A unit's rows, its curve and what is predicted, by way; and the warp that units share."""
    figure, axes = common.subplots(1, len(found) + 1, figsize=(16, 3.4))
    x, y = made.rows[0]
    for i, (axis, (name, units)) in enumerate(zip(axes, found.items())):
        q = units[0].predict(made.grid)
        axis.plot(made.grid, made.curves[0], color="black", linewidth=1)
        axis.plot(made.grid, q.mean, color=f"C{i}")
        fm.band(axis, made.grid[:, 0], fm.Prediction(q.mean, q.stddev), 1.96, color=f"C{i}", alpha=0.25)
        axis.plot(x, y, ".", color="0.4")
        axis.set_title(name)
        axis.set_xlabel("time")
    shared = found["two layers, shared"][0]
    with torch.no_grad():
        axes[-1].plot(made.grid, shared.warp(made.grid), color="C3", label="the inner layer's mean")
    for moment in MOMENTS:
        label = "the four moments" if moment == MOMENTS[0] else None
        axes[-1].axvline(moment, color="0.7", linewidth=1, linestyle="--", label=label)
    axes[-1].legend(frameon=False, fontsize="small")
    axes[-1].set_title("what the units share")
    axes[-1].set_xlabel("time")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Train all ways over seeds, print their scores and draw the first seed."""
    options = common.arguments(__doc__).parse_args(argv)
    rounds = 3 if options.smoke else 200
    runs: dict[str, list[dict[str, float]]] = {}
    shown: tuple[Recipe, dict[str, list[DeepGP]]] | None = None
    for seed in range(options.seeds):
        made = recipe(seed)
        found = {name: trained(algorithm, made.rows, rounds, seed) for name, algorithm in ways().items()}
        shown = shown or (made, found)
        for name, units in found.items():
            runs.setdefault(name, []).append(scores(units, made))
    rows = [row for name, of_seeds in runs.items() for row in common.over_seeds(name, of_seeds)]
    common.show_rows(f"{UNITS} units of {ROWS} rows, {options.seeds} seeds, {rounds} rounds of {STEPS} steps", rows)
    assert shown is not None
    common.finish("fedmgp.deep", rows, options, lambda: {"fedmgp_deep": draw(*shown)})


if __name__ == "__main__":
    main()
