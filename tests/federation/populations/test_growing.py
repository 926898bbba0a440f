"""Rows that come in between rounds: online gradient descent, the same as runs that are carried on, and resumption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance, linear, linear_clients, sgd
from torch import Tensor

import fedtorch as ft
from fedtorch.trust.drift import DriftAlarm

COUNTS = [9, 14, 11]
DATA = linear_clients(COUNTS)
GROWTH = torch.tensor([[2, 3, 1], [2, 5, 4], [6, 8, 4], [9, 14, 30]])  # what is beyond the last row does not matter
STEPS = {"1/(t + 5)": lambda t: 1 / (t + 6), "1/√(t + 5)": lambda t: (t + 6) ** -0.5}  # t = 0 is the book's t = 1


def growth(rounds: int) -> Tensor:
    return GROWTH[min(rounds, 3)]


class Online(L.LightningModule):
    """A linear model from zero, and a schedule by rounds."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        super().__init__()
        self.layer, self.rate = linear(bias=False), rate
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.layer(batch[0])[:, 0] - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)]


@pytest.mark.parametrize("chunk", [None, 1])
def test_rounds_train_with_the_rows_of_their_time(chunk: int | None) -> None:
    """The same as a new run over the rows of each round that goes on from the checkpoint of the one before."""
    for algorithm in (ft.fedavg(sgd(0.05, steps=2)), ft.scaffold(sgd(0.05)), ft.fedavg(ft.least_squares(linear()))):
        run = ft.run(algorithm, ft.Growing(DATA, growth, chunk=chunk), rounds=6, seed=3)
        state = None
        for number in range(6):
            counts = torch.minimum(growth(number), DATA.counts).tolist()
            rows = ft.data.from_tensors([(x[:n], y[:n]) for (x, y), n in zip(DATA, counts)])
            other = ft.Run(algorithm, ft.InProcess(rows, chunk), seed=3)
            if state is not None:
                other.load_state_dict(state, anyway=True)
            other.step()
            state = other.state_dict()
        assert distance(run.server, other.server) < ROUNDING
        assert distance(run.clients.state_dict(), other.clients.state_dict()) < ROUNDING


def test_a_resumed_run_goes_on_with_the_rows_of_its_round() -> None:
    algorithm = ft.fedavg(sgd(0.05))
    whole = ft.run(algorithm, ft.Growing(DATA, growth), rounds=5)
    first = ft.run(algorithm, ft.Growing(DATA, growth), rounds=2)
    second = ft.Run(algorithm, ft.Growing(DATA, growth))
    second.load_state_dict(first.state_dict())
    for _ in second.rounds(5):
        pass
    assert torch.equal(second.server["weight"], whole.server["weight"])  # the same operations


def test_new_rows_are_those_that_come_between_two_rounds() -> None:
    growing = ft.Growing(DATA, growth, window=4)
    assert growing.newest(0).counts.tolist() == [2, 3, 1]
    assert growing.newest(1).counts.tolist() == [0, 2, 3]
    assert torch.equal(growing.newest(2)[0][0], DATA[0][0][2:6])
    assert growing.newest(4).counts.tolist() == [0, 0, 0]
    assert growing.at(2).counts.tolist() == [4, 4, 4]
    assert torch.equal(growing.at(2)[1][1], DATA[1][1][4:8])
    assert torch.equal(growing.at(3)[2][1], DATA[2][1][7:11])


@pytest.mark.parametrize("rate", STEPS)
def test_online_gradient_descent_is_4_23(rate: str) -> None:
    """Every client by itself, its t-th row in round t."""
    growing = ft.Growing(DATA, lambda rounds: torch.full((3,), rounds + 1), window=1)
    local = ft.gradient_descent(Online(STEPS[rate]), steps=1)
    run = ft.run(ft.separate(local), growing, rounds=9)
    for client, (x, y) in enumerate(DATA):
        w = torch.zeros(3, dtype=torch.float64)
        for t in range(9):
            w = w + 2 * STEPS[rate](t) * x[t] * (y[t] - w @ x[t])
        assert distance(run.tensors()["layer.weight"][client, 0], w) < ROUNDING


def test_counts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="window of at least one row, but got 0"):
        ft.Growing(DATA, growth, window=0)
    algorithm = ft.fedavg(sgd(0.05))
    for counts in (torch.tensor([1, 0, 1]), torch.tensor([1, 1]), torch.tensor([1.5, 2, 2])):
        with pytest.raises(ValueError, match="at least one row for each of 3 clients after 0 rounds, but got"):
            ft.Run(algorithm, ft.Growing(DATA, lambda rounds, counts=counts: counts))


def test_a_rolling_validation_raises_the_alarm_when_the_world_changes() -> None:
    """What comes next is predicted before it is learnt from; after round 20 the labels' sign is another."""
    x, y = linear_clients([400], seed=2)[0]
    y = torch.where(torch.arange(400) < 210, y, -y)
    growing = ft.Growing(ft.data.from_tensors([(x, y)]), lambda rounds: torch.tensor([10 * (rounds + 1)]), window=50)
    run = ft.Run(ft.fedavg(ft.least_squares(linear())), growing)
    said: list[str] = []
    drift = DriftAlarm(threshold=5.0, slack=0.5, alarm=said.append)
    error = {"error": ft.metrics.mean_squared_error()}
    for _ in run.rounds(39):
        drift.watch(run.number, run.evaluate(growing.newest(run.number), error)["error"].overall)
    assert 21 <= drift.rounds[0] <= 23
