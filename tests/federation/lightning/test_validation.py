"""A module's own validation_step, run for every client of a federation."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from support.oracles.closed_forms import linear, linear_clients, sgd
from support.small_federations import trainer
from torch import Tensor
from torch.utils.data import DataLoader

import fedtorch as ft

DATA = linear_clients([4, 9, 6])


class Validated(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.error = linear(), torchmetrics.MeanSquaredError()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.nn.functional.mse_loss(self(batch[0])[:, 0], batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        assert not self.training
        self.error(self(x)[:, 0], y)
        self.log("val_error", self.error)
        self.log("val_loss", torch.nn.functional.mse_loss(self(x)[:, 0], y), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("make", [ft.fedavg, lambda local: ft.ditto(local, 0.5)])
@pytest.mark.parametrize("solver", ["gradient_descent", "lightning_fit"])
def test_it_gives_what_a_trainer_of_each_client_gives(make: Any, solver: str) -> None:
    options = {"epochs": 1} if solver == "gradient_descent" else {"max_epochs": 1}
    model = ft.Federation(make(getattr(ft, solver)(Validated(), **options)), ft.InProcess(DATA), validation=DATA)
    outer = trainer(max_epochs=2)
    outer.fit(model)
    alone = []
    for k, (x, y) in enumerate(DATA):
        loader = DataLoader(list(zip(x, y)), batch_size=len(x))
        alone.append(trainer().validate(model.client_module(k), loader, verbose=False)[0])
    for name in ("val_loss", "val_error"):
        values = torch.tensor([each[name] for each in alone], dtype=torch.float64)
        weights = DATA.counts.double() / DATA.counts.sum()
        assert float(outer.callback_metrics[name]) == pytest.approx(float(weights @ values), rel=1e-6)
        assert float(outer.callback_metrics[f"{name}_max"]) == pytest.approx(float(values.max()), rel=1e-6)
    assert list(model.history["val_loss"].notna()) == [True, True]


def test_metrics_come_first_and_something_must_be_there() -> None:
    local = ft.gradient_descent(Validated(), epochs=1)
    metrics = {"mse": lambda prediction, target: (prediction[..., 0] - target).square()}
    model = ft.Federation(ft.fedavg(local), ft.InProcess(DATA), validation=DATA, metrics=metrics)
    (outer := trainer(max_epochs=1)).fit(model)
    assert "val_mse" in outer.callback_metrics
    assert "val_loss" not in outer.callback_metrics
    with pytest.raises(ValueError, match=r"validation= and metrics= together.*no validation_step"):
        ft.Federation(ft.fedavg(sgd(0.1)), ft.InProcess(DATA), validation=DATA)
