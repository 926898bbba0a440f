"""What the VFL source says beside its tables: local steps, weights, unknown σ, subsampling and levels kept secret.

In parts (`--part`), the first four of them on models whose posterior is known:

- `local`: a party takes several steps for each exchange (section 5.3). Told is how many exchanges it takes until all
  means stay within one sd of the posterior's, and the error of their average over the last half, with the response at
  the server (a party goes on along the gradient that it was told) and shared (it computes the gradient anew).
- `weights`: the weights of parties' likelihoods in the power model (section 6), learnt, where one of two parties has
  all the signal and the other none. `fedtorch.vfl.power` says why these cannot rank parties.
- `sigma`: linear regression with unknown σ (section 3.1) beside the posterior of log σ by quadrature. The noise ρ of
  both parties is part of the model: with σ = 1 in the data, what is left of it for σ² is 1 − 2ρ², below zero from
  ρ = 0.71 on.
- `subsampling`: 10 000 rows, of which an iteration sees all, a tenth or a hundredth (section 6).
- `levels`: a party that keeps its levels to itself (section 5.2: "further exploration could help quantify the privacy
  benefits"). Slopes of two columns differ by five levels; the party models them by none, by these, or by levels that it
  draws. What it sends in all iterations is recorded, and an attacker who knows the columns of some rows predicts those
  of the others from it by regression on principal components, whose number leaving one out chooses; one who knows the
  levels of those rows finds the others' as the nearest of the levels' subspaces. Told are the share of variance of the
  first column that is predicted (0: nothing is), and the share of levels found.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments import common, result_pages
from experiments.vfl import oracles
from experiments.vfl.clock import Course, arrival, figures, regression
from fedtorch import random, vfl
from fedtorch.models.encoders import perceptron
from fedtorch.vfl import log_score
from fedtorch.vfl.model import likelihoods

LOCAL_STEPS, KNOWN, LEVELS = (1, 2, 5, 20), (20, 100), 5
RHOS = (0.25, 0.5, 1.0)
READING = result_pages.Reading(smaller="error|exchanges|predicted|found", larger="log score")
Runs = dict[str, list[dict[str, float]]]  # by setting, one for each seed


def exchanged(
    data: vfl.VerticalData, local_steps: int, shared: bool, count: int, lr: float, seed: int, start: Course | None
) -> Course:
    """A fit among nodes that takes so many local steps for each exchange."""
    model = vfl.augmented(
        likelihoods.gaussian(1.0), [vfl.linear(x.shape[1]) for x in data.features], 1.0, intercept=False
    )
    guide, key = vfl.Guide(vfl.sums(skewed=False)), random.fold_in(random.key(seed), 0 if start is None else 1)
    begin = None if start is None else start.end
    whole, nodes = oracles.nodes(model, guide, data, key, partial(torch.optim.Adam, lr=lr), begin, shared)
    run, means = vfl.NodesRun(whole, nodes, local_steps=local_steps), []
    for _ in run.rounds(count):
        means.append(torch.cat([node.q["theta"]["mean"][0].detach().clone() for node in nodes]))
    sds = [guide.theta.covariance(node.q["theta"])[0].diagonal().sqrt().detach() for node in nodes]
    return Course(torch.stack(means), torch.cat(sds), vfl.Parameters(None, whole.q, tuple(node.q for node in nodes)))


def local(seed: int, smoke: bool) -> dict[str, dict[str, float]]:
    """Exchanges that it takes to arrive, and where it stays, by local steps and where the response is."""
    data, mean, sd = regression(seed, 20 if smoke else 60)
    count, found = (6 if smoke else 500), {}
    for shared, steps in itertools.product((False, True), LOCAL_STEPS[:2] if smoke else LOCAL_STEPS):
        there = exchanged(data, steps, shared, count, 0.02, seed, None)
        stays = exchanged(data, steps, shared, count, 0.005, seed, there)
        of = {"exchanges to come within one sd": arrival(there, mean, sd), **figures(stays, mean, sd)}
        found[f"{'response shared' if shared else 'response at the server'}, {steps} local steps"] = of
    return found


def weights(seed: int, smoke: bool) -> dict[str, dict[str, float]]:
    """Learnt weights of a party that knows all and one that knows nothing, and held-out scores."""
    rows, steps, width = (40, 20, 3) if smoke else (500, 2000, 3)
    keys = [random.fold_in(random.key(seed), i) for i in range(2)]
    x = random.normal(keys[0], (2, rows, 2 * width), torch.float32)
    linear = x[..., :width].sum(-1)
    y = (random.uniform(keys[1], (2, rows), torch.float32) < linear.sigmoid()).float()
    train, test = (vfl.VerticalData(tuple(x[i].split(width, -1)), y[i]) for i in range(2))
    small = perceptron(8)
    guides = {
        "mean field": vfl.Guide(vfl.mean_field()),
        "amortised": vfl.Guide(vfl.amortised(small, sees_response=True)),
        "sums": vfl.Guide(vfl.sums(), joint=True),
    }
    found = {}
    for name, guide in guides.items():
        for concentration in (None, 0.1):
            model = vfl.power(likelihoods.bernoulli(), [vfl.linear(width)] * 2, 1.0, concentration=concentration)
            fit = vfl.sfvi(model, guide, train, seed=seed, steps=steps, lr=0.02, every=max(1, steps // 5))
            thetas = fit.sample(200, seed=int(random.fold_in(random.key(seed), 9)))
            of = {
                "held-out log score": float(log_score(model, thetas, test, noise=vfl.noise_variance(model)).mean()),
                "bound": float(fit.bounds[-1, 0]),
                "weight of the party with all the signal": float(fit.weights()[0, 0]) if concentration else 0.5,
            }
            found[f"power, {name}, weights {'learnt' if concentration else 'equal'}"] = of
    return found


def posterior_of_sigma(data: vfl.VerticalData, rho: float) -> tuple[float, float]:
    """Mean and sd of log σ by quadrature, with N(0, 1) priors of log σ and of all coefficients."""
    x = torch.cat(data.features, 1)
    values, vectors = torch.linalg.eigh(x @ x.T)
    turned = (vectors.T @ data.response).square()
    at = torch.linspace(-8, 3, 4001, dtype=x.dtype)
    variance = values[:, None] + (2 * at).exp() + len(data.features) * rho**2
    density = -0.5 * (variance.log() + turned[:, None] / variance).sum(0) - 0.5 * at.square()
    share = (density - density.max()).exp()
    share = share / share.sum()
    mean = (share * at).sum()
    return float(mean), float((share * (at - mean).square()).sum().sqrt())


def sigma(seed: int, smoke: bool) -> dict[str, dict[str, float]]:
    """What is found of log σ beside its posterior, by ρ; σ is 1 in the data."""
    data, _, _ = regression(seed, 40 if smoke else 200)
    found = {}
    for rho in RHOS:
        model = vfl.augmented(
            likelihoods.gaussian(), [vfl.linear(x.shape[1]) for x in data.features], rho, intercept=False
        )
        guide = vfl.Guide(vfl.sums(), joint=True)
        steps = 20 if smoke else 4000
        fit = vfl.sfvi(model, guide, data, seed=seed, steps=steps, lr=0.02, draws=4, every=max(1, steps // 5))
        mean, covariance = fit.moments()
        exact, spread = posterior_of_sigma(data, rho)
        found[f"ρ = {rho:g}, σ = 1 in the data"] = {
            "log σ": float(mean[0, 0]),
            "log σ by quadrature": exact,
            "error of log σ, in sds": abs(float(mean[0, 0]) - exact) / spread,
            "ratio of sds to the posterior's": float(covariance[0, 0, 0].sqrt()) / spread,
        }
    return found


def subsampling(seed: int, smoke: bool) -> dict[str, dict[str, float]]:
    """The error of means and sds after as many iterations, by the rows that an iteration sees."""
    rows, steps = (200, 20) if smoke else (10_000, 3000)
    data, mean, sd = regression(seed, rows)
    found = {}
    for size in (None, rows // 10, rows // 100):
        model = vfl.augmented(
            likelihoods.gaussian(1.0), [vfl.linear(x.shape[1]) for x in data.features], 1.0, intercept=False
        )
        guide = vfl.Guide(vfl.sums(skewed=False), joint=True)
        began = time.process_time()
        fit = vfl.sfvi(model, guide, data, seed=seed, steps=steps, lr=0.02, batch_size=size, every=max(1, steps // 5))
        seconds = time.process_time() - began
        means, covariance = fit.moments()
        found[f"{size or rows} of {rows} rows an iteration"] = {
            "error of means, in sds": float(((means[0] - mean) / sd).abs().max()),
            "ratio of sds to the posterior's": float((covariance[0].diagonal().sqrt() / sd).mean()),
            "processor milliseconds an iteration": 1e3 * seconds / steps,
        }
    return found


def grouped(seed: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Columns `(2, 2, n, 2)` of both parties, training and held-out, responses `(2, n)` and levels `(2, n)`.

    Slopes of the first party differ by level, N(1, 1) each.
    """
    keys = [random.fold_in(random.key(seed), i) for i in range(4)]
    x = random.normal(keys[0], (2, 2, rows, 2), torch.float64)
    groups = random.randint(keys[1], LEVELS, (2, rows))
    slopes = 1 + random.normal(keys[2], (LEVELS, 2), torch.float64)
    y = (x[:, 0] * slopes[groups]).sum(-1) + x[:, 1].sum(-1) + random.normal(keys[3], (2, rows), torch.float64)
    return x, y, groups


def overheard(
    x: Tensor, y: Tensor, groups: Tensor, levels: int, guide: vfl.Guide, count: int, seed: int
) -> tuple[Tensor, float]:
    """What the first party sends in each iteration `(n, T)`, and the held-out log score of the fit."""
    first = vfl.linear(2) if levels == 1 else vfl.multilevel(2, levels, centred=True)
    model = vfl.augmented(likelihoods.gaussian(1.0), [first, vfl.linear(2)], 1.0)
    own = [x[i, 0] if levels == 1 else vfl.by_level(x[i, 0], groups[i], levels) for i in range(2)]
    train, test = (vfl.VerticalData((own[i], x[i, 1]), y[i]) for i in range(2))
    key = random.key(seed)
    whole, nodes = oracles.nodes(model, guide, train, key, partial(torch.optim.Adam, lr=0.02))
    sent, propose = [], nodes[0].propose

    def recorded(iteration: vfl.Iteration) -> object:
        proposal = propose(iteration)
        sent.append(proposal.sent[0, 0, 0].clone())
        return proposal

    nodes[0].propose = recorded  # type: ignore[assignment, method-assign]
    for _ in vfl.NodesRun(whole, nodes).rounds(count):
        pass
    noise = [random.normal(random.fold_in(key, 50 + i), (200, node.q["theta"]["mean"].shape[-1]), torch.float64)
             for i, node in enumerate((whole, *nodes))]  # fmt: skip
    thetas = []
    for node, drawn in zip((whole, *nodes), noise):
        covariance = guide.theta.covariance(node.q["theta"])[0].detach()
        root = torch.linalg.cholesky(covariance) if len(covariance) else covariance
        thetas.append((node.q["theta"]["mean"].detach() + drawn @ root.T)[None])
    score = log_score(model, [theta.reshape(1, 200, -1) for theta in thetas], test, noise=vfl.noise_variance(model))
    return torch.stack(sent, 1), float(score.mean())


def predicted(sent: Tensor, x: Tensor, known: int) -> float:
    """The share of the variance of a column of other rows that what was sent predicts, from the first rows' columns."""
    centred = sent - sent[:known].mean(0)
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    scores = (left * sizes)[:, sizes > 1e-9 * sizes[0]]  # what is below is rounding
    target, best = x[:known] - x[:known].mean(), (float("inf"), 0)
    for count in range(1, min(known // 2, scores.shape[1]) + 1):
        design = torch.cat([torch.ones(known, 1, dtype=x.dtype), scores[:known, :count]], 1)
        q, _ = torch.linalg.qr(design)
        left_out = (target - q @ (q.T @ target)) / (1 - q.square().sum(1)).clamp(min=1e-9)
        best = min(best, (float(left_out.square().mean()), count))
    design = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), scores[:, : best[1]]], 1)
    beta = torch.linalg.lstsq(design[:known], x[:known, None]).solution
    rest = x[known:] - (design @ beta)[known:, 0]
    return 1 - float(rest.square().mean() / (x[known:] - x[known:].mean()).square().mean())


def nearest_levels(sent: Tensor, groups: Tensor, known: int, levels: int) -> float:
    """The share of other rows whose level is that of the nearest plane through the origin of known rows of a level."""
    distance = torch.full((levels, len(groups)), torch.inf, dtype=sent.dtype)
    for level in range(levels):
        rows = sent[:known][groups[:known] == level]
        if len(rows):
            plane = torch.linalg.svd(rows, full_matrices=False)[2][:2]
            distance[level] = (sent - sent @ plane.T @ plane).norm(dim=1)
    return float((distance.argmin(0)[known:] == groups[known:]).double().mean())


def levels(seed: int, smoke: bool) -> dict[str, dict[str, float]]:
    """What can be told from what a party sends, by how it groups its rows and by the kind of message."""
    rows, count = (120, 8) if smoke else (500, 600)
    x, y, real = grouped(seed, rows)
    key = random.fold_in(random.key(seed), 9)
    choices = {"no levels": (real, 1), f"{LEVELS} levels, real": (real, LEVELS)}
    for many in (LEVELS, 20):
        choices[f"{many} levels, drawn"] = random.randint(random.fold_in(key, many), many, (2, rows)), many
    kinds = {
        "z with noise ρ": vfl.Guide(vfl.amortised(perceptron(8))),
        "η without mask": vfl.Guide(vfl.sums(skewed=False)),
    }
    found = {}
    for (choice, (groups, many)), (kind, guide) in itertools.product(choices.items(), kinds.items()):
        sent, score = overheard(x, y, groups, many, guide, count, seed)
        of = {"held-out log score": score}
        for known in KNOWN:
            of[f"predicted from one message, {known} rows known"] = predicted(sent[:, -1:], x[0, 0, :, 0], known)
            of[f"predicted from all messages, {known} rows known"] = predicted(sent, x[0, 0, :, 0], known)
        if many > 1:
            of[f"levels found, {KNOWN[-1]} rows known"] = nearest_levels(sent, groups[0], KNOWN[-1], many)
        found[f"{choice}, {kind}"] = of
    return found


PARTS: dict[str, Callable[[int, bool], dict[str, dict[str, float]]]] = {
    "local": local, "weights": weights, "sigma": sigma, "subsampling": subsampling, "levels": levels
}  # fmt: skip
SHOWN = {
    "local": ("exchanges to come within one sd", "exchanges to come within one sd"),
    "weights": ("weight of the party with all the signal", "weight of the party\nwith all the signal"),
    "sigma": ("error of log σ, in sds", "error of log σ, in sds"),
    "subsampling": ("error of means, in sds", "error of means, in sds"),
    "levels": (f"predicted from all messages, {KNOWN[-1]} rows known", "share of a column's variance\npredicted"),
}


def draw(runs: dict[str, Runs]) -> Figure:
    """A panel for each part, with the standard deviation over seeds."""
    figure, axes = common.subplots(len(runs), 1, figsize=(8, 0.7 + 1.9 * len(runs)))
    for axis, (part, of) in zip(np.atleast_1d(axes), runs.items()):
        _bars(axis, of, *SHOWN[part])
    return figure


def _bars(axis: Axes, of: Runs, metric: str, label: str) -> None:
    values = [[run[metric] for run in runs] for runs in of.values()]
    place = np.arange(len(of))
    axis.barh(place, [float(np.mean(each)) for each in values], xerr=[common.spread(each) or 0.0 for each in values])
    axis.set_yticks(place, list(of), fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(label, fontsize=8)


def main(argv: Sequence[str] | None = None) -> None:
    """Do the parts, print what they find and draw it."""
    parser = common.arguments(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part (default all)")
    parser.add_argument("--kept", type=Path, help="folder of the parts that are done, where the next call goes on")
    options = parser.parse_args(argv)
    runs: dict[str, Runs] = {}
    for part in options.part or PARTS:
        for seed in range(options.seeds):
            work = partial(PARTS[part], seed, options.smoke)
            for setting, found in common.kept(options.kept, f"promises_{part}_{seed}", work).items():
                runs.setdefault(part, {}).setdefault(setting, []).append(found)
    rows = [
        row for part, of in runs.items() for setting, each in of.items()
        for row in common.over_seeds(f"{part}: {setting}", each)
    ]  # fmt: skip
    common.show_rows("What is said beside the tables", rows, ".4f")
    common.finish("vfl.promises", rows, options, lambda: {"vfl_promises": draw(runs)})


if __name__ == "__main__":
    main()
