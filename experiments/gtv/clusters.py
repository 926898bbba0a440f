"""Clustered federated learning on a stochastic block model: when does sharing help, and who finds the clusters?

Three clusters of nodes with linear models of their own, more edges within clusters than between them. Clusters come
from k-means of the nodes' own fits, which looks at data only; from spectral clustering, which looks at the network
only; and from GTV minimisation with ‖w_i − w_j‖, by primal–dual steps whose ties are exact, which looks at both, with
one α throughout and without being told how many clusters there are. Then each cluster has the fit of its nodes. Beside
them: no sharing, one model for all, and the true clusters. First the rows of a node vary, then the edges between
clusters. Source: Jung, "Federated learning: from theory to practice", section 6.3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from fedtorch.federation.runs import recipes
from fedtorch.networks import clustering, discrepancy, solvers

CLUSTERS, FEATURES, NOISE = 3, 3, 0.5
WITHIN, BETWEEN, ROWS = 0.5, 0.02, 6  # probabilities of edges; rows of a node while edges vary
ALPHA = 0.5
READING = result_pages.Reading(across="(?P<column>.*), (?P<line>(rows|probability) .*)")


class Case(NamedTuple):
    """Nodes with data, and what made them."""

    data: ft.data.FederatedData
    network: ft.Network
    truth: Tensor  # (n, d)
    labels: Tensor  # (n,)
    seed: int


class Outcome(NamedTuple):
    """Of one way to share."""

    error: float  # ‖w − truth‖ / ‖truth‖ over all nodes
    agreement: float  # adjusted Rand index of its clusters with the true ones
    clusters: int


def draw_case(nodes: int, rows: int, between: float, seed: int) -> Case:
    """Clusters of `nodes` nodes with orthogonal parameters of norm two."""
    key = ft.random.key(seed)
    keys = [ft.random.fold_in(key, purpose) for purpose in range(5)]
    labels = torch.arange(CLUSTERS).repeat_interleave(nodes)
    truth = 2 * torch.linalg.qr(ft.random.normal(keys[0], (FEATURES, CLUSTERS), torch.float64)).Q.T[labels]
    x = ft.random.normal(keys[1], (len(labels), rows, FEATURES), torch.float64)
    y = (x * truth[:, None]).sum(2) + NOISE * ft.random.normal(keys[2], (len(labels), rows), torch.float64)
    network = ft.Network.stochastic_blocks([nodes] * CLUSTERS, WITHIN, between, seed=int(keys[3]))
    return Case(ft.data.from_tensors(list(zip(x, y))), network, truth, labels, int(keys[4]))


def primal_dual_clusters(case: Case) -> Tensor:
    """The nodes that GTV minimisation ties."""
    found = recipes.clustered_by_gtv(solvers.linear_problem(case.data, case.network, ALPHA), rounds=3000)
    return torch.arange(len(case.labels)) if found.clusters is None else found.clusters


WAYS: dict[str, Callable[[Case], Tensor]] = {
    "no sharing": lambda case: torch.arange(len(case.labels)),
    "one model": lambda case: torch.zeros_like(case.labels),
    "k-means": lambda case: clustering.k_means(discrepancy.maximum_likelihood(case.data), CLUSTERS, seed=case.seed),
    "spectral": lambda case: clustering.spectral(case.network, CLUSTERS, seed=case.seed),
    "primal–dual": primal_dual_clusters,
    "true clusters": lambda case: case.labels,
}


def outcome(case: Case, way: str) -> Outcome:
    """Find clusters in one way, and fit a model to each."""
    labels = WAYS[way](case)
    alone = way == "no sharing"
    w = discrepancy.maximum_likelihood(case.data) if alone else recipes.clustered(case.data, labels).parameters
    error = float((w - case.truth).norm() / case.truth.norm())
    return Outcome(error, adjusted_rand_score(case.labels.numpy(), labels.numpy()), len(labels.unique()))


def sweep(cases: dict[float, list[Case]]) -> dict[str, dict[float, list[Outcome]]]:
    """Every way on every case: by way and value, an outcome per seed."""
    return {way: {value: [outcome(case, way) for case in of] for value, of in cases.items()} for way in WAYS}


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    """Over seeds."""
    return float(np.mean([getattr(one, name) for one in outcomes]))


def verdict(found: dict[str, dict[float, list[Outcome]]], what: str) -> list[str]:
    """In words: for which values each way's error is below that of no sharing."""
    alone, text = found["no sharing"], []
    for way in ("one model", "k-means", "spectral", "primal–dual"):
        better = [value for value in alone if mean(found[way][value], "error") < mean(alone[value], "error")]
        where = "never" if not better else "always" if len(better) == len(alone) else f"at {what} "
        listed = ", ".join(f"{value:g}" for value in better) if where.startswith("at") else ""
        text.append(f"{way} is better than no sharing {where}{listed}")
    return text


def draw(sweeps: dict[str, dict[str, dict[float, list[Outcome]]]]) -> Figure:
    """Errors and agreement with the true clusters against what varies."""
    figure, panels = common.subplots(2, len(sweeps), figsize=(10, 6.4), sharex="col", sharey="row")
    styles = {"no sharing": ("0.5", ":"), "one model": ("0.5", "--"), "true clusters": ("black", "-")}
    for (what, found), (above, below) in zip(sweeps.items(), panels.T):
        for i, way in enumerate(WAYS):
            colour, line = styles.get(way, (f"C{i - 2}", "-"))
            marker = "" if way in styles else "o"
            above.plot(
                list(found[way]),
                [mean(of, "error") for of in found[way].values()],
                line,
                color=colour,
                marker=marker,
                label=way,
            )
            if way not in styles:
                below.plot(
                    list(found[way]), [mean(of, "agreement") for of in found[way].values()], color=colour, marker="o"
                )
        above.set_yscale("log")
        below.set_xscale("log")
        below.set_xlabel(what)
        below.set_xticks(list(found["no sharing"]), [f"{value:g}" for value in found["no sharing"]])
        below.minorticks_off()
    panels[0, 0].set_ylabel("relative error of the parameters")
    panels[1, 0].set_ylabel("adjusted Rand index")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def draw_network(nodes: int) -> Figure:
    """The first federation, coloured by what GTV minimisation ties."""
    case = draw_case(nodes, ROWS, BETWEEN, 0)
    return ft.plots.network(case.network, clusters=primal_dual_clusters(case), names=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Run both sweeps, print errors and who recovers the clusters, say when sharing helps, and draw it."""
    options = common.arguments(__doc__).parse_args(argv)
    nodes = 9 if options.smoke else 20
    rows_of_node = (2, 10) if options.smoke else (1, 2, 3, 4, 6, 10, 20, 50)
    probabilities = (0.02, 0.5) if options.smoke else (0.005, 0.02, 0.05, 0.1, 0.2, 0.5)
    seeds = range(options.seeds)
    sweeps = {
        "rows of a node": sweep({n: [draw_case(nodes, n, BETWEEN, s) for s in seeds] for n in rows_of_node}),
        "probability of an edge between clusters": sweep(
            {p: [draw_case(nodes, ROWS, p, s) for s in seeds] for p in probabilities}
        ),
    }
    rows = []
    for what, found in sweeps.items():
        lines = []
        for way, by_value in found.items():
            for value, outcomes in by_value.items():
                for metric, name in (("relative error", "error"), ("adjusted Rand index", "agreement")):
                    figures = [getattr(one, name) for one in outcomes]
                    rows.append(common.row(f"{way}, {what}: {value:g}", metric, figures))
            cells = [f"{mean(of, 'error'):.2f} ({mean(of, 'agreement'):.2f})" for of in by_value.values()]
            lines.append([way, *cells])
        title = f"Relative error (adjusted Rand index) by {what}: {CLUSTERS} clusters of {nodes} nodes, d = {FEATURES}"
        common.show(title, ["", *(f"{value:g}" for value in found["no sharing"])], lines)
        sys.stderr.write("\n".join(verdict(found, what)) + "\n")
    draws = lambda: {"gtv_clusters_network": draw_network(nodes), "gtv_clusters": draw(sweeps)}
    common.finish("gtv.clusters", rows, options, draws)


if __name__ == "__main__":
    main()
