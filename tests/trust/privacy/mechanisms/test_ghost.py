"""Gradients that reach a layer's weight other than through the layer's call are not lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import lightning as L
import pytest
import torch
from support.oracles.closed_forms import distance
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import fedtorch as ft
from fedtorch import random
from fedtorch.tree import Tree
from fedtorch.trust import privacy
from fedtorch.trust.privacy.examples._layers import ghost_squares, linear_layers
from fedtorch.trust.privacy.examples._per_example import PrivateLoss

double = partial(nn.Linear, dtype=torch.float64)


class Ridge(L.LightningModule):
    """Least squares with a penalty inside the loss, from zeros, where the penalty is flat."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.layer, self.strength = double(3, 1, bias=False), strength
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self.layer(x)[:, 0], y) + self.strength * self.layer.weight.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Net(L.LightningModule):
    """Two layers and a loss of one's own, `of(net, x, y)`."""

    def __init__(self, of: Callable[[Net, Tensor, Tensor], Tensor], zero_head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.of = double(3, 3), double(3, 1), of
        if zero_head:
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)))[..., 0]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.of(self, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def plain(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net(x), y)


def penalised(penalty: Callable[[Tensor], Tensor]) -> Callable[[Net, Tensor, Tensor], Tensor]:
    return lambda net, x, y: plain(net, x, y) + penalty(net.layer.weight)


def tied(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net.head(F.linear(torch.tanh(net.layer(x)), net.layer.weight))[:, 0], y)


def functional(net: Net, x: Tensor, y: Tensor) -> Tensor:
    doubled = functional_call(net.layer, {"weight": 2 * net.layer.weight}, (x,))
    return plain(net, x, y) + doubled.square().mean()


def other_weights(net: Net, x: Tensor, y: Tensor) -> Tensor:
    doubled = functional_call(net.layer, {"weight": 2 * net.layer.weight}, (x,))
    return F.mse_loss(net.head(torch.tanh(doubled))[:, 0], y)


def by_the_class(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return plain(net, x, y) + nn.Linear.forward(net.layer, x).square().mean()


def twice(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net.head(torch.tanh(net.layer(torch.tanh(net.layer(x)))))[:, 0], y)


def smooth(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on the network's derivative, without a value of it."""
    slopes = torch.func.grad(lambda rows: net(rows).sum())(x)
    return slopes.square().sum(1).mean()


def later(loss: Callable[[Net, Tensor, Tensor], Tensor]) -> Callable[[Net, Tensor, Tensor], Tensor]:
    """From the third step on."""
    return lambda net, x, y: (loss if net.global_step >= 2 else plain)(net, x, y)


def late_positions(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Two positions of an output from the third step on, which one would be spread over."""
    rows = x[:, None] if net.global_step < 2 else torch.stack([x, -2 * x], 1)
    return F.mse_loss(net.head(torch.tanh(net.layer(rows))).sum((1, 2)), y)


def mixing(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return plain(net, x - x.mean(0), y)


def overwritten(net: Net, x: Tensor, y: Tensor, late: bool) -> Tensor:
    """What went into the head is changed in place, where autograd has no use for it."""
    hidden = net.layer(x)
    loss = F.mse_loss(net.head(hidden)[:, 0], y)
    if late and net.global_step >= 2:
        hidden.add_(1.0)
    return loss


def positions_first(net: Net, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.stack([x, x.sin(), 2 * x])  # (positions, examples, 3)
    return F.mse_loss(net(rows).sum(0), y)


def unused(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net.layer(x).sum(1), y)


def constant(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net.head(x)[:, 0] + net.layer(x.new_ones(4, 3)).sum(), y)


def single(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """An example alone without its dimension."""
    return F.mse_loss(net(x.squeeze(0)), y.squeeze(0))


def rows(count: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


DATA = ft.data.from_tensors([rows(9, 1), rows(6, 2)])


def ridge(strength: float = 1.0) -> Tensor:
    """argmin of the mean square plus the penalty."""
    x, y = rows()
    return torch.linalg.solve(x.T @ x / len(x) + strength * torch.eye(3, dtype=torch.float64), x.T @ y / len(x))


def private(module: nn.Module, ghost: bool, **settings) -> ft.LocalSolver:
    settings = {"clip": 0.5, "noise": 1e-9, "sampling_rate": 0.7, "steps": 4, "delta": 1e-3, **settings}
    return privacy.example_level(module, entropy=privacy.from_seed(0), ghost=ghost, **settings)


def loss_of(local: ft.LocalSolver) -> PrivateLoss:
    return local.solve.__self__.loss


def ends(local: ft.LocalSolver, data: ft.data.FederatedData = DATA) -> Tree:
    return ft.run(ft.separate(local), ft.InProcess(data), rounds=1).tensors()


def test_by_default_a_penalty_inside_the_loss_is_in_the_gradients() -> None:
    local = privacy.example_level(Ridge(1.0), clip=1e6, noise=1e-15, sampling_rate=1.0, steps=40, delta=1e-3,
                                  entropy=privacy.from_seed(0))  # fmt: skip
    run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors([rows()])), rounds=1)
    assert float((run.server["layer.weight"][0] - ridge()).abs().max()) < 1e-6


def test_a_ridge_penalty_from_zeros_gives_ridge_regression(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        local = private(Ridge(1.0), True, clip=1e6, noise=1e-15, sampling_rate=1.0, steps=40)
        found = ends(local, ft.data.from_tensors([rows()]))
    assert float((found["layer.weight"][0, 0] - ridge()).abs().max()) < 1e-6
    said = [record.message for record in caplog.records if "ghost=False" in record.message]
    assert len(said) == 1
    assert "layer.weight" in said[0]


EXACT = {  # losses that ghost norms cannot do
    "L2": Net(penalised(lambda w: w.square().sum())),
    "L1": Net(penalised(lambda w: w.abs().sum())),
    "flat so far": Net(penalised(lambda w: F.relu(w.abs() - 1).sum())),
    "of a transpose": Net(penalised(lambda w: (w.T @ w).logdet())),
    "tied, behind a head of zeros": Net(tied, zero_head=True),
    "functional call": Net(functional),
    "by the class": Net(by_the_class),
    "called twice": Net(twice),
    "of the derivative": Net(smooth),
    "a penalty later": Net(later(penalised(lambda w: w.square().sum()))),
    "a second call later": Net(later(twice)),
    "a functional call later": Net(later(functional)),
    "of other weights only, later": Net(later(other_weights)),
    "of the derivative later": Net(later(smooth)),
    "other shapes later": Net(late_positions),
}
FAST = {
    "plain": Net(plain),
    "positions first": Net(positions_first),
    "unused": Net(unused),
    "constant": Net(constant),
    "single": Net(single),
    "mixing later": Net(later(mixing)),
}


@pytest.mark.parametrize("name", [*EXACT, *FAST])
def test_ghost_norms_train_as_the_examples_own_gradients_do(name: str, caplog: pytest.LogCaptureFixture) -> None:
    module = (EXACT | FAST)[name]
    ways = [private(module, ghost, clip=8.0, noise=1e-10) for ghost in (True, False)]  # about half of them are clipped
    assert distance(*map(ends, ways)) < 1e-8
    assert (loss_of(ways[0]).layers is None) == (name in EXACT)
    said = [record.message for record in caplog.records if "ghost=False" in record.message]
    assert len(said) == (name in EXACT)
    assert all("depends on layer." in each or name == "other shapes later" for each in said)


def test_unsupported_layers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    loss = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    private(nn.Sequential(double(3, 2), nn.LayerNorm(2, dtype=torch.float64)), True, **loss)
    assert [record.message for record in caplog.records] == [
        "Sequential trains with ghost=False: expected nothing but linear layers and convolutions to be trained"
    ]
    private(double(3, 2), False, **loss)
    assert len(caplog.records) == 1


def test_inputs_that_are_changed_in_place_later_are_those_of_the_call() -> None:
    modules = [Net(partial(overwritten, late=late)) for late in (True, False)]
    assert distance(*(ends(private(module, True)) for module in modules)) < 1e-8


def test_hooks_of_users_are_part_of_the_loss() -> None:
    for hook in (lambda layer, inputs, output: output.square(), lambda layer, inputs, output: output @ layer.weight):
        module = Net(plain)
        module.layer.register_forward_hook(hook)
        assert distance(*(ends(private(module, ghost)) for ghost in (True, False))) < 1e-8


def test_weights_that_are_computed_are_not_a_layers_own() -> None:
    for module in (parametrizations.weight_norm(double(3, 2)), parametrizations.spectral_norm(double(3, 2)),
                   parametrizations.orthogonal(double(3, 3))):  # fmt: skip
        assert linear_layers(module, [name for name, _ in module.named_parameters()]) is None
    other = double(3, 2)
    other.forward = lambda x: F.linear(x, 2 * other.weight)
    assert linear_layers(other, ["weight", "bias"]) is None
    module = Net(plain)
    parametrize.register_parametrization(module.layer, "weight", Symmetric())
    assert distance(*(ends(private(module, ghost)) for ghost in (True, False))) < 1e-8


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.mT


class Frames(nn.Module):
    """Convolutions of several images and lines of an example, with and without a dimension for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plane, self.line = nn.Conv2d(1, 2, 2), nn.Conv1d(2, 3, 2, stride=2)
        self.alone = nn.Conv2d(1, 2, (1, 3), padding=1)

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.stack([x, x.sin(), x.cos(), x + 1], 1)  # (n, 4, 3)
        planes = torch.tanh(self.plane(frames.reshape(-1, 1, 4, 3).repeat(2, 1, 1, 1)))  # two of each example
        lines = self.line(planes.flatten(2)).flatten(1).reshape(2, len(x), -1).sum((0, 2))
        return lines + self.alone(frames[:, None].squeeze(0)).reshape(len(x), -1).square().sum(1)


def test_positions_of_convolutions_are_those_of_all_of_an_examples_images() -> None:
    ways = [private(Frames().double(), ghost, loss=lambda output, y: F.mse_loss(output, y),
                    optimizer=lambda p: torch.optim.SGD(p, lr=0.05)) for ghost in (True, False)]  # fmt: skip
    assert distance(*map(ends, ways)) < 1e-8
    assert loss_of(ways[0]).layers is not None


def test_no_scale_of_numbers_hides_a_norm() -> None:
    """Squares of 1e-200 and sums that cancel are zeros; the gradients are not."""
    a, g = (random.normal(random.key(k), (1, 4, 1, d), torch.float64) for k, d in ((0, 5), (1, 3)))
    expected = ghost_squares(a, g, False)
    assert torch.allclose(ghost_squares(a * 1e-200, g * 1e200, False), expected, rtol=1e-12)
    assert torch.allclose(ghost_squares((a * 1e-30).float(), (g * 1e30).float(), False), expected, rtol=1e-5)
    for positions in (2, 40):
        a = torch.full((1, 1, positions, 30), 1e9, dtype=torch.float32)
        g = random.normal(random.key(2), (1, 1, positions, 20), torch.float32)
        g = g - g.mean(2, keepdim=True)  # Σ_t g_t a_tᵀ is what rounding leaves
        left = (g[0, 0].mT @ a[0, 0]).double().norm()
        assert float(ghost_squares(a, g, False).sqrt()) > float(left)
