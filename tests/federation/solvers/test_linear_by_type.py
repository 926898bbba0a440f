"""Programs for linear models take exact types alone; whatever differs trains as its own code says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.oracles.stacked_losses import sgd
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.solvers.linear_steps import LinearSteps


def layer(kind: Callable[..., nn.Module] = nn.Linear, outputs: int = 1) -> Any:
    module = kind(3, outputs).double()
    for i, p in enumerate(module.parameters()):
        p.data = 0.5 * random.normal(random.key(i), p.shape, p.dtype)
    return module


def numbers() -> list[tuple[Tensor, Tensor]]:
    x = [random.normal(random.key(10 + k), (4, 3), torch.float64) for k in range(3)]
    return [(each, each.sum(1, keepdim=True) + 1) for each in x]


def labels() -> list[tuple[Tensor, Tensor]]:
    return [(x, (3 * y[:, 0].sigmoid()).long().clamp(max=2)) for x, y in numbers()]


def solver(module: nn.Module, loss: Any) -> Any:
    return ft.gradient_descent(module, epochs=3, loss=loss, optimizer=sgd)


def trained(local: Any, rows: Any) -> dict[str, Tensor]:
    return ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=1).server


def loop(make: Callable[[], nn.Module], loss: Any, rows: Any) -> dict[str, Tensor]:
    each = []
    for x, y in rows:
        module = make()
        optimizer = sgd(module.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
        each.append({name: p.detach() for name, p in module.named_parameters()})
    return {name: torch.stack([own[name] for own in each]).mean(0) for name in each[0]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-11, atol=1e-12)


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the programs have answered."""
    answers: list[Any] = []
    family = LinearSteps.family
    monkeypatch.setattr(LinearSteps, "family", lambda *a: answers.append(family(*a)) or answers[-1])
    return answers


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Module:
    module = layer()
    module.register_forward_hook(lambda part, inputs, output: 2 * output)
    return module


def hooked_weight() -> nn.Module:
    module = layer()
    module.weight.register_hook(lambda gradient: gradient / 2)
    return module


def replaced() -> nn.Module:
    module = layer()
    module.register_forward_pre_hook(lambda part, inputs: (inputs[0] - 1,))
    return module


MODULES = {"subclass": lambda: layer(Doubled), "hook": hooked, "hook of the weight": hooked_weight, "before": replaced}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_are_no_plain_layer_train_by_their_own_code(name: str, families: list[Any]) -> None:
    same(trained(solver(MODULES[name](), F.mse_loss), numbers()), loop(MODULES[name], F.mse_loss, numbers()))
    assert not any(families)


def test_a_plain_layer_is_known(families: list[Any]) -> None:
    same(trained(solver(layer(), F.mse_loss), numbers()), loop(layer, F.mse_loss, numbers()))
    assert any(families)


@pytest.mark.parametrize(
    "change", [{"label_smoothing": 0.3}, {"weight": torch.tensor([1.0, 4.0, 0.5]).double()}, {"reduction": "sum"}]
)
def test_settings_that_change_after_the_solver_is_made_hold(change: dict[str, Any], families: list[Any]) -> None:
    loss, make = nn.CrossEntropyLoss(), lambda: layer(outputs=3)
    local = solver(make(), loss)
    same(trained(local, labels()), loop(make, nn.CrossEntropyLoss(), labels()))
    assert any(families)
    families.clear()
    for name, value in change.items():
        setattr(loss, name, value)
    same(trained(local, labels()), loop(make, nn.CrossEntropyLoss(**change), labels()))
    assert not any(families)


def test_a_function_of_torch_that_was_replaced_is_called(families: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    square = lambda p, y, **settings: 3 * (p - y).square().mean()
    monkeypatch.setattr(F, "mse_loss", square)
    same(trained(solver(layer(), nn.MSELoss()), numbers()), loop(layer, square, numbers()))
    assert not any(families)


def test_a_lightning_module_trains_by_its_own_step(families: list[Any]) -> None:
    L = pytest.importorskip("lightning")

    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = layer()

        def training_step(self, batch: Any) -> Tensor:
            return 2 * F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters())

    ours = trained(ft.gradient_descent(Lit(), epochs=3), numbers())
    theirs = loop(layer, lambda p, y: 2 * F.mse_loss(p, y), numbers())
    same(ours, {f"net.{name}": value for name, value in theirs.items()})
    assert not any(families)
