"""Separate training is every client's own fit, with nothing sent; pooled training the fit on everybody's rows."""

from __future__ import annotations

import pytest
import torch
from support.algorithm_cases import Case, pool
from support.oracles.closed_forms import (
    ROUNDING,
    client_tensors,
    copy_of,
    distance,
    joined,
    linear,
    linear_clients,
    moments,
    same_bits,
    sgd,
)

import fedtorch as ft
from fedtorch import random, tree

SIZES = [5, 7, 9, 6, 17, 6]
K = len(SIZES)


def test_every_client_has_its_own_solution() -> None:
    data = linear_clients(SIZES)
    final = ft.run(ft.separate(ft.least_squares(linear())), ft.InProcess(data), rounds=2).last
    for k, (x, y) in enumerate(data):
        expected = torch.linalg.solve(*moments(x, y))
        assert distance(joined(client_tensors(final.clients, final.server, k)), expected) < 10 * ROUNDING


def test_descent_is_a_linear_iteration() -> None:
    """w ← w − η(Aw − b), three times a round, for two rounds."""
    data, rate = linear_clients(SIZES), 0.1
    local = sgd(rate, steps=3)
    final = ft.run(ft.separate(local), ft.InProcess(data), rounds=2).last
    for k, (x, y) in enumerate(data):
        matrix, vector = moments(x, y)
        expected = joined(local.parameters)
        for _ in range(6):
            expected = expected - rate * (matrix @ expected - vector)
        assert distance(joined(client_tensors(final.clients, {}, k)), expected) < ROUNDING


def test_the_first_step_is_minus_the_gradient() -> None:
    data, rate = linear_clients(SIZES), 1e-3
    local = sgd(rate)
    round = ft.Run(ft.separate(local), ft.InProcess(data)).step()
    for k, (x, y) in enumerate(data):
        own = {name: leaf.clone().requires_grad_() for name, leaf in local.parameters.items()}
        loss = (x @ own["weight"][0] + own["bias"] - y).square().mean()
        gradient = torch.autograd.grad(loss, list(own.values()))
        expected = {name: (leaf - rate * g).detach() for (name, leaf), g in zip(own.items(), gradient)}
        assert distance(client_tensors(round.clients, {}, k), expected) < ROUNDING


def test_nothing_is_sent() -> None:
    for round in ft.Run(ft.separate(sgd(0.1)), ft.InProcess(linear_clients(SIZES), 2), cohort=4).rounds(3):
        assert (round.bytes_up, round.bytes_down) == (0, 0)
        assert round.server == {}
        assert len(round.ids) == 4
        assert round.info["loss"].shape == (4,)


def test_the_others_do_not_matter() -> None:
    data, order = linear_clients(SIZES), torch.tensor([4, 0, 2])
    whole = ft.run(ft.separate(sgd(0.1)), ft.InProcess(data), rounds=3).last
    some = ft.run(ft.separate(sgd(0.1)), ft.InProcess(data.select(order)), rounds=3).last
    for row, k in enumerate(order.tolist()):
        assert distance(client_tensors(some.clients, {}, row), client_tensors(whole.clients, {}, k)) < ROUNDING


def test_a_silent_client_stays_where_it_is() -> None:
    data, silent = linear_clients(SIZES), ft.Faults(after=lambda keys, ids: ids == 2)
    start = tree.map(lambda leaf: leaf + 2, sgd(0.1).parameters)
    final = ft.run(ft.separate(sgd(0.1)), ft.InProcess(data), start, faults=silent, rounds=3).last
    whole = ft.run(ft.separate(sgd(0.1)), ft.InProcess(data), start, rounds=3).last
    assert same_bits(client_tensors(final.clients, {}, 2), start)
    assert distance(client_tensors(final.clients, {}, 3), client_tensors(whole.clients, {}, 3)) < ROUNDING
    assert distance(client_tensors(whole.clients, {}, 2), start) > 0.01


def test_no_clients() -> None:
    for local in (ft.least_squares(linear()), sgd(0.1)):
        clients = ft.Run(ft.separate(local), ft.InProcess(linear_clients(SIZES))).clients
        reply = clients.reply(clients.empty_block(), {}, ft.Turn(torch.tensor(0), 0))
        assert all(len(leaf) == 0 for leaf in tree.leaves(reply))


# -- all rows in one place ---------------------------------------------------------------------------------------------


def test_the_solution_on_all_rows() -> None:
    data = linear_clients(SIZES)
    final = ft.run(ft.pooled(ft.least_squares(linear())), ft.InProcess(data.pool()), rounds=2).last
    expected = torch.linalg.solve(*moments(*data.rows))
    assert distance(joined(client_tensors(final.clients, {}, 0)), expected) < ROUNDING
    assert (final.bytes_up, final.bytes_down) == (0, 0)


def test_full_steps_are_those_of_torch_optim() -> None:
    data, module = linear_clients(SIZES), linear()
    rounds = ft.Run(ft.pooled(sgd(0.05, steps=4)), ft.InProcess(data.pool())).rounds(3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    x, y = data.rows
    for round in rounds:
        for _ in range(4):
            optimizer.zero_grad()
            (module(x).squeeze(-1) - y).square().mean().backward()
            optimizer.step()
        expected = {name: p.detach() for name, p in module.named_parameters()}
        assert distance(client_tensors(round.clients, {}, 0), expected) < ROUNDING


def test_descent_converges_to_the_solution_at_a_linear_rate() -> None:
    data, rate = linear_clients(SIZES), 0.2
    matrix, vector = moments(*data.rows)
    exact = torch.linalg.solve(matrix, vector)
    slowest = 1 - rate * float(torch.linalg.eigvalsh(matrix)[0])
    errors = [
        float((joined(client_tensors(round.clients, {}, 0)) - exact).norm())
        for round in ft.Run(ft.pooled(sgd(rate)), ft.InProcess(data.pool())).rounds(60)
    ]
    assert errors[-1] / errors[-2] == pytest.approx(slowest, rel=1e-2)  # faster directions have died out


def test_how_the_rows_were_shared_out_does_not_matter() -> None:
    data = linear_clients(SIZES)
    other = ft.data.FederatedData(data.rows, torch.tensor([20, sum(SIZES) - 20]))
    one, two = (
        ft.Run(ft.pooled(sgd(0.1, epochs=1, batch_size=8)), ft.InProcess(d.pool())).step() for d in (data, other)
    )
    assert distance(client_tensors(one.clients, {}, 0), client_tensors(two.clients, {}, 0)) == 0


def test_a_lost_message_changes_nothing() -> None:
    data = linear_clients(SIZES)
    lost = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.5))
    previous, changes = copy_of(sgd(0.1).parameters), []
    for round in ft.Run(ft.pooled(sgd(0.1)), ft.InProcess(data.pool()), faults=lost).rounds(12):
        now = client_tensors(round.clients, {}, 0)
        changes.append(distance(now, previous) > 0)
        assert changes[-1] == (len(round.ids) == 1)
        previous = now
    assert 0 < sum(changes) < 12


def test_several_clients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected one client with all rows, but got 6; pool them with data\.pool"):
        ft.Run(ft.pooled(sgd(0.1)), ft.InProcess(linear_clients(SIZES))).step()


CASES: dict[str, Case] = {
    "pooled": Case(lambda: ft.pooled(sgd(0.1, epochs=1, batch_size=8)), rows=pool),
    "separate": Case(lambda: ft.separate(sgd(0.1, steps=2))),
}
