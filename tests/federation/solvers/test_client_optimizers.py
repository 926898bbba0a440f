"""Optimisers that look across what one client trains: each client has its own, as in its own loop."""

from __future__ import annotations

import logging
import random as python_random
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fedtorch as ft
from fedtorch import random
from fedtorch.optimisers import elementwise

Make = Callable[[Any], Optimizer]


class Cut(SGD):
    """Cuts the gradients of each parameter to a norm, in place."""

    most = 0.3

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_((self.most / p.grad.norm()).clamp(max=1))
        super().step()


class CutHigh(Cut):
    most = 100.0


class Late(SGD):
    """Divides by norms of gradients after its second step, which it counts outside of its state."""

    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        if self.taken > 2:
            for p in self.param_groups[0]["params"]:
                p.grad = None if p.grad is None else p.grad / p.grad.norm()
        super().step()


class AdaGradNorm(Optimizer):
    """One number for each parameter, of Python or of torch."""

    def __init__(self, parameters: Any, kind: type) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            square = p.grad.square().sum()
            self.state[p]["sum"] = self.state[p].get("sum", 0.1) + (float(square) if self.kind is float else square)
            p.data = p.data - self.param_groups[0]["lr"] * p.grad / p.numel() / self.state[p]["sum"] ** 0.5


class Lookahead(Optimizer):
    """Steps another optimiser, and goes half of the way back in every second step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.fast = Adam(self.param_groups[0]["params"], lr=0.1)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step()
        self.taken += 1
        for p, slow in zip(self.param_groups[0]["params"], self.slow) if self.taken % 2 == 0 else ():
            p.data.lerp_(slow, 0.5)
            slow.copy_(p.data)


class Swinging(Optimizer):
    """Keeps where it began in its state, which is zero where a parameter is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            anchor = self.state[p].setdefault("anchor", p.clone())
            p.sub_(self.param_groups[0]["lr"] * (p.grad / (1 + p.grad.norm()) + p - anchor))


def hooked(parameters: Any) -> Optimizer:
    optimizer = SGD(parameters, lr=0.1)

    def cut(stepped: Any, *_: Any) -> None:
        for p in stepped.param_groups[0]["params"]:
            nn.utils.clip_grad_norm_([p], 0.3)

    optimizer.register_step_pre_hook(cut)
    return optimizer


def patched(parameters: Any) -> Optimizer:
    optimizer = SGD(parameters, lr=0.1)
    step = optimizer.step

    def normed() -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.2)
        step()

    optimizer.step = normed  # type: ignore[assignment, method-assign]
    return optimizer


KEPT: dict[str, Make] = {
    "cut": partial(Cut, lr=0.1, momentum=0.9),
    "Adafactor": partial(Adafactor, lr=0.05, weight_decay=0.1),
    "Muon": partial(Muon, lr=0.05, ns_steps=1),
    "AdaGrad-Norm": partial(AdaGradNorm, kind=Tensor),
    "AdaGrad-Norm of floats": partial(AdaGradNorm, kind=float),
    "a state of zeros": Swinging,
    "hook": hooked,
    "step of its own": patched,
}
MADE_ANEW: dict[str, Make] = {"late": partial(Late, lr=0.1), "look-ahead": Lookahead}

SIZES, EPOCHS, ROUNDS = (4, 4, 6, 4, 2), 4, 2
SHARES = (1.0, 0.5, 1.0, 0.25, 0.75)  # of the epochs, so that clients leave the stack


class Heads(nn.Module):
    """A body and two heads: clients with many rows use the second, and the third nobody. One weight begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4, bias=False)
        self.heads = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(3))
        for i, p in enumerate(self.parameters()):
            p.data = 0.5 * random.normal(random.key(i), p.shape, torch.float64)
        next(self.heads[0].parameters()).data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(len(x) > 4)](self.body(x).tanh())


def clients() -> list[tuple[Tensor, Tensor]]:
    x = [random.normal(random.key(10 + k), (size, 3), torch.float64) for k, size in enumerate(SIZES)]
    return [(each, (k + 1) * each[:, :2]) for k, each in enumerate(x)]


def ours(make: Make, reset: Any = "round", **settings: Any) -> ft.Run:
    local = ft.gradient_descent(Heads(), epochs=EPOCHS, loss=F.mse_loss, optimizer=make, reset=reset, **settings)
    slow = ft.partial_work(1.0, shares=torch.tensor(SHARES))
    return ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(clients())), rounds=ROUNDS, faults=slow)


def loop(make: Make, reset: str = "round", clip: float | None = None) -> dict[str, Tensor]:
    modules = [Heads() for _ in SIZES]
    optimizers = [make(module.parameters()) for module in modules]
    server = {name: p.detach().clone() for name, p in modules[0].named_parameters()}
    for _ in range(ROUNDS):
        for k, (x, y) in enumerate(clients()):
            for name, p in modules[k].named_parameters():
                p.data.copy_(server[name])
            if reset == "round":
                optimizers[k] = make(modules[k].parameters())
            for _ in range(round(SHARES[k] * EPOCHS)):
                optimizers[k].zero_grad()
                F.mse_loss(modules[k](x), y).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(modules[k].parameters(), clip)
                optimizers[k].step()
        each = [dict(module.named_parameters()) for module in modules]
        weighted = lambda name, each=each: sum(n * own[name].detach() for n, own in zip(SIZES, each))
        server = {name: weighted(name) / sum(SIZES) for name in server}
    return server


def check(run: ft.Run, wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        assert not torch.equal(value, dict(Heads().named_parameters())[name]) or name.startswith("heads.2")
        torch.testing.assert_close(run.server[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("batched", ["auto", False])
@pytest.mark.parametrize("name", [*KEPT, *MADE_ANEW])
def test_clients_train_as_in_their_own_loops(name: str, batched: Any) -> None:
    make = {**KEPT, **MADE_ANEW}[name]
    check(ours(make, batched=batched), loop(make))


@pytest.mark.parametrize("name", KEPT)
def test_states_are_kept_by_client(name: str) -> None:
    check(ours(KEPT[name], "never"), loop(KEPT[name], "never"))


def test_clipped_clients_train_as_in_their_own_loops() -> None:
    check(ours(KEPT["Adafactor"], clip=0.2), loop(KEPT["Adafactor"], clip=0.2))


def test_a_bound_that_is_far_away_is_each_clients_own() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(module.weight)
    rows = (torch.full((2, 1), 120.0, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64))
    local = ft.gradient_descent(module, steps=1, loss=lambda o, t: o.mean(), optimizer=lambda p: CutHigh(p, lr=0.01))
    run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors([rows] * 4)), rounds=1)
    assert float(run.server["weight"]) == pytest.approx(-1.0)


@pytest.mark.parametrize("name", MADE_ANEW)
def test_what_is_kept_outside_of_the_state_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"keeps its state outside of the parameters, in .*taken.*use reset='round'"):
        ours(MADE_ANEW[name], "never")


class Growing(SGD):
    """Keeps its gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("seen", []).append(p.grad)
        super().step()


class Warming(SGD):
    """Keeps a counter in its hyperparameters, but not from the first step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        if any(p.grad is not None and p.grad.any() for p in group["params"]):
            group["warm"] = group.get("warm", 0) + 1
        super().step()


def counting(parameters: Any) -> Optimizer:
    """Return an optimiser whose step closes over a count."""
    optimizer, taken = SGD(parameters, lr=0.1), 0
    step = optimizer.step

    def counted() -> None:
        nonlocal taken
        taken += 1
        step()

    optimizer.step = counted  # type: ignore[assignment, method-assign]
    return optimizer


def test_states_that_are_no_numbers_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"Growing to be numbers and tensors, but got seen \(list\)"):
        ours(partial(Growing, lr=0.1), "never")
    with pytest.raises(TypeError, match=r"Warming keeps its state outside of the parameters, in .*warm"):
        ours(partial(Warming, lr=0.1), "never")
    with pytest.raises(TypeError, match=r"SGD keeps its state outside of the parameters, in .*taken"):
        ours(counting, "never")


class Noisy(SGD):
    """Langevin dynamics."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            p.data.add_(0.1 * torch.randn_like(p))


def test_noise_is_each_clients_own_and_does_not_depend_on_company() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    rows = (torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64))
    before, found = torch.get_rng_state(), []
    ways: list[tuple[int | None, Any]] = [(None, "auto"), (1, "auto"), (None, False)]
    for chunk, batched in ways:
        local = ft.gradient_descent(
            module, steps=3, loss=F.mse_loss, optimizer=lambda p: Noisy(p, lr=0.1), batched=batched
        )
        algorithm = ft.ditto(local, 0.0)
        run = ft.run(algorithm, ft.InProcess(ft.data.from_tensors([rows] * 4), chunk), rounds=1)
        found.append(run.tensors()["weight"][:, 0, 0])
    assert torch.equal(torch.get_rng_state(), before)
    assert len(found[0].unique()) == 4
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-12, atol=1e-12)


class HostNoise(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["params"][0].data.add_(python_random.random())


class NeedsClosure(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "two passes"


@pytest.mark.parametrize("batched", ["auto", False])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (HostNoise, "Expected HostNoise to draw by torch, but it draws from Python's random"),
        (NeedsClosure, r"Expected NeedsClosure to step by .*, but it raised AssertionError \(two passes"),
    ],
)
def test_steps_that_cannot_be_taken_are_refused(kind: Any, message: str, batched: Any) -> None:
    with pytest.raises(TypeError, match=message):
        ours(partial(kind, lr=0.1), batched=batched)


class SetsItsRate(SGD):
    """Takes a rate by the norm of its gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["lr"] = float(0.1 / (1 + sum(p.grad.norm() for p in group["params"])))
        super().step()


def test_the_sum_of_rates_is_each_clients_own() -> None:
    module = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    data = ft.data.from_tensors(clients()).stack(range(len(SIZES)))
    local = ft.gradient_descent(module, steps=3, loss=F.mse_loss, optimizer=lambda p: SetsItsRate(p, lr=0.1))
    start, state = ft.tree.expand((local.parameters, local.init(local.parameters)), len(SIZES))
    keys = random.fold_in(random.key(0), torch.arange(len(SIZES)))
    found = local.solve(start, state, data, None, ft.Turn(keys, 0)).lr_sum
    for k, (x, y) in enumerate(clients()):
        own = ft.functional.load(module, {})
        optimizer, total = SetsItsRate(own.parameters(), lr=0.1), 0.0
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(own(x), y).backward()
            optimizer.step()
            total += optimizer.param_groups[0]["lr"]
        assert float(found[k]) == pytest.approx(total, rel=1e-12)


class Scheduled(L.LightningModule):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.heads, self.kind = Heads(), kind

    def training_step(self, batch: Any) -> Tensor:
        output: Tensor = self.heads(batch[0])
        return F.mse_loss(output, batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.1)
        schedule = LambdaLR(optimizer, lambda t: 1 / (1 + t))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_schedules_reach_every_client() -> None:
    local = ft.gradient_descent(Scheduled(Cut), steps=3, reset="never")
    run = ft.run(ft.fedavg(local), ft.InProcess(ft.data.from_tensors(clients())), rounds=1)
    each = []
    for x, y in clients():
        module = Scheduled(Cut)
        configured = module.configure_optimizers()
        for _ in range(3):
            configured["optimizer"].zero_grad()
            module.training_step((x, y)).backward()
            configured["optimizer"].step()
            configured["lr_scheduler"]["scheduler"].step()
        each.append(dict(module.named_parameters()))
    for name, value in run.server.items():
        wanted = sum(n / sum(SIZES) * own[name].detach() for n, own in zip(SIZES, each))
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-11)


def test_a_projection_reaches_every_client() -> None:
    inside = lambda tensors: {name: value.clamp(-0.4, 0.4) for name, value in tensors.items()}
    run = ours(KEPT["Adafactor"], project=inside)
    wanted = Heads()
    with torch.no_grad():
        for p in wanted.parameters():
            p.clamp_(-0.4, 0.4)
    assert all(bool((value.abs() <= 0.4 + 1e-12).all()) for value in run.server.values())
    assert not torch.equal(run.server["body.weight"], wanted.body.weight)


def test_torchs_own_classes_are_bound_to_the_stack_and_others_say_so(caplog: pytest.LogCaptureFixture) -> None:
    parameters = [torch.zeros(2, 2, requires_grad=True)]
    adam = Adam(parameters)
    LambdaLR(adam, lambda t: 1.0)
    assert elementwise(adam)
    for other in (Cut(parameters, lr=0.1), Muon(parameters), hooked(parameters), patched(parameters)):
        assert not elementwise(other)
    handle = register_optimizer_step_pre_hook(lambda *arguments: None)
    assert not elementwise(adam)
    handle.remove()
    with caplog.at_level(logging.INFO):
        ft.gradient_descent(Heads(), epochs=1, loss=F.mse_loss, optimizer=KEPT["Muon"])
    assert "Muon is not one of torch's elementwise optimisers" in caplog.text


def test_a_step_of_a_class_that_was_replaced_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    adam = Adam([torch.zeros(2, requires_grad=True)])
    assert elementwise(adam)
    monkeypatch.setattr(Adam, "step", lambda self, closure=None: None)
    assert not elementwise(adam)
