"""Logistic and Poisson mixed effects: expectation propagation beside statsmodels, and who of both is right.

Groups with an intercept each from N(β₀, s²) and two slopes that all share; priors are statsmodels': β ~ N(0, 2²),
log s ~ N(0, 1). *EP*, whose groups are clients that send a normal density of four numbers; *statsmodels*, variational
Bayes of `BinomialBayesMixedGLM` and `PoissonBayesMixedGLM`, which takes all rows in one place and coordinates as
independent; *Metropolis*, random-walk steps in plain NumPy on the marginal likelihood, with 30 points of Gauss-Hermite
quadrature for each group's intercept: the referee.

The paper names mixed effects as a next step (section 7) and has no figures for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

import fedtorch as ft
from experiments import common, result_pages
from experiments.fedlin.generalised import MODELS
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import hyperpriors

FIXED_SD, LOG_SD, TRUTH = 2.0, 1.0, (-0.5, 0.8, -0.4, float(np.log(0.7)))
NAMES = ("intercept", "slope 1", "slope 2", "log sd")
METHODS = ("EP", "statsmodels", "Metropolis")
READING = result_pages.Reading(across="(?P<line>logistic|poisson), (?P<column>.*)")

Array = NDArray[np.float64]


def simulate(family: str, groups: int, rows: int, seed: int) -> tuple[Array, Array]:
    """Rows `(G, N, 3)`, the first column a constant, and responses `(G, N)`."""
    generator = np.random.default_rng(80_000 + seed)
    x = np.concatenate([np.ones((groups, rows, 1)), generator.standard_normal((groups, rows, 2))], 2)
    eta = x @ np.array(TRUTH[:3]) + np.exp(TRUTH[3]) * generator.standard_normal((groups, 1))
    y = (
        generator.uniform(size=eta.shape) < 1 / (1 + np.exp(-eta))
        if family == "logistic"
        else generator.poisson(np.exp(eta))
    )
    return x, y.astype(float)


def propagated(family: str, x: Array, y: Array) -> tuple[Array, Array]:
    """Means and sds by expectation propagation."""
    variance = hyperpriors.log_normal(0.0, 2 * LOG_SD)
    model = MODELS[family](hierarchical.normal(3, random=[0], sd=FIXED_SD, variance=variance))
    data = ft.data.from_tensors([(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(x, y)])
    q = posterior(ft.run(ft.ep(model), ft.InProcess(data), rounds=60, until=settled(0.01)), tolerance=0.02)
    scale = np.array([1.0, 1.0, 1.0, 0.5])  # of a log variance
    return q.mean.numpy() * scale, q.stddev.numpy() * scale


def variational(family: str, x: Array, y: Array) -> tuple[Array, Array]:
    """Means and sds by statsmodels."""
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM, PoissonBayesMixedGLM

    kind = BinomialBayesMixedGLM if family == "logistic" else PoissonBayesMixedGLM
    groups, rows, _ = x.shape
    of_groups = np.kron(np.eye(groups), np.ones((rows, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(y.ravel(), x.reshape(-1, 3), of_groups, np.zeros(groups, int), vcp_p=LOG_SD, fe_p=FIXED_SD)
        found = model.fit_vb()
    return np.concatenate([found.fe_mean, found.vcp_mean]), np.concatenate([found.fe_sd, found.vcp_sd])


def log_posterior(family: str, x: Array, y: Array, at: Array, nodes: Array, weights: Array) -> float:
    """The logarithm of likelihood times prior at (β, log s), groups' intercepts integrated."""
    eta = (x @ at[:3])[..., None] + np.exp(at[3]) * nodes
    if family == "logistic":
        each = y[..., None] * eta - np.logaddexp(0, eta)
    else:
        each = y[..., None] * eta - np.exp(eta) - gammaln(y + 1)[..., None]
    likelihood = logsumexp(each.sum(1) + np.log(weights), axis=1).sum()
    return float(likelihood - (at[:3] ** 2).sum() / (2 * FIXED_SD**2) - at[3] ** 2 / (2 * LOG_SD**2))


def metropolis(
    family: str, x: Array, y: Array, start: tuple[Array, Array], steps: int, seed: int
) -> tuple[Array, Array]:
    """Means and sds by random-walk Metropolis, proposals of the size of EP's sds."""
    generator = np.random.default_rng(seed)
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    weights = weights / weights.sum()
    at, spread = start[0].copy(), 1.1 * start[1]
    now, kept = log_posterior(family, x, y, at, nodes, weights), []
    for step in range(steps):
        trial = at + spread * generator.standard_normal(4)
        value = log_posterior(family, x, y, trial, nodes, weights)
        if np.log(generator.uniform()) < value - now:
            at, now = trial, value
        if step >= steps // 10:
            kept.append(at)
    draws = np.stack(kept)
    return draws.mean(0), draws.std(0)


def compare(family: str, groups: int, rows: int, steps: int, seed: int) -> dict[str, tuple[Array, Array]]:
    """Means and sds by method."""
    x, y = simulate(family, groups, rows, seed)
    ours = propagated(family, x, y)
    return dict(zip(METHODS, (ours, variational(family, x, y), metropolis(family, x, y, ours, steps, seed))))


def figures(family: str, found: dict[str, tuple[Array, Array]]) -> list[common.Row]:
    """Means and sds of all, and how far from the referee the two are, in its sds."""
    rows = []
    for method, (mean, sd) in found.items():
        for name, value, spread in zip(NAMES, mean, sd):
            rows += [
                common.Row(f"{family}, {method}", name, float(value)),
                common.Row(f"{family}, {method}", f"sd of {name}", float(spread)),
            ]
    mean, sd = found["Metropolis"]
    for method in METHODS[:2]:
        gap, ratio = np.abs(found[method][0] - mean) / sd, found[method][1] / sd
        rows += [
            common.Row(f"{family}, {method}", "farthest mean from Metropolis, in sds", float(gap.max())),
            common.Row(f"{family}, {method}", "sds of Metropolis's, least", float(ratio.min())),
            common.Row(f"{family}, {method}", "sds of Metropolis's, most", float(ratio.max())),
        ]
    return rows


def draw(every: dict[str, dict[str, tuple[Array, Array]]]) -> Figure:
    """Means and two sds of all methods in both families, less the referee's mean."""
    figure, axes = common.subplots(1, 2, figsize=(9, 3.4))
    for axis, (family, found) in zip(axes, every.items()):
        centre, unit = found["Metropolis"]
        for i, (method, (mean, sd)) in enumerate(found.items()):
            places = np.arange(4) + 0.2 * (i - 1)
            axis.errorbar(places, (mean - centre) / unit, 2 * sd / unit, fmt="o", capsize=3, label=method)
        axis.axhline(0, color="0.6", linewidth=1)
        axis.set_xticks(range(4), NAMES)
        axis.set_title(family)
    axes[0].set_ylabel("mean ± 2 sds, in sds about Metropolis's")
    axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Both families; `--seeds` chooses the data set, of which there is one."""
    options = common.arguments(__doc__).parse_args(argv)
    sizes = (10, 8, 300) if options.smoke else (40, 20, 20_000)
    every = {family: compare(family, *sizes, options.seeds - 1) for family in MODELS}
    rows = [row for family, found in every.items() for row in figures(family, found)]
    common.show_rows("Mixed effects", rows)
    common.finish("fedlin.mixed", rows, options, lambda: {"fedlin_mixed": draw(every)})


if __name__ == "__main__":
    main()
