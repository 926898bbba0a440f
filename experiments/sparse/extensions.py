"""Networks of variables over sites with curves and with gaps: splines and missing covariates in graph models.

The first two of the future directions that the paper names (section 4), in the graph model of its section 2.3.

`splines`: six variables in two trees, 0 – 1 – 2 and 3 – 4 – 5, where 1 is a parabola and 4 a wave of their neighbours.
Neighbourhood selection with straight lines (`graphical.neighbourhoods`) stands beside one with a block of cubic
B-splines for every neighbour and one indicator for each block (`splines.b_splines`, `spike_and_slab(groups=…)`): a
regression for each variable, all of them by `ft.gibbs`.

`missing`: eight variables in a ring. Two of five sites never measured variable 2, another one never variable 5, and of
all other cells one in ten is missing. Compared are

- complete: the rows before anything went missing
- complete rows only: rows without a gap, and sites that have any
- imputed five times: `ft.inference.imputed` by the normal distribution of all sites, inclusion probabilities averaged
- drawn in the chain: `imputation.imputing`, a regression for each variable on the rows in which it is observed.

Edges are those of the "or" and "and" rules at an expected false discovery rate of 20 %. Published: nothing; the paper
speaks of preliminary simulations that it does not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.sparse.common import Report, Sizes, finish, sample, share, shared
from experiments.sparse.network import LEVEL, RULES, algorithm
from fedtorch.models import gibbs
from fedtorch.models.gibbs import graphical, imputation, sparse, splines
from fedtorch.models.gibbs.global_priors import spike_and_slab

SITES, ROWS = 5, 80
CURVED = ((0, 1), (1, 2), (3, 4), (4, 5))
RING, STRENGTH = 8, 0.35
LACKING = {1: 5, 3: 2, 4: 2}  # site: the variable that it never measured
IMPUTATIONS = 5


def curved(seed: int) -> list[Tensor]:
    """Return the sites' rows of six variables, standardised."""
    z = ft.random.normal(ft.random.fold_in(ft.random.key(21), seed), (SITES * ROWS, 6), torch.float64)
    y = z.clone()
    y[:, 1] = (z[:, 0].square() - 1) / math.sqrt(2) + 0.5 * z[:, 1]
    y[:, 2] = 0.6 * y[:, 1] + 0.8 * z[:, 2]
    y[:, 4] = 1.2 * (2 * z[:, 3]).cos() + 0.5 * z[:, 4]
    y[:, 5] = 0.6 * y[:, 4] + 0.8 * z[:, 5]
    return list(((y - y.mean(0)) / y.std(0)).split(ROWS))


def ringed(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sites' rows of eight variables in a ring, and the same with NaN for what is missing."""
    key = ft.random.fold_in(ft.random.key(22), seed)
    omega = torch.eye(RING, dtype=torch.float64)
    for j in range(RING):
        omega[j, (j + 1) % RING] = omega[(j + 1) % RING, j] = -STRENGTH
    sigma = torch.linalg.inv(omega)
    scale = sigma.diagonal().sqrt()
    factor = torch.linalg.cholesky(sigma / scale / scale[:, None])
    z = ft.random.normal(ft.random.fold_in(key, 0), (SITES, ROWS, RING), torch.float64)
    complete = z @ factor.mT
    gaps = ft.random.bernoulli(ft.random.fold_in(key, 1), 0.1, complete.shape)
    for site, variable in LACKING.items():
        gaps[site, :, variable] = True
    return list(complete), list(torch.where(gaps, torch.nan, complete))


def straight(sites: Sequence[Tensor], sizes: Sizes, seed: int) -> Tensor:
    """Return inclusion probabilities `(p, p)` by neighbourhood selection with straight lines."""
    p = sites[0].shape[1]
    names = [f"y{j + 1}" for j in range(p)]
    data = ft.data.from_tensors(list(sites))
    done = sample(algorithm(sizes, names), data, graphical.start(p), sizes.rounds, sizes.rounds // 5, seed, shared)
    return graphical.square(done.sampler.mean()["included"])


Regression = tuple[ft.data.FederatedData, gibbs.LocalKernel, Any, Tensor]


def each_variable(p: int, regression: Callable[[int], Regression], sizes: Sizes, seed: int) -> Tensor:
    """Return inclusion probabilities `(p, p)` by a sampler for each variable on all others.

    Args:
        p: variables.
        regression: variable -> data, the clients' half, the prior of coefficients, and the covariate of each of them.
        sizes: of the chains.
        seed: of the chains.
    """
    inclusion = torch.zeros(p, p, dtype=torch.float64)
    for j in range(p):
        data, local, prior, covariate = regression(j)
        chains = ft.gibbs(local, sparse.hierarchy(prior), sweeps=sizes.sweeps, chains=sizes.chains)
        start = torch.zeros(len(covariate))
        done = sample(chains, data, start, sizes.rounds, sizes.rounds // 5, seed, shared)
        inclusion[j, covariate] = done.sampler.mean()["included"]
    return inclusion


def with_splines(sites: Sequence[Tensor], sizes: Sizes, seed: int) -> Tensor:
    """Return inclusion probabilities `(p, p)` with a smooth function of every neighbour."""
    p = sites[0].shape[1]

    def regression(j: int) -> Regression:
        others = torch.tensor([h for h in range(p) if h != j])
        bases = [splines.b_splines(y[:, others], lower=-3.0, upper=3.0, pieces=4) for y in sites]
        data = ft.data.from_tensors([(basis, y[:, j]) for (basis, _), y in zip(bases, sites)])
        groups = bases[0][1]
        return data, sparse.regression(intercept=True), spike_and_slab(groups=groups), others[groups]

    return each_variable(p, regression, sizes, seed)


def with_gaps(sites: Sequence[Tensor]) -> ft.data.FederatedData:
    """Return rows with NaN as data, the last variable in the place of a response."""
    return imputation.incomplete([(y[:, :-1], y[:, -1]) for y in sites])


def imputed(sites: Sequence[Tensor], sizes: Sizes, seed: int) -> Tensor:
    """Return inclusion probabilities `(p, p)` over several completed data sets."""
    each = []
    for data in ft.inference.imputed(with_gaps(sites), IMPUTATIONS, between=False, seed=seed):
        each.append(straight([torch.cat([x, y[:, None]], 1) for x, y in data], sizes, seed))
    return torch.stack(each).mean(0)


def in_the_chain(sites: Sequence[Tensor], sizes: Sizes, seed: int) -> Tensor:
    """Return inclusion probabilities `(p, p)` with missing covariates among the variables that are sampled."""
    p = sites[0].shape[1]
    draws = ft.normal_em(IMPUTATIONS, between=False, columns=p)
    normal = ft.run(draws, ft.InProcess(with_gaps(sites)), rounds=100, seed=seed).server.normal
    normal = normal._replace(mean=normal.mean.mean(0), covariance=normal.covariance.mean(0))

    def regression(j: int) -> Regression:
        others = torch.tensor([h for h in range(p) if h != j])
        order = torch.tensor([*others.tolist(), j])
        known = normal._replace(mean=normal.mean[order], covariance=normal.covariance[order][:, order])
        rows = [y[~y[:, j].isnan()] for y in sites]
        data = imputation.incomplete([(y[:, others], y[:, j]) for y in rows if len(y)])
        return data, imputation.imputing(sparse.regression(), known), spike_and_slab(), others

    return each_variable(p, regression, sizes, seed)


def complete_rows(sites: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows without a gap, of sites that have more than a few."""
    rows = [y[~y.isnan().any(1)] for y in sites]
    return [y for y in rows if len(y) > 2]


def judged(inclusion: Tensor, truth: Tensor) -> dict[str, float]:
    """Return how many edges are found by either rule, and how many of them are none."""
    numbers: dict[str, float] = {}
    for rule, symmetrise in RULES.items():
        edge = graphical.edges(inclusion, LEVEL, symmetrise)
        numbers |= {f'edges found, "{rule}"': share(edge, truth), f'false discoveries, "{rule}"': share(~truth, edge)}
    return numbers


def study(
    name: str, methods: dict[str, Callable[[int], Tensor]], truth: Tensor, seeds: int, p: int
) -> tuple[list[common.Row], dict[str, Tensor]]:
    """Return the rows of all methods, and each one's inclusion probabilities in the first repetition."""
    rows, first = [], {}
    for method, inclusion in methods.items():
        every = [inclusion(seed) for seed in range(seeds)]
        first[method] = every[0]
        rows += common.over_seeds(f"{name}, {method}", [judged(each, truth) for each in every])
    common.show_rows(f"{name}, {p} variables, {seeds} repetitions", rows)
    return rows, first


def draw(first: dict[str, Tensor], truth: Tensor) -> Figure:
    """Return the inclusion probabilities of every method side by side, edges of the truth framed."""
    figure, axes = common.subplots(1, len(first), figsize=(2.7 * len(first) + 0.6, 3.1), squeeze=False)
    for panel, (method, inclusion) in zip(axes[0], first.items()):
        shown = inclusion.clone().fill_diagonal_(torch.nan)
        image = panel.imshow(shown.numpy(), vmin=0, vmax=1, cmap="Blues")
        for j, h in truth.nonzero().tolist():
            panel.add_patch(Rectangle((h - 0.5, j - 0.5), 1, 1, fill=False, edgecolor="C3", linewidth=1.4))
        panel.set_xticks(range(len(truth)), [f"{j}" for j in range(len(truth))])
        panel.set_yticks(range(len(truth)), [f"{j}" for j in range(len(truth))])
        panel.set_title(method, fontsize=9)
        panel.set_xlabel("neighbour")
    axes[0, 0].set_ylabel("variable")
    figure.colorbar(image, ax=axes[0, -1], label="inclusion", shrink=0.8)
    return figure


def edges_of(pairs: Sequence[tuple[int, int]], p: int) -> Tensor:
    """Return pairs as a symmetric matrix `(p, p)` bool."""
    truth = torch.zeros(p, p, dtype=torch.bool)
    for j, h in pairs:
        truth[j, h] = truth[h, j] = True
    return truth


def main(argv: Sequence[str] | None = None) -> None:
    """Run both studies."""
    parser = common.arguments(__doc__)
    parser.add_argument("--study", choices=["splines", "missing", "both"], default="both", help="default both")
    options = parser.parse_args(argv)
    sizes = Sizes(8, 1, 1) if options.smoke else Sizes(150, 4, 2)
    reports = []
    if options.study in ("splines", "both"):
        truth = edges_of(CURVED, 6)
        ways = {
            "straight lines": lambda seed: straight(curved(seed), sizes, seed),
            "splines": lambda seed: with_splines(curved(seed), sizes, seed),
        }
        rows, first = study("splines", ways, truth, options.seeds, 6)
        reports.append(Report(rows, {"sparse_extensions_splines": draw(first, truth)}))
    if options.study in ("missing", "both"):
        truth = edges_of([(j, (j + 1) % RING) for j in range(RING)], RING)
        ways = {
            "complete": lambda seed: straight(ringed(seed)[0], sizes, seed),
            "complete rows only": lambda seed: straight(complete_rows(ringed(seed)[1]), sizes, seed),
            "imputed five times": lambda seed: imputed(ringed(seed)[1], sizes, seed),
            "drawn in the chain": lambda seed: in_the_chain(ringed(seed)[1], sizes, seed),
        }
        rows, first = study("missing", ways, truth, options.seeds, RING)
        reports.append(Report(rows, {"sparse_extensions_missing": draw(first, truth)}))
    finish("sparse.extensions", reports, options)


if __name__ == "__main__":
    main()
