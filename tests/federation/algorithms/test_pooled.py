"""Pooled training is the fit on everybody's rows."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import (
    ROUNDING,
    client_tensors,
    copy_of,
    distance,
    joined,
    linear,
    linear_clients,
    moments,
    sgd,
)

import fedtorch as ft
from fedtorch import random

SIZES = [5, 2, 9, 1, 17, 6]


@pytest.mark.parametrize("chunk", [None, 1])
def test_the_solution_on_all_rows(chunk: int | None) -> None:
    data = linear_clients(SIZES)
    final = ft.run(ft.pooled(ft.least_squares(linear())), ft.InProcess(data.pool(), chunk), rounds=2).last
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
    lost = ft.Faults(after=lambda key, ids: random.bernoulli(random.fold_in(key, ids), 0.5))
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
