"""Data as forecasting packages have it: series of several lengths, items that hold None, their own `collate_fn`."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from support.oracles.plain_training import seeded
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import fedtorch as ft
from fedtorch import random
from fedtorch.data.items import seeded as draws
from fedtorch.federation.solvers.batches import MODULE
from fedtorch.random.named import numbers

Item = tuple[dict[str, Any], tuple[Tensor, None]]


class Series(Dataset[Item]):
    """Windows of several lengths of one series; there are no weights of the targets."""

    def __init__(self, place: int, windows: int) -> None:
        self.place, self.windows = place, windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, window: int) -> Item:
        length = 2 + (window + self.place) % 3
        values = random.normal(random.fold_in(random.key(self.place), window), (length + 1,), torch.float64)
        return {"past": values[:length, None], "length": length, "group": f"shop {self.place}"}, (values[length:], None)

    def to_dataloader(self, batch_size: int) -> DataLoader:
        return DataLoader(self, batch_size=batch_size, shuffle=True, collate_fn=self._collate)

    def _collate(self, items: list[Item]) -> tuple[dict[str, Any], tuple[Tensor, None]]:
        past = pad_sequence([x["past"] for x, _ in items], batch_first=True)
        x = {
            "past": past,
            "length": torch.tensor([x["length"] for x, _ in items]),
            "group": [x["group"] for x, _ in items],
        }
        return x, (torch.stack([y for _, (y, _) in items]), None)


class Forecaster(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def forward(self, x: dict[str, Any]) -> Tensor:
        return self.net(x["past"].sum(1) / x["length"][:, None])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, (y, weight) = batch
        assert weight is None
        assert all(group.startswith("shop") for group in x.get("group", []))
        loss = (self(x) - y).square().mean()
        self.log("train_loss_step", loss, batch_size=len(y))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Numeric(Series):
    """The same without names, which are no tensors."""

    def _collate(self, items: list[Item]) -> tuple[dict[str, Any], tuple[Tensor, None]]:
        x, y = super()._collate(items)
        return {name: value for name, value in x.items() if name != "group"}, y


def loop(module: Forecaster, loader: DataLoader, key: Tensor) -> dict[str, Tensor]:
    module = copy.deepcopy(module)
    optimizer = module.configure_optimizers()
    module.log = lambda *arguments, **named: None  # type: ignore[method-assign]
    with draws(int(random.fold_in(key, MODULE))):
        for batch in loader:
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "make", "pad"),
    [
        (Series, lambda module: ft.lightning_fit(module, max_epochs=1), None),
        (Series, lambda module: ft.gradient_descent(module, epochs=1, batched=False), None),
        (Numeric, lambda module: ft.gradient_descent(module, epochs=1), None),
        (Numeric, lambda module: ft.gradient_descent(module, epochs=1), ({"past": 0.0, "length": None}, (None, None))),
    ],
    ids=["lightning_fit", "one by one", "stacked", "padded"],
)
def test_a_round_is_that_of_plain_loops(kind: type[Series], make: Any, pad: Any) -> None:
    given = {f"shop {place}": kind(place, windows).to_dataloader(4) for place, windows in enumerate((9, 6, 4))}
    module = seeded(Forecaster)
    run = ft.run(ft.fedavg(make(module)), ft.InProcess(ft.data.from_loaders(given, pad=pad), chunk=3), rounds=1, seed=2)
    keys = random.fold_in(run._keys(0).client, numbers(tuple(given)))
    each = [loop(module, loader, key) for loader, key in zip(given.values(), keys)]
    for name, value in run.server.items():
        mean = sum(count * alone[name] for count, alone in zip((9, 6, 4), each)) / 19
        torch.testing.assert_close(value, mean, rtol=1e-10, atol=1e-12)
