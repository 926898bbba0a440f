"""What intervals of units that join a multi-output Gaussian process cover.

Thirty units of 24 rows share one to three latent processes, RBF or Matérn-5/2, that are drawn anew for each setting;
weights are standard normal, the noise is 0.1. FedMGP learns the processes and, from sums, what units' own parameters
are like. Then units that nobody has seen join with 3, 5, 8 and 20 rows (`join`), and units of the run integrate over
their own parameters with their own rows (`join(…, known=True)`). Beside each: what the plain module of a unit of the
run says, whose own parameters are points, and exact Bayes for somebody who knows curves and noise, a bound that nobody
reaches. Scored are 95 % intervals of f on a grid, and of new outputs there. Coverage of a unit's grid is one number, so
± over units is what a mean over units varies by, times their root.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.fedmgp import models as fm
from fedtorch.models.gaussian_process import ConvolvedGP, join
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

UNITS, ROWS, POINTS, NOISE, GRID = 30, 24, 20, 0.1, 201
NORMAL = 1.959963984540054  # of 95 % intervals
KERNELS = {"RBF": 0.12, "Matérn": 0.24}  # lengthscale of the first latent process; the next are 1.6 times as long each
SIZES = (3, 5, 8, 20)
AT = torch.arange(0, GRID, 5)  # places of the grid that are scored


class Units(NamedTuple):
    """Rows of some units, and their curves."""

    x: Tensor  # (K, N, 1)
    y: Tensor  # (K, N)
    curves: Tensor  # (K, GRID)


class Study(NamedTuple):
    """Latent curves, the units of the run, and new ones by their number of rows."""

    grid: Tensor  # (GRID, 1)
    latent: Tensor  # (latents, GRID)
    members: Units
    new: dict[int, Units]


def simulate(kernel: str, latents: int, new: int, seed: int) -> Study:
    """Draw latent curves and units."""
    key = ft.random.fold_in(ft.random.key(seed), torch.arange(2 + len(SIZES)))
    grid = torch.linspace(0, 1, GRID, dtype=fm.DTYPE)
    width = KERNELS[kernel] * 1.6 ** torch.arange(latents, dtype=fm.DTYPE)[:, None, None]
    distance = (grid[:, None] - grid).abs() / width
    far = math.sqrt(5) * distance
    covariance = (-0.5 * distance.square()).exp() if kernel == "RBF" else (1 + far + far.square() / 3) * (-far).exp()
    root = torch.linalg.cholesky(covariance + 1e-8 * torch.eye(GRID, dtype=fm.DTYPE))
    latent = (root @ ft.random.normal(key[0], (latents, GRID, 1), fm.DTYPE))[..., 0]

    def draw(key: Tensor, units: int, rows: int) -> Units:
        weights, places, noise = ft.random.split(key, 3)
        curves = ft.random.normal(weights, (units, latents), fm.DTYPE) @ latent
        keys = ft.random.fold_in(places, torch.arange(units))
        chosen = torch.stack([ft.random.choice(each, GRID, rows).sort().values for each in keys])
        y = curves.gather(1, chosen) + NOISE * ft.random.normal(noise, (units, rows), fm.DTYPE)
        return Units(grid[chosen][..., None], y, curves)

    groups = {rows: draw(key[2 + i], new, rows) for i, rows in enumerate(SIZES)}
    return Study(grid[:, None], latent, draw(key[1], UNITS, ROWS), groups)


def members(study: Study, kernel: str, rounds: int) -> list[ConvolvedGP]:
    """Train, and return the modules of the units of the run."""
    latents = len(study.latent)
    kernels = None if kernel == "RBF" else [gpytorch.kernels.MaternKernel() for _ in range(latents)]
    model = ConvolvedGP(torch.linspace(0, 1, POINTS, dtype=fm.DTYPE)[:, None], kernels, latents=latents)
    data = ft.data.from_tensors(list(zip(study.members.x, study.members.y)))
    run = ft.run(ft.fedmgp(model, accept_disclosure=True), ft.InProcess(data), rounds=rounds)
    return [fm.unit_model(run, k) for k in range(len(data))]


def scores(mean: Tensor, variance: Tensor, curves: Tensor) -> dict[str, Tensor]:
    """Coverage of f by unit, and its mean squared error, `(K,)` each."""
    error = mean - curves[:, AT]
    inside = (error.abs() < NORMAL * variance.sqrt()).to(fm.DTYPE)
    return {"95 % intervals of f cover": inside.mean(1), "mean squared error of f": error.square().mean(1)}


def of_mixture(unit: Any, study: Study, units: Units, seed: int) -> dict[str, Tensor]:
    """`scores` of units that joined, and coverage of new outputs."""
    at, curves = study.grid[AT], units.curves
    mean, variance = (part.reshape(len(curves), -1) for part in unit.marginals(at))
    low, high = (part.reshape(len(curves), -1) for part in unit.interval(at, 0.95))
    outputs = curves[:, AT] + NOISE * ft.random.normal(ft.random.key(seed), mean.shape, fm.DTYPE)
    inside = ((outputs > low) & (outputs < high)).to(fm.DTYPE).mean(1)
    return {**scores(mean, variance, curves), "95 % intervals of outputs cover": inside}


def knowing(study: Study, units: Units) -> dict[str, Tensor]:
    """`scores` of exact Bayes for weights alone, with latent curves and noise known."""
    place = (units.x[..., 0] * (GRID - 1)).round().long()
    basis = study.latent.T[place]  # (K, N, latents)
    eye = torch.eye(len(study.latent), dtype=fm.DTYPE)
    covariance = torch.linalg.inv(eye + basis.mT @ basis / NOISE**2)
    weights = covariance @ basis.mT @ units.y[..., None] / NOISE**2
    at = study.latent.T[AT]
    return scores((at @ weights)[..., 0], ((at @ covariance) * at).sum(-1), units.curves)


def measured(kernel: str, latents: int, new: int, rounds: int, seed: int) -> dict[str, dict[str, Tensor]]:
    """Scores `(K,)` by method and metric, of one draw of the latent curves."""
    study = simulate(kernel, latents, new, seed)
    units, told = members(study, kernel, rounds), study.members
    with torch.no_grad():
        mean, variance = (torch.stack(part) for part in zip(*(unit.marginals(study.grid[AT]) for unit in units)))
    alone = [
        of_mixture(join(unit, x, y, known=True), study, Units(x[None], y[None], curves[None]), seed + 100 + k)
        for k, (unit, x, y, curves) in enumerate(zip(units, *told))
    ]
    found = {
        f"units of the run, {ROWS} rows: its module": scores(mean, variance, told.curves),
        f"units of the run, {ROWS} rows: join(known=True)": {
            metric: torch.cat([each[metric] for each in alone]) for metric in alone[0]
        },
    }
    for rows, some in study.new.items():
        found[f"new units, {rows} rows: join"] = of_mixture(join(units[0], some.x, some.y), study, some, seed + rows)
        found[f"new units, {rows} rows: exact Bayes, curves and noise known"] = knowing(study, some)
    return found


def draw(kernel: str, latents: int, rounds: int) -> Figure:
    """Four new units by their number of rows: rows, curve, mean and band."""
    study = simulate(kernel, latents, 1, seed=0)
    unit = members(study, kernel, rounds)[0]
    figure, axes = common.subplots(1, len(SIZES), figsize=(12, 3), sharey=True)
    for axis, (rows, some) in zip(axes, study.new.items()):
        mean, variance = (part[0] for part in join(unit, some.x, some.y).marginals(study.grid))
        half, x = NORMAL * variance.sqrt(), study.grid[:, 0]
        axis.fill_between(x, mean - half, mean + half, color="C0", alpha=0.2, linewidth=0, label="95 % of f")
        axis.plot(x, mean, color="C0", label="mean")
        axis.plot(x, some.curves[0], color="black", linewidth=1, label="curve")
        axis.plot(some.x[0, :, 0], some.y[0], ".", color="black", label="rows")
        axis.set_title(f"{rows} rows")
        axis.set_xlabel("x")
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Measure coverage for the kernels and numbers of latent processes asked for, and draw new units."""
    parser = common.arguments(__doc__)
    parser.add_argument("--new", type=int, default=200, help="new units of each size (default 200)")
    parser.add_argument("--kernel", choices=list(KERNELS), help="one of the kernels; default: each in turn")
    parser.add_argument("--latents", type=int, choices=(1, 2, 3), help="latent processes; default: each in turn")
    options = parser.parse_args(argv)
    rounds, new = (10, 3) if options.smoke else (100, options.new)
    kernels = [options.kernel] if options.kernel else ["RBF"] if options.smoke else list(KERNELS)
    counts = [options.latents] if options.latents else [1] if options.smoke else [1, 2, 3]
    rows: list[common.Row] = []
    for kernel in kernels:
        for latents in counts:
            runs: list[dict[str, Any]] = [measured(kernel, latents, new, rounds, seed) for seed in range(options.seeds)]
            for method in runs[0]:
                values = {m: torch.cat([run[method][m] for run in runs]).tolist() for m in runs[0][method]}
                name = f"{kernel}, {latents} latent{'s' * (latents > 1)}: {method}"
                rows += [common.row(name, metric, each) for metric, each in values.items()]
    common.show_rows(f"{UNITS} units, {new} new ones of each size, {options.seeds} draws, {rounds} rounds", rows)
    common.finish("fedmgp.joining", rows, options, lambda: {"fedmgp_joining": draw(kernels[0], counts[-1], rounds)})


if __name__ == "__main__":
    main()
