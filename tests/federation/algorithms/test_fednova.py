"""FedNova against the paper's formula written out, FedAvg at equal steps, and the optimum of the pooled rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import ROUNDING, distance, joined, linear, linear_clients, moments, sgd
from torch import Tensor

import fedtorch as ft

SIZES = [4, 8, 12, 40]
COUNTS = torch.tensor(SIZES, dtype=torch.float64)


def optimum(data: ft.data.FederatedData) -> Tensor:
    """The minimiser over all rows, `(p, o)`."""
    systems = [moments(x, y) for x, y in data]
    matrix = sum(n * a for n, (a, _) in zip(SIZES, systems))
    return torch.linalg.solve(matrix, sum(n * b for n, (_, b) in zip(SIZES, systems)))


@pytest.mark.parametrize(("lr", "cohort"), [(1.0, None), (0.6, 3)])
def test_the_formula_of_the_paper(lr: float, cohort: int | None) -> None:
    """Full-batch steps, of which clients take 1, 3, 6 and 4."""
    data, rate, steps = linear_clients(SIZES), 0.07, [1, 3, 6, 4]
    work = ft.partial_work(1.0, shares=torch.tensor(steps, dtype=torch.float64) / 6)
    algorithm = ft.fednova(sgd(rate, steps=6), lr=lr)
    run = ft.Run(algorithm, ft.InProcess(data), cohort=cohort, faults=work, seed=1)
    systems, theta = [moments(x, y) for x, y in data], joined(algorithm.start)
    for round in run.rounds(4):
        ids = round.ids.tolist()
        shares = (COUNTS[ids] / COUNTS[ids].sum()).tolist()
        direction = torch.zeros_like(theta)
        for k, share in zip(ids, shares):
            matrix, vector = systems[k]
            own = theta
            for _ in range(steps[k]):
                own = own - rate * (matrix @ own - vector)
            direction += share * (own - theta) / steps[k]
        theta = theta + lr * sum(share * steps[k] for k, share in zip(ids, shares)) * direction
        assert distance(joined(round.server), theta) < 10 * ROUNDING


def test_with_equal_steps_it_is_fedavg() -> None:
    data = linear_clients(SIZES)
    runs = [ft.run(make(sgd(0.05, steps=3), lr=0.8), ft.InProcess(data), rounds=5) for make in (ft.fednova, ft.fedavg)]
    assert distance(joined(runs[0].server), joined(runs[1].server)) < 10 * ROUNDING


def test_small_steps_reach_the_optimum_of_the_pooled_rows_and_those_of_fedavg_do_not() -> None:
    """Its bias is of the order of the learning rate, FedAvg's of the differences of steps, which no rate mends."""
    data, work = linear_clients(SIZES), ft.partial_work(1.0, shares=torch.tensor([1.0, 3.0, 6.0, 2.0]).double() / 6)
    best = optimum(data)

    def bias(make: Callable[..., ft.Algorithm], rate: float) -> float:
        run = ft.run(make(sgd(rate, steps=6)), ft.InProcess(data), rounds=round(2 / rate), faults=work)
        return distance(joined(run.server), best)

    coarse, fine = (bias(ft.fednova, rate) for rate in (0.04, 0.02))
    assert 0.4 < fine / coarse < 0.6
    assert fine < 0.1 * bias(ft.fedavg, 0.02)


def test_exact_local_solvers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"takes gradient steps, but got a sum of learning rates of 0\.0"):
        ft.run(ft.fednova(ft.least_squares(linear())), ft.InProcess(linear_clients(SIZES)), rounds=1)
    with pytest.raises(ValueError, match="Expected a positive lr, but got 0"):
        ft.fednova(sgd(0.1), lr=0)


CASES: dict[str, Case] = {
    "fednova": Case(
        lambda: ft.fednova(sgd(0.05, epochs=1, batch_size=4)),
        waits=6,  # whether all have taken steps; two means
    )
}
