"""Robust losses on networks: linear programs, smooth minimisation, least squares, and what wrong labels can do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from scipy.sparse import coo_matrix, hstack, identity, vstack
from support.oracles.closed_forms import distance
from support.oracles.gtv_problems import bare_linear_clients, dense_solution, weighted_network

import fedtorch as ft
from fedtorch.networks import solvers
from fedtorch.networks.solvers.penalties import Penalty, huber

SIZES = [7, 9, 5, 12, 8, 6]
NETWORK = weighted_network(len(SIZES), seed=1)
DATA = bare_linear_clients(SIZES, seed=2)


def objective(w: torch.Tensor, loss: Penalty, penalty: Penalty, alpha: float) -> float:
    """f, written out node by node and edge by edge."""
    total = sum(float(loss.value((y - x @ w[i])[:, None]).mean()) for i, (x, y) in enumerate(DATA))
    for (i, j), weight in zip(NETWORK.edges.tolist(), NETWORK.weights.tolist()):
        total += alpha * weight * float(penalty.value((w[i] - w[j])[None]))
    return total


def test_squared_errors_are_least_squares() -> None:
    """½s² and `squared`, which is s²: the minimiser of the linear problem."""
    found = solvers.robust_loss(DATA, NETWORK, 0.7, solvers.squared, tolerance=1e-10)
    assert found.converged
    assert distance(found.parameters, dense_solution(DATA, NETWORK, 0.7)) < 1e-7  # of the tolerance, conditioned
    far = solvers.robust_loss(DATA, NETWORK, 0.7, huber(1e6), tolerance=1e-10)
    assert distance(far.parameters, dense_solution(DATA, NETWORK, 1.4)) < 1e-7  # half the loss, half the strength


def test_absolute_errors_are_a_linear_program() -> None:
    """min Σ a_r/m_i + αA Σ|b_e| subject to −a ≤ y − Xw ≤ a and −b ≤ w_i − w_j ≤ b, by SciPy's HiGHS."""
    alpha, n, d = 0.3, len(SIZES), 3
    x, y = (leaf.numpy() for leaf in DATA.rows)
    node = np.repeat(np.arange(n), SIZES)
    rows = np.arange(len(y))
    design = coo_matrix((x.ravel(), (np.repeat(rows, d), (node[:, None] * d + np.arange(d)).ravel())), (len(y), n * d))
    first, second = NETWORK.edges.numpy().T
    edges = np.arange(len(first) * d)
    ones = np.ones(len(edges))
    at = lambda nodes: (nodes[:, None] * d + np.arange(d)).ravel()
    difference = coo_matrix(
        (np.r_[ones, -ones], (np.r_[edges, edges], np.r_[at(first), at(second)])), (len(edges), n * d)
    )
    one, two = identity(len(y)), identity(len(edges))
    matrix = vstack(
        [
            hstack([-design, -one, coo_matrix((len(y), len(edges)))]),
            hstack([design, -one, coo_matrix((len(y), len(edges)))]),
            hstack([difference, coo_matrix((len(edges), len(y))), -two]),
            hstack([-difference, coo_matrix((len(edges), len(y))), -two]),
        ]
    )
    bound = np.r_[-y, y, np.zeros(2 * len(edges))]
    cost = np.r_[np.zeros(n * d), 1 / np.array(SIZES)[node], alpha * np.repeat(NETWORK.weights.numpy(), d)]
    free = [(None, None)] * (n * d) + [(0, None)] * (len(y) + len(edges))
    best = linprog(cost, matrix, bound, bounds=free)
    found = solvers.robust_loss(DATA, NETWORK, alpha, solvers.norm1, solvers.norm1, rounds=4000)
    value = objective(found.parameters, solvers.norm1, solvers.norm1, alpha)
    assert -1e-12 < value / best.fun - 1 < 1e-5  # ADMM comes near a vertex slowly: what 4000 rounds leave


@pytest.mark.parametrize("delta", [0.1, 0.5])
def test_huber_s_loss_is_a_smooth_minimisation(delta: float) -> None:
    loss = huber(delta)

    def value(w: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(w.reshape(len(SIZES), 3), requires_grad=True)
        total = sum(loss.value((y - x @ leaf[i])[:, None]).mean() for i, (x, y) in enumerate(DATA))
        ends = NETWORK.edges
        total = total + 0.7 * (NETWORK.weights * (leaf[ends[:, 0]] - leaf[ends[:, 1]]).square().sum(1)).sum()
        total.backward()
        return float(total.detach()), leaf.grad.numpy().ravel()

    best = minimize(value, np.zeros(len(SIZES) * 3), jac=True, method="BFGS", options={"gtol": 1e-10})
    found = solvers.robust_loss(DATA, NETWORK, 0.7, loss, tolerance=1e-9)
    assert found.converged
    assert distance(found.parameters.flatten(), torch.tensor(best.x)) < 1e-6


@pytest.mark.parametrize("delta", [0.3, 2.0])
def test_huber_s_proximal_step_minimises(delta: float) -> None:
    loss, v = huber(delta), torch.linspace(-5, 5, 41, dtype=torch.float64)[:, None]
    for t in (0.2, 1.0, 7.0):
        step = loss.prox(v, torch.full((41,), t).double())
        cost = lambda s, t=t: t * loss.value(s) + 0.5 * (s - v).square().sum(1)
        for other in (step + 1e-4, step - 1e-4, v, torch.zeros_like(v)):
            assert bool((cost(step) <= cost(other) + 1e-15).all())


def test_few_wrong_labels_move_the_absolute_error_little() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 20, 2, generator=generator).double()
    truth = torch.tensor([1.0, -2.0]).double()
    y = x @ truth + 0.01 * torch.randn(4, 20, generator=generator).double()
    wrong = y.clone()
    wrong[1, :6] += 100
    data, network = ft.data.from_tensors(list(zip(x, wrong))), ft.Network.ring(4)
    moved = solvers.direct(solvers.linear_problem(data, network, 0.5)).parameters
    assert float((moved - truth).abs().max()) > 5
    for loss in (solvers.norm1, huber(0.01)):
        found = solvers.robust_loss(data, network, 0.5, loss, rounds=4000)
        assert float((found.parameters - truth).abs().max()) < 0.05


def test_units_do_not_matter() -> None:
    scaled = DATA.map(lambda rows: (rows[0] * torch.tensor([1e-3, 1.0, 1e3]).double(), 1e4 * rows[1]))
    alone = ft.Network(torch.empty(0, 2, dtype=torch.int64), nodes=6)
    plain = solvers.robust_loss(DATA, alone, 0.0, solvers.norm1)
    other = solvers.robust_loss(scaled, alone, 0.0, solvers.norm1)
    back = other.parameters * torch.tensor([1e-3, 1.0, 1e3]).double() / 1e4
    assert distance(back, plain.parameters) < 1e-6


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="positive delta, but got 0"):
        huber(0.0)
    with pytest.raises(ValueError, match="as many nodes as there are clients"):
        solvers.robust_loss(DATA, ft.Network.ring(4), 1.0)
