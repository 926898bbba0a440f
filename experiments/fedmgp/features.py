"""Deep kernels, categories and outputs of several kinds in federated multi-output Gaussian processes.

Three simulations of eight units that share a latent signal, each unit with an amplitude of its own and noise of 0.1:

- a chirp, whose waves get shorter from left to right: an RBF kernel of the input, and of what a small network makes of
  it (`features=`), trained by the server with the other shared hyperparameters; and of four starts of the network the
  one whose training ends with the largest bound;
- waves whose phase depends on one of four categories: the category left out, its code as a number, and a learnt point
  for each (`EmbedCategories`);
- four units that measure and four that answer yes or no: those that answer among themselves, and together with those
  that measure (`MixedLikelihood`).

Scored are new inputs: root mean squared errors from the curves without noise, and from the probabilities of a yes.
Nothing is published of these; the source names such kernels and likelihoods as future work. What came of five seeds is
on the page of results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common
from experiments.fedmgp import models as fm
from fedtorch.models.gaussian_process import ConvolvedGP, EmbedCategories, MixedLikelihood
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

UNITS, ROWS, LEVELS, GRID, STARTS = 8, 40, 4, 100, 4
GAUSSIAN, YES_NO = 0, 1


class Warp(nn.Module):
    """The input and what a small network makes of it, one column each.

    Args:
        seed: of the network's start.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return `(..., 2)` of x `(..., 1)`."""
        return torch.cat([x, self.network(x)], -1)


Variants = dict[str, tuple[list[ConvolvedGP], list[Any]]]


class Study(NamedTuple):
    """One simulation: what to train for each variant, and how to score it."""

    variants: Variants  # the model from one start or several, and each unit's rows
    at: dict[str, Tensor]  # new inputs `(GRID, ·)` by variant
    truth: Tensor  # (units, GRID)
    read: Callable[[ConvolvedGP, Tensor], Tensor]  # what a unit's model predicts there


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(places `(UNITS, ROWS)` on [0, 1], noise, amplitudes `(UNITS,)`)."""
    key = ft.random.fold_in(ft.random.key(seed), torch.arange(3))
    place = ft.random.uniform(key[0], (UNITS, ROWS), fm.DTYPE)
    noise = fm.NOISE * ft.random.normal(key[1], (UNITS, ROWS), fm.DTYPE)
    return place, noise, 0.5 + 1.5 * ft.random.uniform(key[2], (UNITS,), fm.DTYPE)


def mean_of(unit: ConvolvedGP, at: Tensor) -> Tensor:
    """A unit's predicted curve."""
    return unit.marginals(at)[0]


def grid(points: int) -> Tensor:
    """Places on [0, 1], `(points, 1)`."""
    return torch.linspace(0, 1, points, dtype=fm.DTYPE)[:, None]


def rbf(columns: int = 1) -> Any:
    """An RBF kernel of one latent process, with a lengthscale for each column."""
    return gpytorch.kernels.RBFKernel(ard_num_dims=columns, batch_shape=torch.Size([1]))


def chirp(seed: int) -> Study:
    """Waves that get shorter from left to right, by a kernel of the input and by a deep kernel."""
    place, noise, amplitude = inputs(seed)
    at = grid(GRID)

    def curve(x: Tensor) -> Tensor:
        return (12 * x**3).sin()

    rows = [(x[:, None], a * curve(x) + e) for x, a, e in zip(place, amplitude, noise)]
    deep = [ConvolvedGP(grid(25), rbf(2), features=Warp(seed + 1000 * start)) for start in range(STARTS)]
    variants: Variants = {
        "RBF kernel": ([ConvolvedGP(grid(25), rbf())], rows),
        "deep kernel": (deep[:1], rows),
        f"deep kernel, the best bound of {STARTS} starts": (deep, rows),
    }
    return Study(variants, dict.fromkeys(variants, at), amplitude[:, None] * curve(at[:, 0]), mean_of)


def phases(seed: int) -> Study:
    """Waves with a phase for each category, without it, with its code as a number and with a learnt point."""
    place, noise, amplitude = inputs(seed)
    code = (torch.arange(UNITS * ROWS).reshape(UNITS, ROWS) % LEVELS).to(fm.DTYPE)
    phase = torch.tensor([0.0, 2.4, 0.7, 1.6], dtype=fm.DTYPE)

    def curve(x: Tensor, level: Tensor) -> Tensor:
        return (6 * x + phase[level.long()]).sin()

    new = (torch.arange(GRID) % LEVELS).to(fm.DTYPE)
    rows = [(torch.stack([x, c], -1), a * curve(x, c) + e) for x, c, a, e in zip(place, code, amplitude, noise)]
    places = torch.cartesian_prod(grid(8)[:, 0], torch.arange(LEVELS).to(fm.DTYPE))
    at = torch.stack([grid(GRID)[:, 0], new], -1)
    variants: Variants = {
        "category left out": ([ConvolvedGP(grid(12), rbf())], [(x[:, :1], y) for x, y in rows]),
        "its code as a number": ([ConvolvedGP(places, rbf(2))], rows),
        "a learnt point for each": ([ConvolvedGP(places, rbf(3), features=EmbedCategories(2, {1: LEVELS}))], rows),
    }
    truth = amplitude[:, None] * curve(at[:, 0], new)
    return Study(variants, {n: at[:, :1] if n == "category left out" else at for n in variants}, truth, mean_of)


def kinds(seed: int) -> Study:
    """Units that answer yes or no, among themselves and with units that measure."""
    place, noise, amplitude = inputs(seed)
    at, half = grid(GRID), UNITS // 2

    def probability(x: Tensor, size: Tensor) -> Tensor:
        return torch.special.ndtr(2 * size * (7 * x).sin())

    coin = ft.random.uniform(ft.random.fold_in(ft.random.key(seed), 9), (UNITS, ROWS), fm.DTYPE)
    answers = (coin < probability(place, amplitude[:, None])).to(fm.DTYPE)
    measured = amplitude[:, None] * (7 * place).sin() + noise
    every = [(x[:, None], y) for x, y in zip(place, torch.cat([answers[:half], measured[half:]]))]
    marked = [(*rows, torch.full((ROWS,), YES_NO if k < half else GAUSSIAN)) for k, rows in enumerate(every)]
    parts = [gpytorch.likelihoods.GaussianLikelihood(), gpytorch.likelihoods.BernoulliLikelihood()]
    variants: Variants = {
        "among themselves": ([ConvolvedGP(grid(12), rbf(), likelihood=parts[YES_NO])], [*every[:half]]),
        "with units that measure": ([ConvolvedGP(grid(12), rbf(), likelihood=MixedLikelihood(parts))], [*marked]),
    }

    def read(unit: ConvolvedGP, x: Tensor) -> Tensor:
        part = getattr(unit.likelihood, "parts", [None, unit.likelihood])[YES_NO]
        return part(unit(x)).probs

    return Study(variants, dict.fromkeys(variants, at), probability(at[:, 0], amplitude[:half, None]), read)


STUDIES = {"a chirp": chirp, "four categories": phases, "answers of yes or no": kinds}


def trained(study: Study, rounds: int) -> dict[str, Tensor]:
    """What each variant predicts at the new inputs, `(units, GRID)`."""
    found = {}
    for name, (models, rows) in study.variants.items():
        population = ft.InProcess(ft.data.from_tensors(rows))
        algorithms = [ft.fedmgp(model, server_lr=0.05, accept_disclosure=True) for model in models]
        runs = [ft.run(algorithm, population, rounds=rounds) for algorithm in algorithms]
        run = min(runs, key=lambda each: each.history["train_loss"].iloc[-1])
        with torch.no_grad():
            units = [fm.unit_model(run, k) for k in range(len(study.truth))]
            found[name] = torch.stack([study.read(unit, study.at[name]) for unit in units])
    return found


def draw(shown: dict[str, tuple[Study, dict[str, Tensor]]]) -> Figure:
    """One unit of each simulation: its rows, the truth, and what each variant predicts."""
    figure, axes = common.subplots(1, len(shown), figsize=(13, 3.8))
    for axis, (title, (study, found)) in zip(axes, shown.items()):
        some = slice(None, None, LEVELS) if title == "four categories" else slice(None)
        x, y = next(iter(study.variants.values()))[1][0][:2]
        axis.plot(x[some, 0], y[some], ".", color="0.6", label="observed")
        axis.plot(grid(GRID)[some, 0], study.truth[0, some], color="black", linewidth=1, label="truth")
        for i, (name, mean) in enumerate(found.items()):
            axis.plot(grid(GRID)[some, 0], mean[0, some], color=f"C{i}", linestyle="--", label=name)
        axis.set_title(f"{title}, the first of them" if title == "four categories" else title)
        axis.set_xlabel("x")
        axis.legend(frameon=False, fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Train all variants over seeds, print their errors and draw the first seed."""
    options = common.arguments(__doc__).parse_args(argv)
    rounds = 3 if options.smoke else 100
    rows: list[common.Row] = []
    shown: dict[str, tuple[Study, dict[str, Tensor]]] = {}
    for title, make in STUDIES.items():
        errors: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            study = make(seed)
            found = trained(study, rounds)
            shown.setdefault(title, (study, found))
            for name, mean in found.items():
                errors.setdefault(name, []).append(math.sqrt(float((mean - study.truth).square().mean())))
        rows += [common.row(f"{title}: {name}", "rmse", values) for name, values in errors.items()]
    common.show_rows(f"{UNITS} units, {options.seeds} seeds, {rounds} rounds", rows, ".4f")
    common.finish("fedmgp.features", rows, options, lambda: {"fedmgp_features": draw(shown)})


if __name__ == "__main__":
    main()
