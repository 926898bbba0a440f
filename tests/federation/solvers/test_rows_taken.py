"""How many of a client's rows a round takes: solvers say so to the turn, by which sites refuse messages of few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fedtorch as ft
from fedtorch.models.gaussian_process import ConvolvedGP

ROWS = (12, 20)
PAIRS = [(torch.ones(n, 2), torch.zeros(n, 1)) for n in ROWS]
LOSS = torch.nn.functional.mse_loss


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return LOSS(self.linear(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def descent(**limits: Any) -> ft.Algorithm:
    return ft.fedavg(ft.gradient_descent(torch.nn.Linear(2, 1), loss=LOSS, optimizer=sgd, **limits))


def trainer(batch_size: int | None, **limits: Any) -> ft.Algorithm:
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    return ft.fedavg(ft.lightning_fit(Module(), batch_size=batch_size, **quiet, **limits))


def curves(**settings: Any) -> ft.Algorithm:
    return ft.fedmgp(
        ConvolvedGP(torch.linspace(-1, 1, 3).double()[:, None]), steps=1, accept_disclosure=True, **settings
    )


def loaders(size: int) -> ft.data.FederatedData:
    made = {str(k): DataLoader(TensorDataset(*pair), size, shuffle=True) for k, pair in enumerate(PAIRS)}
    return ft.data.from_loaders(made)


TENSORS = ft.data.from_tensors(PAIRS)
SINGLE = ft.data.from_tensors([(x[:, :1].double().cumsum(0), y[:, 0].double()) for x, y in PAIRS])
CASES: dict[str, tuple[Callable[[], ft.Algorithm], ft.data.FederatedData, set[int]]] = {
    "steps": (lambda: descent(steps=2, batch_size=4), TENSORS, {8}),
    "all rows": (lambda: descent(steps=2), TENSORS, set()),
    "an epoch": (lambda: descent(epochs=1, batch_size=5), TENSORS, set()),
    "an epoch without its end": (lambda: descent(epochs=2, batch_size=5, drop_last=True), TENSORS, {10}),
    "as many steps as rows": (lambda: descent(steps=5, batch_size=4), TENSORS, set()),
    "loaders": (lambda: descent(steps=1), loaders(3), {3}),
    "an epoch of loaders": (lambda: descent(epochs=1), loaders(3), set()),
    "loaders of a Trainer": (lambda: trainer(None, max_steps=1), loaders(3), {3}),
    "a Trainer": (lambda: trainer(3, max_steps=2), TENSORS, {6}),
    "an epoch of a Trainer": (lambda: trainer(3, max_epochs=1), TENSORS, set()),
    "a Trainer's limit": (lambda: trainer(3, max_epochs=2, limit_train_batches=1), TENSORS, {3}),
    "curves": (lambda: curves(batch_size=7), SINGLE, {7}),
    "curves' sites": (lambda: curves(site_batch_size=5, damping=0.5), SINGLE, {5}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fewest_rows_that_a_client_takes(name: str) -> None:
    make, data, fewest = CASES[name]
    run, taken = ft.Run(make(), ft.InProcess(data)), dict[str, int]()
    turned = run._turn

    def turn(done: int, **ask: Any) -> ft.Turn:
        made = turned(done, **ask)
        made.taken = taken
        return made

    run._turn = turn  # type: ignore[method-assign]
    run.step()
    assert ({taken[""]} if "" in taken else set()) == fewest
