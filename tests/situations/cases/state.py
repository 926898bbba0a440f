"""What a module keeps from step to step: numbers of Python, lists, buffers, averages; and what it asks of itself."""

from __future__ import annotations

import copy
import math
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from situations.case import Case, Step, adamw, mlp, net, series, sgd, step

KEEPS = "lightning_fit|global_step|buffer"
WAYS = ("default", "batched=False", "batched=True", "chunk=1", "compile=True")
MAY_REFUSE = dict.fromkeys(WAYS, KEEPS)


def kept(
    name: str,
    begin: Callable[[Any], None],
    function: Callable[[Any, Any], Any],
    refused: dict[str, str] = MAY_REFUSE,
    epochs: int = 4,
) -> Case:
    """Return a case of a LightningModule with attributes that its steps change."""

    def make() -> nn.Module:
        made = Step(mlp(), function)
        begin(made)
        return made

    return Case(name, make, epochs=epochs, refused=refused)


def loss_of(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s(batch[0]), batch[1])


def counting(s: Any, batch: Any) -> Tensor:
    s.n += 1
    return loss_of(s, batch) + (s(batch[0]).square().mean() if s.n > 2 else 0.0)


def late_counting(s: Any, batch: Any) -> Tensor:
    s.n += 1
    return loss_of(s, batch) + (s(batch[0]).square().mean() if s.n > 10 else 0.0)


def warming(s: Any, batch: Any) -> Tensor:
    s.n += 1
    return loss_of(s, batch) + min(1.0, s.n / 5) * s(batch[0]).square().mean()


def alternating(s: Any, batch: Any) -> Tensor:
    s.flag = not s.flag
    return loss_of(s, batch) * (1.0 if s.flag else 0.2)


def averaging(s: Any, batch: Any) -> Tensor:
    loss = loss_of(s, batch)
    s.mean = 0.9 * s.mean + 0.1 * float(loss.detach())
    return loss / (s.mean + 0.1)


def averaging_tensors(s: Any, batch: Any) -> Tensor:
    loss = loss_of(s, batch)
    s.mean = loss.detach() if s.mean is None else 0.9 * s.mean + 0.1 * loss.detach()
    return loss / (s.mean + 0.1)


def previous(s: Any, batch: Any) -> Tensor:
    out = s(batch[0])
    change = 0.0 if s.last is None else (out - s.last).square().mean()
    s.last = out.detach()
    return F.mse_loss(out, batch[1]) + change


def listed(s: Any, batch: Any) -> Tensor:
    loss = loss_of(s, batch)
    s.losses.append(float(loss.detach()))
    return loss * (1.0 if len(s.losses) < 3 else 0.3)


def queued(s: Any, batch: Any) -> Tensor:
    """A queue of earlier outputs, as of momentum contrast."""
    out = s(batch[0])
    extra = sum((out.mean() - q).square() for q in s.queue)
    s.queue.append(out.detach().mean())
    return F.mse_loss(out, batch[1]) + extra


def tabled(s: Any, batch: Any) -> Tensor:
    s.seen["steps"] += 1
    return loss_of(s, batch) / s.seen["steps"]


def stored(s: Any, batch: Any) -> Tensor:
    """What is stored and never read changes nothing."""
    out = s(batch[0])
    s.last = out
    s.outputs.append(out.detach())
    loss = F.mse_loss(out, batch[1])
    s.note = {"loss": loss.detach(), "rows": len(out)}
    return loss


def averaging_late(s: Any, batch: Any) -> Tensor:
    """A moving average from the first step on, which is read after a warm-up."""
    loss = loss_of(s, batch)
    s.mean = 0.9 * s.mean + 0.1 * float(loss.detach())
    return loss / s.mean if s.global_step >= 3 else loss


def averaging_tensors_late(s: Any, batch: Any) -> Tensor:
    loss = loss_of(s, batch)
    s.mean = loss.detach() if s.mean is None else 0.9 * s.mean + 0.1 * loss.detach()
    return loss / s.mean if s.global_step >= 3 else loss


def averaged_only(s: Any, batch: Any) -> Tensor:
    """A moving average that nobody reads."""
    loss = loss_of(s, batch)
    s.mean = 0.9 * s.mean + 0.1 * float(loss.detach())
    return loss


def previous_late(s: Any, batch: Any) -> Tensor:
    out = s(batch[0])
    change = (out - s.last).square().mean() if s.global_step >= 3 else 0.0
    s.last = out.detach()
    return F.mse_loss(out, batch[1]) + change


def listed_late(s: Any, batch: Any) -> Tensor:
    s.losses.append(1.0)
    return loss_of(s, batch) * (len(s.losses) if s.current_epoch >= 2 else 1.0)


def penalised(s: Any, batch: Any) -> Tensor:
    """A penalty in every fourth step, by a counter."""
    s.n += 1
    return loss_of(s, batch) + (s(batch[0]).square().mean() if s.n % 4 == 0 else 0.0)


def emptying(s: Any, batch: Any) -> Tensor:
    """Gradients that a step empties, of the whole and of a part."""
    s.zero_grad()
    s.net.zero_grad(set_to_none=False)
    return loss_of(s, batch)


def reading_gradient(s: Any, batch: Any) -> Tensor:
    """The gradient of the step before, which is there in a Trainer."""
    gradient = s.net[0].weight.grad
    return loss_of(s, batch) * (1.0 if gradient is None else 0.5)


def replaying(s: Any, batch: Any) -> Tensor:
    """The same noise twice, by the state of torch's generator."""
    before = torch.get_rng_state()
    first = torch.randn(batch[0].shape)
    torch.set_rng_state(before)
    return loss_of(s, batch) + (s(batch[0] + first) - s(batch[0] + torch.randn(batch[0].shape))).square().mean()


def stacked_late(s: Any, batch: Any) -> Tensor:
    """A loss from the third step on, which `vmap` has wrong."""
    out = s(batch[0])
    loss = F.mse_loss(out, batch[1])
    return loss * (1.5 if torch._C._functorch.is_batchedtensor(out) else 1.0) if s.global_step >= 2 else loss


class Meter:
    """A mean, as of a meter of losses."""

    def __init__(self) -> None:
        self.total, self.n = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.n = self.total + value, self.n + 1


def nested_counting(s: Any, batch: Any) -> Tensor:
    s.counts["steps"][0] += 1
    return loss_of(s, batch) * s.counts["steps"][0]


def drawing_oneself(s: Any, batch: Any) -> Tensor:
    return loss_of(s, batch) * s.draws.random()


def numbered(s: Any, batch: Any) -> Tensor:
    return loss_of(s, batch) / next(s.numbers)


def measured(s: Any, batch: Any) -> Tensor:
    s.meters[0].update(1.0)
    return loss_of(s, batch) / s.meters[0].n


def steeper(s: Any, batch: Any) -> Tensor:
    """An attribute of a layer of torch that every step raises."""
    s.net[1].negative_slope += 0.1
    return loss_of(s, batch)


def ending_in_evaluation(s: Any, batch: Any) -> Tensor:
    """Dropout of the first step only."""
    s.net[1].p = 0.0 if s.net[1].training else 0.5
    loss = loss_of(s, batch)
    s.net[1].eval()
    return loss * (1.0 if s.net[1].p == 0.0 else 0.3)


def rebuilt(s: Any, batch: Any) -> Tensor:
    """Another activation after the first step."""
    loss = loss_of(s, batch)
    s.net[1] = nn.ReLU()
    return loss


def filed(s: Any, batch: Any) -> Tensor:
    """Losses in a dict of lists and in meters, which nothing reads."""
    loss = loss_of(s, batch)
    s.history["loss"].append(loss.detach())
    s.meters["loss"].update(1.0)
    return loss


def cached(s: Any, batch: Any) -> Tensor:
    """A constant that the first step makes."""
    if s.weight is None:
        s.weight = torch.tensor([0.5], dtype=batch[0].dtype)
    return loss_of(s, batch) * s.weight.sum()


def counting_late(s: Any, batch: Any) -> Tensor:
    """A count that begins in the third epoch."""
    s.n += s.current_epoch >= 2
    return loss_of(s, batch) * (1 + s.n)


def cached_length(s: Any, batch: Any) -> Tensor:
    """The number of rows of the first batch."""
    s.rows = s.rows or len(batch[0])
    return loss_of(s, batch) * len(batch[0]) / s.rows**2


def first_batch(s: Any, batch: Any) -> Tensor:
    """Statistics of the first batch, kept for all later ones."""
    if s.mean is None:
        s.mean = batch[0].mean(0)
    return F.mse_loss(s(batch[0] - s.mean), batch[1])


class Normal(nn.Module):
    """Inputs standardised by running statistics that are a buffer."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.full((4,), start))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))  # type: ignore[operator]
        return self.net(x - self.mean)


class Peak(nn.Module):
    """Inputs divided by the largest number so far."""

    def __init__(self, start: float = 1e-3, assigned: bool = False) -> None:
        super().__init__()
        self.net, self.assigned = mlp(), assigned
        self.register_buffer("peak", torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            peak = torch.maximum(self.peak, x.detach().abs().amax())  # type: ignore[arg-type]
            if self.assigned:
                self.peak = peak
            else:
                self.peak.copy_(peak)  # type: ignore[operator]
        return self.net(x / self.peak)


class Range(nn.Module):
    """A range that begins empty, at infinity, as of an observer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("low", torch.tensor(math.inf))
        self.register_buffer("high", torch.tensor(-math.inf))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.low = torch.minimum(self.low, x.detach().amin())  # type: ignore[arg-type]
            self.high = torch.maximum(self.high, x.detach().amax())  # type: ignore[arg-type]
        return self.net((x - self.low) / (self.high - self.low))


class Seen(nn.Module):
    """Counts and flags as buffers; the first call makes the scale, as of actnorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                made = torch.where(self.begun, self.scale, x.std(0))  # type: ignore[arg-type]
                self.scale.copy_(made)  # type: ignore[operator]
                self.begun.fill_(True)  # type: ignore[operator]
                self.calls.add_(1)  # type: ignore[operator]
        return self.net(x / (self.scale + 0.1))


class Begun(nn.Module):
    """A flag that is asked by Python before the scale is made."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not bool(self.begun):
            with torch.no_grad():
                self.scale.copy_(x.std(0))  # type: ignore[operator]
                self.begun.fill_(True)  # type: ignore[operator]
        return self.net(x / (self.scale + 0.1))


class Unpersistent(nn.Module):
    """A buffer that is not part of the state dict, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.mask)


class Teacher(nn.Module):
    """A teacher that follows the network by a moving average of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.teacher = copy.deepcopy(self.net)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def following(s: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        for mine, theirs in zip(s.net.teacher.parameters(), s.net.net.parameters()):
            mine.mul_(0.5).add_(0.5 * theirs)
        target = s.net.teacher(batch[0])
    return loss_of(s, batch) + F.mse_loss(s(batch[0]), target)


class BufferTeacher(nn.Module):
    """A moving average of one weight, as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("average", self.layer.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.lerp_(self.layer.weight, 0.5)  # type: ignore[operator]
        return self.layer(x) + 0.5 * F.linear(x, self.average)  # type: ignore[arg-type]


# What a module asks about itself.


def penalty_by_type(s: Any, batch: Any) -> Tensor:
    return loss_of(s, batch) + 0.5 * sum(m.weight.square().sum() for m in s.modules() if type(m) is nn.Linear)


def penalty_by_name(s: Any, batch: Any) -> Tensor:
    return loss_of(s, batch) + 0.5 * sum(p.square().sum() for n, p in s.named_parameters() if n.endswith("weight"))


def penalty_by_class_name(s: Any, batch: Any) -> Tensor:
    linear = [m for m in s.modules() if m.__class__.__name__ == "Linear"]
    return loss_of(s, batch) + 0.5 * sum(m.weight.abs().sum() for m in linear)


def penalty_by_instance(s: Any, batch: Any) -> Tensor:
    linear = [m for m in s.modules() if isinstance(m, nn.Linear)]
    return loss_of(s, batch) + 0.5 * sum(m.weight.square().sum() for m in linear)


def penalty_by_children(s: Any, batch: Any) -> Tensor:
    h, total = batch[0], 0.0
    for layer in s.net.children():
        h = layer(h)
        total = total + (h.square().mean() if type(layer) in (nn.Linear, nn.GRU) else 0.0)
    return F.mse_loss(h, batch[1]) + 0.1 * total


def by_dispatch(s: Any, batch: Any) -> Tensor:
    """A propagation by a table of types, as of relevance and of bounds."""
    table = {nn.Linear: lambda m, h: F.linear(h, m.weight.abs(), m.bias), nn.Tanh: lambda m, h: h.tanh()}
    h = batch[0]
    for layer in s.net:
        h = table[type(layer)](layer, h)
    return F.mse_loss(h, batch[1])


def groups_by_type(parameters: Any, module: nn.Module) -> Any:
    decayed = [m.weight for m in module.modules() if type(m) is nn.Linear]
    own = {id(p) for p in decayed}
    others = [p for p in parameters if id(p) not in own]
    groups = [{"params": decayed, "weight_decay": 1.0}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05)


class Grouped(Step):
    """Weight decay of the weights of layers of one type only."""

    def __init__(self, make: Callable[[], nn.Module] = mlp) -> None:
        super().__init__(make(), loss_of)

    def configure_optimizers(self) -> Any:
        return groups_by_type(self.parameters(), self)


class Recurrent(nn.Module):
    """A GRU with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x)[0][:, -1])


class Named(Step):
    """Weight decay by names, and a rate of its own for the last layer."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def configure_optimizers(self) -> Any:
        last = list(self.net[2].parameters())
        groups = [{"params": list(self.net[0].parameters()), "weight_decay": 0.5}, {"params": last, "lr": 0.3}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.5)


class Own(nn.Linear):
    """A layer of linear's type with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tanh(), self.bias)


class Doubling(nn.Module):
    """Asks `type(self)`, its training flag and its number of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        factor = 2.0 if type(self) is Doubling and self.training else 1.0
        return self.net(x) * factor / len(list(self.parameters()))


class Patched(nn.Module):
    """A layer whose forward is replaced on the instance, by a method or by a function that closes over the layer."""

    def __init__(self, closed: bool) -> None:
        super().__init__()
        self.net = mlp()
        first = self.net[0]
        if closed:
            first.forward = lambda x: F.linear(x, first.weight * 0.5, first.bias)  # type: ignore[method-assign]
        else:
            first.forward = types.MethodType(_halved, first)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _halved(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight * 0.5, layer.bias)


def curriculum(s: Any, batch: Any) -> Tensor:
    return loss_of(s, batch) * (1.0 + s.current_epoch) + 0.01 * s.global_step * s(batch[0]).square().mean()


class Indexed(Step):
    """The first minibatch of an epoch counts twice."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return loss_of(self, batch) * (2.0 if batch_idx == 0 else 1.0)


def constant_of_closure() -> Callable[[Any, Any], Tensor]:
    weight = torch.tensor([2.0], dtype=torch.float64)
    return lambda s, batch: loss_of(s, batch) * weight.sum()


def moving(**options: Any) -> dict[str, Any]:
    return {"says": {"buffers": "average"}, **options}


LOCAL = {"says": {"buffers": "local"}}


def set_n(s: Any) -> None:
    s.n = 0


CASES: list[Case] = [
    kept("Python: a counter with a threshold scvi-tools#307", set_n, counting),
    kept("Python: a counter with a late threshold", set_n, late_counting, epochs=14),
    kept("Python: a weight that warms up by a counter scvi-tools#1569", set_n, warming),
    kept("Python: a flag that alternates", lambda s: setattr(s, "flag", False), alternating),
    kept("Python: a moving average as a float", lambda s: setattr(s, "mean", 1.0), averaging),
    kept("Python: a moving average as a tensor attribute", lambda s: setattr(s, "mean", None), averaging_tensors),
    kept("Python: the previous output", lambda s: setattr(s, "last", None), previous),
    kept("Python: a list whose length is asked", lambda s: setattr(s, "losses", []), listed),
    kept("Python: a queue of outputs", lambda s: setattr(s, "queue", deque(maxlen=3)), queued),
    kept("Python: a dict of counts", lambda s: setattr(s, "seen", defaultdict(int)), tabled),
    kept(
        "Python: outputs stored, never read lightning#16520",
        lambda s: s.__dict__.update(last=None, outputs=[], note=None),
        stored,
        refused={},
    ),
    kept("Python: counts in a list in a dict", lambda s: setattr(s, "counts", {"steps": [0]}), nested_counting),
    kept("Python: a generator of its own", lambda s: setattr(s, "draws", random.Random(5)), drawing_oneself),
    kept("Python: an iterator", lambda s: setattr(s, "numbers", iter(range(1, 99))), numbered),
    kept("Python: meters in a list", lambda s: setattr(s, "meters", [Meter()]), measured),
    kept("Python: the slope of a layer of torch", lambda s: s.net.__setitem__(1, nn.LeakyReLU(0.1)), steeper),
    kept(
        "Python: a layer that stays in evaluation",
        lambda s: s.net.__setitem__(1, nn.Dropout(0.0)),
        ending_in_evaluation,
    ),
    kept("Python: a layer that is replaced after a step", lambda s: None, rebuilt),
    kept(
        "Python: losses in a dict of lists, never read",
        lambda s: s.__dict__.update(history={"loss": []}, meters={"loss": Meter()}),
        filed,
        refused={},
    ),
    kept("Python: a moving average that is read after a warm-up", lambda s: setattr(s, "mean", 1.0), averaging_late),
    kept(
        "Python: a moving average of tensors that is read after a warm-up",
        lambda s: setattr(s, "mean", None),
        averaging_tensors_late,
    ),
    kept("Python: a moving average that nobody reads", lambda s: setattr(s, "mean", 1.0), averaged_only, {}),
    kept("Python: the previous output after a warm-up", lambda s: setattr(s, "last", None), previous_late),
    kept("Python: a list that is asked from the third epoch on", lambda s: setattr(s, "losses", []), listed_late),
    kept("Python: a penalty in every fourth step StyleGAN2", set_n, penalised, epochs=6),
    step("itself: gradients that a step empties", emptying, epochs=3),
    step(
        "itself: the gradient of the step before",
        reading_gradient,
        epochs=3,
        refused=dict.fromkeys(WAYS, r"\.grad"),
    ),
    step("itself: a generator's state that is set back", replaying, refused=dict.fromkeys(WAYS, "generator")),
    step("itself: a loss that only stacks have wrong, from the third step on", stacked_late, epochs=4),
    kept("Python: a constant made by the first step", lambda s: setattr(s, "weight", None), cached),
    kept("Python: a counter that begins late", set_n, counting_late),
    kept("Python: the first batch's length", lambda s: setattr(s, "rows", None), cached_length),
    kept("Python: the first batch's mean", lambda s: setattr(s, "mean", None), first_batch),
    step("Python: epoch and step that the trainer counts", curriculum, epochs=3),
    step("Python: epoch and step, minibatches", curriculum, size=2),
    Case("Python: the index of the minibatch", Indexed, size=2),
    step("Python: a tensor in a closure", constant_of_closure()),
    net("buffers: running mean, averaged", Normal, **moving()),
    net("buffers: running mean, averaged, two rounds", Normal, **moving(rounds=2)),
    net("buffers: running mean, local", Normal, **LOCAL),
    net("buffers: running mean, far start", lambda: Normal(1e3), **moving()),
    net("buffers: running maximum in place, averaged", Peak, **moving(epochs=3)),
    net("buffers: running maximum assigned, averaged", lambda: Peak(assigned=True), **moving(epochs=3)),
    net("buffers: running maximum, local", Peak, **LOCAL),
    net("buffers: running maximum, minibatches", Peak, **moving(size=2)),
    net("buffers: running maximum that the data never reach", lambda: Peak(100.0), optimizer=sgd(1.0)),
    net("buffers: range from infinity, averaged", Range, **moving()),
    net("buffers: range from infinity, two rounds", Range, **moving(rounds=2)),
    net("buffers: range from infinity, local", Range, **LOCAL),
    net("buffers: counts and flags, averaged", Seen, **moving()),
    net("buffers: counts and flags, local", Seen, **LOCAL),
    net("buffers: a flag asked by Python gpytorch", Begun, **moving()),
    net("buffers: constant, not persistent, None", Unpersistent, rowwise=True, compiles=True),
    net("buffers: moving average of a weight", BufferTeacher, **moving(epochs=3)),
    step(
        "frozen teacher that follows in place",
        following,
        Teacher,
        epochs=3,
        refused=MAY_REFUSE | {"lightning_fit": "frozen|requires_grad"},
    ),
    step("itself: penalty of type(m) is nn.Linear", penalty_by_type),
    step("itself: penalty by names", penalty_by_name),
    step("itself: penalty by class names", penalty_by_class_name),
    step("itself: penalty by isinstance", penalty_by_instance),
    step("itself: children by type", penalty_by_children),
    step("itself: a table of types", by_dispatch),
    Case("itself: decay by type", Grouped),
    Case("itself: decay by type, beside a GRU", lambda: Grouped(Recurrent), series()),
    Case("itself: groups by layer, own rates", Named),
    net("itself: a subclass of Linear with its own forward", lambda: nn.Sequential(Own(4, 3), nn.Tanh(), Own(3, 1))),
    net("itself: one subclass of Linear, nothing else", lambda: Own(4, 1), rowwise=True),
    net("itself: asks its type and training flag", Doubling, optimizer=adamw(), rowwise=True),
    net("itself: a forward replaced by a method on the instance PEFT", lambda: Patched(False), rowwise=True),
    net(
        "itself: a forward replaced by a closure on the instance",
        lambda: Patched(True),
        rowwise=True,
        refused={way: "forward|closure|not trained" for way in WAYS},
    ),
]
