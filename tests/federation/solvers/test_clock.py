"""Schedules run on the federation's clock: what a module's schedule says of epochs it says of rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from support.oracles.closed_forms import linear, linear_clients

import fedtorch as ft
from fedtorch.federation.algorithm import Local
from fedtorch.tree import Tree

SIZES = [4, 9, 6]


class Halving(L.LightningModule):
    """A `StepLR` as it stands in any module."""

    def __init__(self, step_size: int = 2) -> None:
        super().__init__()
        self.linear, self.step_size = linear(), step_size

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.linear(batch[0])[:, 0], batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, self.step_size, gamma=0.5)]


def watched(local: ft.LocalSolver, rates: list[list[float]]) -> ft.LocalSolver:
    """The same solver, which takes down the clients' sums of learning rates."""

    def solve(start: Tree, state: Tree, data: Any, quadratic: Any, turn: ft.Turn) -> Local:
        solved = local.solve(start, state, data, quadratic, turn)
        rates.append([round(rate, 6) for rate in solved.lr_sum.tolist()])
        return solved

    return dataclasses.replace(local, solve=solve)


@pytest.mark.parametrize("reset", ["round", "never"])
def test_a_learning_rate_is_halved_after_its_rounds(reset: Any) -> None:
    rates: list[list[float]] = []
    local = watched(ft.gradient_descent(Halving(), epochs=1, reset=reset), rates)
    ft.run(ft.fedavg(local), ft.InProcess(linear_clients(SIZES)), rounds=5)
    assert rates == [[rate] * 3 for rate in (0.1, 0.1, 0.05, 0.05, 0.025)]


@pytest.mark.parametrize("reset", ["round", "never"])
def test_returning_client_has_the_federations_clock(reset: Any) -> None:
    rates: list[list[float]] = []
    local = watched(ft.gradient_descent(Halving(), epochs=1, batch_size=4, reset=reset), rates)
    run = ft.Run(ft.fedavg(local), ft.InProcess(linear_clients(SIZES)))
    for number, cohort in enumerate([[0], [0], [0, 1], [2], [1]]):
        run.clients.step(run.outbox, torch.tensor(cohort), ft.Turn(ft.random.key(number), number)).commit()
    assert rates == [[0.1], [0.1], [0.05, 0.15], [0.1], [0.075]]  # of 1, 3 and 2 minibatches


def test_a_resumed_run_goes_on_in_its_schedule(tmp_path: Any) -> None:
    make = lambda: ft.Run(ft.fedavg(ft.gradient_descent(Halving(), epochs=1)), ft.InProcess(linear_clients(SIZES)))
    whole, first = make(), make()
    for run, rounds in ((whole, 5), (first, 3)):
        list(run.rounds(rounds))
    first.save(tmp_path / "run")
    again = make().load(tmp_path / "run")
    list(again.rounds(5))
    assert torch.equal(again.server["linear.weight"], whole.server["linear.weight"])


class Stepwise(Halving):
    """A schedule by steps, and a loss that reads the clock."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (1 + 0.1 * self.current_epoch + 0.01 * self.global_step) * super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, self.step_size, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("module", [Halving, Stepwise])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_trainer_per_client_runs_on_the_same_clock(module: type[Halving], epochs: int) -> None:
    data, ends = ft.InProcess(linear_clients(SIZES)), []
    stacked = ft.gradient_descent(module(), epochs=epochs, batch_size=4)
    for local in (stacked, ft.lightning_fit(module(), max_epochs=epochs, batch_size=4)):
        rates: list[list[float]] = []
        ends.append((ft.run(ft.fedavg(watched(local, rates)), data, rounds=4, cohort=2).server, rates))
    assert sorted(map(sorted, ends[0][1])) == sorted(map(sorted, ends[1][1]))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-10, atol=1e-12)


class OverTheRound(Halving):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def test_a_schedule_as_long_as_a_trainers_fit_begins_anew() -> None:
    rates: list[list[float]] = []
    local = watched(ft.lightning_fit(OverTheRound(), max_epochs=2, rounds="each"), rates)
    ft.run(ft.fedavg(local), ft.InProcess(linear_clients(SIZES)), rounds=3)
    assert rates == [[0.15] * 3] * 3
