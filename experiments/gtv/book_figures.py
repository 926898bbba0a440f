"""The book's figures 2.4, 4.3, 6.3 and 7.1 and its problems 2.1, 2.3 and 3.2, each beside a closed form.

How far least squares is from the truth (2.18), and what augmentation by noise (2.26) and by interpolation does; the
contraction of gradient steps (4.7); how long links need to collect all data (problem 3.2), as a flow; how clusters of
GTV minimisation grow with α, until a cut says that all is one; what edges cost and gain. The numbers at Figure 3.4 are
in the picture alone, so that the network here is another. Source: Jung, "Federated learning: from theory to practice",
chapters 2 to 7.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import networkx
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from experiments.gtv.chapter_2 import (
    FEATURES,
    Check,
    augmentation,
    draw_augmentation,
    error_bound,
    interpolation,
    normal,
    risk,
)
from fedtorch.federation.runs import recipes
from fedtorch.networks import solvers

FORM = "closed form"
EIGENVALUES = {"λ₁ = 0.2, λ_d = 1": (0.2, 1.0), "λ₁ = 0.6, λ_d = 1": (0.6, 1.0)}
SIZES = (3.0, 8.0, 2.0, 5.0, 4.0)  # of data sets, the first at the node that collects
LINKS = {(0, 1): 2.0, (0, 2): 1.0, (1, 2): 1.0, (1, 3): 1.0, (2, 4): 3.0, (3, 4): 1.0}  # capacities
LABELS = (1.0, 1.2, 0.9, 2.1, 2.3, 2.0, 4.0, 4.4)  # of the nodes of Figure 6.3
INSIDE = ((0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5), (6, 7))
ACROSS = ((2, 3), (5, 6))
COUPLINGS = (0.05, 0.4, 6.0, 24.0, 30.0)
DENSITIES = (0.08, 0.12, 0.2, 0.35, 0.6, 1.0)
READING = result_pages.Reading(
    reasons=(
        result_pages.Reason(
            r"\(2\.22\)",
            "(2.22) has ‖n‖² where (2.18) gives (1'n)², for X'n = 1'n where X = 1. It fails where a variable with "
            "distribution Beta(1/2, (m − 1)/2) is above 4/m: about once in 22 draws",
        ),
        result_pages.Reason(
            "random graphs", "(7.2) is for large n p: λ₂ and the degrees differ from it by about √(n p)"
        ),
    )
)


def collecting_time() -> list[Check]:
    """Problem 3.2: the least T with which a flow brings all data to node 0, beside the tightest of all cuts."""

    def collected(time: float) -> bool:
        graph = networkx.DiGraph()
        for (i, j), capacity in LINKS.items():
            graph.add_edge(i, j, capacity=time * capacity)
            graph.add_edge(j, i, capacity=time * capacity)
        for node, size in enumerate(SIZES[1:], 1):
            graph.add_edge("data", node, capacity=size)
        return networkx.maximum_flow_value(graph, "data", 0) >= sum(SIZES[1:]) - 1e-9

    low, high = 0.0, 100.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (low, middle) if collected(middle) else (middle, high)
    slowest = max(
        sum(SIZES[node] for node in side) / sum(c for (i, j), c in LINKS.items() if (i in side) != (j in side))
        for side in subsets(range(1, len(SIZES)))
    )
    return [Check("problem 3.2, five nodes", "time to collect all data", high, slowest)]


def subsets(nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """All that are not empty."""
    return [side for size in range(1, len(nodes) + 1) for side in itertools.combinations(nodes, size)]


def contraction(rate: float, least: float, most: float) -> float:
    """(4.7)."""
    return max(abs(1 - 2 * rate * least), abs(1 - 2 * rate * most))


def contractions(seed: int) -> tuple[list[Check], dict[str, list[tuple[float, float, float]]]]:
    """(4.7): how much a gradient step shrinks the distance to the minimum at worst, by rate."""
    curves: dict[str, list[tuple[float, float, float]]] = {}
    checks = []
    for name, (least, most) in EIGENVALUES.items():
        values = torch.linspace(least, most, FEATURES, dtype=torch.float64)
        turn = torch.linalg.qr(normal(seed, 0, FEATURES, FEATURES)).Q
        q = turn @ values.diag() @ turn.T
        for rate in torch.linspace(0.02, 1.1, 55).tolist():
            w = normal(seed, 1, FEATURES, 200)
            for _ in range(60):  # f(w) = w'Qw, whose minimum is 0; the slowest direction is left
                before, w = w, w - 2 * rate * (q @ w)
                w = w / before.norm(dim=0)
                before = before / before.norm(dim=0)
            curves.setdefault(name, []).append((rate, float(w.norm(dim=0).max()), contraction(rate, least, most)))
        best = min(curves[name], key=lambda point: point[1])
        checks.append(Check(f"4.3 {name}", "best rate of the grid", best[0], 1 / (least + most)))
        exact = contraction(1 / (least + most), least, most)
        checks.append(Check(f"4.3 {name}", "contraction at (4.9)", exact, (most / least - 1) / (most / least + 1)))
        gap = max(abs(ours - form) for _, ours, form in curves[name])
        checks.append(Check(f"4.3 {name}", "largest difference from (4.7)", gap, 0.0))
    return checks, curves


def clustered_network() -> ft.Network:
    """Three clusters, with light edges between them."""
    edges = [(i, j, 1.0) for i, j in INSIDE] + [(i, j, 0.3) for i, j in ACROSS]
    return ft.Network.from_edges(edges)


def clustered(alpha: float) -> tuple[Tensor, int]:
    """Means of one label a node, coupled by α|w_i − w_j|, and how many different ones there are."""
    rows = [(torch.ones(1, 1).double(), torch.tensor([label]).double()) for label in LABELS]
    problem = solvers.linear_problem(ft.data.from_tensors(rows), clustered_network(), alpha)
    found = recipes.clustered_by_gtv(problem, rounds=5000)
    number = len(LABELS) if found.clusters is None else len(found.clusters.unique())
    return found.parameters[:, 0], number


def merging() -> list[Check]:
    """The least α with one cluster: where a flow with |u_e| ≤ αA_e carries 2(y_i − ȳ), so the tightest of all cuts."""
    network, y = clustered_network(), torch.tensor(LABELS).double()
    excess = (2 * (y - y.mean())).tolist()
    links = [(i, j, weight) for (i, j), weight in zip(network.edges.tolist(), network.weights.tolist())]
    threshold = max(
        abs(sum(excess[i] for i in side)) / cut
        for side in subsets(range(len(LABELS)))
        if (cut := sum(weight for i, j, weight in links if (i in side) != (j in side))) > 0
    )
    low, high = 0.5 * threshold, 1.5 * threshold
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (low, middle) if clustered(middle)[1] == 1 else (middle, high)
    return [Check("6.3 eight nodes, three clusters", "least α with one model for all", high, threshold)]


def edges_and_rounds(seed: int, nodes: int) -> tuple[list[Check], list[dict[str, float]]]:
    """Figure 7.1 on random graphs: values a round, and rounds of FedGD to 1e-6; (7.2) and (7.3).

    With rows at all nodes and with rows at few: at one α, degrees raise the largest eigenvalue more than λ₂ the least.
    """
    table = []
    x, noise = normal(seed, 0, nodes, 20, 3), normal(seed, 1, nodes, 20)
    rows = [(x[i], x[i].sum(1) + noise[i]) for i in range(nodes)]
    few = rows[: max(1, nodes // 20)]
    counts = torch.zeros(nodes, dtype=torch.int64)
    counts[: len(few)] = 20
    at_few = ft.data.FederatedData(tuple(torch.cat(part) for part in zip(*few)), counts, allow_empty=True)
    for p in DENSITIES:
        network = ft.Network.erdos_renyi(nodes, p, seed=int(ft.random.fold_in(ft.random.key(seed), 2)))
        if network.components.number > 1:
            continue
        line = {"p": p, "edges": len(network.edges), "values sent a round": 6 * len(network.edges)}
        for name, data in (("rows at all nodes", ft.data.from_tensors(rows)), ("rows at one node in 20", at_few)):
            problem = solvers.linear_problem(data, network, 1.0, unlabelled=True)
            line[f"rounds, {name}"] = ft.networks.diagnose(problem, tolerance=1e-6).gradient_rounds
        degrees = network.degrees
        line |= {"λ₂": network.algebraic_connectivity, "largest degree": float(degrees.max())}
        table.append(line | {"least degree": float(degrees.min())})
    ratio = max(line["λ₂"] / (nodes / (nodes - 1) * line["least degree"]) for line in table)
    checks = [Check(f"7.2 random graphs of {nodes} nodes", "largest λ₂ / (7.3)", ratio, 1.0)]
    for line in table:
        if line["p"] in (0.2, 0.6):
            setting = f"7.2 random graphs of {nodes} nodes, p = {line['p']}"
            for name in ("λ₂", "largest degree"):
                checks.append(Check(setting, f"{name} / (n p)", line[name] / (nodes * line["p"]), printed=1.0))
    return checks, table


def draw(found: dict[str, Any], seed: int) -> dict[str, Figure]:
    """The four figures, and the curves of problem 2.1."""
    return {
        "gtv_book_augmentation": draw_augmentation(found["apart"], found["risk"], seed),
        "gtv_book_clusters": draw_clusters(),
        "gtv_book_rates": draw_rates(found["curves"], found["table"]),
    }


def draw_clusters() -> Figure:
    """Figure 6.3: the nodes' models over α."""
    figure, panels = common.subplots(1, len(COUPLINGS), figsize=(13, 3.0))
    places = torch.tensor([[0, 1], [0, 0], [1, 0.5], [2, 0.5], [3, 1], [3, 0], [4, 0.5], [5, 0.5]])
    for axes, alpha in zip(panels, COUPLINGS):
        values, number = clustered(alpha)
        for (i, j), weight in zip(clustered_network().edges.tolist(), clustered_network().weights.tolist()):
            axes.plot(*places[[i, j]].T, color="0.6", linewidth=2 * weight, zorder=1)
        points = axes.scatter(*places.T, c=values, vmin=0.9, vmax=4.4, s=90, zorder=2)
        axes.set_title(f"α = {alpha}: {number} model{'s' if number > 1 else ''}", fontsize="medium")
        axes.margins(0.15)
        axes.set_axis_off()
    figure.colorbar(points, ax=panels, label="model", shrink=0.8)
    return figure


def draw_rates(curves: dict[str, list[tuple[float, float, float]]], table: list[dict[str, float]]) -> Figure:
    """Figures 4.3 and 7.1."""
    figure, (left, right) = common.subplots(1, 2, figsize=(10.5, 3.8))
    for i, (name, points) in enumerate(curves.items()):
        rates, ours, form = zip(*points)
        left.plot(rates, form, color=f"C{i}", label=f"(4.7), {name}")
        left.plot(rates[::4], ours[::4], "o", color=f"C{i}", markersize=4, label="gradient steps")
    left.axhline(1, color="0.5", linestyle=":")
    left.set_xlabel("learning rate η")
    left.set_ylabel("contraction factor κ")
    left.legend(frameon=False, fontsize="small")
    for name in ("values sent a round", "rounds, rows at all nodes", "rounds, rows at one node in 20"):
        right.loglog([line["edges"] for line in table], [line[name] for line in table], "o-", label=name)
    right.set_xlabel("edges")
    right.legend(frameon=False, fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Check the closed forms, and draw the figures."""
    options = common.arguments(__doc__).parse_args(argv)
    draws, nodes = (500, 40) if options.smoke else (20_000, 100)
    runs = []
    first: dict[str, Any] = {}
    for seed in range(options.seeds):
        risks, curve = risk(seed, draws)
        copies, apart = augmentation(seed)
        rates, curves = contractions(seed)
        edges, table = edges_and_rounds(seed, nodes)
        chapter_2 = [*error_bound(seed, draws), *risks, *copies, *interpolation(seed)]
        runs.append([*chapter_2, *rates, *edges, *collecting_time(), *merging()])
        first = first or {"apart": apart, "risk": curve, "curves": curves, "table": table}
    rows, lines = [], []
    for each in zip(*runs):
        setting, metric = each[0].setting, each[0].metric
        rows.append(common.row(setting, metric, [check.ours for check in each], each[0].printed))
        form = float(np.mean([check.form for check in each]))
        lines.append([setting, metric, f"{rows[-1].ours:.6g}", f"{form:.6g}", common.number(each[0].printed, form="g")])
        if not math.isnan(form):
            rows.append(common.Row(setting, f"{metric}, {FORM}", form))
    common.show("Figures and problems of chapters 2 to 7", ["", "", "ours", FORM, "printed"], lines)
    common.finish("gtv.book_figures", rows, options, lambda: draw(first, 0))


if __name__ == "__main__":
    main()
