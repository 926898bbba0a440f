"""How many edges of a network are found at the same false discovery rate: "or" and "and", graphical lasso, knockoffs.

Networks of twelve variables with fourteen edges of partial correlations about ±0.18, five sites of sixty rows. In
`alike` all sites have the network; in `one site differs` one of them has another one. Every method ranks the pairs of
variables:

- "or" and "and": the larger or the smaller of a pair's two inclusion probabilities, by federated neighbourhood
  selection (`graphical.neighbourhoods`); rows stay at their sites
- graphical lasso (scikit-learn) on pooled rows: the penalty at which the pair enters the precision matrix; and on each
  site's own rows, the sites' penalties averaged
- knockoffs on pooled rows: W_jh + W_hj, where W_jh is the signed maximum of the penalties at which variable h and its
  copy enter the lasso path of variable j; copies are Gaussian of second order, equicorrelated, in closed form.

Rows are standardised at each site for all of them. The threshold of a method is the one with the most edges found
whose false discoveries are at most 10 % (20 %) on average over repetitions, so that methods are compared by their power
at the same rate; what each finds at the level that it promises itself stands beside: 20 % expected false discoveries of
"or" and "and"; pairs of which both W_jh and W_hj pass knockoff+ of all of them at 20 %, for their sum is not symmetric
around zero (what is alike by chance in the data counts twice, what is in copies once); the penalty by cross-validation
of the graphical lasso (of most sites).

Sources: Kidd et al. (2023), section 2.3; Friedman, Hastie and Tibshirani, "Sparse inverse covariance estimation with
the graphical lasso", Biostatistics 9, 2008; Candès, Fan, Janson and Lv, "Panning for gold: model-X knockoffs for high
dimensional controlled variable selection", JRSS B 80, 2018. Published: nothing (simulations are in a supplement that is
no longer there).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.covariance import GraphicalLassoCV, graphical_lasso
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import lars_path
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.sparse.common import Sizes, sample, shared, standardised
from experiments.sparse.network import RULES, algorithm
from fedtorch.models.gibbs import graphical

P, EDGES, SITES, ROWS, STRENGTH = 12, 14, 5, 60, 0.18
LEVELS = (0.1, 0.2)
PROMISED = 0.2
PENALTIES = np.geomspace(0.7, 0.02, 40)


class Ranking(NamedTuple):
    """What a method says of the pairs of one data set."""

    score: Tensor  # of every pair, the larger the likelier
    chosen: Tensor  # the pairs that it reports at its own level


def pairs(matrix: Tensor) -> Tensor:
    """Return a symmetric matrix's elements above the diagonal."""
    return matrix[tuple(torch.triu_indices(P, P, 1))]


def precision(key: Tensor) -> Tensor:
    """Return a precision matrix of unit diagonal, or a larger one where that has no square root."""
    every = torch.triu_indices(P, P, 1).T
    edges = every[ft.random.permutation(ft.random.fold_in(key, 0), len(every))[:EDGES]]
    signs = 1 - 2 * ft.random.bernoulli(ft.random.fold_in(key, 1), 0.5, (EDGES,)).double()
    omega = torch.eye(P, dtype=torch.float64)
    omega[edges[:, 0], edges[:, 1]] = omega[edges[:, 1], edges[:, 0]] = STRENGTH * signs
    return omega + torch.eye(P) * max(0.0, 0.2 - float(torch.linalg.eigvalsh(omega)[0]))


def simulated(seed: int, differs: bool) -> tuple[ft.data.FederatedData, Tensor]:
    """Return standardised rows of all sites, and which pairs are edges."""
    key = ft.random.fold_in(ft.random.key(11), seed)
    common_one, other = precision(ft.random.fold_in(key, 0)), precision(ft.random.fold_in(key, 1))
    sites = []
    for k in range(SITES):
        factor = torch.linalg.cholesky(torch.linalg.inv(other if differs and k == SITES - 1 else common_one))
        z = ft.random.normal(ft.random.fold_in(key, 2 + k), (ROWS, P), torch.float64)
        sites.append(z @ factor.mT)
    return standardised(ft.data.from_tensors(sites)), pairs(common_one) != 0


def by_neighbourhoods(data: ft.data.FederatedData, sizes: Sizes, seed: int) -> dict[str, Ranking]:
    """Return what federated neighbourhood selection says, by both rules."""
    names = [f"y{j + 1}" for j in range(P)]
    chains = algorithm(sizes, names)
    done = sample(chains, data, graphical.start(P), sizes.rounds, sizes.rounds // 5, seed, shared)
    inclusion = graphical.square(done.sampler.mean()["included"])
    return {
        f'"{name}"': Ranking(
            pairs(rule(inclusion, inclusion.mT)), pairs(graphical.edges(inclusion, PROMISED, rule).double()) > 0
        )
        for name, rule in RULES.items()
    }


def by_graphical_lasso(sites: Sequence[np.ndarray]) -> Ranking:
    """Return the penalties at which pairs enter, averaged over sites, and the pairs that most sites choose."""
    entered, chosen = np.zeros((len(sites), P, P)), np.zeros((len(sites), P, P), dtype=bool)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for k, y in enumerate(sites):
            for penalty in PENALTIES:
                estimate = np.abs(graphical_lasso(np.cov(y.T, bias=True), alpha=penalty)[1]) > 1e-8
                entered[k] = np.where(estimate & (entered[k] == 0), penalty, entered[k])
            chosen[k] = np.abs(GraphicalLassoCV(cv=5).fit(y).precision_) > 1e-8
    return Ranking(*(pairs(torch.from_numpy(each)) for each in (entered.mean(0), chosen.mean(0) > 0.5)))


def by_knockoffs(y: Tensor, key: Tensor) -> Ranking:
    """Return what knockoffs of each regression's covariates say."""
    statistic = torch.zeros(P, P, dtype=torch.float64)
    for j in range(P):
        others = [h for h in range(P) if h != j]
        x = y[:, others]
        copies = knockoffs(x, ft.random.fold_in(key, j))
        both = torch.cat([x, copies], 1).numpy()
        penalties, _, path = lars_path(both, y[:, j].numpy(), method="lasso")
        active = path != 0
        entry = np.where(active.any(1), penalties[active.argmax(1).clip(1) - 1], 0.0)
        real, copy = torch.from_numpy(entry).split(P - 1)
        statistic[j, others] = torch.maximum(real, copy) * (real - copy).sign()
    every = statistic[~torch.eye(P, dtype=torch.bool)]
    smaller = torch.minimum(statistic, statistic.mT)
    return Ranking(pairs(statistic + statistic.mT), pairs(smaller) >= knockoff_threshold(every, PROMISED))


def knockoffs(x: Tensor, key: Tensor) -> Tensor:
    """Return Gaussian knockoffs `(n, d)` with the covariances of the rows, all at the same distance from them."""
    sigma = torch.corrcoef(x.T)
    d = len(sigma)
    distance = min(1.0, 2 * float(torch.linalg.eigvalsh(sigma)[0])) * 0.999
    inverse = torch.linalg.inv(sigma)
    spread = torch.linalg.cholesky(2 * distance * torch.eye(d, dtype=x.dtype) - distance**2 * inverse)
    return x - distance * x @ inverse + ft.random.normal(key, x.shape, x.dtype) @ spread.mT


def knockoff_threshold(score: Tensor, level: float) -> float:
    """Return the least threshold of knockoff+ (Barber and Candès 2015); infinity where there is none.

    >>> import torch
    >>> knockoff_threshold(torch.tensor([5.0, 4.0, 3.0, 2.0, -1.0]), 0.25), knockoff_threshold(torch.ones(2), 0.25)
    (2.0, inf)
    """
    for threshold in score[score != 0].abs().sort().values.tolist():
        if (1 + int((score <= -threshold).sum())) / max(int((score >= threshold).sum()), 1) <= level:
            return threshold
    return float("inf")


def rates(rankings: Sequence[Ranking], truths: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return thresholds `(H,)`, and each repetition's shares of false discoveries and of edges found, `(H, R)`."""
    scores, truth = torch.stack([ranking.score for ranking in rankings]), torch.stack(list(truths))
    thresholds = scores[scores > 0].unique()
    reported = scores >= thresholds[:, None, None]
    false = (reported & ~truth).sum(-1) / reported.sum(-1).clamp(min=1)
    return thresholds, false, (reported & truth).sum(-1) / truth.sum(-1)


def study(setting: str, differs: bool, sizes: Sizes, seeds: int) -> tuple[list[common.Row], dict[str, Tensor]]:
    """Return the rows, and each method's curve: false discoveries and power on average, `(2, H)`."""
    by_method: dict[str, list[Ranking]] = {}
    truths = []
    for seed in range(seeds):
        data, truth = simulated(seed, differs)
        truths.append(truth)
        pooled = data.pool()[0]
        each = by_neighbourhoods(data, sizes, seed)
        each["graphical lasso"] = by_graphical_lasso([pooled.numpy()])
        each["graphical lasso, sites averaged"] = by_graphical_lasso([y.numpy() for y in data])
        each["knockoffs"] = by_knockoffs(pooled, ft.random.fold_in(ft.random.key(12), seed))
        for name, ranking in each.items():
            by_method.setdefault(name, []).append(ranking)
    rows, curves = [], {}
    for name, rankings in by_method.items():
        _, false, power = rates(rankings, truths)
        curves[name] = torch.stack([false.mean(1), power.mean(1)])
        for level in LEVELS:
            allowed = torch.where(false.mean(1) <= level, power.mean(1), -1.0)
            best = power[allowed.argmax()] if float(allowed.max()) >= 0 else torch.zeros(seeds)
            rows.append(common.row(f"{setting}, {name}", f"edges found, {level:.0%} of all false", best.tolist()))
        chosen = [(ranking.chosen, truth) for ranking, truth in zip(rankings, truths)]
        wrong = [float((some & ~truth).sum() / some.sum().clamp(min=1)) for some, truth in chosen]
        right = [float((some & truth).sum() / truth.sum()) for some, truth in chosen]
        rows.append(common.row(f"{setting}, {name}", "edges found at its own level", right))
        rows.append(common.row(f"{setting}, {name}", "false discoveries at its own level", wrong))
    common.show_rows(f"{setting}, {seeds} repetitions", rows)
    return rows, curves


def draw(curves: dict[str, dict[str, Tensor]]) -> Figure:
    """Return power by false discovery rate, a panel for each setting."""
    figure, axes = common.subplots(1, len(curves), figsize=(4.4 * len(curves), 3.8), sharey=True, squeeze=False)
    for panel, (setting, methods) in zip(axes[0], curves.items()):
        for i, (name, (false, power)) in enumerate(methods.items()):
            order = false.argsort()
            panel.plot(false[order], power[order].cummax(0).values, color=f"C{i}", label=name, linewidth=1.8)
        for level in LEVELS:
            panel.axvline(level, color="0.85", linewidth=1, zorder=0)
        panel.set_xlim(0, 0.5)
        panel.set_ylim(0, 1.02)
        panel.set_title(setting, fontsize=10)
        panel.set_xlabel("false discoveries, on average")
    axes[0, 0].set_ylabel("share of edges found")
    axes[0, -1].legend(frameon=False, loc="lower right")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run both settings."""
    options = common.arguments(__doc__).parse_args(argv)
    sizes = Sizes(10, 1, 1) if options.smoke else Sizes(200, 5, 2)
    rows, curves = [], {}
    for setting, differs in (("alike", False), ("one site differs", True)):
        some, curves[setting] = study(setting, differs, sizes, options.seeds)
        rows += some
    common.finish("sparse.power", rows, options, lambda: {"sparse_power": draw(curves)})


if __name__ == "__main__":
    main()
