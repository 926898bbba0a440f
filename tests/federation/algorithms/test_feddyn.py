"""FedDyn against the paper's algorithm written out, the pooled optimum, and first order conditions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import ROUNDING, distance, joined, linear, linear_clients, moments, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch import random, tree

SIZES = [5, 2, 9, 4, 17, 6]
K = len(SIZES)
COUNTS = torch.tensor(SIZES, dtype=torch.float64)


def equal(data: Any) -> Tensor:
    return torch.ones_like(data.count)


def pooled_optimum(data: ft.data.FederatedData, weights: Tensor) -> Tensor:
    """The minimiser of Σ_k w_k L_k, `(p, o)`."""
    systems = [moments(x, y) for x, y in data]
    matrix = sum(w * a for w, (a, _) in zip(weights, systems))
    return torch.linalg.solve(matrix, sum(w * b for w, (_, b) in zip(weights, systems)))


@pytest.mark.parametrize("cohort", [None, 3])
def test_algorithm_1_of_the_paper(cohort: int | None) -> None:
    """Exact local solutions, plain means, h ← h − α/N Σ_{k∈S} (θ_k − θ)."""
    data, alpha = linear_clients(SIZES), 0.8
    algorithm = ft.feddyn(ft.least_squares(linear()), alpha, weight=equal)
    systems, eye = [moments(x, y) for x, y in data], torch.eye(4, dtype=torch.float64)
    theta = joined(algorithm.start)
    h, own = torch.zeros_like(theta), [torch.zeros_like(theta) for _ in range(K)]
    for round in ft.Run(algorithm, ft.InProcess(data), cohort=cohort, seed=1).rounds(6):
        ids = round.ids.tolist()
        solved = {}
        for k in ids:
            matrix, vector = systems[k]
            solved[k] = torch.linalg.solve(matrix + alpha * eye, vector + own[k] + alpha * theta)
            own[k] = own[k] - alpha * (solved[k] - theta)
        h = h - alpha / K * sum(solved[k] - theta for k in ids)
        theta = sum(solved[k] for k in ids) / len(ids) - h / alpha
        assert distance(joined(round.server.parameters), theta) < 10 * ROUNDING
    sent = round.clients.table.read(slice(0, K)).controls.weighted
    assert distance(joined(sent), torch.stack(own)) < 10 * ROUNDING


def test_the_kept_gradients_are_those_of_the_local_solutions() -> None:
    data, alpha = linear_clients(SIZES), 0.8
    algorithm = ft.feddyn(ft.least_squares(linear()), alpha)
    round = ft.Run(algorithm, ft.InProcess(data)).step()
    own = joined(tree.scale(round.clients.table.read(slice(0, K)).controls.weighted, 1 / COUNTS))
    theta = joined(algorithm.start)
    for k, (x, y) in enumerate(data):
        matrix, vector = moments(x, y)
        solution = theta - own[k] / alpha  # g_k⁺ = −α (θ_k − θ) after the first round
        solution.requires_grad_()
        loss = (solution * (matrix @ solution)).sum() / 2 - (vector * solution).sum()
        (gradient,) = torch.autograd.grad(loss, solution)
        assert distance(own[k], gradient) < 10 * ROUNDING


@pytest.mark.parametrize(
    ("solver", "participation"),
    [("least squares", "a tenth"), *(pytest.param("descent", p, marks=pytest.mark.slow) for p in ("full", "a tenth"))],
)
def test_it_reaches_the_optimum_of_the_pooled_rows(solver: str, participation: str) -> None:
    sizes = [10 + (7 * k) % 40 for k in range(40)]
    data = linear_clients(sizes)
    local = ft.least_squares(linear()) if solver == "least squares" else sgd(0.05, steps=8)
    best = pooled_optimum(data, data.counts)
    cohort, rounds, tolerance = (None, 150, 10 * ROUNDING) if participation == "full" else (4, 260, 1e-5)
    start = tree.map(lambda leaf: leaf + 2, local.parameters)
    found = ft.run(ft.feddyn(local, 4.0), ft.InProcess(data), start, cohort=cohort, rounds=rounds).last
    assert distance(joined(found.server.parameters), best) < tolerance  # it converges linearly
    plain = ft.run(ft.fedavg(local), ft.InProcess(data), start, cohort=cohort, rounds=20).last
    assert distance(joined(plain.server), best) > 0.01


def test_its_fixed_point_follows_the_weights() -> None:
    data = linear_clients([30, 12, 50, 9])
    algorithm = ft.feddyn(ft.least_squares(linear()), 2.0, weight=equal)
    found = ft.run(algorithm, ft.InProcess(data), rounds=90).last
    assert distance(joined(found.server.parameters), pooled_optimum(data, torch.ones(4))) < 10 * ROUNDING
    assert distance(joined(found.server.parameters), pooled_optimum(data, data.counts)) > 1e-3


def test_a_strong_regulariser_moves_little() -> None:
    """After the first round the server has moved by −2∇/α, mean and correction, to first order in 1/α."""
    data, alpha = linear_clients(SIZES), 1e6
    local = ft.least_squares(linear())
    round = ft.Run(ft.feddyn(local, alpha), ft.InProcess(data)).step()
    theta, rows = joined(local.parameters), COUNTS.sum()
    slope = sum(n / rows * (a @ theta - b) for n, (a, b) in zip(COUNTS, [moments(x, y) for x, y in data]))
    moved = (joined(round.server.parameters) - theta) * alpha
    assert distance(moved, -2 * slope) < 1e-4  # O(1/α) times curvatures of order ten


def test_the_order_of_the_clients_does_not_matter() -> None:
    data, order = linear_clients(SIZES), torch.tensor([3, 5, 0, 1, 4, 2])
    algorithm = ft.feddyn(sgd(0.05, steps=3), 1.0)
    one = ft.run(algorithm, ft.InProcess(data), rounds=4).last
    two = ft.run(algorithm, ft.InProcess(data.select(order)), rounds=4).last
    assert distance(one.server, two.server) < 10 * ROUNDING


def test_server_total_is_the_sum_of_all_contributions() -> None:
    data, algorithm = linear_clients(SIZES), ft.feddyn(ft.least_squares(linear()), 3.0)
    lost = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.4))
    start = tree.map(lambda leaf: leaf + 3, algorithm.start)
    for round in ft.Run(algorithm, ft.InProcess(data), start, cohort=4, faults=lost).rounds(20):
        sent = round.clients.table.read(slice(0, K)).controls
        assert distance(round.server.total, tree.map(lambda leaf: leaf.sum(0, dtype=torch.float64), sent)) < ROUNDING


def test_a_client_that_never_answers_is_not_in_the_optimum() -> None:
    data, algorithm = linear_clients([30, 12, 50, 9]), ft.feddyn(ft.least_squares(linear()), 2.0)
    silent = ft.Faults(before=lambda keys, ids: ids == 2)
    found = ft.run(algorithm, ft.InProcess(data), faults=silent, rounds=90).last
    others = data.select([0, 1, 3])
    assert distance(joined(found.server.parameters), pooled_optimum(others, others.counts)) < 10 * ROUNDING


def test_averaged_buffers_are_averaged() -> None:
    module = torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(1, dtype=torch.float64))
    algorithms = (ft.feddyn(sgd(0.05, module, buffers="average"), 2.0), ft.fedavg(sgd(0.05, module, buffers="average")))
    data = ft.InProcess(linear_clients([5, 9, 4, 17]))
    ours, plain = (ft.Run(algorithm, data).step().server for algorithm in algorithms)
    assert distance(ours.parameters["1.running_var"], plain["1.running_var"]) < ROUNDING


def test_no_clients() -> None:
    progress = ft.Run(algorithm := ft.feddyn(sgd(0.1), 1.0), ft.InProcess(linear_clients(SIZES)))
    reply = progress.clients.reply(
        progress.clients.empty_block(), algorithm.outbox(progress.server), ft.Turn(torch.tensor(0), 0)
    )
    assert all(len(leaf) == 0 for leaf in tree.leaves(reply))


def test_wrong_settings_are_refused() -> None:
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"Expected a positive alpha, but got {alpha}"):
            ft.feddyn(sgd(0.1), alpha)


CASES: dict[str, Case] = {"feddyn": Case(lambda: ft.feddyn(ft.least_squares(linear()), 3.0))}
