"""The book's bounds on random instances, solved densely, and the expected rounds against runs."""

import math
import warnings

import numpy as np
import pytest
import torch

import fedtorch as ft
from fedtorch.models.linear import SufficientStatistics
from fedtorch.networks import diagnostics
from fedtorch.networks.bounds import contraction, perturbed_gradient_bound
from fedtorch.networks.solvers import LinearProblem

D, ROWS = 3, 6
SEEDS = range(12)


def stated(network, gram, alpha, b=None):
    """The problem of given Gram matrices and right-hand sides, zeros by default."""
    cross = torch.zeros_like(gram[..., 0]) if b is None else b
    ones = torch.ones(len(gram), dtype=gram.dtype)
    return LinearProblem(network, alpha, SufficientStatistics(gram, cross, ones, ones))


def system_matrix(network, gram, alpha):
    return stated(network, gram, alpha).matrix()


def diagnose(network, gram, alpha, right_hand_side=None, **kwargs):
    return ft.networks.diagnose(stated(network, gram, alpha, right_hand_side), **kwargs)


class Instance:
    """Linear models y_i = X_i w̄ + ε_i on a connected weighted network, with the solution of (3.26)."""

    def __init__(self, seed, alpha=None, truth=None, network=None):
        key = ft.random.key(seed)
        draw = lambda purpose, *shape: ft.random.normal(ft.random.fold_in(key, purpose), shape, torch.float64)
        self.network = connected(seed) if network is None else network
        n = len(self.network)
        scale = (draw(0, n, 1, 1) / 2).exp()  # nodes of different λ_max
        self.alpha = float(draw(1, 1).exp()) if alpha is None else alpha
        self.x = scale * draw(2, n, ROWS, D)
        self.noise = 0.3 * draw(3, n, ROWS)
        self.truth = draw(4, D) if truth is None else truth
        self.y = (self.x @ self.truth.expand(n, D)[..., None])[..., 0] + self.noise
        self.gram = self.x.mT @ self.x / ROWS
        self.solution = self.solve(self.y)
        self.noise_size = float(self.noise.square().sum() / ROWS)
        self.key = key

    def solve(self, y):
        b = (self.x.mT @ y[..., None])[..., 0] / ROWS
        q = torch.from_numpy(system_matrix(self.network, self.gram, self.alpha).toarray())
        return torch.linalg.solve(q, b.flatten()).reshape(b.shape)

    def diagnose(self, **kwargs):
        b = (self.x.mT @ self.y[..., None])[..., 0] / ROWS
        return diagnose(self.network, self.gram, self.alpha, b, **kwargs)


def connected(seed, nodes=14):
    key = ft.random.fold_in(ft.random.key(seed), 99)
    edges = torch.cat((ft.Network.ring(nodes).edges, ft.Network.erdos_renyi(nodes, 0.15, seed=int(key)).edges)).unique(
        dim=0
    )
    return ft.Network(edges, ft.random.exponential(key, (len(edges),), torch.float64) + 0.1, nodes)


def spread(w):
    return float((w - w.mean(0)).square().sum())


def test_the_system_matrix_is_the_curvature_of_the_objective():
    problem = Instance(0)
    w = ft.random.normal(ft.random.key(5), (len(problem.network), D), torch.float64)

    def objective(w):
        i, j = problem.network.edges.T
        loss = (problem.y - (problem.x @ w[..., None])[..., 0]).square().sum() / ROWS
        return loss + problem.alpha * (problem.network.weights * (w[i] - w[j]).square().sum(1)).sum()

    hessian = torch.autograd.functional.hessian(objective, w).reshape(w.numel(), w.numel())
    q = system_matrix(problem.network, problem.gram, problem.alpha).toarray()
    np.testing.assert_allclose(2 * q, hessian, rtol=0, atol=1e-11)  # rounding, at eigenvalues up to 1e3


@pytest.mark.parametrize("seed", SEEDS)
def test_eigenvalues_of_random_instances_lie_within_their_bounds(seed):
    problem = Instance(seed)
    values = np.linalg.eigvalsh(system_matrix(problem.network, problem.gram, problem.alpha).toarray())
    report = problem.diagnose()
    assert report.smallest == pytest.approx(values[0], rel=1e-9)
    assert report.largest == pytest.approx(values[-1], rel=1e-12)
    tight, loose = report.upper_bounds
    assert values[-1] <= tight <= loose
    assert 0 < report.lower_bound <= values[0]
    assert report.nullity == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_errors_of_random_instances_lie_within_their_bounds(seed):
    problem = Instance(seed)
    report = problem.diagnose()
    assert 0 < spread(problem.solution) <= report.deviation_bound(problem.noise_size)
    error = float((problem.solution.mean(0) - problem.truth).square().sum())
    assert 0 < error <= report.estimation_bound(problem.noise_size)
    moved = 0.5 * ft.random.normal(ft.random.fold_in(problem.key, 7), problem.y.shape, torch.float64)
    change = float((problem.solve(problem.y + moved) - problem.solution).square().sum())
    assert 0 < change <= report.sensitivity_bound(float(moved.square().sum()) / ROWS)
    # The whole network is a cluster without a boundary, for which (6.4) is (3.31).
    assert report.clusters[0].deviation(problem.noise_size, 1.0, 1.0) == report.deviation_bound(problem.noise_size)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_is_as_tight_as_its_bound(seed):
    network = ft.Network.stochastic_blocks([8, 9], 0.9, 0.05, seed=seed)
    labels = torch.arange(2).repeat_interleave(torch.tensor([8, 9]))
    truth = ft.random.normal(ft.random.key(seed), (17, D), torch.float64)
    truth[:8] = truth[0]
    problem = Instance(seed, alpha=0.5, truth=truth, network=network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some of the networks fall into their two blocks
        bound = problem.diagnose(clusters=labels).clusters[0]
    ends = network.edges < 8
    assert bound.boundary == float(network.weights[ends[:, 0] ^ ends[:, 1]].sum())
    assert bound.connectivity == pytest.approx(network.subnetwork(range(8)).algebraic_connectivity)
    noise = float(problem.noise[:8].square().sum() / ROWS)
    outside = float(problem.solution[8:].square().sum(1).max())
    assert 0 < spread(problem.solution[:8]) <= bound.deviation(noise, float(truth[0].square().sum()), outside)


def test_gradient_descent_takes_the_expected_rounds():
    problem = Instance(3)
    report = problem.diagnose(tolerance=1e-6)
    q = torch.from_numpy(system_matrix(problem.network, problem.gram, problem.alpha).toarray())
    _, vectors = torch.linalg.eigh(q)
    error = vectors[:, 0] + vectors[:, -1]  # the slowest directions
    start, rounds = error.norm(), 0
    while error.norm() > 1e-6 * start:
        error = error - 2 * report.learning_rate * (q @ error)
        rounds += 1
    assert rounds == report.gradient_rounds
    assert report.contraction == pytest.approx((report.condition - 1) / (report.condition + 1))


def test_chebyshev_and_conjugate_gradients_arrive_in_the_expected_rounds():
    problem = Instance(3)
    report = problem.diagnose()
    q = torch.from_numpy(system_matrix(problem.network, problem.gram, problem.alpha).toarray())
    values = torch.linalg.eigvalsh(q)

    def largest_residual_polynomial(rounds):  # of Chebyshev's iteration, over the spectrum
        centre, half = (values[0] + values[-1]) / 2, (values[-1] - values[0]) / 2
        inner = torch.cos(rounds * torch.acos(((centre - values) / half).clamp(-1, 1)))
        return float(inner.abs().max() / torch.cosh(rounds * torch.acosh(centre / half)))

    assert largest_residual_polynomial(report.chebyshev_rounds) <= 1e-8
    assert largest_residual_polynomial(report.chebyshev_rounds - 1) > 1e-8  # both ends of the spectrum attain it
    solution, b = problem.solution.flatten(), q @ problem.solution.flatten()
    w, residual = torch.zeros_like(b), b.clone()
    direction = residual.clone()
    for _ in range(report.conjugate_gradient_rounds):
        image = q @ direction
        step = residual @ residual / (direction @ image)
        w, before, residual = w + step * direction, residual, residual - step * image
        direction = residual + (residual @ residual) / (before @ before) * direction
    assert (w - solution).norm() <= 1e-8 * solution.norm()


def test_lost_messages_move_the_iterates_no_further_than_the_bound():
    problem = Instance(1)
    report = problem.diagnose()
    network, w, rate = problem.network, problem.solution.clone(), report.learning_rate
    q = torch.from_numpy(system_matrix(network, problem.gram, problem.alpha).toarray())
    distances, perturbations = [0.0], []
    for round_ in range(200):
        lost = ft.random.bernoulli(ft.random.fold_in(problem.key, round_), 0.3, (len(network.edges),))
        i, j = network.edges[lost].T
        pull = 2 * rate * problem.alpha * network.weights[lost, None] * (w[j] - w[i])
        missing = torch.zeros_like(w).index_add_(0, i, -pull).index_add_(0, j, pull)
        exact = w - 2 * rate * (q @ (w - problem.solution).flatten()).reshape(w.shape)
        w = exact + missing
        distances.append(float((w - problem.solution).norm()))
        perturbations.append(float(missing.norm()))
    bounds = perturbed_gradient_bound(report.contraction, 0.0, perturbations)
    assert len(bounds) == 201
    assert all(distance <= bound * (1 + 1e-12) for distance, bound in zip(distances, bounds))  # rounding
    assert bounds[-1] <= report.lasting_error(max(perturbations))
    printed = report.contraction * perturbations[0]  # the exponent k' of the book, after one step
    assert distances[1] > printed * (1 + 1e-6)


@pytest.mark.slow
def test_the_sparse_eigenvalues_are_those_of_the_whole_matrix(monkeypatch):
    problem = Instance(2, network=connected(2, 300))
    pairs = ft.Network([(i, i + 1) for i in range(0, 300, 2)], nodes=300)
    singular = problem.gram.clone()
    singular[:, 1] = singular[:, :, 1] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for network, gram in ((problem.network, problem.gram), (problem.network, singular), (pairs, singular)):
            dense = diagnose(network, gram, 2.0)
            monkeypatch.setattr(diagnostics, "_DENSE", 0)
            sparse = diagnose(network, gram, 2.0)
            monkeypatch.undo()
            assert sparse.nullity == dense.nullity
            assert sparse.smallest == pytest.approx(dense.smallest, rel=1e-8)
            assert sparse.largest == pytest.approx(dense.largest, rel=1e-10)


def test_singular_problems_and_components_are_warned_of():
    network = ft.Network.ring(4)
    gram = torch.diag(torch.tensor([1.0, 0.0])).expand(4, 2, 2)
    with pytest.warns(UserWarning, match=r"singular in 1 dimensions.*minimum norm"):
        report = diagnose(network, gram, 1.0)
    assert report.nullity == 1
    assert report.smallest == pytest.approx(1.0)
    assert report.lower_bound == 0
    assert report.sensitivity_bound(1.0) == report.estimation_bound(1.0) == math.inf
    assert "minimum-norm solution" in str(report)
    split = ft.Network([(0, 1), (2, 3)])
    with pytest.warns(UserWarning, match="2 components"):
        report = diagnose(split, torch.eye(2).expand(4, 2, 2), 1.0)
    assert report.deviation_bound(1.0) == math.inf
    assert [bound.deviation(1.0, 0.0, 0.0) for bound in report.clusters] == pytest.approx([0.5, 0.5])
    unlabelled = torch.eye(2).expand(4, 2, 2) * torch.tensor([1.0, 1, 0, 0])[:, None, None]
    with pytest.warns(UserWarning, match="components|singular") as caught:
        assert diagnose(split, unlabelled, 1.0).nullity == 2  # a component without labels
    assert len(caught) == 2


def test_minimum_norm_is_where_gradient_descent_from_zero_arrives():
    problem = Instance(4)
    problem.x[..., 1] = 0
    gram = problem.x.mT @ problem.x / ROWS
    b = (problem.x.mT @ problem.y[..., None])[..., 0] / ROWS
    with pytest.warns(UserWarning, match="singular"):
        report = diagnose(problem.network, gram, problem.alpha, right_hand_side=b, tolerance=1e-9)
    q = torch.from_numpy(system_matrix(problem.network, gram, problem.alpha).toarray())
    expected = torch.linalg.pinv(q, hermitian=True) @ b.flatten()
    w = torch.zeros_like(expected)
    for _ in range(report.gradient_rounds):
        w = w - 2 * report.learning_rate * (q @ w - b.flatten())
    assert (w - expected).norm() <= 1.01e-9 * expected.norm()  # the tolerance and rounding
    with pytest.raises(ValueError, match="the objective has no minimum"):
        diagnose(problem.network, gram, problem.alpha, right_hand_side=b + 1)


def test_the_report_prints_every_bound():
    text = str(Instance(0).diagnose())
    for equation in ("(5.5)", "(5.6)", "(3.31)", "(6.4)", "(8.3)", "(8.9)", "(4.14)", "condition", "Chebyshev"):
        assert equation in text
    assert len(text.splitlines()) == 18


def test_one_node_is_a_problem_too():
    report = diagnose(ft.Network.star(1), torch.eye(3)[None], 1.0)
    assert (report.smallest, report.largest) == (1.0, 1.0)
    assert report.gradient_rounds == 1
    assert contraction(report.learning_rate, 1.0, 1.0) == 0


def test_bad_input():
    network, gram = ft.Network.ring(4), torch.eye(2).expand(4, 2, 2)
    with pytest.raises(ValueError, match=r"Expected statistics of shapes \(4, 2, 2\)"):
        diagnose(network, gram[:3], 1.0)
    with pytest.raises(ValueError, match="finite Gram"):
        diagnose(network, gram * math.nan, 1.0)
    with pytest.raises(ValueError, match="above zero"):
        diagnose(network, gram * 0, 1.0)
    with pytest.raises(ValueError, match="symmetric"):
        diagnose(network, gram + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), 1.0)
    with pytest.raises(ValueError, match="positive semi-definite"):
        diagnose(network, -gram, 1.0)
    with pytest.raises(ValueError, match="alpha > 0"):
        diagnose(network, gram, 0.0)
    with pytest.raises(ValueError, match="tolerance between"):
        diagnose(network, gram, 1.0, tolerance=0.0)
    with pytest.raises(ValueError, match="cluster of each node"):
        diagnose(network, gram, 1.0, clusters=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="Expected statistics of shapes"):
        diagnose(network, gram, 1.0, right_hand_side=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="Expected finite right-hand sides"):
        diagnose(network, gram, 1.0, right_hand_side=torch.full((4, 2), math.nan))
