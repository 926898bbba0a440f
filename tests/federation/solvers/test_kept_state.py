"""What a step keeps from call to call is refused wherever it is, for clients would share it; draws are keyed."""

from __future__ import annotations

import functools
import itertools
import os
import random as python_random
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.solvers.step_check import StateKept

WAYS = ["auto", False]
COUNTS = {"all": 0}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class CountsInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.n += 1
        return output.mean() * self.n


def in_a_global(output: Tensor, target: Tensor) -> Tensor:
    COUNTS["all"] += 1
    return output.mean() * COUNTS["all"]


def in_a_default(output: Tensor, target: Tensor, seen: list[int] = [0]) -> Tensor:  # noqa: B006
    seen[0] += 1
    return output.mean() * seen[0]


def in_the_environment(output: Tensor, target: Tensor) -> Tensor:
    os.environ["FEDTORCH_TEST_COUNT"] = str(int(os.environ.get("FEDTORCH_TEST_COUNT", "0")) + 1)
    return output.mean() * int(os.environ["FEDTORCH_TEST_COUNT"])


@functools.lru_cache(1)
def counter() -> itertools.count[int]:
    return itertools.count(1)


def in_a_cache(output: Tensor, target: Tensor) -> Tensor:
    return output.mean() * next(counter())


def in_a_module(norm: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        norm(output)
        return (output * norm.running_mean).mean()

    return loss


LOSSES: dict[str, Callable[[], Any]] = {
    "a buffer of the loss": CountsInABuffer,
    "a global": lambda: in_a_global,
    "a default argument": lambda: in_a_default,
    "the environment": lambda: in_the_environment,
    "a cache": lambda: in_a_cache,
    "a module in a closure": lambda: in_a_module(nn.BatchNorm1d(1).double()),
    "a part of a function": lambda: functools.partial(in_a_default, seen=[0]),
}


def trained(loss: Any, batched: Any, module: Callable[[], nn.Module] = Scaled) -> Tensor:
    rows = [(torch.arange(1, 4, dtype=torch.float64)[:, None], torch.zeros(3, 1, dtype=torch.float64))] * 4
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    local = ft.gradient_descent(module(), steps=2, loss=loss, optimizer=sgd, batched=batched)
    run = ft.run(ft.separate(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=1, progress=False)
    return torch.stack([run.client_module(k).w.detach() for k in range(4)])


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTORCH_TEST_COUNT", "0")


@pytest.mark.parametrize("batched", WAYS)
@pytest.mark.parametrize("where", LOSSES)
def test_a_count_is_refused_wherever_it_is(where: str, batched: Any) -> None:
    with pytest.raises((StateKept, TypeError, ValueError), match=r"keeps|keep something|read|count"):
        trained(LOSSES[where](), batched)


@pytest.mark.parametrize("batched", WAYS)
def test_unread_kept_state_changes_nothing(batched: Any) -> None:
    seen: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(1.0)
        return output.mean()

    torch.testing.assert_close(trained(loss, batched), torch.full((4, 1), 0.6, dtype=torch.float64))


@pytest.mark.parametrize("batched", WAYS)
def test_draws_of_python_are_each_client_s_own(batched: Any) -> None:
    found = trained(lambda output, target: output.mean() * python_random.random(), batched)
    assert len(found.unique()) == 4


@pytest.mark.parametrize("seeding", ["manual_seed", "fork_rng", "the same seed", "set_rng_state", "set_state"])
@pytest.mark.parametrize("batched", WAYS)
def test_a_seed_set_in_a_step_is_refused_and_the_generator_stays(batched: Any, seeding: str) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if seeding == "the same seed":
            torch.manual_seed(torch.initial_seed())
            return output.mean() * torch.rand(2).sum()
        if seeding.startswith("set"):
            state = torch.get_rng_state()
            first = torch.rand(2)
            (torch.set_rng_state if seeding == "set_rng_state" else torch.default_generator.set_state)(state)
            return output.mean() * (first - torch.rand(2)).abs().sum()
        if seeding == "manual_seed":
            torch.manual_seed(3)
            return output.mean() * torch.rand(2).sum()
        with torch.random.fork_rng([]):
            torch.manual_seed(3)
            return output.mean() * torch.rand(2).sum()

    torch.rand(1)
    before = torch.get_rng_state()
    with pytest.raises(NotImplementedError, match=r"calls torch\.manual_seed"):
        trained(loss, batched)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.distributions.Beta(0.4, 0.4).sample(),
        lambda: torch.distributions.Gamma(2.0, 1.0).sample(),
        lambda: torch.poisson(torch.full((50,), 3.0)).mean(),
    ],
)
def test_draws_without_a_rule_are_torch_s_from_the_client_s_key(draw: Callable[[], Tensor]) -> None:
    before = torch.get_rng_state()
    loss = lambda output, target: output.mean() * draw()
    found = trained(loss, "auto")
    assert len(found.unique()) == 4
    assert torch.equal(found, trained(loss, False))
    assert torch.equal(torch.get_rng_state(), before)


class Replaces(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        return self.w * x


@pytest.mark.parametrize("batched", WAYS)
def test_a_parameter_that_is_replaced_in_a_step_is_refused(batched: Any) -> None:
    with pytest.raises(TypeError, match="puts another parameter in its place"):
        trained(lambda output, target: output.mean(), batched, Replaces)


def test_a_generator_that_is_set_in_a_later_step_is_refused() -> None:
    class Replays(Step):
        def training_step(self, batch: Any) -> Tensor:
            noise = torch.rand(2)
            if self.global_step > 0:
                state = torch.get_rng_state()
                noise = noise - torch.rand(2)
                torch.set_rng_state(state)
            return self(batch[0]).mean() * noise.sum()

    with pytest.raises(NotImplementedError, match="sets a generator's state"):
        stepped(Replays(), "auto")


class Step(L.LightningModule):
    """Four steps of a scale, of which subclasses write what a step keeps or reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.mean: Any = 1.0
        self.last: Any = None
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Mean(Step):
    """A running mean, of numbers or tensors, that is read after a warm-up."""

    def training_step(self, batch: Any) -> Tensor:
        loss = self(batch[0]).mean()
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss / self.mean if self.global_step >= 2 else loss


class MeanOfTensors(Step):
    def training_step(self, batch: Any) -> Tensor:
        loss = self(batch[0]).mean()
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean if self.global_step >= 2 else loss


class Last(Step):
    def training_step(self, batch: Any) -> Tensor:
        output = self(batch[0])
        change = (output - self.last).square().mean() if self.global_step >= 2 else 0.0
        self.last = output.detach()
        return output.mean() + change


class Listed(Step):
    def training_step(self, batch: Any) -> Tensor:
        loss = self(batch[0]).mean()
        self.seen.append(1.0)
        return loss * len(self.seen) if self.global_step >= 2 else loss


class Swallowed(Step):
    """Reads it where errors are caught."""

    def training_step(self, batch: Any) -> Tensor:
        loss = self(batch[0]).mean()
        self.mean += 1.0
        try:
            return loss * (2.0 if self.global_step >= 2 and self.mean > 3 else 1.0)
        except TypeError:
            return loss


LATE = {"mean": (Mean, MeanOfTensors, Swallowed), "last": (Last,), "seen": (Listed,)}


def stepped(module: nn.Module, batched: Any) -> Tensor:
    local = ft.gradient_descent(module, steps=4, batched=batched)
    rows = [(torch.arange(1, 4, dtype=torch.float64)[:, None],)] * 4
    run = ft.run(ft.separate(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=1, progress=False)
    return torch.stack([run.client_module(k).w.detach() for k in range(4)])


@pytest.mark.parametrize("batched", WAYS)
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in LATE.items() for kind in kinds])
def test_kept_state_read_later_is_refused_by_name(name: str, kind: Any, batched: Any) -> None:
    with pytest.raises(TypeError, match=f"keeps {name} from step to step"):
        stepped(kind(), batched)


class OnlyKept(Step):
    """Counts in numbers of both kinds, a list and a table of lists, and reads none."""

    def training_step(self, batch: Any) -> Tensor:
        loss = self(batch[0]).mean()
        self.mean = 2 * self.mean + 0.5
        self.mean -= 1
        self.seen.append(1.0)
        TABLE["losses"].append(1.0)
        TABLE_COUNTS["steps"] += 1
        return loss


TABLE: dict[str, list[float]] = {"losses": []}
TABLE_COUNTS = {"steps": 0}


@pytest.mark.parametrize("batched", WAYS)
def test_unread_counts_equal_sequential_ones(batched: Any) -> None:
    TABLE["losses"].clear()
    TABLE_COUNTS["steps"] = 0
    torch.testing.assert_close(stepped(OnlyKept(), batched), torch.full((4, 1), 0.92, dtype=torch.float64))
    assert type(TABLE_COUNTS["steps"]) is int
    assert TABLE_COUNTS["steps"] == len(TABLE["losses"]) >= 4


class ReadsGradients(Step):
    """Reads the gradient of the step before, from some step on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def training_step(self, batch: Any) -> Tensor:
        loss = self(batch[0]).mean()
        return loss if self.global_step < self.first or self.w.grad is None else loss / self.w.grad.norm()


class Zeroes(Step):
    def training_step(self, batch: Any) -> Tensor:
        self.zero_grad()
        return self(batch[0]).mean()


@pytest.mark.parametrize("batched", [*WAYS, True])
@pytest.mark.parametrize("first", [0, 2])
def test_the_gradient_of_the_step_before_is_refused(first: int, batched: Any) -> None:
    with pytest.raises(TypeError, match=r"does not read the \.grad of its parameters"):
        stepped(ReadsGradients(first), batched)


@pytest.mark.parametrize("batched", WAYS)
def test_a_step_may_empty_gradients(batched: Any) -> None:
    torch.testing.assert_close(stepped(Zeroes(), batched), torch.full((4, 1), 0.92, dtype=torch.float64))
