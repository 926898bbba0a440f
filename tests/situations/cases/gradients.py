"""Gradients that are changed on their way, taken inside a step, or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parameters_to_vector

from situations.case import Case, Step, adam, adamw, labelled, mlp, net, sgd, step


def hooked(name: str, change: Callable[[nn.Sequential], Any], **options: Any) -> Case:
    """Return a case of a perceptron that has been given a hook."""

    def make() -> nn.Module:
        made = mlp()
        change(made)
        return made

    return net(name, make, **options)


def masked(made: nn.Sequential) -> None:
    made[0].weight.register_hook(lambda g: g * g.new_tensor([1.0, 1.0, 0.0, 0.0]))


def clamped(made: nn.Sequential) -> None:
    for p in made.parameters():
        p.register_hook(lambda g: g.clamp(-0.05, 0.05))


def normed(made: nn.Sequential) -> None:
    made[2].weight.register_hook(lambda g: g / (g.norm() + 1e-3))


def replaced_outputs(made: nn.Sequential) -> None:
    made[0].register_forward_hook(lambda module, args, output: output * 2)


def replaced_inputs(made: nn.Sequential) -> None:
    made[2].register_forward_pre_hook(lambda module, args: (args[0] - 0.5,))


def halved_inside(made: nn.Sequential) -> None:
    made[1].register_full_backward_hook(lambda module, gin, gout: tuple(g / 2 for g in gin))


def normed_inside(made: nn.Sequential) -> None:
    made[1].register_full_backward_hook(lambda module, gin, gout: tuple(g / g.norm() for g in gin))


def halved_before(made: nn.Sequential) -> None:
    made[1].register_full_backward_pre_hook(lambda module, gout: tuple(g / 2 for g in gout))


class Unit(torch.autograd.Function):
    """The identity, whose gradient has norm one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign: an adversary's layer, written the old way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * g, None


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity in [−1, 1]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1)


class Spike(torch.autograd.Function):
    """A step function with a surrogate gradient, once differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g / (1 + 10 * x.abs()).square()


class Between(nn.Module):
    """A perceptron with a function of its hidden units."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(4, 3), function, nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def between(name: str, function: Callable[[Tensor], Tensor], **options: Any) -> Case:
    return net(name, lambda: Between(function), **options)


def with_hook(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(h: Tensor) -> Tensor:
        h = torch.tanh(h)
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return function


def scaled_by_the_batch(h: Tensor) -> Tensor:
    """The identity, whose gradient is scaled by the batch."""
    k = 1 / h.detach().abs().sum()
    return h * k + (h - h * k).detach()


def rounded(h: Tensor) -> Tensor:
    return h + ((4 * h).round() / 4 - h).detach()


def quantised(h: Tensor) -> Tensor:
    """Straight through a scale of the whole batch, as of quantisation-aware training."""
    scale = h.detach().abs().max() / 7
    return h + ((h / scale).round() * scale - h).detach()


def one_hot_through(h: Tensor) -> Tensor:
    soft = h.softmax(-1)
    hard = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard + soft - soft.detach()


def nearest_code(h: Tensor) -> Tensor:
    codes = torch.linspace(-1, 1, 12, dtype=h.dtype).view(4, 3)
    code = codes[torch.cdist(h, codes).argmin(1)]
    return h + (code - h).detach()


# Steps with gradients inside.


def penalty_of_inputs(s: Any, batch: Any) -> Tensor:
    """A gradient penalty, as of a critic lightning#4487."""
    x = batch[0].clone().requires_grad_()
    out = s(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + 0.1 * (g.norm(dim=1) - 1).square().mean()


def forces(s: Any, batch: Any) -> Tensor:
    """Energies and their negative gradients as forces lightning#10287."""
    x = batch[0].detach().requires_grad_()
    energy = s(x).sum(1)
    (g,) = torch.autograd.grad(energy, x, torch.ones_like(energy), create_graph=True)
    return (energy - batch[1][:, 0]).square().mean() + (g + batch[0]).square().mean()


def equation(s: Any, batch: Any) -> Tensor:
    """The residual of u'' = −u at points, by second derivatives."""
    x = batch[0][:, :1].clone().requires_grad_()
    u = s(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second + u).square().mean() + (u[0] - 1).square().sum()


def by_transform(s: Any, batch: Any) -> Tensor:
    g = torch.func.vmap(torch.func.grad(lambda x: s(x).sum()))(batch[0])
    return F.mse_loss(s(batch[0]), batch[1]) + 0.1 * g.square().mean()


def jacobian(s: Any, batch: Any) -> Tensor:
    j = torch.func.vmap(torch.func.jacrev(s.net))(batch[0])
    return F.mse_loss(s(batch[0]), batch[1]) + 0.1 * j.square().sum((1, 2)).mean()


def tangent(s: Any, batch: Any) -> Tensor:
    x, v = batch[0], torch.ones_like(batch[0])
    out, slope = torch.func.jvp(s.net, (x,), (v,))
    return F.mse_loss(out, batch[1]) + 0.1 * slope.square().mean()


def adversarial(s: Any, batch: Any) -> Tensor:
    """A step on the inputs against the loss, with the gradient's sign."""
    x = batch[0].clone().requires_grad_()
    (g,) = torch.autograd.grad(F.mse_loss(s(x), batch[1]), x)
    return F.mse_loss(s(batch[0] + 0.1 * g.sign()), batch[1])


def virtual_adversary(s: Any, batch: Any) -> Tensor:
    d = (0.1 * torch.ones_like(batch[0])).requires_grad_()
    clean = s(batch[0])
    (g,) = torch.autograd.grad((s(batch[0] + d) - clean.detach()).square().sum(), d)
    return F.mse_loss(clean, batch[1]) + (s(batch[0] + 0.1 * g / (g.norm() + 1e-6)) - clean.detach()).square().mean()


def inner_step(s: Any, batch: Any) -> Tensor:
    """One step of a copy of the parameters inside, as of meta-learning."""
    parameters = dict(s.net.named_parameters())
    call = lambda values: F.mse_loss(torch.func.functional_call(s.net, values, (batch[0],)), batch[1])
    grads = torch.autograd.grad(call(parameters), list(parameters.values()), create_graph=True)
    return call({n: p - 0.1 * g for (n, p), g in zip(parameters.items(), grads)})


def gradient_norm(s: Any, batch: Any) -> Tensor:
    loss = F.mse_loss(s(batch[0]), batch[1])
    grads = torch.autograd.grad(loss, list(s.net.parameters()), create_graph=True)
    return loss + 0.1 * sum(g.square().sum() for g in grads)


def enabled(s: Any, batch: Any) -> Tensor:
    with torch.enable_grad():
        return penalty_of_inputs(s, batch)


def partly_without(s: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        target = 0.5 * s(batch[0]) + 0.5 * batch[1]
    return F.mse_loss(s(batch[0]), target)


def stopped(s: Any, batch: Any) -> Tensor:
    """Two views, one of them behind a stopped gradient."""
    first, second = s(batch[0]), s(batch[0] + 0.1)
    return F.mse_loss(first, second.detach()) + F.mse_loss(first, batch[1])


def hooked_loss(s: Any, batch: Any) -> Tensor:
    out = s(batch[0])
    if out.requires_grad:
        out.register_hook(lambda g: g / (g.norm() + 1e-6))
    return F.mse_loss(out, batch[1])


# Parts without gradients: None, not zero, so that nothing decays and no moments move.


class Heads(nn.Module):
    """A head for each task on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 3), nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


def task_rows(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of one task a client, which goes by the client's first number."""
    x = torch.randn(n, 4)
    return x, torch.randn(n, 1), torch.full((n,), int(x[0, 0] > 0) + int(x[0, 1] > 0))


def one_head(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s.net.heads[int(batch[2][0])](s.net(batch[0])), batch[1])


def heads(name: str, optimizer: Any, **options: Any) -> Case:
    return step(name, one_head, Heads, task_rows, optimizer=optimizer, **options)


class Unused(nn.Module):
    """A layer that no step reads, beside those of use."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused, self.alone = mlp(), nn.Linear(4, 2), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Late(Step):
    """A layer that takes part from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList([mlp(), nn.Linear(4, 1)]), lambda s, b: None, adamw())

    def forward(self, x: Tensor) -> Tensor:
        return self.net[0](x)

    def training_step(self, batch: Any) -> Tensor:
        out = self.net[0](batch[0])
        if self.current_epoch > 0:
            out = out + self.net[1](batch[0])
        return F.mse_loss(out, batch[1])


class Branch(nn.Module):
    """One of two layers, by the sign of the batch's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if bool(x.sum() > 0) else self.right(x)


class Experts(nn.Module):
    """Experts that are called on the rows they win, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(1)
        chosen, out = gates.argmax(1), x.new_zeros(len(x), 1)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * gates[rows, index : index + 1])
        return out


def thawing(s: Any, batch: Any) -> Tensor:
    """The first layer takes part from the second step on."""
    s.net[0].requires_grad_(s.global_step > 0)
    return F.mse_loss(s(batch[0]), batch[1])


def detached_body(s: Any, batch: Any) -> Tensor:
    h = s.net[1](s.net[0](batch[0]))
    return F.mse_loss(s.net[2](h if s.current_epoch else h.detach()), batch[1])


def frozen(made: nn.Sequential) -> None:
    made[0].requires_grad_(False)


def frozen_bias(made: nn.Sequential) -> None:
    made[0].bias.requires_grad_(False)


def unused(name: str, optimizer: Any) -> Case:
    return net(name, Unused, optimizer=optimizer, rowwise=True)


def vector_penalty(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s(batch[0]), batch[1]) + 0.1 * parameters_to_vector(s.net.parameters()).square().mean()


TRAINER = {"default": "lightning_fit", "batched=False": "lightning_fit"}
CASES: list[Case] = [
    hooked("hook of a parameter: a mask sparseml#1438", masked, rowwise=True),
    hooked("hook of a parameter: a mask, Adam", masked, optimizer=adam(), rowwise=True),
    hooked("hook of a parameter: a bound", clamped),
    hooked("hook of a parameter: divided by its norm", normed),
    hooked("hook of a module: outputs doubled", replaced_outputs, rowwise=True),
    hooked("hook of a module: inputs shifted", replaced_inputs, rowwise=True),
    hooked("hook of a module: gradients halved functorch#638", halved_inside, rowwise=True),
    hooked("hook of a module: gradients divided by their norm", normed_inside),
    hooked("hook of a module: gradients halved before", halved_before, rowwise=True),
    between("hook of a tensor: divided by its norm pytorch#99556", with_hook(lambda g: g / (g.norm() + 1e-6))),
    between("hook of a tensor: doubled", with_hook(lambda g: 2 * g), rowwise=True),
    between("hook of a tensor: bounded", with_hook(lambda g: g.clamp(-0.01, 0.01))),
    step("hook of the output: divided by its norm", hooked_loss),
    between("function: gradient of norm one", Unit.apply),
    between("function: reversed gradient", lambda h: Reversed.apply(h, 0.5), rowwise=True),
    between("function: sign, straight through", Sign.apply, rowwise=True),
    between("function: spikes with a surrogate gradient", Spike.apply, rowwise=True),
    between("straight through: scaled by the batch", scaled_by_the_batch),
    between("straight through: rounded", rounded, rowwise=True),
    between("straight through: quantised by the batch's range", quantised),
    between("straight through: one hot", one_hot_through, rowwise=True),
    between("straight through: nearest code", nearest_code, rowwise=True),
    step("gradient inside: penalty of inputs lightning#4487", penalty_of_inputs),
    step("gradient inside: energies and forces lightning#10287", forces),
    step("gradient inside: differential equation", equation, lambda: mlp(1), metrics={}),
    step("gradient inside: torch.func.grad", by_transform),
    step("gradient inside: torch.func.jacrev", jacobian),
    step("gradient inside: torch.func.jvp", tangent),
    step("gradient inside: adversarial rows", adversarial),
    step("gradient inside: virtual adversary", virtual_adversary),
    step("gradient inside: an inner step", inner_step),
    step("gradient inside: norm of the parameters' gradients", gradient_norm),
    step("gradient inside: under enable_grad lightning#15765", enabled),
    step("gradient inside: penalty, minibatches", penalty_of_inputs, size=2),
    step("no gradient: a target made without", partly_without),
    step("no gradient: a detached view", stopped),
    step("penalty: parameters as one vector", vector_penalty),
    heads("heads by task: SGD", sgd()),
    heads("heads by task: decay pytorch#28294", sgd(weight_decay=0.3)),
    heads("heads by task: momentum and decay", sgd(momentum=0.9, weight_decay=0.3), epochs=3),
    heads("heads by task: AdamW", adamw(), epochs=3),
    heads("heads by task: Adam with decay", adam(weight_decay=0.3)),
    heads("heads by task: RMSprop with decay", lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.3)),
    heads("heads by task: decay, minibatches", sgd(weight_decay=0.3), size=2, metrics={}),
    unused("unused layer: decay pytorch#150610", sgd(weight_decay=0.3)),
    unused("unused layer: AdamW", adamw()),
    unused("unused layer: maximising Adam with decay", adam(weight_decay=0.3)),
    Case("layer of the second epoch: AdamW", Late, epochs=3),
    net("layer by the sign of the batch: AdamW", Branch, optimizer=adamw()),
    net(
        "layer by the sign of the batch: momentum, minibatches",
        Branch,
        optimizer=sgd(momentum=0.9, weight_decay=0.3),
        size=2,
    ),
    net("experts on the rows they win: AdamW", Experts, optimizer=adamw(0.05)),
    step("frozen until the second step: SGD", thawing, refused=dict.fromkeys(TRAINER, "requires_grad")),
    step("body detached in the first epoch: AdamW", detached_body, optimizer=adamw(), epochs=3),
    hooked("frozen layer", frozen, rowwise=True),
    hooked("frozen layer, AdamW", frozen, optimizer=adamw(), rowwise=True),
    hooked("frozen bias", frozen_bias, optimizer=adamw(), rowwise=True),
    net(
        "loss: of logits that a frozen layer makes",
        lambda: _random_features(),
        labelled(),
        F.cross_entropy,
        rowwise=True,
    ),
]


def _random_features() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    made[0].requires_grad_(False)
    return made
