"""The book's smaller assignments, each beside a closed form or another library (chapters 2 to 7).

Ridge regression by gradient descent on 100 weather observations, beside scikit-learn (sections 2.6 and 4.9); how fast
FedGD converges on the two nodes of the exercise in section 5.2, beside the eigenvalues; clusters of weather stations
and how well a cluster's mean temperature predicts (6.8), beside the decomposition of the variance; networks learnt from
the stations' data (7.4, 7.6), beside another method or the optimum. The assignment of 5.8 is `experiments.gtv.fmi`.
Source: Jung, "Federated learning: from theory to practice". Reads the folder `fmi_weather` of FEDTORCH_DATA_DIR, or
downloads the course's file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from sklearn.linear_model import Ridge
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.gtv import fmi as gtv_fmi
from fedtorch.models.linear import SufficientStatistics
from fedtorch.networks import clustering, discrepancy, learning, solvers

RIDGE, ROWS, RATES = 0.1, 100, (0.02, 0.05, 0.1)  # α, observations to train with, learning rates of the curves
TWO_NODES = {  # curvatures and minima of the local losses q (w − c)²
    "(w + 5)², 1000 (w + 5)²": ((1.0, 1000.0), (-5.0, -5.0)),
    "1000 (w + 5)², 1000 (w − 5)²": ((1000.0, 1000.0), (-5.0, 5.0)),
}
TWO_NODE_RATE, COUPLINGS = 0.5e-3, (1.0, 10.0, 100.0)
CLUSTERS, DEGREE = 5, 3


class Found(NamedTuple):
    """A number beside a closed form, another library's, or the optimum."""

    setting: str
    metric: str
    ours: float
    reference: float | None = None


def observations(seed: int) -> list[Tensor]:
    """x and y of 100 observations of all stations, each before that of the others: x, other x, y, other y."""
    return gtv_fmi.halves(*ft.data.fmi_weather(torch.float64).rows, train_size=ROWS, random_state=seed)


def ridge(seed: int, steps: int) -> list[Found]:
    """Gradient descent on (2.27) and scikit-learn's closed form, on the same 100 rows, without intercept."""
    train_x, other_x, train_y, other_y = observations(seed)
    ours = ft.run(*descent(train_x, train_y, RATES[-1], steps), rounds=1).tensors()["weight"][0, 0]
    fitted = Ridge(alpha=ROWS * RIDGE, fit_intercept=False).fit(train_x.numpy(), train_y.numpy())
    theirs = torch.from_numpy(fitted.coef_)

    def error(x: Tensor, y: Tensor, w: Tensor) -> float:
        return float((y - x @ w).square().mean())

    setting = f"4.9 ridge, α = {RIDGE}, {steps} steps"
    return [
        Found(setting, "training error", error(train_x, train_y, ours), error(train_x, train_y, theirs)),
        Found(setting, "validation error", error(other_x, other_y, ours), error(other_x, other_y, theirs)),
    ]


def descent(x: Tensor, y: Tensor, rate: float, steps: int) -> tuple[ft.Algorithm, ft.InProcess]:
    """Algorithm 4.1 from zero: full-batch steps, the penalty α‖w‖² as weight decay 2α."""
    local = common.linear_descent(x.shape[1], steps=steps, lr=rate, weight_decay=2 * RIDGE)
    return ft.pooled(local), ft.InProcess(ft.data.from_tensors([(x, y)]))


def ridge_curves(seed: int, steps: int) -> dict[str, list[float]]:
    """By how much the objective is above its minimum after every step, for several learning rates."""
    train_x, _, train_y, _ = observations(seed)

    def objective(w: Tensor) -> float:
        return float((train_y - train_x @ w).square().mean() + RIDGE * w.square().sum())

    system = train_x.T @ train_x / ROWS + RIDGE * torch.eye(7, dtype=torch.float64)
    least = objective(torch.linalg.solve(system, train_x.T @ train_y / ROWS))
    curves = {}
    for rate in RATES:
        run = ft.Run(*descent(train_x, train_y, rate, 1))
        curves[f"η = {rate}"] = [objective(run.tensors()["weight"][0, 0]) - least for _ in run.rounds(steps)]
    return curves


def two_node_problem(curvatures: Sequence[float], minima: Sequence[float], alpha: float) -> solvers.LinearProblem:
    """Two nodes, an edge of weight one, and local losses q (w − c)²."""
    q, c = (torch.tensor(values, dtype=torch.float64) for values in (curvatures, minima))
    per_row = SufficientStatistics(q[:, None, None], (q * c)[:, None], q * c.square(), torch.ones_like(q))
    return solvers.LinearProblem(ft.Network.from_edges([(0, 1)]), alpha, per_row)


def two_node_errors(problem: solvers.LinearProblem, iterations: int) -> list[float]:
    """|w − ŵ| of FedGD from zero after every iteration, as long as rounding is far."""
    best, found = solvers.direct(problem).parameters, []

    def watch(rounds: int, w: Tensor) -> bool:
        found.append(float((w - best).norm()))
        return found[-1] < 1e-7

    solvers.fedgd(problem, rate=TWO_NODE_RATE, rounds=iterations, tolerance=0, watch=watch)
    return found


def two_nodes(iterations: int) -> list[Found]:
    """The factor by which an iteration shrinks the error in the end, and max |1 − 2ηλ| over the eigenvalues (4.7)."""
    found = []
    for losses, (curvatures, minima) in TWO_NODES.items():
        for alpha in COUPLINGS:
            problem = two_node_problem(curvatures, minima, alpha)
            q1, q2 = curvatures[0] + alpha, curvatures[1] + alpha
            root = math.hypot((q1 - q2) / 2, alpha)
            eigenvalues = ((q1 + q2) / 2 - root, (q1 + q2) / 2 + root)
            expected = max(abs(1 - 2 * TWO_NODE_RATE * value) for value in eigenvalues)
            errors = two_node_errors(problem, iterations)
            setting = f"5.2 {losses}, α = {alpha:g}"
            found.append(Found(setting, "contraction of FedGD", errors[-1] / errors[-2], expected))
            right = (curvatures[0] * minima[0], curvatures[1] * minima[1])
            first = (q2 * right[0] + alpha * right[1]) / (q1 * q2 - alpha**2)
            found.append(Found(setting, "solution, node 1", float(solvers.direct(problem).parameters[0]), first))
    return found


def clusters(seed: int) -> list[Found]:
    """Squared errors of the cluster's mean temperature, directly and from the sums of the clusters."""
    data, places = ft.data.fmi_weather(torch.float64), ft.data.fmi_coordinates()
    network = ft.Network.k_nearest(places, DEGREE)
    eigenvectors = torch.linalg.eigh(network.laplacian().to_dense()).eigenvectors
    representations = {
        "coordinates": places,
        "Gaussian mixture": discrepancy.gaussian_mixture(data),
        "Laplacian's eigenvectors": eigenvectors[:, :CLUSTERS],
    }
    labels = {name: clustering.k_means(vectors, CLUSTERS, seed=seed) for name, vectors in representations.items()}
    labels["normalised spectral"] = clustering.spectral(network, CLUSTERS, seed=seed)
    labels["all in one"] = torch.zeros(len(data), dtype=torch.int64)
    found = [cluster_error(f"6.8 {name}", data.rows[1], label[stations(data)]) for name, label in labels.items()]
    components = network.components
    same = clustering.k_means(eigenvectors[:, : components.number], components.number, seed=seed)
    score = adjusted_rand_score(components.labels.numpy(), same.numpy())
    return [*found, Found("6.8 eigenvectors of eigenvalue 0", "Rand index with the components", score, 1.0)]


def stations(data: ft.data.FederatedData) -> Tensor:
    """The station of every row."""
    return torch.arange(len(data)).repeat_interleave(data.counts)


def cluster_error(setting: str, y: Tensor, cluster: Tensor) -> Found:
    """The mean of (y − its cluster's mean)², and the mean of y² less that of the clusters' squared means."""
    size = torch.bincount(cluster)
    mean = torch.bincount(cluster, y) / size
    ours = float((y - mean[cluster]).square().mean())
    return Found(setting, "mean squared error (°C²)", ours, float(y.square().mean() - (size * mean**2).sum() / len(y)))


def learnt_networks(iterations: int, smoke: bool) -> list[Found]:
    """FedGD over networks of three discrepancies beside the optimum, and designs (7.6) and (7.7) beside another way."""
    number = 20 if smoke else None
    found = []
    for construction, graph in {"I": "mean", "II": "gmm", "III": "gradient"}.items():
        result = gtv_fmi.run(gtv_fmi.Settings(graph=graph, iterations=iterations), number)
        for metric in ("training error", "validation error"):
            setting = f"7.6 construction {construction}, FedGD beside the optimum"
            found.append(Found(setting, metric, result.values[metric], result.optimum[metric]))
    split = gtv_fmi.load(1, 20 if smoke else 60)  # a dense projection: some dozens of nodes
    apart = discrepancy.distances(discrepancy.mean_label(split.training))

    def cost(network: ft.Network) -> float:
        return float((network.weights * apart[network.edges[:, 0], network.edges[:, 1]]).sum())

    program, projection = learning.regular(apart, DEGREE), learning.regular(apart, DEGREE, projected=True)
    found.append(Found("(7.6) by projection, by linear programming", "ΣAD", cost(projection), cost(program)))
    budget = DEGREE * len(apart) // 2
    pairs = apart[torch.ones_like(apart).triu(1) > 0]
    least = float(pairs.sort().values[:budget].sum())
    found.append(Found(f"(7.7) with {budget} edges", "ΣAD", cost(learning.edge_budget(apart, budget)), least))
    return found


def draw(curves: dict[str, list[float]], iterations: int) -> Figure:
    """Gradient descent for ridge regression, and FedGD on the two nodes."""
    figure, (left, right) = common.subplots(1, 2, figsize=(10.5, 4))
    for name, values in curves.items():
        left.plot(range(1, len(values) + 1), values, label=name)
    left.set_xlabel("gradient step")
    left.set_ylabel("objective less its minimum (°C²)")
    left.set_title(f"Ridge regression on {ROWS} rows")
    for (losses, (curvatures, minima)), style in zip(TWO_NODES.items(), ("-", "--")):
        for i, alpha in enumerate(COUPLINGS):
            errors = two_node_errors(two_node_problem(curvatures, minima, alpha), iterations)
            right.plot(range(1, len(errors) + 1), errors, style, color=f"C{i}", label=f"{losses}, α = {alpha:g}")
    right.set_xscale("log")
    right.set_xlabel("iteration of FedGD")
    right.set_ylabel("distance to the solution")
    right.set_title(f"Two nodes, η = {TWO_NODE_RATE}")
    for axes in (left, right):
        axes.set_yscale("log")
    left.legend(frameon=False)
    right.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Do all assignments, print ours beside the references and draw the curves."""
    options = common.arguments(__doc__).parse_args(argv)
    steps, iterations = (1000, 200) if options.smoke else (3000, 20_000)
    runs = [
        [
            *ridge(seed, steps),
            *two_nodes(iterations),
            *clusters(seed),
            *learnt_networks(30 if options.smoke else 1000, options.smoke),
        ]
        for seed in range(1, options.seeds + 1)
    ]
    rows, lines = [], []
    for repeated in zip(*runs):
        setting, metric, _, reference = repeated[0]
        rows.append(common.row(setting, metric, [found.ours for found in repeated]))
        line = [setting, metric, f"{rows[-1].ours:.8g}", ""]
        if reference is not None:
            known = statistics.mean(found.reference for found in repeated)
            rows.append(common.Row(setting, f"{metric}, reference", known))
            line[-1] = f"{known:.8g}"
        lines.append(line)
    common.show("Assignments of chapters 2 to 7", ["", "", "ours", "reference"], lines)
    draws = lambda: {"gtv_assignments": draw(ridge_curves(1, 50 if options.smoke else 300), iterations)}
    common.finish("gtv.assignments", rows, options, draws)


if __name__ == "__main__":
    main()
