"""What copies of a module may lose, and state kept elsewhere: attributes of parameters, views, closures, hooks."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from situations.case import Case, Step, adamw, mlp, net, step

ONE_PROCESS = ("default", "batched=False", "batched=True", "chunk=1", "compile=True", "rowwise=True")
MAY_REFUSE = dict.fromkeys(
    (*ONE_PROCESS, "lightning_fit"), "lightning_fit|global_step|buffer|storage|shar|attribute|hook"
)


def loss_of(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s(batch[0]), batch[1])


class FollowingBuffer(nn.Module):
    """A buffer that is the weight itself, detached, and so follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("view", self.layer.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.5 * F.linear(x, self.view)  # type: ignore[arg-type]


class Marked(Step):
    """Parameters that say by an attribute how they train, as of state space models."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)
        for p in self.net[0].parameters():
            p.options = {"lr": 0.001, "weight_decay": 0.0}  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        own = [p for p in self.parameters() if hasattr(p, "options")]
        others = [p for p in self.parameters() if not hasattr(p, "options")]
        return torch.optim.AdamW([{"params": others}, {"params": own, "lr": 0.001}], lr=0.1, weight_decay=0.5)


class Unregistered(nn.Module):
    """A layer in a plain list, which no optimiser sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(4, 3), [nn.Linear(3, 3).requires_grad_(False)]
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden[0](self.first(x)).tanh())


class Made(nn.Module):
    """A buffer that the first forward registers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "places"):
            self.register_buffer("places", torch.arange(x.shape[1], dtype=x.dtype), persistent=False)
        return self.net(x + 0.1 * self.places)


class InSubmodule(nn.Module):
    """A counter in a module inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.net(x) * (1.0 if self.calls < 3 else 0.5)


def bound(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.05, 0.05)


def post_hooked() -> nn.Module:
    made = mlp()
    for p in made.parameters():
        p.register_post_accumulate_grad_hook(bound)
    return made


@functools.cache
def constant(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size, dtype=torch.float64)


def cached(s: Any, batch: Any) -> Tensor:
    """A constant of a cached function."""
    return F.mse_loss(s(batch[0] * constant(4)), batch[1])


def counter() -> Any:
    """Return a step with a counter in a closure."""
    calls = 0

    def function(s: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return loss_of(s, batch) * (1.0 if calls < 3 else 0.3)

    return function


def without_inference(s: Any, batch: Any) -> Tensor:
    with torch.inference_mode():
        target = s(batch[0]).clone()
    return loss_of(s, batch) + (s(batch[0]) - 0.5 * target.clone()).square().mean()


def shared_data() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    made[2].weight.data = made[0].weight.data
    return made


class CountsInABuffer(nn.Module):
    """A loss with a count in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.n += 1
        return F.mse_loss(output, target) * self.n


TABLE = {"steps": 0}
BELOW = {"steps": 0}


def in_a_table(output: Tensor, target: Tensor) -> Tensor:
    TABLE["steps"] += 1
    return F.mse_loss(output, target) * TABLE["steps"]


def beyond_a_bound(output: Tensor, target: Tensor) -> Tensor:
    """A count that only later clients take over its bound."""
    BELOW["steps"] += 1
    return F.mse_loss(output, target) * (1.0 if BELOW["steps"] % 7 < 5 else 3.0)


def in_a_default(output: Tensor, target: Tensor, seen: list[int] = [0]) -> Tensor:  # noqa: B006
    seen[0] += 1
    return F.mse_loss(output, target) * seen[0]


@functools.lru_cache(1)
def numbers() -> Any:
    return itertools.count(1)


def in_a_cache(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * next(numbers())


def in_a_module(norm: nn.Module) -> Any:
    """Return a loss with a running mean in a module that it closes over."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        norm(output.detach())
        return F.mse_loss(output - norm.running_mean, target)  # type: ignore[operator]

    return loss


NOTED: list[float] = []


def noting(output: Tensor, target: Tensor) -> Tensor:
    """A list that nobody reads."""
    NOTED.append(1.0)
    return F.mse_loss(output, target)


def elsewhere(name: str, loss: Any) -> Case:
    """Return a case of a loss that keeps a count, which only processes of their own would have apart."""
    anything = "keep|read|buffer|lightning_fit"
    return net(f"elsewhere: {name}", mlp, loss=loss, epochs=4, refused=dict.fromkeys(MAY_REFUSE, anything))


class Replaces(nn.Module):
    """Puts another parameter in the place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = mlp(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = nn.Parameter(2 * torch.ones(1))
        return self.net(x) * self.scale


class Followed(Step):
    """A teacher that follows the network, in a list or by `__dict__`, so that it is in no state dict."""

    def __init__(self, listed: bool) -> None:
        super().__init__(mlp(), Followed.follow)
        self.listed = listed
        teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.__dict__["teacher"] = [teacher] if listed else teacher

    @property
    def followed(self) -> nn.Module:
        return self.teacher[0] if self.listed else self.teacher

    def follow(self, batch: Any) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.followed.parameters(), self.net.parameters()):
                old.data.mul_(0.9).add_(new, alpha=0.1)
        return loss_of(self, batch) + F.mse_loss(self(batch[0]), self.followed(batch[0]))


class Probed(Step):
    """A part that the step trains by an optimiser of its own."""

    def __init__(self) -> None:
        super().__init__(mlp(), Probed.probed)
        self.probe = nn.Linear(4, 1)
        self.inner = torch.optim.SGD(self.probe.parameters(), lr=0.1, momentum=0.9)

    def probed(self, batch: Any) -> Tensor:
        self.inner.zero_grad()
        F.mse_loss(self.probe(batch[0]), batch[1]).backward()
        self.inner.step()
        return F.mse_loss(self(batch[0]), batch[1] - self.probe(batch[0]).detach())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def hold(s: Any, batch: Any) -> Tensor:
    """A layer that is frozen from the second epoch on."""
    if s.current_epoch >= 1:
        s.net[0].requires_grad_(False)
    return loss_of(s, batch)


def release(s: Any, batch: Any) -> Tensor:
    """A layer that is frozen until the second epoch."""
    s.net[0].requires_grad_(s.current_epoch >= 1)
    return loss_of(s, batch)


def frozen() -> nn.Module:
    made = mlp()
    made[0].requires_grad_(False)
    return made


def momentum(s: Any, batch: Any) -> Tensor:
    """The parameters of the step before, kept on the parameters."""
    moved = sum((p - getattr(p, "old", p.detach())).square().sum() for p in s.net.parameters())
    for p in s.net.parameters():
        p.old = p.detach().clone()
    return loss_of(s, batch) + 0.1 * moved


def in_an_attribute(output: Tensor, target: Tensor) -> Tensor:
    in_an_attribute.calls = getattr(in_an_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return F.mse_loss(output, target) * (1.0 if in_an_attribute.calls % 7 < 5 else 3.0)  # type: ignore[attr-defined]


CASES: list[Case] = [
    Case("elsewhere: a teacher in a list that follows", lambda: Followed(True), epochs=3, refused=MAY_REFUSE),
    Case("elsewhere: a teacher in __dict__ that follows", lambda: Followed(False), epochs=3, refused=MAY_REFUSE),
    Case("elsewhere: a probe with an optimiser of its own", Probed, epochs=3, refused=MAY_REFUSE),
    step("elsewhere: a layer that a later epoch freezes", hold, epochs=3, refused=MAY_REFUSE),
    step("elsewhere: a layer that a later epoch unfreezes", release, frozen, epochs=3, refused=MAY_REFUSE),
    step("elsewhere: parameters of the step before", momentum, epochs=3, refused=MAY_REFUSE),
    elsewhere("a count in an attribute of a function", in_an_attribute),
    elsewhere("a count in a buffer of the loss", CountsInABuffer()),
    elsewhere("a count in a table of the file", in_a_table),
    elsewhere("a count that later clients take over a bound", beyond_a_bound),
    elsewhere("a count in a default argument", in_a_default),
    elsewhere("a count in a cached iterator", in_a_cache),
    elsewhere("a running mean of a module in the loss's closure", in_a_module(nn.BatchNorm1d(1).double())),
    net("elsewhere: a list of the file that nobody reads", mlp, loss=noting, rowwise=True, compiles=False),
    net(
        "elsewhere: a parameter that a forward replaces",
        Replaces,
        refused=dict.fromkeys(MAY_REFUSE, "another parameter"),
    ),
    net("elsewhere: a buffer that is the weight, detached", FollowingBuffer, refused=MAY_REFUSE),
    Case("elsewhere: options as attributes of parameters state-spaces/s4", Marked, epochs=3),
    net("elsewhere: a layer in a plain list", Unregistered, rowwise=True),
    net("elsewhere: a buffer registered by the first forward", Made, rowwise=True, refused=MAY_REFUSE),
    net("elsewhere: a counter in a submodule", InSubmodule, epochs=4, refused=MAY_REFUSE),
    net("elsewhere: a hook after gradients are there", post_hooked, refused=MAY_REFUSE),
    step("elsewhere: a constant of a cached function", cached),
    Case("elsewhere: a counter in a closure", lambda: Step(mlp(), counter()), epochs=4, refused=MAY_REFUSE),
    net("elsewhere: weights that share .data ludwig#3410", shared_data, optimizer=adamw(), refused=MAY_REFUSE),
    step("elsewhere: a target in inference mode", without_inference, refused=MAY_REFUSE),
]
