"""Stacked steps held against clients alone: faults of `vmap` and of promises are found, sound modules pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support.oracles.stacked_losses import sgd
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import random
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.solvers.batches import Batch
from fedtorch.federation.solvers.descent import Descent
from fedtorch.federation.solvers.stacked_loss import StepResult
from fedtorch.federation.solvers.step_check import StepCheck, StepsDiffer, relative_gap
from fedtorch.module_randomness.step_draws import StepKeys


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    for i, p in enumerate(module.parameters()):
        p.data = 0.5 * random.normal(random.key(i), p.shape, p.dtype)
    return module.to(dtype)


def block(counts: tuple[int, ...] = (4, 4, 4, 4), dtype: torch.dtype = torch.float64) -> ClientData:
    x = random.normal(random.key(1), (sum(counts), 3), torch.float64).to(dtype)
    y = random.normal(random.key(2), (sum(counts), 1), torch.float64).to(dtype)
    return FederatedData((x, y), torch.tensor(counts)).stack(range(len(counts)))


def batch_of(data: ClientData, padded: bool = False) -> Batch:
    return Batch(data.batch, data.count, padded=padded)


class Held:
    """A check beside the stacked loss and the values that it takes, at a module's start."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor] = F.mse_loss, clients: int = 4) -> None:
        local = bool(list(module.buffers()))
        self.descent = Descent(module, 1, loss=loss, make=sgd, batched=True, buffers="local" if local else "refuse")
        named = {**self.descent.parameters, **self.descent.buffers}
        self.values = [t.expand(clients, *t.shape).clone() for t in named.values()]
        self.keys = StepKeys(random.fold_in(random.key(4), torch.arange(clients)))

    def __call__(
        self,
        batch: Batch,
        round: int = 0,
        index: int = 0,
        promised: bool = False,
        check: StepCheck | None = None,
        fresh: set[Any] | None = None,
    ) -> None:
        fresh = set() if fresh is None else fresh
        (check or self.descent.check)(self.descent.loss, self.values, batch, index, self.keys, round, promised, fresh)


def is_stacked(tensor: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(tensor)


def scaled_if_stacked(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * (1.5 if is_stacked(output) else 1.0)


class SparesTheFirst(torch.autograd.Function):
    """The identity, whose rule for `vmap` doubles the gradient of every client but the first."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        assert in_dims == (0,)
        return Doubled.apply(x), 0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        scale = torch.full((len(gradient),), 2.0, dtype=gradient.dtype)
        scale[0] = 1
        return gradient * scale.reshape(-1, *[1] * (gradient.ndim - 1))


def spares_the_first(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(SparesTheFirst.apply(output), target)


@pytest.mark.parametrize(
    ("loss", "what"), [(scaled_if_stacked, "loss"), (spares_the_first, "gradient")], ids=["forward", "backward"]
)
def test_a_fault_of_the_stack_is_found_and_named(loss: Any, what: str) -> None:
    with pytest.raises(StepsDiffer, match=f"the {what} of Sequential differs by .* stacked from") as caught:
        Held(net(), loss)(batch_of(block()))
    assert not caught.value.padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sound_module_passes_at_its_optimum(dtype: torch.dtype) -> None:
    module = nn.Linear(3, 1).to(dtype)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    data = block(dtype=dtype)
    data.batch[1].zero_()  # the gradient is zero, too
    Held(module)(batch_of(data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fault_is_found_at_an_optimum(dtype: torch.dtype) -> None:
    module = nn.Linear(3, 1).to(dtype)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    data = block(dtype=dtype)
    data.batch[1].zero_()
    with pytest.raises(StepsDiffer):
        Held(module, spares_the_first)(batch_of(data))


def test_a_shape_is_checked_once() -> None:
    held, calls = Held(net()), []
    check = StepCheck(held.descent.module, lambda module, cast: calls.append(module) or held.descent.twin(module, cast))
    compared = check._compared
    check._compared = lambda *a, **n: calls.append("compared") or compared(*a, **n)  # type: ignore[method-assign]
    for counts in ((4, 4, 4, 4), (4, 4, 4, 4), (3, 3, 3, 3), (4, 4, 4, 4)):
        held(batch_of(block(counts)), check=check)
    assert calls.count("compared") == 2
    assert len(calls) == 3  # and one copy of the module


def half_norm(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean().sqrt()


def by_length(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * len(output)


@pytest.mark.parametrize("loss", [half_norm, by_length])
def test_step_check_detects_losses_that_are_no_means(loss: Any) -> None:
    with pytest.raises(StepsDiffer, match="in padded steps from that of each client's own rows") as caught:
        Held(net(), loss)(batch_of(block((4, 2, 3, 4)), padded=True))
    assert caught.value.padded


def test_the_most_uneven_of_many_padded_clients_are_looked_at() -> None:
    counts = (6,) * 69 + (5,)  # of seventy clients one has fewer rows

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * (2 if len(output) == 5 else 1)

    with pytest.raises(StepsDiffer):
        Held(net(), loss, 70)(batch_of(block(counts), padded=True))
    check = Held(net()).descent.check
    assert 69 in check.clients(batch_of(block(counts), padded=True), 0, first=True)


def test_padded_clients_take_turns_in_later_rounds() -> None:
    check, batch = Held(net()).descent.check, batch_of(block((4, 2, 3, 4)), padded=True)
    assert [check.clients(batch, round, first=False).tolist() for round in (1, 2, 5)] == [[1], [2], [1]]


def test_the_last_clients_of_an_equal_stack_are_looked_at() -> None:
    check = Held(net()).descent.check
    assert check.clients(batch_of(block((4,) * 7)), 0, first=True).tolist() == [5, 6]


class Counts(nn.Module):
    """Keeps a mean of its outputs as a buffer, which is another one in a stack, if that is said."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.net, self.wrong = net(), wrong
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(x)
        self.mean = self.mean + output.detach().mean() * (2 if self.wrong and is_stacked(output) else 1)
        return output


def test_a_buffer_that_differs_is_found_and_named() -> None:
    Held(Counts(wrong=False))(batch_of(block()))
    with pytest.raises(StepsDiffer, match="the buffer 'mean' of Counts differs"):
        Held(Counts(wrong=True))(batch_of(block()))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_log_that_differs_is_found_and_named(wrong: bool) -> None:
    L = pytest.importorskip("lightning")

    class Logs(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any) -> Tensor:
            output = self.net(batch[0])
            self.log("size", output.detach().abs().mean() * (2 if wrong and is_stacked(output) else 1))
            return F.mse_loss(output, batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    descent = Descent(Logs(), 1, batched=True)
    held = Held(net())
    held.descent = descent
    if wrong:
        with pytest.raises(StepsDiffer, match="the log 'size' of Logs differs"):
            held(batch_of(block()))
    else:
        held(batch_of(block()))


class Listing(nn.Module):
    """Keeps a list, a count and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen, self.calls = net(), [], 0
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.calls += 1
        self.total = self.total + 1
        return self.net(x)


def test_nothing_of_the_original_changes() -> None:
    module = Listing()
    held = Held(module)
    before = copy.deepcopy(module.state_dict()), [value.clone() for value in held.values]
    generator = torch.get_rng_state()
    held(batch_of(block()))
    for part in (module, held.descent.module, held.descent.objective.module):
        assert (part.seen, part.calls) == ([], 0)
        assert all(torch.equal(tensor, before[0][name]) for name, tensor in part.state_dict().items())
        assert all(p.grad is None for p in part.parameters())
    assert all(torch.equal(one, other) for one, other in zip(held.values, before[1]))
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_module_that_takes_no_float64_is_checked_in_its_own_dtype(caplog: pytest.LogCaptureFixture) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return scaled(output.to(torch.float32) @ torch.ones(1, 1), target)

    def scaled(output: Tensor, target: Tensor) -> Tensor:
        return (output * torch.ones(1, dtype=torch.float32) - target).square().mean()

    def strict(output: Tensor, target: Tensor) -> Tensor:
        if output.dtype != torch.float32:
            raise TypeError("float32 only")
        return loss(output, target)

    with caplog.at_level("INFO"):
        Held(net(torch.float32), strict)(batch_of(block(dtype=torch.float32)))
    assert "checked coarsely" in caplog.text

    def faulty(output: Tensor, target: Tensor) -> Tensor:
        return strict(output, target) * (1.01 if is_stacked(output) else 1.0)

    with pytest.raises(StepsDiffer):
        Held(net(torch.float32), faulty)(batch_of(block(dtype=torch.float32)))


@pytest.mark.parametrize(
    ("one", "other", "gap"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 5.0], [0.0, 4.0], 0.2),
        ([float("nan"), 2.0], [float("nan"), 1.0], 0.5),
        ([float("inf"), 2.0], [float("inf"), 2.0], 0.0),
    ],
)
def test_gaps_are_relative_to_the_larger_norm(one: list[float], other: list[float], gap: float) -> None:
    assert relative_gap(torch.tensor(one).double(), torch.tensor(other).double()) == pytest.approx(gap, abs=1e-15)


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_difference_is_no_rounding(wrong: float) -> None:
    one, other = torch.tensor([wrong, 1.0]).double(), torch.ones(2).double()
    assert relative_gap(one, other) == relative_gap(other, one) == float("inf")


def not_a_number_if_stacked(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * (float("nan") if is_stacked(output) else 1.0)


def test_a_stack_that_gives_no_number_is_found() -> None:
    with pytest.raises(StepsDiffer, match="the loss of Sequential differs"):
        Held(net(), not_a_number_if_stacked)(batch_of(block()))


def test_a_promise_is_held_against_all_steps_of_the_first_round_and_one_of_a_later_round() -> None:
    held, calls = Held(net()), []
    check = StepCheck(held.descent.module, held.descent.twin)
    compared = check._compared
    check._compared = lambda *a, **n: calls.append(len(a[2].size)) or compared(*a, **n)  # type: ignore[method-assign]
    for round in range(2):
        fresh: set[Any] = set()
        for index in range(3):
            held(batch_of(block((4, 2, 3, 4)), padded=True), round, index, promised=True, check=check, fresh=fresh)
    assert calls == [4, 4] * 3 + [1]  # at moved parameters and at those that are, later at these only


@pytest.mark.parametrize("way", ["stacked", "lightning_fit"])
def test_a_loss_that_counts_in_a_closure_is_refused(way: str) -> None:
    calls = 0

    def counted(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.mse_loss(output, target) / calls

    class Counts(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.loss = nn.Linear(3, 1), counted

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.loss(self.linear(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    local = (
        ft.lightning_fit(Counts(), max_epochs=2) if way == "lightning_fit" else ft.gradient_descent(Counts(), epochs=2)
    )
    rows = [(torch.randn(5, 3), torch.randn(5, 1)) for _ in range(3)]
    with pytest.raises(TypeError, match=r"counted\.calls"):
        ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(rows)), rounds=1, progress=False)


@pytest.mark.parametrize(
    ("dtype", "gap", "sound"),
    [
        (torch.float32, 1e-6, True),
        (torch.float32, 1e-4, False),
        (torch.float64, 1e-6, False),
        (torch.bfloat16, 0.03125, True),
        (torch.bfloat16, 0.25, False),  # no more than of gradients in bfloat16
    ],
)
def test_losses_are_compared_by_the_precision_that_they_have(dtype: torch.dtype, gap: float, sound: bool) -> None:
    """Language models have their logits in single precision before the loss, whatever their own dtype."""
    check, batch = StepCheck(net(), lambda *_: None), batch_of(block())
    result = lambda loss: StepResult(torch.full((4,), loss, dtype=dtype), {}, {}, [torch.ones(4, 2).double()], {})
    found = check._difference(["weight"], result(1.0), result(1.0 + gap), batch, 1e-7)
    assert (found == "") == sound
    assert sound or found.startswith("the loss of Sequential differs by ")
