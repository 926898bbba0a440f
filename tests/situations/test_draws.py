"""Modules that draw random numbers give a client the same numbers in whatever company it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from situations.case import FEDERATIONS, Step, images, mlp, regression, series
from situations.loop import seeded


def loss_of(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s(batch[0]), batch[1])


class Latent(nn.Module):
    """A sample by the reparametrised normal."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale, self.last = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.distributions.Normal(self.mean(x), F.softplus(self.scale(x)) + 0.1).rsample()
        return self.last(z)


class Noisy(nn.Linear):
    """A layer with noise on its weights."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(self.weight) if self.training else torch.zeros_like(self.weight)
        return F.linear(x, self.weight + 0.1 * noise, self.bias)


class Gumbel(nn.Module):
    """A relaxed categorical sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gumbel_softmax(self.first(x), tau=0.5))


class Depth(nn.Module):
    """A branch that is dropped for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = (torch.rand(len(x), 1, dtype=x.dtype) > 0.3).to(x.dtype) if self.training else 1.0
        return self.last(x + self.branch(x) * kept)


def permuted(s: Any, batch: Any) -> Tensor:
    """Mixup with a permutation and a weight that are drawn."""
    x, y = batch
    order, weight = torch.rand(len(x)).argsort(), torch.rand(())
    mix = lambda t: weight * t + (1 - weight) * t[order]
    return F.mse_loss(s(mix(x)), mix(y))


def diffused(s: Any, batch: Any) -> Tensor:
    x = batch[0]
    time = torch.randint(1, 5, (len(x), 1)) / 5
    noise = torch.randn_like(x)
    return F.mse_loss(s(x * (1 - time) + noise * time), noise)


def dropped(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 1))


MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "dropout": (lambda: Step(dropped(nn.Dropout(0.4))(), loss_of), regression()),
    "alpha dropout": (lambda: Step(dropped(nn.AlphaDropout(0.4))(), loss_of), regression()),
    "dropout of channels": (
        lambda: Step(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(32, 1)), loss_of),
        images(),
    ),
    "dropout of a Transformer layer": (
        lambda: Step(
            nn.Sequential(nn.TransformerEncoderLayer(4, 2, 4, 0.3, batch_first=True), nn.Flatten(), nn.Linear(12, 1)),
            loss_of,
        ),
        series(3, 4),
    ),
    "a latent sample": (lambda: Step(Latent(), loss_of), regression()),
    "noise on weights": (lambda: Step(nn.Sequential(Noisy(4, 3), nn.Linear(3, 1)), loss_of), regression()),
    "a relaxed category": (lambda: Step(Gumbel(), loss_of), regression()),
    "dropped branches": (lambda: Step(Depth(), loss_of), regression()),
    "mixup": (lambda: Step(mlp(), permuted), regression()),
    "diffusion": (lambda: Step(mlp(4, 4), diffused), regression()),
}


@pytest.mark.parametrize("name", MODULES)
def test_draws_are_a_clients_own(name: str) -> None:
    """All clients together, each in a block of its own, and client by client."""
    together = _trained(name, {"batched": "auto"}, None)
    for says, chunk in (({"batched": "auto"}, 1), ({"batched": "auto"}, 2), ({"batched": False}, None)):
        other = _trained(name, says, chunk)
        for key, each in together.items():
            torch.testing.assert_close(other[key], each, rtol=1e-9, atol=1e-11)


def _trained(name: str, says: dict[str, Any], chunk: int | None) -> dict[str, Tensor]:
    make, rows = MODULES[name]
    with seeded(5):
        module = make()
        data = ft.data.from_tensors([rows(n) for n in FEDERATIONS["mixed"]])
    local = ft.gradient_descent(module, epochs=3, **says)
    run = ft.run(ft.fedavg(local), ft.InProcess(data, chunk=chunk), rounds=1, progress=False)
    return {key: each.detach() for key, each in run.global_module().named_parameters()}
