"""Statistics in a minute: 442 diabetes patients at 16 clinics, hierarchical Bayes and sparse discovery, with intervals.

Every clinic's score has an offset of its own, as graders have; what age, pressure or body mass index do to the disease
is common to all. No row leaves a clinic. Least squares alone and of all rows at once stand beside a hierarchical model
by expectation propagation, whose coefficients the same model finds with all rows in one place, and beside a sparse
regression by Gibbs sampling. A line on each says why it ends where it does. Data: Efron, Hastie, Johnstone and
Tibshirani (2004), as scikit-learn has them; only the offsets are simulated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import minimize
from torch import Tensor

import fedtorch as ft
from experiments import common
from fedtorch.federation.algorithms.ep import devices, posterior, settled
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse

NAMES = ("age", "sex", "body mass", "pressure", "total cholesterol", "LDL", "HDL", "ratio", "triglycerides", "glucose")
OFFSET = 0.5  # sd of the clinics' offsets
LEVEL = 1.6448536269514722  # of 90 % intervals


class Found(NamedTuple):
    """The coefficients of ten covariates by one method."""

    mean: Tensor  # (10,)
    sd: Tensor  # (10,)


class Way(NamedTuple):
    """One way of fitting, done."""

    why: str
    errors: Tensor  # (K,) each clinic's root mean squared error on its held-out rows
    megabytes: float


class Result(NamedTuple):
    """All ways on the same rows."""

    ways: dict[str, Way]
    federated: Found  # of the hierarchical model
    whole: Found  # of the same model with all rows in one place
    included: Tensor  # (10,) probabilities
    rhat: float  # the largest of the samplers' coefficients


def clinics(count: int, seed: int) -> tuple[ft.data.FederatedData, ft.data.FederatedData]:
    """(training rows, held-out rows): covariates and response of variance 1, and a constant last."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (part.double() for part in ft.data.diabetes())
    y = (y - y.mean()) / y.std()
    dealt = ft.data.partition((x, y), ft.data.iid(), clients=count, seed=seed)
    offsets = OFFSET * torch.randn(count, generator=generator, dtype=torch.float64)
    rows = [(torch.cat([x, torch.ones(len(x), 1)], 1), y + offset) for (x, y), offset in zip(dealt, offsets)]
    return ft.data.from_tensors(rows).split(0.7, seed=seed)


def in_one_place(data: ft.data.FederatedData) -> Found:
    """The same model with all rows at hand: its variances by maximum marginal likelihood, the rest in closed form."""

    def fitted(logs: np.ndarray) -> tuple[float, Tensor, Tensor]:
        noise, between = (math.exp(value) for value in logs)
        precision, moment, value = torch.eye(11).double(), torch.zeros(11).double(), 0.0  # μ ~ N(0, I)
        for x, y in data:  # (σ² I + τ 11')⁻¹ = (I − s 11') / σ²
            s = between / (noise + len(x) * between)
            left = (x - s * x.sum(0)) / noise
            precision, moment = precision + left.mT @ x, moment + left.mT @ y
            value += float((y @ y - s * y.sum() ** 2) / noise) + len(x) * math.log(noise)
            value += math.log(1 + len(x) * between / noise)
        estimate = torch.linalg.solve(precision, moment)
        return value - float(moment @ estimate) + float(torch.logdet(precision)), estimate, precision

    best = minimize(lambda logs: fitted(logs)[0], np.log([0.5, 0.3]), method="Nelder-Mead")
    _, estimate, precision = fitted(best.x)
    return Found(estimate[:10], torch.linalg.inv(precision).diagonal().sqrt()[:10])


def compare(count: int, rounds: int, seed: int) -> Result:
    """Fit in all ways, the sampler for so many rounds, and score them on every clinic's held-out rows."""
    training, held_out = clinics(count, seed)
    population, head = ft.InProcess(training), ft.least_squares(ft.LinearHead(11, intercept=False, dtype=torch.float64))
    alone = ft.run(ft.separate(head), population, rounds=1)
    pooled = ft.run(ft.pooled(head), ft.InProcess(training.pool()), rounds=1)
    hierarchy = hierarchical.normal(11, random=[10])  # ten effects that are common, an intercept of each clinic's
    run = ft.run(ft.ep(hierarchical.linear(hierarchy)), population, rounds=60, until=settled(0.005))
    q, own = posterior(run), devices(run).marginals()

    sampler = ft.Sampler(burn_in=rounds // 6)
    covariates = ft.InProcess(training.map(lambda rows: (rows[0][:, :10], rows[1])))
    sampled = ft.gibbs(sparse.regression(intercept=True), sparse.hierarchy(), sweeps=4, chains=4)
    start = torch.zeros(10, dtype=torch.float64)
    ft.run(sampled, covariates, start, rounds=rounds, seed=seed, record=sampler)
    summary = sampler.summary()

    squared = {"squared": ft.metrics.mean_squared_error()}
    of_clinics = lambda run: run.evaluate(held_out, squared)["squared"].clients.sqrt()
    expected = [(x @ mean - y).square().mean().sqrt() for mean, (x, y) in zip(own.mean, held_out)]
    sent = lambda run: (run.bytes_up + run.bytes_down) / 1e6
    few = f"some {len(training.rows[1]) // count} rows are too few for 11 coefficients"
    ways = {
        "each clinic alone": Way(few, of_clinics(alone), sent(alone)),
        "one model for all": Way("cannot know a clinic's offset", of_clinics(pooled), 0.0),
        "hierarchical Bayes": Way("shares effects, learns how far clinics differ", torch.stack(expected), sent(run)),
    }
    return Result(
        ways,
        Found(q.mean[:10], q.covariance_matrix.diagonal().sqrt()[:10]),
        in_one_place(training),
        sampler.mean()["prior.included"],
        float(summary[summary.index.str.startswith("theta")]["r_hat"].max()),
    )


def draw(result: Result) -> Figure:
    """Left each clinic's error by every way; right the coefficients with 90 % intervals, federated and in one place."""
    figure, (left, right) = common.subplots(1, 2, figsize=(12, 4.2), width_ratios=[1.1, 1])
    for i, way in enumerate(result.ways.values()):
        left.scatter(way.errors, [i] * len(way.errors), s=18, alpha=0.5, color=f"C{i}", linewidths=0)
        left.plot([way.errors.mean()] * 2, [i - 0.2, i + 0.2], color=f"C{i}", linewidth=3)
        left.text(0.02, i - 0.32, way.why, fontsize=8.5, color="0.35", transform=left.get_yaxis_transform())
    left.set_yticks(range(len(result.ways)), list(result.ways))
    left.set_ylim(len(result.ways) - 0.6, -0.6)
    left.set_xlabel("error on held-out patients: each dot a clinic")
    order = result.federated.mean.abs().argsort()
    for found, shift, colour, label in (
        (result.federated, 0.14, "C2", "federated"),
        (result.whole, -0.14, "0.55", "all rows in one place"),
    ):
        mean, reach = found.mean[order], LEVEL * found.sd[order]
        places = torch.arange(len(order)) + shift
        right.errorbar(mean, places, xerr=reach, fmt="o", markersize=4, capsize=2, color=colour, label=label)
    names = [f"{NAMES[j]} ({100 * float(result.included[j]):.0f} %)" for j in order]
    right.set_yticks(range(len(order)), names)
    right.axvline(0, color="0.8", linewidth=1)
    right.set_xlabel("effect, 90 % interval (%: it matters, by sampling)")
    right.legend(frameon=False, fontsize=8.5, loc="lower left")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, print two tables with a line on each way, and draw them."""
    options = common.arguments(__doc__).parse_args(argv)
    count, rounds = (4, 24) if options.smoke else (16, 360)
    results = [compare(count, rounds, seed) for seed in range(options.seeds)]
    first, rows, lines = results[0], [], []
    for name, way in first.ways.items():
        means = [float(result.ways[name].errors.mean()) for result in results]
        worst = [float(result.ways[name].errors.max()) for result in results]
        rows += [common.row(name, "error", means), common.row(name, "worst clinic", worst)]
        lines.append([name, *(common.number(row.ours) for row in rows[-2:]), f"{way.megabytes:.2f}", way.why])
    columns = ["", "error in sd", "worst clinic", "MB sent", "why"]
    common.show(f"442 patients at {count} clinics ({common.machine()})", columns, lines)
    interval = lambda mean, sd: f"{mean:+.2f}  {mean - LEVEL * sd:+.2f} to {mean + LEVEL * sd:+.2f}"
    lines = [
        [name, interval(*federated), interval(*whole), f"{100 * included:.0f} %"]
        for name, federated, whole, included in zip(
            NAMES, zip(*map(Tensor.tolist, first.federated)), zip(*map(Tensor.tolist, first.whole)), first.included
        )
    ]
    columns = ["effect of", "federated, 90 % interval", "all rows in one place", "matters (Gibbs)"]
    common.show("Effects, in sd of the response for a sd of the covariate", columns, lines)
    apart = [float(((r.federated.mean - r.whole.mean) / r.whole.sd).abs().max()) for r in results]
    rows += [common.row("effects", "furthest from one place, in sd", apart)]
    rows += [common.row("Gibbs", "largest R-hat", [result.rhat for result in results])]
    sys.stderr.write(
        f"\nThe federated effects are within {apart[0]:.2f} sd of those of all rows in one place. "
        f"The sampler's\nlargest R-hat is {first.rhat:.2f}; every clinic may deviate from what is common "
        "there, so that small effects are less sure.\n"
    )
    common.finish("demo_statistics", rows, options, lambda: {"demo_statistics": draw(first)})


if __name__ == "__main__":
    main()
