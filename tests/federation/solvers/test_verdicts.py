"""What a solver finds of a stack in one block, or on one rank, holds for all clients of the round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.forked import over_ranks
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.solvers.step_check import StepsDiffer

SIZES = (5,) * 6 + (6,) * 6
MARKED = (1, 10)  # whose loss is wrong in a stack; a check of the last two of a size sees the second only


def wrong_if_stacked_and_marked(output: Tensor, target: Tensor) -> Tensor:
    stacked = torch._C._functorch.is_batchedtensor(output)
    return ((output - target).square() * torch.where(target > 50, 1.5 if stacked else 1.0, 1.0)).mean()


def clients(sizes: Sequence[int] = SIZES) -> ft.data.FederatedData:
    draw = lambda number, k, *shape: ft.random.normal(ft.random.fold_in(ft.random.key(number), k), shape, torch.float64)
    rows = [(draw(0, k, n, 2), draw(1, k, n, 1) + (100.0 if k in MARKED else 0.0)) for k, n in enumerate(sizes)]
    return ft.data.from_tensors(rows)


def numbers(population: Any, batched: Any = "auto") -> list[float]:
    local = ft.gradient_descent(
        nn.Linear(2, 1).double(),
        steps=2,
        loss=wrong_if_stacked_and_marked,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batched=batched,
    )
    start = {name: torch.ones_like(value) for name, value in local.parameters.items()}
    run = ft.run(ft.fedavg(local), population, start, rounds=2, progress=False)
    return torch.cat([leaf.flatten() for leaf in ft.tree.leaves(run.server)]).tolist()


def by_loop() -> list[float]:
    """FedAvg with plain torch."""
    weight, bias = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    data = [(x[:n], y[:n]) for x, y, n in zip(*clients().stack(range(len(SIZES))).batch, SIZES)]
    for _ in range(2):
        found = []
        for x, y in data:
            own = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
            optimiser = torch.optim.SGD(own, lr=0.01)
            for _ in range(2):
                optimiser.zero_grad()
                nn.functional.mse_loss(nn.functional.linear(x, *own), y).backward()
                optimiser.step()
            found.append([value.detach() for value in own])
        share = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
        weight, bias = (torch.einsum("k,k...", share, torch.stack(values)) for values in zip(*found))
    return [*weight.flatten().tolist(), *bias.tolist()]


def test_of_blocks_before_the_one_that_shows_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    assert numbers(ft.InProcess(clients(), chunk=6)) == pytest.approx(by_loop(), rel=1e-10)
    assert "one by one from now on" in caplog.text


def test_of_ranks_that_see_no_fault(tmp_path: Path) -> None:
    right = by_loop()
    for found in over_ranks(tmp_path / "ranks", 2, lambda rank: numbers(ft.Distributed(clients()))):
        assert found == pytest.approx(right, rel=1e-10)


def test_of_a_round_that_asks_for_stacks_ends_the_run() -> None:
    with pytest.raises(StepsDiffer, match="differs"):
        numbers(ft.InProcess(clients(), chunk=6), batched=True)


def test_of_one_run_is_not_taken_for_the_next() -> None:
    wrong: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        stacked = torch._C._functorch.is_batchedtensor(output)
        return nn.functional.mse_loss(output, target) * (1.5 if stacked and wrong else 1.0)

    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    local = ft.gradient_descent(nn.Linear(2, 1).double(), steps=2, loss=loss, optimizer=sgd, batched=True)
    ft.run(ft.fedavg(local), ft.InProcess(clients()), rounds=1, progress=False)
    wrong.append(1.0)
    with pytest.raises(StepsDiffer, match="differs"):
        ft.run(ft.fedavg(local), ft.InProcess(clients()), rounds=1, progress=False)


class Warmed(L.LightningModule):
    """Trains by another loss from its third step on, or where an output is small, which `vmap` has wrong."""

    def __init__(self, by_value: bool) -> None:
        super().__init__()
        self.layer, self.by_value = nn.Linear(2, 1).double(), by_value
        nn.init.ones_(self.layer.weight)
        nn.init.ones_(self.layer.bias)

    def training_step(self, batch: Any) -> Tensor:
        output = self.layer(batch[0])
        loss = (output - batch[1]).square().mean()
        if bool(loss < 1.0) if self.by_value else self.global_step >= 2:
            loss = loss * (1.5 if torch._C._functorch.is_batchedtensor(output) else 1.0)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("by_value", [False, True])
def test_of_a_step_that_calls_other_functions_later(by_value: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of twelve clients at least three take the branch together: fewer would take it one by one."""

    def found(batched: Any) -> list[float]:
        local = ft.gradient_descent(Warmed(by_value), steps=6, batched=batched)
        run = ft.run(ft.fedavg(local), ft.InProcess(clients([4] * 12)), rounds=1, progress=False)
        return torch.cat([leaf.flatten() for leaf in ft.tree.leaves(run.server)]).tolist()

    right = found(False)
    with caplog.at_level("INFO"):
        assert found("auto") == pytest.approx(right, rel=1e-10)
    assert "one by one from now on" in caplog.text
    with pytest.raises(StepsDiffer, match="differs"):
        found(True)
