"""What steps change that is no tensor of the module by its name is refused by name, and trials leave it as it is."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import functional
from fedtorch.federation.solvers.python_state import PythonState

WAYS = ["auto", False]
ROWS = [(torch.linspace(-1, 1, 4 * n, dtype=torch.float64).reshape(n, 4), torch.ones(n, 1).double()) for n in (4, 7, 3)]


class Step(L.LightningModule):
    """A linear model, of which subclasses change what is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1, dtype=torch.float64)
        nn.init.constant_(self.net.weight, 0.1)
        nn.init.constant_(self.net.bias, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(module: nn.Module, batched: Any = "auto", **says: Any) -> dict[str, Tensor]:
    local = ft.gradient_descent(module, epochs=5, batched=batched, **says)
    run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(ROWS)), rounds=1, progress=False)
    return run.global_module().state_dict()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def linear() -> nn.Linear:
    return nn.Linear(4, 1, dtype=torch.float64).requires_grad_(False)


class Follows(Step):
    """Its teacher follows it from a step on, in place or through `.data`, and is read much later."""

    first, data = 0, False

    def __init__(self) -> None:
        super().__init__()
        self.keep(linear())

    def keep(self, teacher: nn.Module) -> None:
        raise NotImplementedError

    def teacher(self) -> nn.Module:
        raise NotImplementedError

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        if self.global_step >= self.first:
            with torch.no_grad():
                for old, new in zip(self.teacher().parameters(), self.net.parameters()):
                    (old.data if self.data else old).mul_(0.9).add_(new, alpha=0.1)
        return loss + (F.mse_loss(self(batch[0]), self.teacher()(batch[0])) if self.global_step > 3 else 0.0)


class InAList(Follows):
    def keep(self, teacher: nn.Module) -> None:
        self.held = [teacher]

    def teacher(self) -> nn.Module:
        return self.held[0]


class InTheDict(Follows):
    def keep(self, teacher: nn.Module) -> None:
        self.__dict__["held"] = teacher

    def teacher(self) -> nn.Module:
        return self.held


class InAnObject(Follows):
    def keep(self, teacher: nn.Module) -> None:
        self.held = types.SimpleNamespace(model=teacher)

    def teacher(self) -> nn.Module:
        return self.held.model


class InAClosure(Follows):
    def keep(self, teacher: nn.Module) -> None:
        self.held = lambda: teacher

    def teacher(self) -> nn.Module:
        return self.held()


class InATuple(Follows):
    def keep(self, teacher: nn.Module) -> None:
        self.held = (teacher, 1)

    def teacher(self) -> nn.Module:
        return self.held[0]


class InAPartial(Follows):
    def keep(self, teacher: nn.Module) -> None:
        self.held = functools.partial(dict, teacher=teacher)

    def teacher(self) -> nn.Module:
        return self.held()["teacher"]


class ByAMethod(Follows):
    def keep(self, teacher: nn.Module) -> None:
        self.held = teacher.requires_grad_

    def teacher(self) -> nn.Module:
        return self.held(False)


class InAnAveragedModel(Follows):
    def keep(self, teacher: nn.Module) -> None:
        self.held = [torch.optim.swa_utils.AveragedModel(teacher)]

    def teacher(self) -> nn.Module:
        return self.held[0].module


TEACHER = linear()


class InTheFile(Follows):
    def keep(self, teacher: nn.Module) -> None:
        pass

    def teacher(self) -> nn.Module:
        return TEACHER


TEACHERS = (InAList, InTheDict, InAnObject, InAClosure, InATuple, InAPartial, ByAMethod, InAnAveragedModel, InTheFile)


@pytest.mark.parametrize("batched", WAYS)
@pytest.mark.parametrize(("first", "data"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", TEACHERS)
def test_a_teacher_that_is_no_part_of_the_module_is_refused_by_name(
    kind: type[Follows], first: int, data: bool, batched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "first", first)
    monkeypatch.setattr(kind, "data", data)
    module, before = kind(), copy.deepcopy(TEACHER.state_dict())
    with pytest.raises(TypeError, match=r"weight.*lightning_fit"):
        trained(module, batched)
    assert all(torch.equal(value, before[name]) for name, value in TEACHER.state_dict().items())


@pytest.mark.parametrize("batched", WAYS)
def test_a_teacher_that_stays_as_it_is_trains(batched: Any) -> None:
    class Distils(Step):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = [nn.init.constant_(linear().weight, 0.5)]

        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch) + F.mse_loss(self(batch[0]), batch[0] @ self.teacher[0].T)

    weight = torch.zeros(1, 4, dtype=torch.float64)
    for x, y in ROWS:
        own = Distils()
        optimizer = sgd(own.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            own.training_step((x, y)).backward()
            optimizer.step()
        weight += own.net.weight.detach() * len(x) / sum(len(x) for x, _ in ROWS)
    torch.testing.assert_close(trained(Distils(), batched)["net.weight"], weight)


class OwnOptimizer(Step):
    """Trains a part by an optimiser of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(4, 1, dtype=torch.float64)
        self.inner = sgd(self.probe.parameters())

    def training_step(self, batch: Any) -> Tensor:
        self.inner.zero_grad()
        F.mse_loss(self.probe(batch[0]), batch[1]).backward()
        self.inner.step()
        return F.mse_loss(self(batch[0]), batch[1] - self.probe(batch[0]).detach())


class OwnGradients(OwnOptimizer):
    """Gives its optimiser the gradients itself."""

    def training_step(self, batch: Any) -> Tensor:
        loss = F.mse_loss(self.probe(batch[0]), batch[1])
        for p, gradient in zip(
            self.inner.param_groups[0]["params"], torch.autograd.grad(loss, self.probe.parameters())
        ):
            p.grad = gradient
        self.inner.step()
        return F.mse_loss(self(batch[0]), batch[1] - self.probe(batch[0]).detach())


class Listed(Step):
    """Writes its tensors by a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.each = list(self.net.parameters())

    def training_step(self, batch: Any) -> Tensor:
        for p in self.each:
            p.data.mul_(0.99)
        return super().training_step(batch)


class InTuple(Step):
    """Writes a tensor that is in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.each = (torch.zeros((), dtype=torch.float64),)

    def training_step(self, batch: Any) -> Tensor:
        self.each[0].add_(1)
        return super().training_step(batch) * self.each[0]


ELSEWHERE = {
    OwnOptimizer: r"calls backward\(\) itself.*probe",
    OwnGradients: "probe.* another reference",
    Listed: "each",
    InTuple: "each",
}


@pytest.mark.parametrize("batched", WAYS)
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_tensors_that_are_written_by_another_reference_are_refused(kind: type[Step], batched: Any) -> None:
    with pytest.raises(TypeError, match=f"{ELSEWHERE[kind]}.*lightning_fit"):
        trained(kind(), batched)


class Thaws(Step):
    def __init__(self) -> None:
        super().__init__()
        self.net.bias.requires_grad_(False)

    def training_step(self, batch: Any) -> Tensor:
        if self.current_epoch >= 2:
            self.net.requires_grad_(True)
        return super().training_step(batch)


class Freezes(Step):
    def training_step(self, batch: Any) -> Tensor:
        if self.current_epoch >= 2:
            self.net.bias.requires_grad_(False)
        return super().training_step(batch)


@pytest.mark.parametrize("batched", WAYS)
def test_a_step_that_unfreezes_is_refused_by_name(batched: Any) -> None:
    with pytest.raises(ValueError, match=r"unfreezes the parameters net\.bias of Thaws"):
        trained(Thaws(), batched)


@pytest.mark.parametrize("batched", WAYS)
def test_a_step_that_freezes_is_refused_by_name(batched: Any) -> None:
    with pytest.raises(TypeError, match=r"freezes net\.bias; use ft\.lightning_fit"):
        trained(Freezes(), batched)


class Waits(Step):
    def training_step(self, batch: Any) -> Tensor:
        self.net.bias.requires_grad_(self.current_epoch >= 1)
        return super().training_step(batch)


def test_a_step_of_a_trainer_may_freeze_at_first() -> None:
    local = ft.lightning_fit(Waits(), max_epochs=2)
    run = ft.run(ft.separate(local), ft.InProcess(ft.data.from_tensors(ROWS)), rounds=1, progress=False)
    for k, (x, y) in enumerate(ROWS):
        own = Step()
        for epoch in range(2):
            own.net.bias.requires_grad_(epoch >= 1)
            own.zero_grad()
            own.training_step((x, y)).backward()
            sgd(own.parameters()).step()
        torch.testing.assert_close(run.client_module(k).net.bias, own.net.bias)
    with pytest.raises(TypeError, match=r"freezes net\.bias; use ft\.lightning_fit"):
        trained(Waits())


class Counts(nn.Module):
    """A loss that counts its calls, in a buffer or an attribute, and whose count acts late."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.buffer, self.calls = buffer, 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.n += self.buffer
        self.calls += not self.buffer
        return F.mse_loss(output, target) * (1.0 if self.n + self.calls <= 1000 else 3.0)


@pytest.mark.parametrize("batched", WAYS)
@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("closed", [True, False])
def test_a_count_of_a_loss_is_refused_and_left_alone(closed: bool, buffer: bool, batched: Any) -> None:
    counts = Counts(buffer)
    loss = (lambda output, target: counts(output, target)) if closed else counts
    with pytest.raises(TypeError, match=f"keeps .*{'n' if buffer else 'calls'} from step to step"):
        trained(nn.Linear(4, 1, dtype=torch.float64), batched, loss=loss, optimizer=sgd)
    assert int(counts.n) == counts.calls == 0


def of_parameter(module: Any) -> int:
    w = module.net.weight
    w.n = getattr(w, "n", 0) + 1
    return int(w.n > 3)


def of_a_tensor_of_a_parameter(module: Any) -> Any:
    w = module.net.weight
    moved = (w - getattr(w, "old", w.detach())).square().sum()
    w.old = w.detach().clone()
    return moved


def of_a_hidden_module(module: Any) -> int:
    module.hidden[0].n = getattr(module.hidden[0], "n", 0) + 1
    return int(module.hidden[0].n > 3)


def of_a_function(module: Any) -> int:
    of_a_function.n = getattr(of_a_function, "n", 0) + 1  # type: ignore[attr-defined]
    return int(of_a_function.n > 1000)  # type: ignore[attr-defined]


def of_a_default(module: Any, seen: list[int] = []) -> int:  # noqa: B006
    seen.append(0)
    return int(len(seen) > 1000)


PLACES: tuple[Callable[[Any], Any], ...] = (
    of_parameter, of_a_tensor_of_a_parameter, of_a_hidden_module, of_a_function, of_a_default,
)  # fmt: skip


@pytest.mark.parametrize("batched", WAYS)
@pytest.mark.parametrize("count", PLACES)
def test_a_count_is_found_where_it_is(count: Callable[[Any], Any], batched: Any) -> None:
    class Counted(Step):
        late = staticmethod(count)

        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Identity()]

        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch) + self.late(self)

    with pytest.raises(TypeError, match=r"keeps .* from step to step"):
        trained(Counted(), batched)
    assert not hasattr(of_a_function, "n")
    assert of_a_default.__defaults__ == ([],)


@pytest.mark.parametrize("batched", WAYS)
def test_a_count_that_a_hook_or_a_maker_of_optimisers_keeps_is_found(batched: Any) -> None:
    steps = [0]

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        steps[0] += 1
        return output * (1.0 if steps[0] < 1000 else 2.0)

    module = nn.Linear(4, 1, dtype=torch.float64)
    module.register_forward_hook(hook)
    with pytest.raises(TypeError, match=r"hook\.steps.* from step to step"):
        trained(module, batched, loss=F.mse_loss, optimizer=sgd)
    assert steps == [0]


@pytest.mark.parametrize("batched", WAYS)
def test_unread_attributes_change_nothing(batched: Any) -> None:
    class Stores(Step):
        def training_step(self, batch: Any) -> Tensor:
            self.net.weight.n = getattr(self.net.weight, "n", 0) + 1
            self.net.bias.last = batch[0].sum()
            return super().training_step(batch)

    found, expected = trained(Stores(), batched), trained(Step(), batched)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_copy_has_attributes_of_parameters_of_its_own() -> None:
    module = nn.Linear(2, 1)
    module.weight.scale = torch.ones(1)  # type: ignore[attr-defined]
    module.weight.derived = module.weight * 2  # type: ignore[attr-defined]
    copied: Any = functional.copied(module)
    copied.weight.scale += 1
    assert float(module.weight.scale) == 1.0  # type: ignore[attr-defined]
    assert copied.weight.derived is module.weight.derived  # type: ignore[attr-defined]


def test_hidden_state_is_restored_exactly() -> None:
    queue, other = torch.zeros(2), linear()

    def loss(output: Tensor) -> Tensor:
        queue.add_(1)
        other.weight.data = torch.zeros(1, 3)
        loss.n = 1  # type: ignore[attr-defined]
        return output.sum() + other.weight.sum() + queue.sum()

    with PythonState(nn.Linear(2, 1), loss).left_alone():
        loss(torch.ones(1))
    assert torch.equal(queue, torch.zeros(2))
    assert other.weight.shape == (1, 4)
    assert not hasattr(loss, "n")
