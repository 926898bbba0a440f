"""FedSGD against pooled gradient descent and the gradient by autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import (
    ROUNDING,
    client_tensors,
    distance,
    joined,
    linear,
    linear_clients,
    mean_squared_error,
    moments,
    sgd,
)
from support.small_federations import Classifier, classes
from torch import Tensor

import fedtorch as ft
from fedtorch import tree

SIZES = [5, 2, 9, 4, 17, 6]
COUNTS = torch.tensor(SIZES, dtype=torch.float64)


def equal(data: Any) -> Tensor:
    return torch.ones_like(data.count)


def fedsgd(lr: float, **arguments: Any) -> ft.Algorithm:
    return ft.fedsgd(linear(), lr=lr, loss=mean_squared_error, **arguments)


def test_it_is_gradient_descent_on_the_pooled_rows() -> None:
    data = linear_clients(SIZES)
    federated = ft.Run(fedsgd(0.1), ft.InProcess(data)).rounds(8)
    central = ft.Run(ft.pooled(sgd(0.1)), ft.InProcess(data.pool())).rounds(8)
    for ours, theirs in zip(federated, central):
        assert distance(ours.server, client_tensors(theirs.clients, {}, 0)) < ROUNDING


@pytest.mark.parametrize("equally", [False, True])
def test_a_round_is_a_step_along_the_gradient(equally: bool) -> None:
    data, weights = linear_clients(SIZES), torch.ones(6, dtype=torch.float64) if equally else COUNTS
    algorithm = fedsgd(0.3, weight=equal) if equally else fedsgd(0.3)
    start = tree.map(lambda leaf: leaf + 2, algorithm.start)
    x = joined(start).requires_grad_()
    losses = torch.stack([(x * (a @ x)).sum() / 2 - (b * x).sum() for a, b in (moments(*rows) for rows in data)])
    (gradient,) = torch.autograd.grad((weights / weights.sum()) @ losses, x)
    round = ft.Run(algorithm, ft.InProcess(data), start).step()
    assert distance(joined(round.server), x.detach() - 0.3 * gradient) < ROUNDING


def test_it_converges_to_least_squares_at_the_rate_of_the_curvature() -> None:
    data, rate = linear_clients([30, 12, 50, 9]), 0.1
    matrix, vector = (
        sum(n * part for n, part in zip(data.counts, parts)) / data.counts.sum()
        for parts in zip(*(moments(*rows) for rows in data))
    )
    best = torch.linalg.solve(matrix, vector)
    errors = [joined(round.server) - best for round in ft.Run(fedsgd(rate), ft.InProcess(data)).rounds(4)]
    for before, after in itertools.pairwise(errors):
        assert distance(after, before - rate * matrix @ before) < ROUNDING


def test_the_order_of_the_clients_does_not_matter() -> None:
    data, order = linear_clients(SIZES), torch.tensor([3, 5, 0, 1, 4, 2])
    one = ft.run(fedsgd(0.1), ft.InProcess(data), rounds=3).last
    two = ft.run(fedsgd(0.1), ft.InProcess(data.select(order)), rounds=3).last
    assert distance(one.server, two.server) < ROUNDING


@pytest.mark.parametrize("when", ["before", "after"])
def test_only_answers_count(when: str) -> None:
    data, lost = linear_clients(SIZES), ft.Faults(**{when: lambda keys, ids: (ids == 1) | (ids == 4)})
    some = ft.run(fedsgd(0.1), ft.InProcess(data), faults=lost, rounds=3).last
    others = ft.run(fedsgd(0.1), ft.InProcess(data.select([0, 2, 3, 5])), rounds=3).last
    assert distance(some.server, others.server) < ROUNDING


def test_a_lightning_modules_own_optimiser_is_not_used() -> None:
    module, data = Classifier("adam").double(), classes(dtype=torch.float64)
    round = ft.Run(ft.fedsgd(module, lr=0.5), ft.InProcess(data)).step()
    step = ft.gradient_descent(module, steps=1, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    assert distance(round.server, ft.Run(ft.fedavg(step), ft.InProcess(data)).step().server) < ROUNDING


def test_a_wrong_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected a positive lr, but got -0\.1"):
        fedsgd(-0.1)


CASES: dict[str, Case] = {"fedsgd": Case(lambda: ft.fedsgd(linear(), lr=0.1, loss=mean_squared_error))}
