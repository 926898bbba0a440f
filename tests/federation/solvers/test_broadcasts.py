"""Outputs `(n, 1)` against targets `(n,)` are refused, and nothing else that looks like it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft

SGD = partial(torch.optim.SGD, lr=0.1)
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(2, 9, 3, generator=GENERATOR), torch.randn(2, 9, generator=GENERATOR)
MESSAGE = (
    r"outputs \(\d+, 1\) and targets \(\d+,\), which torch broadcasts.* output\[:, 0\] with target, or output with"
)


def prepare(module: nn.Module, loss: Any = None, target: Tensor = Y, x: Tensor = X, **more: Any) -> None:
    """Begins a run of two clients."""
    data = ft.data.from_tensors([(x[k], target[k]) for k in range(2)])
    settings = {} if loss is None else {"loss": loss}
    settings |= {} if isinstance(module, L.LightningModule) else {"optimizer": SGD}
    ft.Run(ft.fedavg(ft.gradient_descent(module, steps=1, **settings, **more)), ft.InProcess(data))


class Lit(L.LightningModule):
    """One linear layer, with or without normalisation, and a loss inside."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], *before: nn.Module) -> None:
        super().__init__()
        self.net, self.loss = nn.Sequential(*before, nn.Linear(3, 1)), loss

    def training_step(self, batch: Any) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def likelihood(output: Tensor, target: Tensor) -> Tensor:
    return -torch.distributions.Normal(output, output.exp()).log_prob(target).mean()


BROADCASTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": F.mse_loss,
    "a module": nn.SmoothL1Loss(),
    "reversed": lambda output, target: F.mse_loss(target, output),
    "by name": lambda output, target: F.huber_loss(input=output, target=target),
    "by hand": squared,
    "a likelihood": likelihood,
    "with a variance": lambda output, target: F.gaussian_nll_loss(output, target, torch.ones_like(output)),
    "weighted": lambda output, target: (output[:, 0] * target + target.abs() * output).mean(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", BROADCASTS.values(), ids=BROADCASTS)
def test_a_column_against_numbers_is_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=MESSAGE):
        prepare(nn.Linear(3, 1), loss)
    with pytest.raises(ValueError, match=MESSAGE):
        prepare(Lit(loss))
    if loss is not BROADCASTS["weighted"]:
        prepare(nn.Linear(3, 1), loss, Y[..., None], batched=False)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_where_examples_are_mixed_it_is_refused_too() -> None:
    with pytest.raises(ValueError, match=MESSAGE):
        prepare(Lit(F.mse_loss, nn.BatchNorm1d(3)), buffers="average")
    with pytest.raises(ValueError, match=MESSAGE):
        prepare(Lit(squared, nn.BatchNorm1d(3), nn.Dropout()), buffers="average")


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_numbers_against_a_column_and_longer_rows_are_refused() -> None:
    class Numbers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 0]

    with pytest.raises(ValueError, match=r"compare output with target\[:, 0\], or output\[:, None\] with target"):
        prepare(Numbers(3, 1), F.mse_loss, Y[..., None])
    rows = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (1, 4)))
    with pytest.raises(ValueError, match=r"outputs \(\d+, 1, 4\) and targets \(\d+, 4\)"):
        prepare(rows, F.l1_loss, torch.randn(2, 9, 4))


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_lightning_fit_refuses_it_too() -> None:
    data = ft.data.from_tensors([(X[k], Y[k]) for k in range(2)])
    with pytest.raises(ValueError, match=MESSAGE):
        ft.Run(ft.fedavg(ft.lightning_fit(Lit(F.mse_loss), max_epochs=1)), ft.InProcess(data))


class Radial(nn.Module):
    """Radial functions of the first feature, as many as the probe may have rows."""

    def __init__(self, centres: int) -> None:
        super().__init__()
        self.centres, self.weight = nn.Parameter(torch.randn(centres)), nn.Parameter(torch.randn(centres))

    def forward(self, x: Tensor) -> Tensor:
        return ((x[:, :1] - self.centres).square().neg().exp() * self.weight).sum(1)


def ranks(output: Tensor, target: Tensor) -> Tensor:
    """A pairwise loss, of which everything is meant."""
    return F.softplus(-(output - output[:, 0]) * (target[:, None] - target).sign()).mean()


def nearest(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().min(1).values.mean()


def shuffled(output: Tensor, target: Tensor) -> Tensor:
    return (output - output[torch.arange(len(output)).flip(0)]).square().mean() + output[:, 0].dot(target)


def matched(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.view_as(target), target.type_as(output)) + target @ output


@pytest.mark.parametrize("loss", [ranks, nearest, shuffled, lambda o, t: matched(o, t).sum()])
def test_losses_that_mean_it_are_not_refused(loss: Any) -> None:
    prepare(nn.Linear(3, 1), loss)


def test_ordinary_losses_are_not_refused() -> None:
    classes, both = torch.arange(18).reshape(2, 9) % 4, (Y > 0).float()
    prepare(nn.Linear(3, 4), F.cross_entropy, classes)
    prepare(nn.Linear(3, 1), F.binary_cross_entropy_with_logits, both[..., None])
    prepare(nn.Linear(3, 1), lambda output, target: F.binary_cross_entropy_with_logits(output[:, 0], target), both)
    prepare(nn.Linear(3, 4), lambda output, target: F.mse_loss(output, target[:, None].expand_as(output)))
    prepare(
        nn.Linear(3, 2),
        lambda output, target: F.gaussian_nll_loss(output[:, 0], target, output[:, 1].exp()),
        batched=False,
    )
    prepare(
        nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (1, 4))), F.cross_entropy, classes[..., None].expand(2, 9, 4) * 0
    )


@pytest.mark.parametrize("centres", [2, 5, 7, 9, 11, 16, 18, 20])
def test_as_many_parameters_as_rows_are_not_refused(centres: int) -> None:
    prepare(Radial(centres), F.mse_loss)
