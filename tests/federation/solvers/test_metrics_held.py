"""Metrics of a training step wherever a module has them, called with whatever differs from batch to batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.regression import MeanSquaredError

import fedtorch as ft

SIZES = (4, 7, 4, 3)
ROWS = [
    (torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randn(n, 1, generator=g, dtype=torch.float64))
    for n, g in zip(SIZES, (torch.Generator().manual_seed(k) for k in range(4)))
]
WAYS = [{}, {"batched": False}]


class Logging(L.LightningModule):
    """Learns nothing; what it logs as "m" is of the metrics that a test gives it."""

    def __init__(self, held: Any, log: Any) -> None:
        super().__init__()
        self.net, self.held, self.write = nn.Linear(4, 1, dtype=torch.float64), held, log
        nn.init.constant_(self.net.weight, 0.3)
        nn.init.constant_(self.net.bias, 0.1)

    def training_step(self, batch: Any) -> Tensor:
        prediction = self.net(batch[0])
        self.write(self, prediction, batch[1])
        return F.mse_loss(prediction, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def logged(module: L.LightningModule, **says: Any) -> list[float]:
    """Return what each client logs as "m" in minibatches of two."""
    loaders = {str(k): DataLoader(TensorDataset(*rows), batch_size=2) for k, rows in enumerate(ROWS)}
    run = ft.Run(ft.fedavg(ft.gradient_descent(module, epochs=1, **says)), ft.InProcess(ft.data.from_loaders(loaders)))
    return run.step().info["m"].tolist()


def errors(own: Any) -> list[list[tuple[float, int]]]:
    """Return (mean squared error, rows) of every batch of every client."""
    every = []
    for x, y in ROWS:
        with torch.no_grad():
            batches = [(own.net(x[a : a + 2]), y[a : a + 2]) for a in range(0, len(x), 2)]
        every.append([(float(F.mse_loss(p, t)), len(t)) for p, t in batches])
    return every


def over_rows(own: Any) -> list[float]:
    return [sum(e * n for e, n in client) / sum(n for _, n in client) for client in errors(own)]


def over_steps(own: Any) -> list[float]:
    return [sum(e for e, _ in client) / len(client) for client in errors(own)]


@pytest.mark.parametrize("says", WAYS)
def test_arguments_that_differ_from_batch_to_batch(says: dict[str, Any]) -> None:
    def weighted(self: Any, prediction: Tensor, target: Tensor) -> None:
        self.held(F.mse_loss(prediction, target), len(target))
        self.log("m", self.held)

    module = Logging(torchmetrics.MeanMetric(), weighted)
    assert logged(module, **says) == pytest.approx(over_rows(module), rel=1e-6)


@pytest.mark.parametrize("says", WAYS)
def test_what_is_done_to_a_value_differs_from_batch_to_batch(says: dict[str, Any]) -> None:
    def scaled(self: Any, prediction: Tensor, target: Tensor) -> None:
        self.log("m", self.held(prediction, target) * len(target), reduce_fx="sum")

    module = Logging(MeanSquaredError(), scaled)
    expected = [sum(e * n for e, n in client) for client in errors(module)]
    assert logged(module, **says) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("says", WAYS)
@pytest.mark.parametrize(
    ("held", "get"),
    [
        (lambda: MeanSquaredError(), lambda held: held),
        (lambda: {"mse": MeanSquaredError()}, lambda held: held["mse"]),
        (lambda: [MeanSquaredError()], lambda held: held[0]),
        (lambda: (None, {"a": [MeanSquaredError()]}), lambda held: held[1]["a"][0]),
        (lambda: nn.ModuleDict({"mse": MeanSquaredError()}), lambda held: held["mse"]),
    ],
)
def test_metrics_in_containers_begin_anew_for_every_client(held: Any, get: Any, says: dict[str, Any]) -> None:
    def update(self: Any, prediction: Tensor, target: Tensor) -> None:
        get(self.held).update(prediction, target)
        self.log("m", get(self.held).compute())

    def call(self: Any, prediction: Tensor, target: Tensor) -> None:
        self.log("m", get(self.held)(prediction, target))

    module = Logging(held(), update)
    assert logged(module, **says) == pytest.approx(over_rows(module), rel=1e-6)
    assert get(module.held).update_count == 0
    module = Logging(held(), call)
    assert logged(module, **says) == pytest.approx(over_steps(module), rel=1e-6)


def test_one_metric_in_two_places_is_one() -> None:
    def both(self: Any, prediction: Tensor, target: Tensor) -> None:
        self.held["mse"].update(prediction, target)
        self.log("m", self.mse)

    module = Logging({}, both)
    module.mse = module.held["mse"] = MeanSquaredError()
    assert logged(module) == pytest.approx(over_rows(module), rel=1e-6)


@pytest.mark.parametrize("says", WAYS)
def test_a_value_on_the_epoch_is_a_mean_over_rows(says: dict[str, Any]) -> None:
    def epoch(self: Any, prediction: Tensor, target: Tensor) -> None:
        self.log("m", self.held(prediction, target), on_epoch=True, on_step=False)

    module = Logging(MeanSquaredError(), epoch)
    assert logged(module, **says) == pytest.approx(over_rows(module), rel=1e-6)


def test_metrics_of_other_objects_are_refused_by_name() -> None:
    def call(self: Any, prediction: Tensor, target: Tensor) -> None:
        self.log("m", self.held.mse(prediction, target))

    class OfClass(Logging):
        table = (MeanSquaredError(),)

    with pytest.raises(TypeError, match=r"held\.mse is one of another object.*register it in __init__"):
        ft.gradient_descent(Logging(SimpleNamespace(mse=MeanSquaredError()), call), epochs=1)
    with pytest.raises(TypeError, match=r"table\[0\] is one of another object or of a class"):
        ft.gradient_descent(OfClass(None, call), epochs=1)


@pytest.mark.parametrize(
    "log", [lambda self, p, y: self.log("m", F.mse_loss(p, y), reduce_fx="max") if len(y) == 1 else None]
)
def test_clients_without_logs_are_undefined(log: Any) -> None:
    expected = [client[-1][0] if client[-1][1] == 1 else float("nan") for client in errors(Logging(None, log))]
    assert logged(Logging(None, log)) == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("says", WAYS)
def test_a_generator_made_in_the_step_is_the_steps_own(says: dict[str, Any]) -> None:
    class Noisy(Logging):
        def noisy(self, batch: Any) -> Tensor:
            noise = torch.randn(batch[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            return F.mse_loss(self.net(batch[0] + noise), batch[1])

        def training_step(self, batch: Any) -> Tensor:
            loss = self.noisy(batch)
            self.log("m", loss)
            return loss

    module = Noisy(None, None)
    means = []
    for x, y in ROWS:
        with torch.no_grad():
            losses = [float(module.noisy((x[a : a + 2], y[a : a + 2]))) for a in range(0, len(x), 2)]
        means.append(sum(losses) / len(losses))
    assert logged(module, **says) == pytest.approx(means, rel=1e-6)
