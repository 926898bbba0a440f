"""`drop_last=True`: epochs without their smaller last batch, as a `DataLoader` gives them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.solvers.batches import PERMUTATIONS
from fedtorch.random.named import numbers

SIZES, BATCH, EPOCHS = (4, 9, 13, 7), 4, 2  # the second and third end with a batch of one row


class Normalised(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0])[:, 0], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def clients(sizes: tuple[int, ...] = SIZES) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in sizes]
    return ft.data.from_tensors([(each[:, :3], each[:, 3]) for each in rows], [f"ward {k}" for k in range(len(sizes))])


def plain_loop(rows: Any, key: Tensor) -> Normalised:
    """One client's loop over `DataLoader(drop_last=True)`, in the order of its permutations."""
    module, count = Normalised(), len(rows[0])
    optimizer = module.configure_optimizers()
    for epoch in range(EPOCHS):
        order = random.permutation(random.fold_in(random.fold_in(key, PERMUTATIONS), epoch), count).tolist()
        for batch in DataLoader(list(zip(*rows)), BATCH, sampler=order, drop_last=True):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
    return module


def local(solver: str, **options: Any) -> ft.LocalSolver:
    if solver == "stacked":
        return ft.gradient_descent(Normalised(), epochs=EPOCHS, buffers="local", **options)
    return ft.lightning_fit(Normalised(), max_epochs=EPOCHS, buffers="local", **options)


@pytest.mark.parametrize("solver", ["stacked", "Trainer"])
def test_the_batches_are_those_of_a_loader(solver: str) -> None:
    data = clients()
    run = ft.Run(ft.separate(local(solver, batch_size=BATCH, drop_last=True)), ft.InProcess(data))
    keys = random.fold_in(run._keys(0).client, numbers(tuple(data.names)))
    run.step()
    for k in range(len(SIZES)):
        expected = plain_loop(data[k], keys[k]).state_dict()
        torch.testing.assert_close(run.client_module(k).state_dict(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("solver", ["stacked", "Trainer"])
def test_a_batch_of_one_row_under_batch_norm_names_the_client(solver: str) -> None:
    with pytest.raises(ValueError, match=r"Client 'ward 1': Expected more than one row in a batch.*drop_last=True"):
        ft.Run(ft.fedavg(local(solver, batch_size=BATCH)), ft.InProcess(clients()))
    ft.Run(ft.fedavg(local(solver, batch_size=BATCH)), ft.InProcess(clients((4, 6))))  # there is none


def test_a_batch_of_one_row_that_no_step_comes_to_is_none() -> None:
    steps = ft.gradient_descent(Normalised(), steps=2, batch_size=4, buffers="local")
    assert ft.run(ft.fedavg(steps), ft.InProcess(clients((9, 13))), rounds=2).number == 2


@pytest.mark.parametrize("solver", ["stacked", "Trainer"])
def test_a_client_with_fewer_rows_than_a_batch_is_named(solver: str) -> None:
    with pytest.raises(ValueError, match=r"Client 'ward 3': Expected at least the 8 rows .*but got 7.*leave the"):
        ft.Run(ft.fedavg(local(solver, batch_size=8, drop_last=True)), ft.InProcess(clients((8, 9, 13, 7))))
    with pytest.raises(ValueError, match="batch_size= with drop_last=True, but got none"):
        local(solver, drop_last=True)
    with pytest.raises(ValueError, match="drop_last=True or False, but got 'yes'"):
        local(solver, drop_last="yes", batch_size=4)


def test_clients_of_a_batch_norm_share_their_steps() -> None:
    seen = []

    class Counting(Normalised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    solver = ft.gradient_descent(Counting(), epochs=1, batch_size=BATCH, drop_last=True, buffers="local", batched=True)
    run = ft.Run(ft.fedavg(solver), ft.InProcess(clients()))
    run.step()
    seen.clear()
    run.step()
    assert set(seen) == {4}
    assert len(seen) < sum(size // BATCH for size in SIZES)
