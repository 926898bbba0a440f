"""What a module keeps in Python from step to step: refused by name where a step reads it, allowed where it does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.oracles.stacked_losses import sgd
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import functional, random
from fedtorch.federation.solvers.python_state import PythonState, refuse_kept

Step = Callable[[Any, Tensor], Tensor]


class Keeps(nn.Module):
    """A linear layer with places to keep things, and what a call does with them."""

    shared = 0

    def __init__(self, call: Step) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1).double()
        self.count, self.last, self.items, self.table = 0, None, [], {}
        self.window, self.names, self.inner = deque([0.0], maxlen=3), set[Any](), SimpleNamespace(count=0, deep=None)
        self.inner.deep = SimpleNamespace(count=0)
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self, self.net(x))


def run(module: nn.Module, loss: Any = F.mse_loss, batched: Any = "auto") -> Any:
    x = [random.normal(random.key(k), (4, 2), torch.float64) for k in range(3)]
    data = ft.data.from_tensors([(each, each.sum(1, keepdim=True)) for each in x])
    local = ft.gradient_descent(module, epochs=2, loss=loss, optimizer=sgd, batched=batched)
    return ft.run(ft.fedavg(local), ft.InProcess(data), rounds=1)


def steps(module: nn.Module, loss: Any = F.mse_loss) -> Any:
    """Return what `refuse_kept` returns of losses of fresh copies, without a federation around it."""
    x = random.normal(random.key(1), (2, 4, 2), torch.float64)

    def make() -> tuple[PythonState, Callable[[int], Tensor]]:
        fresh = functional.copied(module)
        return PythonState(fresh, loss), lambda client: loss(fresh(x[client]), x[client].sum(1, keepdim=True))

    return refuse_kept(make, type(module).__name__)


class Frozen(dict[str, Any]):
    """Settings that cannot be written to, as those of diffusers."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


def test_settings_that_cannot_be_written_to_are_left_alone() -> None:
    module = Keeps(lambda self, h: h * self.settings["scale"])
    module.settings = Frozen(scale=2.0)  # type: ignore[assignment]
    assert steps(module) == (frozenset(), frozenset())
    run(module)
    assert module.settings == {"scale": 2.0}


def counted(self: Any, h: Tensor) -> Tensor:
    self.count += 1
    return h * (1 + self.count)


def threshold(self: Any, h: Tensor) -> Tensor:
    self.count += 1
    return 2 * h if self.count > 3 else h


def modulus(self: Any, h: Tensor) -> Tensor:
    self.count = self.count + 1
    return 2 * h if self.count % 2 == 0 else h


def indexed(self: Any, h: Tensor) -> Tensor:
    self.count += 1
    return h * torch.arange(9.0, dtype=h.dtype)[self.count]


def flag(self: Any, h: Tensor) -> Tensor:
    if self.last is None:
        self.last = True
        return 2 * h
    return h


def running(self: Any, h: Tensor) -> Tensor:
    mean = h.detach().mean()
    self.last = mean if self.last is None else 0.9 * self.last + 0.1 * mean
    return h - self.last


def length(self: Any, h: Tensor) -> Tensor:
    self.items.append(1)
    return h * len(self.items)


def last_of_list(self: Any, h: Tensor) -> Tensor:
    scale = self.items[-1] if self.items else 1
    self.items.append(scale + 1)
    return h * scale


def queue(self: Any, h: Tensor) -> Tensor:
    self.window.append(float(len(self.window)))
    return h + sum(self.window)


def looked_up(self: Any, h: Tensor) -> Tensor:
    self.table["n"] = self.table.get("n", 0) + 1
    return h * self.table["n"]


def member(self: Any, h: Tensor) -> Tensor:
    new = "seen" not in self.names
    self.names.add("seen")
    return h * (2 if new else 1)


def nested(self: Any, h: Tensor) -> Tensor:
    self.inner.count += 1
    return h * (1 + self.inner.count)


def nested_twice(self: Any, h: Tensor) -> Tensor:
    self.inner.deep.count += 1
    return h * (1 + self.inner.deep.count)


def of_class(self: Any, h: Tensor) -> Tensor:
    Keeps.shared += 1
    return h * (1 + Keeps.shared)


READ = {
    "count": counted, "count ": threshold, "count  ": modulus, "count   ": indexed, "last": flag, "last ": running,
    "items": length, "items ": last_of_list, "window": queue, "table": looked_up, "names": member,
    "inner.count": nested, "inner.deep.count": nested_twice, "Keeps.shared": of_class,
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("batched", ["auto", False])
def test_state_read_by_another_step_is_refused_by_name(name: str, batched: Any) -> None:
    with pytest.raises(
        (TypeError, ft.data.BadClients), match=f"Keeps keeps .*{name.strip().partition('.')[0]}.* from step to step"
    ):
        run(Keeps(READ[name]), batched=batched)


def stored(self: Any, h: Tensor) -> Tensor:
    self.last = h.detach()
    return h


def only_counted(self: Any, h: Tensor) -> Tensor:
    self.count += 1
    self.inner.count = 2 * self.count + 1
    return h


def growing(self: Any, h: Tensor) -> Tensor:
    self.items.append(h.shape)
    self.items.extend([1])
    self.table["last"] = h.detach()
    self.window.append(1.0)
    return h


def cached(self: Any, h: Tensor) -> Tensor:
    if self.last is None:
        self.last = torch.arange(3.0, dtype=h.dtype).sum()
    return h * self.last


def cached_by_shape(self: Any, h: Tensor) -> Tensor:
    if h.shape[-1] not in self.table:
        self.table[h.shape[-1]] = torch.full((), 2.0, dtype=h.dtype)
    return h * self.table[h.shape[-1]]


ALLOWED: dict[str, tuple[Step, float]] = {
    "stored": (stored, 1.0),
    "counted": (only_counted, 1.0),
    "growing": (growing, 1.0),
    "cached": (cached, 3.0),
    "cached by shape": (cached_by_shape, 2.0),
}


def looped(module: Keeps, scale: float) -> list[Tensor]:
    """Return the average of the clients' parameters after two steps of a plain loop each."""
    start, done = [p.detach().clone() for p in module.net.parameters()], []
    for k in range(3):
        w, b = (value.clone().requires_grad_() for value in start)
        x = random.normal(random.key(k), (4, 2), torch.float64)
        for _ in range(2):
            grads = torch.autograd.grad((scale * (x @ w.T + b) - x.sum(1, keepdim=True)).square().mean(), [w, b])
            with torch.no_grad():
                w -= 0.1 * grads[0]
                b -= 0.1 * grads[1]
        done.append((w.detach(), b.detach()))
    return [torch.stack(each).mean(0) for each in zip(*done)]


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("batched", ["auto", True, False])
def test_what_no_step_reads_or_all_clients_fill_alike_trains(name: str, batched: Any) -> None:
    call, scale = ALLOWED[name]
    module = Keeps(call)
    server = run(module, batched=batched).server
    for one, other in zip(server.values(), looped(module, scale), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def first_batch(self: Any, h: Tensor) -> Tensor:
    if self.last is None:
        self.last = h.detach().abs().mean()
    return h / self.last


def test_a_cache_that_clients_fill_unlike_is_refused() -> None:
    with pytest.raises((TypeError, ft.data.BadClients), match="keeps last"):
        run(Keeps(first_batch))


TOTAL = 0
SEEN: list[int] = []


def with_global(output: Tensor, target: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    return F.mse_loss(output, target) * (2 if TOTAL > 2 else 1)


def with_global_list(output: Tensor, target: Tensor) -> Tensor:
    SEEN.append(1)
    return F.mse_loss(output, target) * len(SEEN)


@pytest.mark.parametrize(("loss", "name"), [(with_global, "TOTAL"), (with_global_list, "SEEN")])
def test_globals_that_a_loss_reads_are_refused_and_put_back(loss: Any, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        steps(nn.Linear(2, 1).double(), loss)
    assert (TOTAL, SEEN) == (0, [])


def test_closures_of_losses_are_refused_and_restored() -> None:
    count, items, window = 0, [], deque([7], maxlen=2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        count += 1
        items.append(count)
        window.append(count)
        return F.mse_loss(output, target) * count

    with pytest.raises(TypeError, match=r"loss\.count"):
        steps(nn.Linear(2, 1).double(), loss)
    assert (count, items, list(window)) == (0, [], [7])


def test_attributes_of_a_loss_are_refused() -> None:
    class Warm:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return F.mse_loss(output, target) * min(1.0, self.calls / 10)

    loss = Warm()
    with pytest.raises(TypeError, match=r"loss\.calls"):
        steps(nn.Linear(2, 1).double(), loss)
    assert loss.calls == 0


def test_a_class_is_put_back() -> None:
    before = Keeps.shared
    with pytest.raises(TypeError, match=r"Keeps\.shared"):
        steps(Keeps(of_class))
    assert Keeps.shared == before


@pytest.mark.parametrize("call", [counted, length, looked_up, nested])
def test_the_users_module_stays_as_it_was(call: Step) -> None:
    module = Keeps(call)
    with pytest.raises((TypeError, ft.data.BadClients)):
        run(module)
    assert (module.count, module.items, module.table, module.inner.count) == (0, [], {}, 0)


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises((TypeError, ft.data.BadClients)) as caught:
        run(Keeps(counted))
    assert all(way in str(caught.value) for way in ("self.global_step", "buffers='local'", "ft.lightning_fit"))
