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

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", torch.nn.functional.mse_loss(self(batch[0])[:, 0], batch[1]))

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


class Predicting(Validated):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])[:, 0] + batch_idx


class Epochs(Validated):
    """Asks its Trainer in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("epoch", float(self.current_epoch))
        self.log("checking", float(self.trainer.sanity_checking))
        self.log("real", float(isinstance(self.trainer, L.Trainer)))


def federation(module: Any = None, **options: Any) -> ft.Federation:
    return ft.Federation(ft.fedavg(ft.gradient_descent(module or Validated(), epochs=1)), ft.InProcess(DATA), **options)


def loader(rows: Any, size: int) -> DataLoader:
    return DataLoader(list(zip(*rows)), batch_size=size)


@pytest.mark.parametrize("given", [True, False], ids=["given", "built"])
@pytest.mark.parametrize(("stage", "name"), [("test", "test_loss"), ("validate", "val_loss")])
def test_trainer_test_and_validate_are_those_of_each_client(stage: str, name: str, given: bool) -> None:
    rows = {} if given else {"test": DATA, "validation": DATA}
    model = federation(evaluation_batch_size=4, **rows)
    trainer(max_epochs=2, limit_val_batches=0).fit(model)
    outer = trainer()
    (answer,) = getattr(outer, stage)(model, DATA if given else None, verbose=False)
    alone = [
        getattr(trainer(), stage)(model.client_module(k), loader(rows, 4), verbose=False)[0][name]
        for k, rows in enumerate(DATA)
    ]
    weights = DATA.counts.double() / DATA.counts.sum()
    assert answer[name] == pytest.approx(float(weights @ torch.tensor(alone, dtype=torch.float64)), rel=1e-6)
    assert (answer[f"{name}_min"], answer[f"{name}_max"]) == pytest.approx((min(alone), max(alone)), rel=1e-6)
    assert model.scores[name].clients.tolist() == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("given", [True, False], ids=["given", "built"])
@pytest.mark.parametrize("module", [Validated, Predicting])
def test_trainer_predict_gives_a_list_for_each_client(module: Any, given: bool) -> None:
    model = federation(module(), evaluation_batch_size=4, **({} if given else {"test": DATA}))
    trainer(max_epochs=1).fit(model)
    answer = trainer().predict(model, DATA if given else None)
    assert answer is not None
    for k, (x, _) in enumerate(DATA):
        alone, parts = model.client_module(k), x.split(4)
        wanted = [alone(part) if module is Validated else alone(part)[:, 0] + i for i, part in enumerate(parts)]
        torch.testing.assert_close(answer[k], wanted)
    with pytest.raises(ValueError, match=r"predict rows of the population's 3 clients, but got 2"):
        trainer().predict(model, DATA.select([0, 1]))


def test_metrics_of_a_test_are_named_after_it() -> None:
    model = federation(test=DATA, metrics={"mse": lambda prediction, target: (prediction[..., 0] - target).square()})
    (answer,) = trainer().test(model, verbose=False)
    assert set(answer) == {f"test_mse{end}" for end in ("", "_mean", "_min", "_max", "_undefined")}
    assert answer["test_mse"] == pytest.approx(model.evaluate(DATA)["mse"].overall)
    with pytest.raises(ValueError, match=r"Expected rows for trainer\.validate, but got none"):
        trainer().validate(model)
    with pytest.raises(ValueError, match=r"test= and metrics= together, .* no test_step"):
        trainer().test(ft.Federation(ft.fedavg(sgd(0.1)), ft.InProcess(DATA), test=DATA))


def test_the_module_finds_its_trainer() -> None:
    model = federation(Epochs(), validation=DATA)
    (outer := trainer(max_epochs=3, num_sanity_val_steps=1)).fit(model)
    assert [float(outer.callback_metrics[name]) for name in ("epoch", "checking", "real")] == [2, 0, 1]
    assert model.run.evaluate(DATA)["epoch"].overall == 3  # rounds done
