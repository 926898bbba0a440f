"""Buffers and frozen parameters that steps change, and generators of Python and NumPy."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracles.stacked_losses import sgd
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.solvers.host_state import HostGenerators, UnchangedTensors

NUMPY = np.random


class Kept(nn.Module):
    """A linear layer, a buffer and a frozen parameter, and what a call does with them."""

    def __init__(self, call: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1).double()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("nothing", torch.full((1,), torch.nan, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        self._call(self, x)
        return self.net(x) + self.seen + self.frozen


def assigned(self: Any, x: Tensor) -> None:
    self.seen = self.seen + 1


def in_place(self: Any, x: Tensor) -> None:
    self.seen.add_(1)


def through_data(self: Any, x: Tensor) -> None:
    self.seen.data += 1


def frozen_in_place(self: Any, x: Tensor) -> None:
    self.frozen.mul_(0.9)


def rarely(self: Any, x: Tensor) -> None:
    if len(x) == 5:
        self.seen.add_(1)


def untouched(self: Any, x: Tensor) -> None:
    self.seen.add_(0)
    self.nothing = self.nothing + 0


def kernel(self: Any, x: Tensor) -> None:
    F.batch_norm(x[:, :1], self.seen, None if self.seen is None else self.frozen, training=True)


CHANGED = {
    "seen": assigned,
    "seen ": in_place,
    "seen  ": through_data,
    "frozen": frozen_in_place,
    "frozen, seen": kernel,
}


@pytest.mark.parametrize("name", CHANGED)
def test_tensors_that_a_step_changes_are_named_and_put_back(name: str) -> None:
    module = Kept(CHANGED[name])
    guard = UnchangedTensors(module, ["net.weight", "net.bias"])
    tensors = module.seen, module.frozen

    def step() -> None:
        with torch.no_grad(), guard():
            module(torch.arange(6.0, dtype=torch.float64).reshape(3, 2))
        guard.check()

    with pytest.raises(ValueError, match=name.strip().split(",")[0]):
        step()
    assert (module.seen is tensors[0], module.frozen is tensors[1]) == (True, True)
    assert (module.seen.tolist(), module.frozen.tolist()) == ([0.0], [1.0])


def test_tensors_that_keep_their_values_are_allowed_nan_included() -> None:
    module = Kept(untouched)
    guard = UnchangedTensors(module, ["net.weight", "net.bias"])
    with torch.no_grad(), guard():
        module(torch.ones(3, 2, dtype=torch.float64))
    guard.check()


def test_an_error_of_the_module_is_not_hidden_by_what_it_changed() -> None:
    def fails(self: Any, x: Tensor) -> None:
        self.seen.add_(1)
        raise ArithmeticError("its own")

    module = Kept(fails)
    guard = UnchangedTensors(module, ["net.weight", "net.bias"])
    with pytest.raises(ArithmeticError, match="its own"), torch.no_grad(), guard():
        module(torch.ones(3, 2, dtype=torch.float64))
    assert module.seen.tolist() == [0.0]


def rows(sizes: tuple[int, ...] = (4, 4, 5, 4)) -> Any:
    x = [random.normal(random.key(k), (n, 2), torch.float64) for k, n in enumerate(sizes)]
    return ft.data.from_tensors([(each, each.sum(1, keepdim=True)) for each in x])


def run(module: nn.Module, seed: int = 0, chunk: int | None = None, **options: Any) -> Any:
    local = ft.gradient_descent(module, epochs=2, loss=F.mse_loss, optimizer=sgd, **options)
    return ft.run(ft.fedavg(local), ft.InProcess(rows(), chunk=chunk), rounds=2, seed=seed)


@pytest.mark.parametrize("call", [assigned, in_place, frozen_in_place, rarely])
@pytest.mark.parametrize("batched", ["auto", False])
def test_a_run_in_which_a_buffer_changes_is_refused(call: Any, batched: Any) -> None:
    with pytest.raises((ValueError, ft.data.BadClients), match=r"(seen|frozen) of Kept"):
        run(Kept(call), batched=batched)


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.net, self.draw = nn.Linear(2, 1).double(), draw
        for i, p in enumerate(self.parameters()):
            p.data = random.normal(random.key(i), p.shape, p.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (1 + self.draw())


DRAWS: dict[str, Callable[[], float]] = {"Python": python_random.random, "NumPy": lambda: float(NUMPY.rand())}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("batched", ["auto", False])
def test_draws_of_the_host_are_a_clients_own_and_leave_the_generators(name: str, batched: Any) -> None:
    python_random.seed(3)
    NUMPY.seed(3)
    before = HostGenerators.state()
    first = run(Draws(DRAWS[name]), batched=batched).server
    assert not HostGenerators.moved(before)
    python_random.seed(4)
    NUMPY.seed(4)
    again = run(Draws(DRAWS[name]), chunk=2, batched=batched).server
    other = run(Draws(DRAWS[name]), seed=1, batched=batched).server
    for leaf, value in first.items():
        assert torch.allclose(value, again[leaf], rtol=1e-12, atol=1e-14), leaf
        assert not torch.allclose(value, other[leaf]), leaf


@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_the_host_are_refused_in_a_stack(name: str) -> None:
    before = HostGenerators.state()
    with pytest.raises(
        RuntimeError, match=r"Draws to draw by torch, but it draws from Python's random or numpy\.random"
    ):
        run(Draws(DRAWS[name]), batched=True)
    assert not HostGenerators.moved(before)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_a_draw_is_seen_and_taken_back(draw: Callable[[], float]) -> None:
    before = HostGenerators.state()
    assert not HostGenerators.moved(before)
    first = draw()
    assert HostGenerators.moved(before)
    assert draw() == first
    HostGenerators.restore(before)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_seeded_draws_depend_on_the_seed_alone(draw: Callable[[], float]) -> None:
    def at(seed: int) -> float:
        with HostGenerators.seeded(seed):
            return draw()

    before = HostGenerators.state()
    assert at(1) == at(1) != at(2**40 + 2)
    with pytest.raises(ArithmeticError), HostGenerators.seeded(5):
        raise ArithmeticError(draw())
    assert not HostGenerators.moved(before)
