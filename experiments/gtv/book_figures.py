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
from typing import Any, NamedTuple

import networkx
import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import beta
from torch import Tensor

import fedtorch as ft
from experiments import common, result_pages
from fedtorch.federation.runs import recipes
from fedtorch.networks import solvers

FORM = "closed form"
FEATURES, ROWS, NOISE = 5, 30, 0.5
COPIES, STRENGTH = (1, 4, 16, 64, 256, 1024), 0.2
EIGENVALUES = {"λ₁ = 0.2, λ_d = 1": (0.2, 1.0), "λ₁ = 0.6, λ_d = 1": (0.6, 1.0)}
SIZES = (3.0, 8.0, 2.0, 5.0, 4.0)  # of data sets, the first at the node that collects
LINKS = {(0, 1): 2.0, (0, 2): 1.0, (1, 2): 1.0, (1, 3): 1.0, (2, 4): 3.0, (3, 4): 1.0}  # capacities
LABELS = (1.0, 1.2, 0.9, 2.1, 2.3, 2.0, 4.0, 4.4)  # of the nodes of Figure 6.3
INSIDE = ((0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5), (6, 7))
ACROSS = ((2, 3), (5, 6))
COUPLINGS = (0.05, 0.4, 1.2, 3.0, 6.0)
DENSITIES = (0.08, 0.12, 0.2, 0.35, 0.6, 1.0)
READING = result_pages.Reading(
    reasons=(
        result_pages.Reason(
            r"\(2\.22\)",
            "(2.22) has ‖n‖² where (2.18) gives (1'n)², for X'n = 1'n where X = 1. It fails where a variable with "
            "distribution Beta(1/2, (m − 1)/2) is above 4/m: about once in 22 draws",
        ),
    )
)


class Check(NamedTuple):
    """A number beside its closed form."""

    setting: str
    metric: str
    ours: float
    form: float


def normal(seed: int, purpose: int, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return ft.random.normal(ft.random.fold_in(ft.random.key(seed), purpose), shape, torch.float64)


def error_bound(seed: int, draws: int) -> tuple[list[Check], float]:
    """Proposition 2.1: the mean error of least squares and its ratio to (2.18); how often (2.22) holds."""
    x, truth = normal(seed, 0, ROWS, FEATURES), torch.ones(FEATURES, dtype=torch.float64)
    noise = NOISE * normal(seed, 1, draws, ROWS)
    fits = torch.linalg.lstsq(x, (x @ truth + noise).T).solution.T
    squared = (fits - truth).square().sum(1)
    least = float(torch.linalg.eigvalsh(x.T @ x / ROWS)[0])
    bound = 4 / ROWS**2 * (noise @ x).square().sum(1) / least**2
    expected = NOISE**2 * float(torch.linalg.inv(x.T @ x).trace())
    holds = float((noise.mean(1).square() <= 4 * noise.square().sum(1) / ROWS**2).double().mean())
    setting = f"2.4 least squares, d = {FEATURES}, m = {ROWS}"
    return [
        Check(setting, "mean of ‖ŵ − w̄‖²", float(squared.mean()), expected),
        Check(setting, "largest ‖ŵ − w̄‖² / (2.18)", float((squared / bound).max()), 0.25),
        Check("2.4 d = 1, x = 1", "share in which (2.22) holds", holds, float(beta.cdf(4 / ROWS, 0.5, (ROWS - 1) / 2))),
    ], holds


def risk(seed: int, draws: int) -> tuple[list[Check], list[tuple[int, float, float]]]:
    """Problem 2.1: the risk of least squares of t Gaussian samples is the minimax one, σ²(1 + d/(t − d − 1))."""
    curve = []
    for t in (8, 10, 14, 20, 40, 80, 160):
        x, noise = normal(seed, t, draws, t, FEATURES), NOISE * normal(seed, t + 1000, draws, t, 1)
        error = torch.linalg.solve(x.mT @ x, x.mT @ noise)[..., 0].square().sum(1)  # (2.14): the risk less σ²
        curve.append((t, NOISE**2 + float(error.mean()), NOISE**2 * (1 + FEATURES / (t - FEATURES - 1))))
    return [Check(f"problem 2.1, {t} samples", "risk", ours, form) for t, ours, form in curve if t >= 14], curve


def augmentation(seed: int) -> tuple[list[Check], dict[int, float]]:
    """(2.26): least squares on noisy copies beside ridge regression; their distance falls as one over √copies."""
    x = normal(seed, 0, ROWS, FEATURES)
    y = x.sum(1) + NOISE * normal(seed, 1, ROWS)
    ridge = torch.linalg.solve(x.T @ x / ROWS + STRENGTH * torch.eye(FEATURES).double(), x.T @ y / ROWS)
    apart = {}
    for copies in COPIES:
        found = []
        for repeat in range(20):
            noisy = x.repeat(copies, 1) + STRENGTH**0.5 * normal(seed, 10 + repeat, copies * ROWS, FEATURES)
            found.append(float((torch.linalg.lstsq(noisy, y.repeat(copies)[:, None]).solution[:, 0] - ridge).norm()))
        apart[copies] = float(np.mean(found))
    slope = np.polyfit(np.log(COPIES[2:]), np.log([apart[copies] for copies in COPIES[2:]]), 1)[0]
    return [Check("(2.26) noisy copies", "exponent of the distance to ridge regression", float(slope), -0.5)], apart


def interpolation(seed: int) -> list[Check]:
    """Problem 2.3: the training error on lines between data points, of a line and of a polynomial of degree 9.

    With residuals that add up to zero it is (1 − 2s − 2s/(m − 1)) times the one before, s the mean of r(1 − r): with an
    intercept, a linear model stays what it was.
    """
    x = normal(seed, 0, ROWS)
    y = torch.sin(2 * x) + 0.1 * normal(seed, 1, ROWS)
    first, second = torch.tensor(list(itertools.permutations(range(ROWS), 2))).T
    r = torch.arange(100).double()[:, None] / 100
    between_x, between_y = ((v[first] + (v[second] - v[first]) * r).flatten() for v in (x, y))
    mean = float((r * (1 - r)).mean())
    checks = []
    for name, degree in (("line", 1), ("polynomial of degree 9", 9)):
        powers = lambda at, degree=degree: torch.stack([at**k for k in range(degree + 1)], 1)
        fit = lambda at, to, powers=powers: torch.linalg.lstsq(powers(at), to[:, None], driver="gelsd").solution[:, 0]
        before = float((powers(x) @ fit(x, y) - y).square().mean())
        after = float((powers(between_x) @ fit(between_x, between_y) - between_y).square().mean())
        form = 1 - 2 * mean * (1 + 1 / (ROWS - 1)) if degree == 1 else math.nan
        checks.append(Check(f"problem 2.3, {name}", "training error, after / before", after / before, form))
    return checks


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
    """Figure 7.1 on random graphs: values a round, rounds of FedGD to 1e-6, and both together; (7.2) and (7.3)."""
    table = []
    x, noise = normal(seed, 0, nodes, 20, 3), normal(seed, 1, nodes, 20)
    data = ft.data.from_tensors([(x[i], x[i].sum(1) + noise[i]) for i in range(nodes)])
    for p in DENSITIES:
        network = ft.Network.erdos_renyi(nodes, p, ft.random.fold_in(ft.random.key(seed), 2))
        report = ft.networks.diagnose(solvers.linear_problem(data, network, 1.0), tolerance=1e-6)
        gap, rounds = network.algebraic_connectivity, report.gradient_rounds
        table.append({"p": p, "values a round": 6 * len(network.edges), "rounds": rounds, "λ₂": gap, "n p": nodes * p,
                      "least degree": float(network.degrees.min())})  # fmt: skip
    ratio = max(line["λ₂"] / (nodes / (nodes - 1) * line["least degree"]) for line in table if line["λ₂"] > 0)
    return [
        Check(f"7.2 random graphs of {nodes} nodes", "largest λ₂ / (7.3)", ratio, 1.0),
        Check(f"7.2 random graphs of {nodes} nodes, p = 0.6", "λ₂", table[-2]["λ₂"], table[-2]["n p"]),
    ], table


def draw(found: dict[str, Any], seed: int) -> dict[str, Figure]:
    """The four figures, and the curves of problem 2.1."""
    return {
        "gtv_book_augmentation": draw_augmentation(found["apart"], found["risk"], seed),
        "gtv_book_clusters": draw_clusters(),
        "gtv_book_rates": draw_rates(found["curves"], found["table"]),
    }


def draw_augmentation(apart: dict[int, float], curve: list[tuple[int, float, float]], seed: int) -> Figure:
    """Figure 2.4, the distance to ridge regression by copies, and the risk by samples."""
    figure, (left, middle, right) = common.subplots(1, 3, figsize=(13, 3.8))
    x = normal(seed, 20, 6)
    y = 1.5 * x + 0.3 * normal(seed, 21, 6)
    noisy = x.repeat(200) + STRENGTH**0.5 * normal(seed, 22, 1200)
    left.plot(noisy, y.repeat(200), ".", color="0.75", markersize=2, label="noisy copies (2.26)")
    left.plot(x, y, "ko", label="data")
    ends = torch.tensor([-3.0, 3.0])
    for label, slope, line in (
        ("least squares", float(x @ y / (x @ x)), "-"),
        ("least squares on the copies", float(noisy @ y.repeat(200) / (noisy @ noisy)), "-"),
        (f"ridge regression, α = {STRENGTH}", float(x @ y / (x @ x + 6 * STRENGTH)), "--"),
    ):
        left.plot(ends, slope * ends, line, label=label)
    left.set_xlabel("x")
    left.set_ylabel("y")
    left.legend(frameon=False, fontsize="small")
    middle.loglog(list(apart), list(apart.values()), "o-", label="least squares on the copies")
    middle.loglog(COPIES, [apart[64] * (64 / copies) ** 0.5 for copies in COPIES], "--", label="one over √copies")
    middle.set_xlabel("copies of a data point")
    middle.set_ylabel("distance to ridge regression")
    right.loglog([t for t, *_ in curve], [ours for _, ours, _ in curve], "o", label="least squares")
    right.loglog([t for t, *_ in curve], [form for *_, form in curve], "-", label="minimax, σ²(1 + d/(t − d − 1))")
    right.axhline(NOISE**2, color="0.5", linestyle=":", label="σ²")
    right.set_xlabel("samples")
    right.set_ylabel("risk")
    for axes in (middle, right):
        axes.legend(frameon=False, fontsize="small")
    return figure


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
    connected = [line for line in table if line["λ₂"] > 0]
    edges = [line["values a round"] / 6 for line in connected]
    for name, values in (
        ("values sent a round", [line["values a round"] for line in connected]),
        ("rounds to 1e-6", [line["rounds"] for line in connected]),
        ("values sent in all", [line["values a round"] * line["rounds"] for line in connected]),
    ):
        right.loglog(edges, values, "o-", label=name)
    right.set_xlabel("edges")
    right.legend(frameon=False, fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Check the closed forms, and draw the figures."""
    options = common.arguments(__doc__).parse_args(argv)
    draws, nodes = (500, 40) if options.smoke else (20_000, 100)
    runs, held = [], []
    first: dict[str, Any] = {}
    for seed in range(options.seeds):
        bound, holds = error_bound(seed, draws)
        risks, curve = risk(seed, draws)
        copies, apart = augmentation(seed)
        rates, curves = contractions(seed)
        edges, table = edges_and_rounds(seed, nodes)
        runs.append([*bound, *risks, *copies, *interpolation(seed), *rates, *edges, *collecting_time(), *merging()])
        held.append(holds)
        first = first or {"apart": apart, "risk": curve, "curves": curves, "table": table}
    rows, lines = [], []
    for each in zip(*runs):
        setting, metric = each[0].setting, each[0].metric
        rows.append(common.row(setting, metric, [check.ours for check in each]))
        form = float(np.mean([check.form for check in each]))
        if not math.isnan(form):
            rows.append(common.Row(setting, f"{metric}, {FORM}", form))
        lines.append([setting, metric, f"{rows[-1 - (not math.isnan(form))].ours:.6g}", f"{form:.6g}"])
    rows.append(common.row("2.4 d = 1, x = 1, as printed", "share in which (2.22) holds", held, 1.0))
    common.show("Figures and problems of chapters 2 to 7", ["", "", "ours", FORM], lines)
    common.finish("gtv.book_figures", rows, options, lambda: draw(first, 0))


if __name__ == "__main__":
    main()
