"""SCAFFOLD against the paper's algorithm written out, the pooled optimum, and the gradients of its controls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import (
    ROUNDING,
    distance,
    joined,
    linear,
    linear_clients,
    mean_squared_error,
    moments,
    same_bits,
    sgd,
)
from torch import Tensor, nn
from torch.func import functional_call

import fedtorch as ft
from fedtorch import random, tree
from fedtorch.tree import Tree

SIZES = [5, 2, 9, 4, 17, 6]
K = len(SIZES)
COUNTS = torch.tensor(SIZES, dtype=torch.float64)


def equal(data: Any) -> Tensor:
    return torch.ones_like(data.count)


def gradient(parameters: Tree, x: Tensor, y: Tensor) -> Tree:
    own = {name: leaf.clone().requires_grad_() for name, leaf in parameters.items()}
    found = torch.autograd.grad(mean_squared_error(functional_call(linear(), own, (x,)), y), list(own.values()))
    return dict(zip(own, found))


def pooled_optimum(data: ft.data.FederatedData, weights: Tensor) -> Tensor:
    """The minimiser of Σ_k w_k L_k, `(p, o)`."""
    systems = [moments(x, y) for x, y in data]
    return torch.linalg.solve(
        sum(w * a for w, (a, _) in zip(weights, systems)), sum(w * b for w, (_, b) in zip(weights, systems))
    )


def sum_of_sent(round: ft.Round, clients: int) -> Tree:
    sent = round.clients.table.read(slice(0, clients)).controls
    return tree.map(lambda leaf: leaf.sum(0, dtype=torch.float64), sent)


@pytest.mark.parametrize("cohort", [None, 3])
def test_algorithm_1_of_the_paper(cohort: int | None) -> None:
    """Plain means, and the server's control moved by |S|/N times the mean change of those who answer."""
    data, rate, steps, lr = linear_clients(SIZES), 0.05, 3, 0.7
    algorithm = ft.scaffold(sgd(rate, steps=steps), lr=lr, weight=equal)
    x = algorithm.start
    control, own = tree.zeros_like(x), [tree.zeros_like(x) for _ in range(K)]
    for round in ft.Run(algorithm, ft.InProcess(data), cohort=cohort, seed=1).rounds(5):
        ids = round.ids.tolist()
        changes, moves = [], []
        for k in ids:
            y = x
            for _ in range(steps):
                direction = tree.add(tree.subtract(gradient(y, *data[k]), own[k]), control)
                y = tree.add_scaled(y, direction, -rate)
            new = tree.add_scaled(tree.subtract(own[k], control), tree.subtract(x, y), 1 / (steps * rate))
            changes.append(tree.subtract(y, x))
            moves.append(tree.subtract(new, own[k]))
            own[k] = new
        for change, move in zip(changes, moves):
            x = tree.add_scaled(x, change, lr / len(ids))
            control = tree.add_scaled(control, move, 1 / K)
        assert distance(round.server.parameters, x) < ROUNDING
        assert distance(algorithm.outbox(round.server).control, control) < ROUNDING


@pytest.mark.parametrize("participation", ["full", pytest.param("a tenth", marks=pytest.mark.slow)])
def test_it_reaches_the_optimum_of_the_pooled_rows(participation: str) -> None:
    sizes = [10 + (7 * k) % 40 for k in range(10 if participation == "full" else 40)]
    data, solver = linear_clients(sizes), sgd(0.1, steps=8)
    best = pooled_optimum(data, data.counts)
    cohort, rounds, tolerance = (None, 75, 10 * ROUNDING) if participation == "full" else (4, 300, 1e-5)
    start = tree.map(lambda leaf: leaf + 2, solver.parameters)
    found = ft.run(ft.scaffold(solver), ft.InProcess(data), start, cohort=cohort, rounds=rounds).last
    assert distance(joined(found.server.parameters), best) < tolerance  # it converges linearly
    plain = ft.run(ft.fedavg(solver), ft.InProcess(data), start, cohort=cohort, rounds=30).last
    assert distance(joined(plain.server), best) > 0.01


def test_its_fixed_point_follows_the_weights() -> None:
    data, solver = linear_clients([30, 12, 50, 9]), sgd(0.1, steps=5)
    found = ft.run(ft.scaffold(solver, weight=equal), ft.InProcess(data), rounds=150).last
    assert distance(joined(found.server.parameters), pooled_optimum(data, torch.ones(4))) < 10 * ROUNDING
    assert distance(joined(found.server.parameters), pooled_optimum(data, data.counts)) > 1e-3


def test_controls_are_the_gradients_after_one_step() -> None:
    data, solver = linear_clients(SIZES), sgd(0.1)
    algorithm = ft.scaffold(solver)
    round = ft.Run(algorithm, ft.InProcess(data)).step()
    sent = round.clients.table.read(slice(0, K)).controls
    expected = [gradient(solver.parameters, x, y) for x, y in data]
    assert distance(tree.scale(sent.weighted, 1 / COUNTS), tree.stack(expected)) < 10 * ROUNDING  # divided by 0.1
    mean = tree.map(lambda *each: sum(p * g for p, g in zip(COUNTS / COUNTS.sum(), each)), *expected)
    assert distance(algorithm.outbox(round.server).control, mean) < 10 * ROUNDING
    plain = ft.Run(ft.fedavg(solver), ft.InProcess(data)).step()
    assert distance(round.server.parameters, plain.server) < ROUNDING  # no controls in the first round


def test_controls_are_gradients_to_first_order_in_the_rate() -> None:
    data = linear_clients(SIZES)

    def gap(rate: float) -> Tensor:
        round = ft.Run(ft.scaffold(sgd(rate, steps=4)), ft.InProcess(data)).step()
        sent = tree.scale(round.clients.table.read(slice(0, K)).controls.weighted, 1 / COUNTS)
        exact = tree.stack([gradient(sgd(rate).parameters, x, y) for x, y in data])
        return torch.cat([leaf.flatten() for leaf in tree.leaves(tree.subtract(sent, exact))]).norm()

    assert float(torch.log2(gap(2e-4) / gap(1e-4))) == pytest.approx(1, abs=0.02)  # the next term is O(rate)


def test_the_order_of_the_clients_does_not_matter() -> None:
    data, order = linear_clients(SIZES), torch.tensor([3, 5, 0, 1, 4, 2])
    algorithm = ft.scaffold(sgd(0.05, steps=3))
    one = ft.run(algorithm, ft.InProcess(data), rounds=4).last
    two = ft.run(algorithm, ft.InProcess(data.select(order)), rounds=4).last
    assert distance(one.server, two.server) < 10 * ROUNDING


def test_server_total_is_the_sum_of_all_contributions() -> None:
    data, algorithm = linear_clients(SIZES), ft.scaffold(sgd(0.05, steps=3))
    lost = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.4))
    start = tree.map(lambda leaf: leaf + 3, algorithm.start)
    for round in ft.Run(algorithm, ft.InProcess(data), start, cohort=4, faults=lost).rounds(20):
        assert distance(round.server.total, sum_of_sent(round, K)) < ROUNDING
    assert distance(round.server.total.weight, COUNTS.sum()) == 0  # everybody was heard


def test_a_client_that_never_answers_is_not_in_the_optimum() -> None:
    data, algorithm = linear_clients([30, 12, 50, 9]), ft.scaffold(sgd(0.1, steps=5))
    silent = ft.Faults(after=lambda keys, ids: ids == 2)
    found = ft.run(algorithm, ft.InProcess(data), faults=silent, rounds=150).last
    others = data.select([0, 1, 3])
    assert distance(joined(found.server.parameters), pooled_optimum(others, others.counts)) < 10 * ROUNDING


def test_copies_of_one_client_are_that_client() -> None:
    rows = linear_clients([9])[0]
    many = ft.run(ft.scaffold(sgd(0.1, steps=3)), ft.InProcess(ft.data.from_tensors([rows] * 4)), rounds=3).last
    one = ft.run(ft.fedavg(sgd(0.1, steps=9)), ft.InProcess(ft.data.from_tensors([rows])), rounds=1).last
    assert distance(many.server.parameters, one.server) < 10 * ROUNDING


def test_the_server_holds_the_whole_model() -> None:
    run = ft.run(ft.scaffold(sgd(0.05)), ft.InProcess(linear_clients(SIZES)), rounds=2)
    assert same_bits(dict(run.global_module().state_dict()), run.server.parameters)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    run = ft.run(ft.scaffold(sgd(0.05, module, buffers="local")), ft.InProcess(linear_clients(SIZES)), rounds=2)
    with pytest.raises(ValueError, match=r"or run\.client_module\(client\)"):  # whose statistics stay with the clients
        run.global_module()


def test_no_clients() -> None:
    progress = ft.Run(algorithm := ft.scaffold(sgd(0.1)), ft.InProcess(linear_clients(SIZES)))
    reply = progress.clients.reply(
        progress.clients.empty_block(), algorithm.outbox(progress.server), ft.Turn(torch.tensor(0), 0)
    )
    assert all(len(leaf) == 0 for leaf in tree.leaves(reply))


def test_an_exact_local_solver_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learning rates of 0\.0; SCAFFOLD is not defined for an exact local solver"):
        ft.Run(ft.scaffold(ft.least_squares(linear())), ft.InProcess(linear_clients(SIZES))).step()
    with pytest.raises(ValueError, match="Expected a positive lr, but got 0"):
        ft.scaffold(sgd(0.1), lr=0.0)


CASES: dict[str, Case] = {
    "scaffold": Case(
        lambda: ft.scaffold(sgd(0.05, epochs=1, batch_size=4)),
        waits=5,  # whether all have taken steps
    )
}
