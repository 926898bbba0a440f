"""The flavours: each against a closed form, a dense solution, or what it is good for."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeRegressor
from support.oracles.closed_forms import ROUNDING, client_tensors, distance
from support.oracles.gtv_problems import bare_linear_clients, dense_solution, weighted_network
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.algorithms import regressors
from fedtorch.federation.runs import recipes
from fedtorch.federation.solvers import unlabelled as solvers_unlabelled
from fedtorch.networks import clustering, discrepancy, solvers

SOLVED = 1e-6  # relative distance of iterations that stop at a residual of 1e-8
SIZES = [7, 4, 9, 5, 12]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pooled(clients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The minimiser of the sum of mean squared errors, by least squares of rows scaled by 1/√m_i."""
    x = torch.cat([x / len(x) ** 0.5 for x, _ in clients])
    y = torch.cat([y / len(y) ** 0.5 for _, y in clients])
    return torch.linalg.lstsq(x, y[:, None]).solution[:, 0]


def blocks(rows: int, spread: float = 0.0) -> tuple[ft.data.FederatedData, Tensor, Tensor]:
    """Three clusters of ten nodes with common parameters: (data, parameters `(30, 3)`, labels)."""
    labels = torch.arange(3).repeat_interleave(10)
    truth = 3 * torch.linalg.qr(normal(3, 3)).Q[labels] + spread * normal(30, 3, seed=1)
    x = normal(30, rows, 3, seed=2)
    y = (x * truth[:, None]).sum(2) + 0.1 * normal(30, rows, seed=3)
    return ft.data.from_tensors(list(zip(x, y))), truth, labels


def test_a_single_model_is_the_pooled_fit_and_the_limit_of_strong_coupling() -> None:
    data, network = bare_linear_clients(SIZES), weighted_network(len(SIZES))
    found = recipes.single_model(solvers.linear_problem(data, network, 1.0))
    expected = pooled(list(data)).expand(len(SIZES), 3)
    assert found.converged
    assert distance(found.parameters, expected) < SOLVED
    strong = solvers.direct(solvers.linear_problem(data, network, 1e6)).parameters
    assert distance(strong, expected) < 1e-5  # differences are of the order of 1/α


def test_known_clusters_have_the_fit_of_their_rows() -> None:
    data = bare_linear_clients(SIZES)
    labels = torch.tensor([1, 0, 1, 0, 2])
    found = recipes.clustered(data, labels)
    for label in range(3):
        inside = (labels == label).nonzero()[:, 0].tolist()
        expected = pooled([data[k] for k in inside])
        assert distance(found.parameters[inside], expected.expand(len(inside), 3)) < SOLVED
    assert recipes.cluster_network(labels).components.labels.tolist() == [0, 1, 0, 1, 2]


def test_three_ways_to_clusters() -> None:
    """k-means where nodes have rows enough; the network and GTV also where a node alone has too few."""
    network = ft.Network.stochastic_blocks([10, 10, 10], 0.8, 0.02, seed=0)
    data, _, labels = blocks(rows=10)
    assert torch.equal(clustering.k_means(discrepancy.maximum_likelihood(data), 3, seed=1), labels)
    scarce, truth, _ = blocks(rows=2)
    assert torch.equal(clustering.spectral(network, 3, seed=1), labels)
    found = recipes.clustered_by_gtv(solvers.linear_problem(scarce, network, 0.3))
    assert found.converged
    assert found.clusters is not None
    assert torch.equal(found.clusters, labels)
    assert not torch.equal(clustering.k_means(discrepancy.maximum_likelihood(scarce), 3, seed=1), labels)
    refitted = recipes.clustered(scarce, found.clusters).parameters
    assert distance(refitted, truth) < distance(found.parameters, truth)  # without the bias of the norm


def test_nodes_without_labels_are_the_mean_of_their_neighbours() -> None:
    data, network = bare_linear_clients(SIZES), weighted_network(len(SIZES))
    problem = recipes.horizontal(data, network, 0.4, torch.tensor([1, 3]))
    x, y = data.rows
    labelled = [k not in (1, 3) for k in torch.arange(5).repeat_interleave(data.counts).tolist()]
    empty = ft.data.FederatedData((x[labelled], y[labelled]), torch.tensor([7, 0, 9, 0, 12]), allow_empty=True)
    found = solvers.chebyshev(problem).parameters
    assert distance(found, dense_solution(empty, network, 0.4)) < SOLVED
    mean = network.adjacency().to_dense() @ found / network.degrees[:, None]
    assert distance(found[[1, 3]], mean[[1, 3]]) < SOLVED


def test_any_local_solver_takes_nodes_without_rows() -> None:
    x, y = bare_linear_clients(SIZES).rows
    data = ft.data.FederatedData((x, y), torch.tensor([7, 0, 4, 9, 0, 5, 12]), allow_empty=True)
    network = weighted_network(7)
    local = ft.gradient_descent(
        nn.Linear(3, 1, bias=False, dtype=torch.float64),
        steps=5,
        loss=lambda output, y: (output[:, 0] - y).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.15),
    )
    algorithm = ft.gtv(solvers_unlabelled.unlabelled(local), network, 0.2)

    def parameters(rounds: int, cohort: int | None = None, chunk: int | None = None) -> Tensor:
        final = ft.run(algorithm, ft.InProcess(data, chunk), cohort=cohort, rounds=rounds).last
        outbox = algorithm.outbox(final.server)
        return torch.stack([client_tensors(final.clients, outbox, k)["weight"][0] for k in range(7)])

    assert distance(parameters(80), dense_solution(data, network, 0.2)) < SOLVED
    for cohort in (None, 3):
        assert distance(parameters(6, cohort, chunk=1), parameters(6, cohort)) < ROUNDING
    with pytest.raises(ValueError, match="at least one row to train on"):
        ft.Run(ft.gtv(local, network, 0.2), ft.InProcess(data)).step()


def test_personal_parameters_of_a_node_without_rows_stay_and_its_solver_state_too() -> None:
    x, y = bare_linear_clients([4]).rows
    data = ft.data.FederatedData((x, y), torch.tensor([4, 0]), allow_empty=True)
    module = nn.Linear(3, 1, dtype=torch.float64)
    local = ft.gradient_descent(
        module,
        steps=2,
        reset="never",
        loss=lambda output, y: (output[:, 0] - y).square().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )
    algorithm = ft.gtv(solvers_unlabelled.unlabelled(local), ft.Network.ring(2), {"weight": 1.0})
    final = ft.run(algorithm, ft.InProcess(data), rounds=3).last
    states = final.clients.table.read(slice(0, 2))
    assert torch.equal(states.parameters["bias"][1], module.bias)
    assert not torch.equal(states.parameters["weight"][1], module.weight)
    fresh = ft.tree.leaves(local.init(local.parameters))
    moved = ft.tree.leaves(states.solver)
    assert all(torch.equal(leaf[1], start) for leaf, start in zip(moved, fresh))
    assert any(not torch.equal(leaf[0], start) for leaf, start in zip(moved, fresh))


def test_labels_spread_over_a_network_of_features() -> None:
    """One node in ten has labels; neighbours by mean features are in the same group."""
    groups = torch.arange(2).repeat_interleave(20)
    x = normal(40, 8, 2) + torch.tensor([[3.0, 0.0], [-3.0, 0.0]]).double()[groups][:, None]
    truth = torch.tensor([[1.0, 2.0], [-2.0, 1.0]]).double()[groups]
    y = (x * truth[:, None]).sum(2)
    data = ft.data.from_tensors(list(zip(x, y)))
    network = ft.Network.k_nearest(x.mean(1), 4)
    unlabelled = torch.arange(40)[torch.arange(40) % 10 > 0]
    found = solvers.chebyshev(recipes.horizontal(data, network, 0.5, unlabelled)).parameters
    assert (found[unlabelled] - truth[unlabelled]).norm() < 0.05 * truth[unlabelled].norm()


def vertical_case() -> tuple[Tensor, Tensor, Tensor, ft.Network]:
    x = normal(30, 5)
    columns = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
    return x, x @ normal(5, seed=1) + 0.2 * normal(30, seed=2), columns, ft.Network([(0, 1), (1, 2)], [0.5, 1.5])


def test_vertical_nodes_agree_on_predictions() -> None:
    """The dense minimiser of Σ |y − X_i w_i|²/m + α Σ A_ij |X_i w_i − X_j w_j|²/m over the nodes' own columns."""
    x, y, columns, network = vertical_case()
    lines = lambda: LinearRegression(fit_intercept=False)
    data, algorithm, _ = recipes.vertical(lines, x, y, columns, network, 0.7)
    final = ft.run(algorithm, ft.InProcess(data, 2), {}, cohort=2, seed=1, rounds=80)
    models = regressors.fitted(final)
    parts = [x[:, own] for own in columns]
    strength = torch.eye(3).double() + 0.7 * network.laplacian().to_dense()
    system = torch.cat(
        [torch.cat([strength[i, j] * parts[i].T @ parts[j] for j in range(3)], 1) for i in range(3)], 0
    ) / len(x)
    right = torch.cat([part.T @ y for part in parts]) / len(x)
    expected = torch.linalg.solve(system, right).split([int(own.sum()) for own in columns])
    for model, own, w in zip(models, columns, expected):
        assert distance(torch.as_tensor(model.coef_)[own], w) < 1e-8
        assert float(torch.as_tensor(model.coef_)[~own].abs().max()) < ROUNDING


def test_vertical_trees_do_not_see_the_features_of_others() -> None:
    x, y, columns, network = vertical_case()
    make = lambda: DecisionTreeRegressor(max_depth=3, random_state=0)
    data, algorithm, _ = recipes.vertical(make, x, y, columns, network, 0.7)
    final = ft.run(algorithm, ft.InProcess(data), {}, rounds=5)
    for model, own in zip(regressors.fitted(final), columns):
        features = torch.as_tensor(model.tree_.feature)
        assert bool(own[features[features >= 0]].all())


class Shallow(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.body = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        self.head = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for weight in (self.body.weight, self.head.weight):
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))[..., 0]


def test_a_personal_head_differs_where_a_strongly_coupled_body_does_not() -> None:
    data = bare_linear_clients(SIZES)
    local = ft.gradient_descent(
        Shallow(), steps=1, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.02)
    )
    algorithm = recipes.personalised(local, ft.Network.ring(5), 5.0, "body.*")
    final = ft.run(algorithm, ft.InProcess(data), rounds=150).last
    outbox = algorithm.outbox(final.server)
    nodes = [client_tensors(final.clients, outbox, k) for k in range(5)]

    def spread(name: str) -> float:
        values = torch.stack([node[name] for node in nodes])
        return float((values - values.mean(0)).norm() / values.norm())

    assert spread("body.weight") < 0.1 < 0.3 < spread("head.weight")


def linked_clients(rows: int, nodes: int = 12) -> tuple[ft.data.FederatedData, Tensor, Tensor]:
    """Parameters that are linear in the nodes' coordinates, nearly: (data, coordinates and a one, parameters)."""
    z = torch.cat((torch.ones(nodes, 1).double(), normal(nodes, 2, seed=4)), 1)
    truth = z @ normal(3, 3, seed=5) + 0.1 * normal(nodes, 3, seed=6)
    x = normal(nodes, rows, 3, seed=7)
    y = (x * truth[:, None]).sum(2) + 0.1 * normal(nodes, rows, seed=8)
    return ft.data.from_tensors(list(zip(x, y))), z, truth


def test_a_hypermodel_is_the_pooled_fit_of_products() -> None:
    data, z, _ = linked_clients(4)
    products = [(torch.stack([torch.outer(row, z[k]).flatten() for row in x]), y) for k, (x, y) in enumerate(data)]
    expected = pooled(products).reshape(3, 3)
    assert distance(recipes.hypermodel(data, z), expected) < 1e-5  # ADMM stops at a residual of 1e-8, κ ≈ 100


def test_a_few_steps_from_a_hypermodel_beat_the_same_steps_from_a_common_start() -> None:
    data, z, truth = linked_clients(2)
    local = ft.least_squares(nn.Linear(3, 1, bias=False, dtype=torch.float64), steps=5, lr=0.1)
    alone = ft.run(ft.separate(local), ft.InProcess(data), {"weight": torch.zeros(1, 3).double()}, rounds=1).last
    common = torch.stack([client_tensors(alone.clients, {}, k)["weight"][0] for k in range(len(data))])
    starts = z @ recipes.hypermodel(data, z).T
    found = recipes.trained_from(local, {"weight": starts[:, None]}, data, ft.random.key(0))["weight"][:, 0]
    assert (found - truth).norm() < 0.3 * (common - truth).norm()
    for k, (x, y) in enumerate(data):  # and they are gradient steps from there
        w = starts[k]
        for _ in range(5):
            w = w - 0.1 * 2 * x.T @ (x @ w - y) / len(y)
        assert distance(found[k], w) < ROUNDING


def categories(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, ft.Network]:
    """Twelve categories in groups of three, the first of each with one example: (x, y, test x, test y, network)."""
    group = torch.arange(12) // 3
    centre = 1.5 * normal(4, 10, seed=seed)[group] + 0.4 * normal(12, 10, seed=seed + 100)
    counts = torch.where(torch.arange(12) % 3 == 0, 1, 20)
    y, test = torch.arange(12).repeat_interleave(counts), torch.arange(12).repeat_interleave(50)
    x = centre[y] + normal(len(y), 10, seed=seed + 200)
    return x, y, centre[test] + normal(len(test), 10, seed=seed + 300), test, recipes.cluster_network(group)


def test_few_examples_are_detected_with_the_help_of_similar_categories() -> None:
    """The share of pairs (a row of the category, a row of another group) in which the first has the larger score."""

    def ranked(w: Tensor, x: Tensor, y: Tensor) -> float:
        found = []
        for c in range(0, 12, 3):
            score = x @ w[c]
            found.append((score[y == c][:, None] > score[y // 3 != c // 3]).double().mean())
        return float(torch.stack(found).mean())

    gains = []
    for seed in range(5):
        x, y, test_x, test_y, network = categories(seed)
        alone = solvers.direct(recipes.few_shot(x, y, network, 0.0)).parameters
        together = solvers.direct(recipes.few_shot(x, y, network, 1.0)).parameters
        gains.append(ranked(together, test_x, test_y) - ranked(alone, test_x, test_y))
    assert min(gains) > 0, gains


def test_the_few_shot_objective_is_balanced() -> None:
    x, y = normal(9, 2), torch.tensor([0, 0, 0, 0, 0, 0, 2, 2, 2])
    problem = recipes.few_shot(x, y, ft.Network.ring(4), 0.5)
    w = normal(4, 2, seed=1)
    expected = torch.zeros(()).double()
    for c in (0, 2):
        expected += 0.5 * (1 - x[y == c] @ w[c]).square().mean() + 0.5 * (x[y != c] @ w[c]).square().mean()
    for i, j in problem.network.edges.tolist():
        expected += 0.5 * (w[i] - w[j]).square().sum()
    assert abs(problem.objective(w) - float(expected)) < ROUNDING * float(expected)


def test_what_does_not_fit_is_refused() -> None:
    x, y, columns, network = vertical_case()
    with pytest.raises(ValueError, match=r"Expected columns \(3, 5\) of type bool, but got torch.int64"):
        recipes.vertical(LinearRegression, x, y, columns.long(), network, 1.0)
    with pytest.raises(ValueError, match=r"Expected columns \(3, 5\)"):
        recipes.vertical(LinearRegression, x, y, columns[:2], network, 1.0)
    with pytest.raises(ValueError, match=r"Expected int64 categories \(30,\) from 0 to 2"):
        recipes.few_shot(x, torch.full((30,), 3), network, 1.0)
    with pytest.raises(ValueError, match=r"Expected a vector per node, \(5, q\), but got shape \(4, 2\)"):
        recipes.hypermodel(bare_linear_clients(SIZES), torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"Expected shared inputs .* or \(3, m', d\), but got shape \(2, 4, 5\)"):
        regressors.gtv_regressors(LinearRegression, network, 1.0, torch.zeros(2, 4, 5))
