"""Schedules run on the federation's clock: what a module's schedule says of epochs it says of rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from support.closed_forms import linear, linear_clients

import fedtorch as ft
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

    def solve(start: Tree, state: Tree, data: Any, quadratic: Any, turn: ft.Turn) -> ft.Local:
        solved = local(start, state, data, quadratic, turn)
        rates.append([round(rate, 6) for rate in solved.steps.tolist()])
        return solved

    return dataclasses.replace(local, solve=solve)


@pytest.mark.parametrize("reset", ["round", "never"])
def test_a_learning_rate_is_halved_after_its_rounds(reset: Any) -> None:
    rates: list[list[float]] = []
    local = watched(ft.gradient_descent(Halving(), epochs=1, reset=reset), rates)
    ft.run(ft.fedavg(local), ft.InProcess(linear_clients(SIZES)), rounds=5)
    assert rates == [[rate] * 3 for rate in (0.1, 0.1, 0.05, 0.05, 0.025)]


@pytest.mark.parametrize("reset", ["round", "never"])
def test_who_has_been_away_goes_on_where_the_federation_is(reset: Any) -> None:
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
