"""Markov random fields over sites: protein networks in breast cancer, by federated neighbourhood selection.

`proteins` is the paper's study: levels of eleven proteins in the seven tissue source sites with more than 50 samples,
each site's columns centred and scaled. It draws the heat map of the paper's Figure 2(a), which is not symmetric, and
the network of the edges found, and says where the two edges that the paper names come among all pairs: STK11–CDKN1B
(here LKB1–p27_pT157) first, and CDKN1B with itself in another form (p27_pT157–p27_pT198) second. The paper does not
list its eleven proteins; these are drawn from the same interaction landscape (Kim et al. 2021). It runs once more
without a server, over a ring of the sites.

`simulated` has a known network: ten variables, nine edges, five sites of 120 rows.

Published: Kidd et al. (2023), section 3.2: the order of the two edges; it prints no probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.sparse.common import Report, Sizes, finish, sample, share, shared, standardised
from fedtorch.models.gibbs import graphical, sparse

PROTEINS = (
    "LKB1",
    "p27.Kip.1",
    "p27_pT157",
    "p27_pT198",
    "E.Cadherin",
    "GATA3",
    "PTEN",
    "Smad4",
    "p53",
    "Rb",
    "PI3K.p85",
)
NAMED = (("LKB1", "p27_pT157"), ("p27_pT157", "p27_pT198"))  # first and second in the paper
LEVEL = 0.2  # of the false discovery rate; the paper does not say its own
RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"or": torch.maximum, "and": torch.minimum}
READING = result_pages.Reading(
    reasons=(
        result_pages.Reason(
            "rank", "the paper does not list its eleven proteins; these are others of the same landscape"
        ),
    ),
)


class Found(NamedTuple):
    """What the chains say."""

    inclusion: Tensor  # (p, p), row j from the regression of variable j
    effects: Tensor  # (p, p) posterior means
    r_hat: float
    seconds: float


def algorithm(sizes: Sizes, names: Sequence[str]) -> ft.Algorithm:
    """The regressions of all variables on all others."""
    kernels = graphical.neighbourhoods(names=names), graphical.every_response(sparse.hierarchy())
    return ft.gibbs(*kernels, sweeps=sizes.sweeps, chains=sizes.chains)


def analyse(data: ft.data.FederatedData, names: Sequence[str], sizes: Sizes, seed: int) -> Found:
    """The federated analysis."""
    start, burn_in = graphical.start(len(names)), sizes.rounds // 5
    done = sample(algorithm(sizes, names), data, start, sizes.rounds, burn_in, seed, shared)
    inclusion, effects = (graphical.square(done.sampler.mean()[name]) for name in ("included", "theta"))
    return Found(inclusion, effects, done.largest_r_hat("theta"), done.seconds)


def ranked(matrix: Tensor, names: Sequence[str]) -> list[tuple[float, str, str]]:
    """Pairs by their symmetrised probability, the most probable first."""
    pairs = torch.triu_indices(len(names), len(names), 1).T.tolist()
    return sorted(((float(matrix[i, j]), names[i], names[j]) for i, j in pairs), reverse=True)


def network(inclusion: Tensor, names: Sequence[str]) -> ft.Network:
    """The edges found, on a circle; `inclusion` is symmetric."""
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(names)) / len(names)
    kept = torch.where(graphical.edges(inclusion, LEVEL, torch.maximum), inclusion, 0.0)
    return ft.Network.from_matrix(kept, names, np.column_stack((np.cos(angles), np.sin(angles))))


def without_server(data: ft.data.FederatedData, names: Sequence[str], sizes: Sizes) -> list[common.Row]:
    """A few rounds over a ring beside the same rounds with a server."""
    served, start = algorithm(sizes, names), graphical.start(len(names))
    ring = ft.without_server(served, ft.Network.ring(len(data)))
    central, alone = (ft.run(each, ft.InProcess(data), start, rounds=sizes.rounds) for each in (served, ring))
    difference = (alone.server.variables.theta - central.server.variables.theta).abs().max()
    megabytes = [
        (run.history["round_bytes_up"].iloc[-1] + run.history["round_bytes_down"].iloc[-1]) / 1e6
        for run in (central, alone)
    ]
    figures = {
        "largest difference of a coefficient from the server's": float(difference),
        "megabytes per round, with a server": megabytes[0],
        "megabytes per round, over a ring": megabytes[1],
    }
    rows = [common.Row("proteins, without a server", name, value) for name, value in figures.items()]
    common.show_rows("proteins, over a ring of the sites", rows, ".3g")
    return rows


def proteins(sizes: Sizes) -> Report:
    """The paper's section 3.2."""
    data = standardised(ft.data.tcpa_brca_rppa(PROTEINS, dtype=torch.float64))
    found = analyse(data, PROTEINS, sizes, 0)
    rows = [
        common.Row("proteins", "largest R-hat", found.r_hat),
        common.Row("proteins", "seconds", found.seconds),
    ]
    figures = {"sparse_network_heat_map": ft.plots.inclusion_map(found.inclusion, PROTEINS)}
    for rule, symmetrise in RULES.items():
        matrix = symmetrise(found.inclusion, found.inclusion.mT)
        order = ranked(matrix, PROTEINS)
        lines = [[f"{a}–{b}", f"{q:.3f}"] for q, a, b in order[:10]]
        count = int(graphical.edges(found.inclusion, LEVEL, symmetrise).sum()) // 2
        title = f'proteins, rule "{rule}": {count} edges at an expected false discovery rate of {LEVEL:.0%}, R-hat'
        common.show(f"{title} {found.r_hat:.2f}, {found.seconds:.0f} s", ["pair", "inclusion"], lines)
        rows.append(common.Row(f"proteins, {rule}", "edges found", count))
        for place, pair in enumerate(NAMED, 1):
            rank = next(i for i, (_, a, b) in enumerate(order, 1) if {a, b} == set(pair))
            rows.append(common.Row(f"proteins, {rule}", f"rank of {pair[0]}–{pair[1]}", rank, published=place))
            rows.append(common.Row(f"proteins, {rule}", f"inclusion of {pair[0]}–{pair[1]}", order[rank - 1][0]))
        figures[f"sparse_network_{rule}"] = ft.plots.network(network(matrix, PROTEINS), names=True)
    return Report([*rows, *without_server(data, PROTEINS, Sizes(5, 2, 2))], figures)


def simulated(sizes: Sizes, seeds: int) -> Report:
    """Edges found of a known network."""
    p, names = 10, [f"y{j + 1}" for j in range(10)]
    figures = []
    for seed in range(seeds):
        key = ft.random.fold_in(ft.random.key(1), seed)
        every = torch.triu_indices(p, p, 1).T
        edges = every[ft.random.permutation(ft.random.fold_in(key, 0), len(every))[: p - 1]]
        signs = 1 - 2 * ft.random.bernoulli(ft.random.fold_in(key, 1), 0.5, (p - 1,)).double()
        omega = torch.eye(p, dtype=torch.float64)
        omega[edges[:, 0], edges[:, 1]] = omega[edges[:, 1], edges[:, 0]] = 0.35 * signs
        omega += torch.eye(p) * max(0.0, 0.2 - float(torch.linalg.eigvalsh(omega)[0]))
        factor = torch.linalg.cholesky(torch.linalg.inv(omega))
        y = ft.random.normal(ft.random.fold_in(key, 2), (600, p), torch.float64) @ factor.mT
        data = standardised(ft.data.FederatedData(y, torch.full((5,), 120)))
        found, truth = analyse(data, names, sizes, seed), (omega != 0) & ~torch.eye(p, dtype=torch.bool)
        numbers: dict[str, float] = {}
        for rule, symmetrise in RULES.items():
            edge = graphical.edges(found.inclusion, LEVEL, symmetrise)
            numbers |= {f"false discoveries, {rule}": share(~truth, edge), f"edges found, {rule}": share(edge, truth)}
        figures.append({**numbers, "largest R-hat": found.r_hat})
    rows = common.over_seeds("simulated", figures)
    common.show_rows(f"simulated network, {seeds} repetitions, level {LEVEL}", rows)
    return Report(rows, {})


def main(argv: Sequence[str] | None = None) -> None:
    """Both studies."""
    parser = common.arguments(__doc__)
    parser.add_argument("--study", choices=["simulated", "proteins", "both"], default="both", help="default both")
    options = parser.parse_args(argv)
    sizes = Sizes(15, 2, 2) if options.smoke else Sizes(2000, 5, 4)
    reports = []
    if options.study in ("simulated", "both"):
        reports.append(simulated(sizes, options.seeds))
    if options.study in ("proteins", "both"):
        reports.append(proteins(sizes))
    finish("sparse.network", reports, options)


if __name__ == "__main__":
    main()
