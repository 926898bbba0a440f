"""Situations of public reports and of well-known projects that no other theme has; the report is in the name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from situations.case import Case, Step, adam, images, labelled, mlp, net, regression, series, sgd, step, tokens

ONE_PROCESS = ("default", "batched=False", "batched=True", "chunk=1", "compile=True", "rowwise=True")
TRAINER = dict.fromkeys(ONE_PROCESS, "lightning_fit")
KEPT = dict.fromkeys(ONE_PROCESS, "lightning_fit|global_step|buffer")
AVERAGE: dict[str, Any] = {"says": {"buffers": "average"}}
FROZEN = "frozen|requires_grad"


def loss_of(s: Any, batch: Any) -> Tensor:
    return F.mse_loss(s(batch[0]), batch[1])


# Parameters that are more than leaves of their own.


class SharedStorage(nn.Module):
    """Two parameters of one storage: a step of either moves both."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(4, 1)
        self.first, self.second = nn.Parameter(values), nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first + (x @ self.second).tanh()


class Renormed(nn.Module):
    """Rows of a weight are cut to a norm in every forward, by `.data`."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        self.first, self.last, self.data = nn.Linear(4, 3), nn.Linear(3, 1), data

    def forward(self, x: Tensor) -> Tensor:
        if self.data:
            self.first.weight.data = torch.renorm(self.first.weight.data, 2, 0, 0.5)
        else:
            with torch.no_grad():
                self.first.weight.copy_(torch.renorm(self.first.weight, 2, 0, 0.5))
        return self.last(self.first(x).tanh())


class Property(nn.Module):
    """A weight that a property makes of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.scale = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.ones(1, 1))

    @property
    def weight(self) -> Tensor:
        return self.scale * F.normalize(self.direction)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Magnitude(nn.Module):
    """A low-rank change with directions and magnitudes apart, as of DoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.last = nn.Linear(4, 3), nn.Linear(3, 1)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(3, 2))
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.b @ self.a
        scale = self.magnitude / weight.norm(dim=1).detach()
        return self.last((F.linear(x, weight) * scale + self.base.bias).tanh())


class Saved(nn.Module):
    """A frozen original beside the copy that trains in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.original = nn.Linear(4, 3), nn.Linear(3, 1)
        self.active = nn.ModuleDict({"default": copy.deepcopy(self.original)})
        self.original.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.active["default"](self.body(x).tanh()) + 0.1 * self.original(self.body(x))


class Scaled(nn.Module):
    """Trained scales of frozen layers' outputs, as of IA3."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.net.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[1](self.net[0](x)) * self.scale)


class Vectors(nn.Module):
    """Two layers that share fixed random matrices and train vectors, as of VeRA."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.randn(2, 4))
        self.register_buffer("b", torch.randn(4, 2))
        self.d, self.c = (
            nn.ParameterList([torch.ones(2), torch.ones(2)]),
            nn.ParameterList([torch.ones(4), torch.ones(4)]),
        )
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for d, c in zip(self.d, self.c):
            x = x + torch.tanh((x @ self.a.T * d) @ self.b.T * c)
        return self.last(x)


class SomeTokens(nn.Module):
    """Only two rows of a table train; the rest is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2)
        self.table.weight.requires_grad_(False)
        self.new, self.head = nn.Parameter(self.table.weight[[1, 4]].clone()), nn.Linear(6, 1)

    def forward(self, words: Tensor) -> Tensor:
        weight = self.table.weight.index_copy(0, torch.tensor([1, 4]), self.new)
        return self.head(F.embedding(words, weight).flatten(1))


class Hyper(nn.Module):
    """A network that makes the weights of another, which is called with them."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.code = nn.Linear(4, 1), nn.Parameter(torch.randn(2))
        self.base.requires_grad_(False)
        self.maker = nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        made = self.maker(self.code)
        return torch.func.functional_call(self.base, {"weight": made[:4][None], "bias": made[4:]}, (x,))


class RowHyper(nn.Module):
    """Weights of each row's own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.last = nn.Linear(4, 12), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.bmm(self.maker(x).view(-1, 3, 4), x[:, :, None])[..., 0].tanh())


class ClassToken(nn.Module):
    """A token and positions that are parameters, as of vision Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 4, 2, 2)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.places
        return self.head(self.layer(h)[:, 0])


# Subclasses of layers.


class MaskedLinear(nn.Linear):
    """A mask of the weights, as of autoregressive networks."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class Standardised(nn.Conv2d):
    """Filters of mean zero and variance one."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = w / (w.std((1, 2, 3), keepdim=True) + 1e-3)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Causal(nn.Conv1d):
    """Padded on the left before the layer's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


class Wide(nn.LayerNorm):
    """Normalised in float32, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float().to(self.weight.dtype)).to(x.dtype)


class ChannelsLast(nn.LayerNorm):
    """Normalisation of images' channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ScaledTable(nn.Embedding):
    """A table with a scale, as of translation models."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) * math.sqrt(self.embedding_dim)


class Gated(nn.GRU):
    """A recurrent layer that returns its outputs only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Attending(nn.MultiheadAttention):
    """Attention of one argument, under a causal mask."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return super().forward(x, x, x, attn_mask=mask, need_weights=False)[0]


class Fixed(nn.Module):
    """BatchNorm whose weights and statistics are buffers, as of detectors."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"weight": 2.0, "bias": 0.1, "running_mean": 0.3, "running_var": 1.5}.items():
            self.register_buffer(name, torch.full((4,), value))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean) * self.running_var.rsqrt() * self.weight + self.bias


class Ghost(nn.Module):
    """BatchNorm of parts of the batch, as of TabNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4, track_running_stats=False),
            nn.Linear(4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(torch.cat([self.norm(part) for part in h.split(2 if len(h) % 2 == 0 else len(h))]))


def frozen_norm() -> nn.Module:
    """Return a network whose BatchNorm has no gradients; its statistics still move."""
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    made[1].requires_grad_(False)
    return made


def norm_put_into_evaluation(s: Any, batch: Any) -> Tensor:
    s.net[1].eval()
    return loss_of(s, batch)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(mlp())


# State that is written before it is read, or only counted.


class Neuron(nn.Module):
    """A leaky neuron whose potential is an attribute that each forward begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.beta = nn.Linear(4, 3), nn.Linear(3, 1), nn.Parameter(torch.tensor(0.8))
        self.potential: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.potential = torch.zeros(len(x), 3, dtype=x.dtype)
        total = torch.zeros(len(x), 3, dtype=x.dtype)
        for _ in range(3):
            self.potential = self.beta * self.potential + self.first(x)
            total = total + torch.sigmoid(4 * self.potential)
        return self.last(total)


class Evaluations(nn.Module):
    """Four steps of a differential equation; evaluations are counted and never read."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.last, self.evaluations = nn.Linear(4, 4), nn.Linear(4, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            self.evaluations += 1
            x = x + 0.25 * torch.tanh(self.field(x))
        return self.last(x)


class Recurrent(nn.Module):
    """A hidden state that goes on from batch to batch, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 1)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        state = self.hidden if self.training and self.hidden is not None else None
        out, hidden = self.core(x, state)
        if self.training:
            self.hidden = hidden.detach()
        return self.head(out[:, -1])


class Hooking(nn.Module):
    """A hook that is registered and removed in every forward and keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.net[1].register_forward_hook(lambda module, args, output: seen.append(output))
        out = self.net(x)
        handle.remove()
        return out + 0.1 * seen[0].sum(1, keepdim=True)


class TwiceRead(nn.Module):
    """A moving buffer that is used on both sides of its update."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x - self.mean
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.net(first) + self.net(x - self.mean)


class Queue(nn.Module):
    """A queue of keys with a pointer, as of momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 2)
        self.register_buffer("queue", F.normalize(torch.randn(6, 2)))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x))


def enqueue(s: Any, batch: Any) -> Tensor:
    q, m = s.net(batch[0]), s.net
    logits = torch.cat([(q * q.detach().roll(1, 1)).sum(1, keepdim=True), q @ m.queue.clone().T], 1) / 0.5
    place = (m.pointer + torch.arange(2)) % 6
    m.queue = m.queue.index_copy(0, place, q.detach()[:2])
    m.pointer = (m.pointer + 2) % 6
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


class Bank(nn.Module):
    """A memory of each row's last output, by the row's number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 2)
        self.register_buffer("memory", torch.zeros(9, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def remember(s: Any, batch: Any) -> Tensor:
    x, number = batch
    out, m = s.net(x), s.net
    loss = (out - m.memory[number]).square().mean() + (out - 1).square().mean()
    m.memory = m.memory.index_copy(0, number, 0.5 * m.memory[number] + 0.5 * out.detach())
    return loss


def numbered(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.arange(n)


class Codes(nn.Module):
    """Codes that follow the rows they win by moving averages, as of VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)
        self.register_buffer("codes", torch.randn(3, 2))
        self.register_buffer("size", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        hot = F.one_hot(torch.cdist(z, self.codes).argmin(1), 3).to(z.dtype)
        quantised = hot @ self.codes
        if self.training:
            with torch.no_grad():
                self.size = 0.9 * self.size + 0.1 * hot.sum(0)
                self.codes = 0.9 * self.codes + 0.1 * (hot.T @ z) / self.size.clamp(min=0.1)[:, None]
        return self.decoder(z + (quantised - z).detach())


def rebuilt(p: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(p, t)


class Centred(nn.Module):
    """Two views, one of them centred by a running mean, as of DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 3)
        self.register_buffer("centre", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def distil(s: Any, batch: Any) -> Tensor:
    x, m = batch[0], s.net
    with torch.no_grad():
        teacher = m(x)
        target = ((teacher - m.centre) / 0.3).softmax(1)
        m.centre = 0.9 * m.centre + 0.1 * teacher.mean(0, keepdim=True)
    return -(target * m(x + 0.1).log_softmax(1)).sum(1).mean()


class Target(nn.Module):
    """A network and its target, which is copied every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = mlp(), mlp()
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def bootstrapped(s: Any, batch: Any) -> Tensor:
    if s.global_step % 2 == 0:
        s.net.target.load_state_dict(s.net.net.state_dict())
    with torch.no_grad():
        value = batch[1] + 0.9 * s.net.target(batch[0].roll(1, 1))
    return F.smooth_l1_loss(s(batch[0]), value)


class Keys(nn.Module):
    """A second encoder that is in the optimiser and has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.keys = mlp(4, 2), mlp(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def against_keys(s: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        keys = s.net.keys(batch[0])
    return F.cross_entropy(s.net(batch[0]) @ keys.T, torch.arange(len(keys)))


# Control flow and values.


class Guarded(nn.Module):
    """Raises where an output is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        if out.isnan().any():
            raise RuntimeError("not a number")
        return out


class Asks(nn.Module):
    """Asks whether gradients are on, and whether a tensor has one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[1](self.net[0](x))
        h = h * 2 if h.requires_grad else h
        return self.net[2](h if torch.is_grad_enabled() else h * 2)


class Relaxed(nn.Module):
    """A loop until the change is small, for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(0.3 * torch.randn(4, 4)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        z, change = torch.zeros_like(x), torch.tensor(1.0)
        while change > 1e-2:
            new = torch.tanh(z @ self.w * 0.5 + x)
            change, z = (new - z).detach().norm(), new
        return self.last(z)


class Implicit(nn.Module):
    """An equilibrium found without gradients, whose gradient a hook solves for."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(0.2 * torch.randn(4, 4)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(12):
                z = torch.tanh(z @ self.w + x)
        z = torch.tanh(z @ self.w + x)
        if z.requires_grad:
            start = z.detach().requires_grad_()
            again = torch.tanh(start @ self.w + x)

            def solve(g: Tensor) -> Tensor:
                total = g
                for _ in range(12):
                    total = torch.autograd.grad(again, start, total, retain_graph=True)[0] + g
                return total

            z.register_hook(solve)
        return self.last(z)


class Matched(nn.Module):
    """Three slots of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def matched(p: Tensor, t: Tensor) -> Tensor:
    """Slots against targets by the best assignment of each row, found in NumPy, as of DETR."""
    from scipy.optimize import linear_sum_assignment

    cost = (p[:, :, None] - t[:, None]).abs()
    total = p.new_zeros(())
    for each in cost:
        rows, columns = linear_sum_assignment(each.detach().numpy())
        total = total + each[rows, columns].sum()
    return total / len(p)


def by_class(p: Tensor, t: Tensor) -> Tensor:
    """A loop over the labels that there are."""
    losses = [F.cross_entropy(p[t == label], t[t == label]) for label in t.unique()]
    return torch.stack(losses).mean()


def counted(p: Tensor, t: Tensor) -> Tensor:
    weight = 1 / torch.bincount(t, minlength=3).clamp(min=1).to(p.dtype)
    return F.cross_entropy(p, t, weight=weight)


def unless_empty(p: Tensor, t: Tensor) -> Tensor:
    mask = t > 0.5
    if mask.sum() == 0:
        return p.sum() * 0
    return F.mse_loss(p[mask], t[mask])


def signs_known(p: Tensor, t: Tensor) -> Tensor:
    """Labels −1, 0, 1 of several tasks, of which 0 is unknown, as of molecules."""
    y = t.sign() * (t.abs() > 0.4)
    known = y.square() > 0
    terms = F.binary_cross_entropy_with_logits(p, (y + 1) / 2, reduction="none")
    return torch.where(known, terms, torch.zeros_like(terms)).sum() / known.sum()


def per_item(p: Tensor, t: Tensor) -> Tensor:
    """The sum over tokens, divided by how many of the batch there are."""
    terms = F.cross_entropy(p.transpose(1, 2).reshape(-1, 3), t.reshape(-1), ignore_index=-100, reduction="sum")
    return terms / (t != -100).sum()


def smoothed_per_token(p: Tensor, t: Tensor) -> Tensor:
    logs, known = p.log_softmax(1), t != -100
    hit = logs.gather(1, t.clamp(min=0)[:, None])[:, 0]
    return -((0.9 * hit + 0.1 * logs.mean(1)) * known).sum() / known.sum()


class Tokens(nn.Module):
    """Logits (n, 3, 3) of three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).view(len(x), 3, 3)


def token_rows(n: int) -> tuple[Tensor, Tensor]:
    known = torch.arange(3) < 1 + torch.arange(n)[:, None] % 3
    return torch.randn(n, 4), torch.where(known, torch.randint(3, (n, 3)), -100)


def survival(p: Tensor, t: Tensor) -> Tensor:
    """Reconstruction and the sum of a partial likelihood."""
    order = t[:, 0].argsort(descending=True)
    risk = p[order, 0]
    return 0.5 * p.square().mean() - (risk - risk.logcumsumexp(0)).sum()


def balanced(p: Tensor, t: Tensor) -> Tensor:
    """Balanced squares: every target of the batch against every output."""
    return F.cross_entropy(-(p - t.T).square() / 2, torch.arange(len(p)))


def policy(p: Tensor, t: Tensor) -> Tensor:
    """A clipped ratio with advantages standardised over the batch."""
    ratio = (p[:, 0] - p[:, 0].detach() + 0.1 * t[:, 0]).exp()
    gain = (t[:, 0] - t[:, 0].mean()) / (t[:, 0].std() + 1e-8)
    return -torch.min(ratio * gain, ratio.clamp(0.9, 1.1) * gain).mean()


def assigned(p: Tensor, t: Tensor) -> Tensor:
    """Prototypes whose assignments are balanced over the batch without gradients, as of SwAV."""
    with torch.no_grad():
        q = (p / 0.3).exp().T
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / q.shape[0]
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        q = (q * q.shape[1]).T
    return -(q * p.log_softmax(1)).sum(1).mean()


def asymmetric(p: Tensor, t: Tensor) -> Tensor:
    """A focal weight without gradients, other for positives than for negatives."""
    q, y = p.sigmoid(), (t > 0).to(p.dtype)
    terms = y * q.log() + (1 - y) * (1 - q).log()
    with torch.no_grad():
        weight = (1 - (q * y + (1 - q) * (1 - y))) ** (y + 4 * (1 - y))
    return -(terms * weight).sum() / len(p)


def ordinal(p: Tensor, t: Tensor) -> Tensor:
    levels = torch.arange(3) < t[:, None]
    return F.binary_cross_entropy_with_logits(p, levels.to(p.dtype))


def capacity(p: Tensor, t: Tensor) -> Tensor:
    """Rows above an expert's capacity are dropped, in the batch's order."""
    gates = p.softmax(1)
    hot = F.one_hot(gates.argmax(1), 3)
    place = (hot.cumsum(0) * hot).sum(1)
    kept = place <= math.ceil(len(p) / 3)
    return ((gates.amax(1) - 0.2).square() * kept).sum() / kept.sum()


# Steps.


def jacobian_inside(s: Any, batch: Any) -> Tensor:
    j = torch.autograd.functional.jacobian(lambda x: s(x).sum(0), batch[0], create_graph=True)
    return loss_of(s, batch) + 0.1 * j.square().mean()


def by_products(s: Any, batch: Any) -> Tensor:
    """Products of two vectors with a Jacobian through GroupNorm."""
    x = batch[0].clone().requires_grad_()
    out = s(x)
    vectors = (torch.ones_like(out), -0.5 * torch.ones_like(out))
    grads = [torch.autograd.grad(out, x, v, create_graph=True)[0] for v in vectors]
    return loss_of(s, batch) + 0.1 * sum(g.square().mean() for g in grads)


def balanced_tasks(s: Any, batch: Any) -> Tensor:
    """Two losses weighted by their gradients' norms at the last shared layer, as of GradNorm."""
    out = s(batch[0])
    losses = [F.mse_loss(out, batch[1]), out.abs().mean()]
    shared = s.net[2].weight
    norms = [torch.autograd.grad(each, shared, retain_graph=True)[0].norm() for each in losses]
    mean = sum(norms) / 2
    return sum(each * (mean / (norm + 1e-6)).detach() for each, norm in zip(losses, norms))


def pooled_penalty(s: Any, batch: Any) -> Tensor:
    """A gradient penalty through max pooling."""
    x = batch[0].clone().requires_grad_()
    out = s(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + g.square().sum((1, 2, 3)).mean()


def descended(s: Any, batch: Any) -> Tensor:
    """Contrast with points that descend the energy, as of energy-based models."""
    x = torch.zeros_like(batch[0]).requires_grad_()
    for _ in range(2):
        (g,) = torch.autograd.grad(s(x).sum(), x)
        x = (x - 0.5 * g).detach().requires_grad_()
    return s(batch[0]).mean() - s(x.detach()).mean() + 0.1 * s(batch[0]).square().mean()


def flow(s: Any, batch: Any) -> Tensor:
    """The divergence of a field by a fixed vector, as of continuous flows."""
    x = batch[0].clone().requires_grad_()
    e = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=x.dtype).expand_as(x)
    field = s(x)
    (v,) = torch.autograd.grad(field, x, e, create_graph=True)
    return (v * e).sum(1).mean() + 0.5 * (x + field).square().sum(1).mean()


def clamped_scale(s: Any, batch: Any) -> Tensor:
    """A temperature that is cut in the step, as of CLIP."""
    s.net.scale.data.clamp_(0, 1.0)
    a = F.normalize(s.net.net(batch[0]))
    return F.cross_entropy(s.net.scale.exp() * a @ a.detach().T, torch.arange(len(a)))


class Temperature(nn.Module):
    """A network and the logarithm of a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = mlp(4, 2), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def clipped_critic(s: Any, batch: Any) -> Tensor:
    """Weights that are cut in the step, as of a critic."""
    for p in s.net.parameters():
        p.data.clamp_(-0.3, 0.3)
    return loss_of(s, batch)


class Ramp(Step):
    """A weight that goes by the share of the training that is done, as of adversaries' layers."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def training_step(self, batch: Any) -> Tensor:
        share = self.global_step / self.trainer.estimated_stepping_batches
        weight = 2 / (1 + math.exp(-10 * share)) - 1
        return loss_of(self, batch) + weight * self(batch[0]).square().mean()


class ByDimension(Step):
    """Decay of matrices, none of vectors, as of nanoGPT."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 1.0}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.05)


class WithoutVectors(torch.optim.AdamW):
    """AdamW that groups the parameters it is given by their dimensions."""

    def __init__(self, parameters: Any) -> None:
        every = list(parameters)
        matrices, others = [p for p in every if p.ndim >= 2], [p for p in every if p.ndim < 2]
        super().__init__([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.05, weight_decay=1.0)


class OneCycle(Step):
    """A cycle over the whole training, by its number of steps."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(made, 0.2, total_steps=total)
        return [made], [{"scheduler": schedule, "interval": "step"}]


class Cube(torch.autograd.Function):
    """A third power with its derivative by hand, which is another function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x.square()


class Sorted(torch.autograd.Function):
    """A sort with a rule of its own for `torch.vmap`."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = x.sort(-1)
        return values, order

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, order, g)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Sorted.apply(x.movedim(in_dims[0], 0)), (0, 0)


class Called(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 3), nn.Linear(3, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def pairs(h: Tensor) -> Tensor:
    return torch.stack([h[:, i] * h[:, j] for i, j in torch.combinations(torch.arange(3)).tolist()], 1)


def curved(s: Any, batch: Any) -> Tensor:
    """A penalty on gradients through a function with a derivative by hand."""
    x = batch[0].clone().requires_grad_()
    out = s(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + 0.1 * g.square().mean()


def averaged(s: Any, batch: Any) -> Tensor:
    """A teacher moved by one operation on all tensors."""
    m = s.net
    with torch.no_grad():
        torch._foreach_lerp_(list(m.target.parameters()), list(m.net.parameters()), 0.5)
        target = m.target(batch[0])
    return loss_of(s, batch) + F.mse_loss(s(batch[0]), target)


class ByLayer(Step):
    """Rates that fall from layer to layer, with a schedule of each group's own."""

    def __init__(self) -> None:
        super().__init__(mlp(), loss_of)

    def configure_optimizers(self) -> Any:
        layers = [self.net[2], self.net[0]]
        made = torch.optim.SGD([{"params": m.parameters(), "lr": 0.1 * 0.5**i} for i, m in enumerate(layers)])
        schedule = torch.optim.lr_scheduler.LambdaLR(made, [lambda t: 1.0, lambda t: min(1.0, t / 2)])
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Optimiser(torch.optim.Optimizer):
    """Plain descent with a change of the gradients."""

    def __init__(self, parameters: Any, change: Callable[[Tensor, Tensor], Tensor], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.change(p.grad, p), alpha=-group["lr"])


def centralised(g: Tensor, p: Tensor) -> Tensor:
    return g - g.mean(tuple(range(1, g.dim())), keepdim=True) if g.dim() > 1 else g


def decayed_matrices(g: Tensor, p: Tensor) -> Tensor:
    return g + 0.5 * p if p.dim() > 1 else g


def trusted(g: Tensor, p: Tensor) -> Tensor:
    return g * (p.norm() / (g.norm() + 1e-6))


def orthogonalised(g: Tensor, p: Tensor) -> Tensor:
    """Newton and Schulz's iteration for matrices, as of Muon."""
    if g.dim() != 2:
        return g
    x = g / (g.norm() + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 1.5 * x - 0.5 * a @ x
    return x * max(1, g.shape[0] / g.shape[1]) ** 0.5


def by_size(g: Tensor, p: Tensor) -> Tensor:
    return g / math.sqrt(p.numel())


def by_first_dimension(g: Tensor, p: Tensor) -> Tensor:
    return g / len(p)


def optimised(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Case:
    make = lambda parameters: Optimiser(parameters, change)
    return net(f"optimiser: {name}", mlp, optimizer=make, rowwise=True)


# Networks.


class ConvRecurrent(nn.Module):
    """A recurrent cell of convolutions on four frames."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 2, 4, 4)
        for frame in x.unbind(1):
            i, f, o, g = self.gates(torch.cat([frame[:, None], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h.mean((2, 3)))


class Graph(nn.Module):
    """Messages on each row's own graph of four nodes."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.first, self.last, self.attention = nn.Linear(2, 3), nn.Linear(3, 1), attention
        self.score = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        nodes = x.view(len(x), 4, 2)
        edges = (torch.cdist(nodes, nodes) < 1.5).to(x.dtype)
        h = self.first(nodes)
        if self.attention:
            scores = F.leaky_relu((h @ self.score)[:, :, None] + (h @ self.score)[:, None])
            weights = scores.masked_fill(edges == 0, -torch.inf).softmax(2)
        else:
            degree = edges.sum(2).rsqrt()
            weights = degree[:, :, None] * edges * degree[:, None]
        return self.last(torch.relu(weights @ h).sum(1))


class Capsules(nn.Module):
    """Routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(torch.randn(2, 3, 2, 2)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        u = torch.einsum("nid,ijde->nije", x.view(len(x), 2, 2), self.w)
        b = torch.zeros(len(x), 2, 3, dtype=x.dtype)
        for _ in range(2):
            s = (b.softmax(2)[..., None] * u).sum(1)
            v = s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))
            b = b + (u.detach() * v.detach()[:, None]).sum(-1)
        return self.last(v.flatten(1))


class Points(nn.Module):
    """A function of a set: a maximum over points and a bilinear product."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.align, self.last = nn.Linear(2, 3), nn.Linear(8, 4), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.align(x).view(-1, 2, 2) + torch.eye(2, dtype=x.dtype)
        return self.last(self.each(torch.bmm(x.view(-1, 4, 2), turn)).amax(1))


class Field(nn.Module):
    """A linear chain of labels: the partition function by recursion."""

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.move = nn.Linear(2, 3), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.emit(x)


def chain(mean_of_tokens: bool) -> Callable[[Any, Any], Tensor]:
    """Return the negative log-likelihood of chains of one to three labels."""

    def likelihood(s: Any, batch: Any) -> Tensor:
        x, y = batch
        emit, move = s.net(x), s.net.move
        mask = y >= 0
        label = y.clamp(min=0)
        score, total = emit[:, 0].gather(1, label[:, :1])[:, 0], emit[:, 0]
        for t in range(1, x.shape[1]):
            step_score = move[label[:, t - 1], label[:, t]] + emit[:, t].gather(1, label[:, t : t + 1])[:, 0]
            score = score + step_score * mask[:, t]
            new = torch.logsumexp(total[:, :, None] + move, 1) + emit[:, t]
            total = torch.where(mask[:, t, None], new, total)
        loss = (total.logsumexp(1) - score).sum()
        return loss / (mask.sum() if mean_of_tokens else len(x))

    return likelihood


def chains(n: int) -> tuple[Tensor, Tensor]:
    known = torch.arange(3) < 1 + torch.arange(n)[:, None] % 3
    return torch.randn(n, 3, 2), torch.where(known, torch.randint(3, (n, 3)), -1)


class Coupling(nn.Module):
    """Two affine couplings with a permutation between, and a log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Linear(2, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for layer in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = layer(a).chunk(2, 1)
            x, total = torch.cat([b * scale.tanh().exp() + shift, a], 1), total + scale.tanh().sum(1)
        return (0.5 * x.square().sum(1) - total)[:, None]


def average_output(p: Tensor, t: Tensor) -> Tensor:
    return p.mean()


class Squeezed(nn.Module):
    """Channels weighted by their means over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Conv2d(2, 3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last((h * self.gate(h.mean((2, 3))).sigmoid()[..., None, None]).amax((2, 3)))


class Places(nn.Module):
    """Attention with a table of relative places, read by a buffer of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table, self.last = nn.Linear(4, 12), nn.Parameter(torch.randn(5)), nn.Linear(4, 1)
        self.register_buffer("index", torch.arange(3)[:, None] - torch.arange(3) + 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, 2)
        bias = self.table[self.index.view(-1)].view(3, 3)
        return self.last(((q @ k.mT / 2 + bias).softmax(2) @ v).mean(1))


class Documents(nn.Module):
    """Attention inside the documents that zeros of the row divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(6, 4), nn.Linear(4, 1)

    def forward(self, words: Tensor) -> Tensor:
        h, document = self.table(words), (words == 0).cumsum(1)
        mask = document[:, :, None] == document[:, None]
        return self.last(F.scaled_dot_product_attention(h, h, h, attn_mask=mask).mean(1))


def hamiltonian(x: Tensor) -> Tensor:
    diagonal = torch.where(x == 0, 1e3, x)
    return torch.diag_embed(diagonal)


class Diagonal(nn.Module):
    """Smallest eigenvalues of matrices with the row on the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(0.3 * torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(hamiltonian(x) + self.w + self.w.T)[:, :1]


class Reflections(nn.Module):
    """A product of reflections."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.tau = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.householder_product(self.v, self.tau)[:, :1]


def signs_of_bits(h: Tensor) -> Tensor:
    return h * (h.detach().contiguous().view(torch.int64) < 0)


class Bits(nn.Module):
    """Signs read from the numbers' bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(signs_of_bits(self.first(x)))


class Autocast(nn.Module):
    """A part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(x)
        return self.last(h.to(x.dtype))


def table(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(layer(), nn.Flatten(), nn.Linear(6, 1))


def frames(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, 4, 4), torch.randn(n, 1)


def wide(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8), torch.randn(n, 1)


class Batched(nn.Module):
    """A GRU whose layer returns its outputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = Gated(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x).mean(1))


class Attended(nn.Module):
    """A subclass of attention with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = Attending(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x).mean(1))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.Linear(4, 1))


def pooling() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.Softplus(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 1))


CASES: list[Case] = [
    net(
        "two parameters of one storage pytorch#79788",
        SharedStorage,
        refused=dict.fromkeys((*ONE_PROCESS, "lightning_fit"), "storage|shar"),  # each would be averaged apart
    ),
    net("weights renormed by .data in forward braindecode", lambda: Renormed(True), refused=TRAINER),
    net("weights renormed in place in forward", lambda: Renormed(False), refused=TRAINER),
    net("a weight that is a property", Property, rowwise=True),
    net("directions and magnitudes peft#1474", Magnitude, optimizer=adam(), rowwise=True),
    net("a frozen original beside its copy peft#602", Saved, rowwise=True),
    net("scales of frozen layers PEFT IA3", Scaled, optimizer=adam(), rowwise=True),
    net("shared random matrices PEFT VeRA", Vectors, rowwise=True),
    net("some rows of a table train peft#2838", SomeTokens, tokens(), rowwise=True),
    net("weights made by a network", Hyper, rowwise=True),
    net("weights made for each row", RowHyper, rowwise=True),
    net("a class token and places opacus#239", ClassToken, images(), rowwise=True),
    net("subclass: masked weights", lambda: nn.Sequential(MaskedLinear(), nn.Tanh(), nn.Linear(4, 1)), rowwise=True),
    net(
        "subclass: standardised filters",
        lambda: nn.Sequential(Standardised(2, 3, 3), nn.Flatten(), nn.Linear(12, 1)),
        images(),
        rowwise=True,
    ),
    net(
        "subclass: causal convolution",
        lambda: nn.Sequential(Causal(3, 2, 2), nn.Flatten(), nn.Linear(4, 1)),
        series(3, 2),
        rowwise=True,
    ),
    net(
        "subclass: norm in float32",
        lambda: nn.Sequential(nn.Linear(4, 4), Wide(4), nn.Linear(4, 1)),
        rowwise=True,
        tolerance=1e-5,
    ),
    net(
        "subclass: norm of channels",
        lambda: nn.Sequential(nn.Conv2d(2, 3, 1), ChannelsLast(3), nn.Flatten(), nn.Linear(48, 1)),
        images(),
        rowwise=True,
    ),
    net(
        "subclass: a scaled table with padding", table(lambda: ScaledTable(6, 2, padding_idx=0)), tokens(), rowwise=True
    ),
    net("subclass: GRU that returns outputs only", Batched, series(), rowwise=True),
    net("subclass: attention of one argument", Attended, series(3, 4), rowwise=True),
    net(
        "BatchNorm as buffers vision#1728",
        lambda: nn.Sequential(nn.Linear(4, 4), Fixed(), nn.Linear(4, 1)),
        rowwise=True,
    ),
    net("BatchNorm of parts of a batch pytorch-tabnet", Ghost),
    net("BatchNorm without gradients, statistics move lightning#15062", frozen_norm, **AVERAGE),
    step("BatchNorm put into evaluation by the step chemprop#952", norm_put_into_evaluation, normed),
    net("a traced graph torchvision#8634", traced, rowwise=True),
    net("a potential that each forward begins anew snntorch#250", Neuron, rowwise=True),
    net("evaluations counted, never read torchdiffeq#53", Evaluations, rowwise=True),
    net("hidden state kept between batches pytorch#2769", Recurrent, series(), epochs=3, refused=KEPT),
    net("a hook of each forward pytorch#128272", Hooking, rowwise=True),
    net("a buffer read on both sides of its update pytorch#22095", TwiceRead, **AVERAGE),
    step("a queue of keys with a pointer moco", enqueue, Queue, labelled(), metrics={}, **AVERAGE),
    step("a memory by numbers of rows", remember, Bank, numbered, metrics={}, **AVERAGE),
    net(
        "codes that follow rows vector-quantize-pytorch",
        Codes,
        lambda n: (torch.randn(n, 4), torch.randn(n, 4)),
        rebuilt,
        **AVERAGE,
    ),
    step("a running centre of the teacher DINO", distil, Centred, epochs=3, metrics={}, **AVERAGE),
    step("a target copied every second step", bootstrapped, Target, epochs=3, refused=KEPT | {"lightning_fit": FROZEN}),
    step(
        "a second encoder without gradients, decay moco#14",
        against_keys,
        Keys,
        labelled(),
        optimizer=sgd(weight_decay=0.3),
        metrics={},
    ),
    net("a guard that raises pytorch#186301", Guarded, rowwise=True),
    net("asks for gradients pytorch#158610", Asks),
    net("a loop until the change is small pytorch#175522", Relaxed),
    net("an equilibrium with a hook locuslab/deq#23", Implicit, refused={"batched=True": "."}),
    net("slots matched by SciPy DETR", Matched, regression(4, 3), matched, rowwise=True),
    net("a loop over the labels there are", lambda: nn.Linear(4, 3), labelled(), by_class),
    net("weights by bincount", lambda: nn.Linear(4, 3), labelled(), counted),
    net("zero where a mask is empty", mlp, None, unless_empty),
    net("unknown labels of several tasks pretrain-gnns", lambda: nn.Linear(4, 3), regression(4, 3), signs_known),
    net("tokens of the batch transformers#34191", Tokens, token_rows, per_item),
    net("tokens of the batch, minibatches transformers#35203", Tokens, token_rows, per_item, size=2),
    net("smoothed, per token OpenNMT#2209", Tokens, token_rows, smoothed_per_token),
    net("a smaller last minibatch keras#20241", mlp, size=4),
    net("a sum of a likelihood beside a mean 4Dsurvival#11", mlp, None, survival),
    net("balanced squares BalancedMSE#19", mlp, None, balanced),
    net("advantages standardised over the batch", lambda: mlp(4, 1), None, policy),
    net("balanced assignments SwAV", lambda: mlp(4, 3), labelled(), assigned),
    net("asymmetric focal weights", lambda: mlp(4, 3), regression(4, 3), asymmetric, rowwise=True),
    net("ordered levels", lambda: mlp(4, 3), labelled(), ordinal, rowwise=True),
    net("capacities of experts", lambda: mlp(4, 3), labelled(), capacity),
    step("Jacobian of torch.autograd.functional functorch#847", jacobian_inside),
    step("products with a Jacobian through GroupNorm functorch#622", by_products, grouped),
    step("losses weighted by gradients' norms pytorch#120538", balanced_tasks),
    step("penalty through max pooling functorch#1019", pooled_penalty, pooling, images()),
    step("points that descend the energy", descended),
    step("divergence of a field", flow, lambda: mlp(4, 4)),
    step("a temperature cut by .data CLIP", clamped_scale, Temperature, labelled(), metrics={}, refused=TRAINER),
    step("weights cut by .data in the step", clipped_critic, refused=TRAINER),
    Case("a weight by the share of training done lightning#5449", Ramp, size=2, says={"rounds": 1}),
    Case("decay by numbers of dimensions nanoGPT#213", ByDimension),
    Case("rates and schedules by layer", ByLayer, size=2),
    net("optimiser that groups by dimensions WatChMaL#112", mlp, optimizer=WithoutVectors, rowwise=True),
    Case("a cycle over the whole training lightning#11599", OneCycle, size=2, says={"rounds": 1}),
    net(
        "function: a rule of its own for vmap pytorch#91451", lambda: Called(lambda h: Sorted.apply(h)[0]), rowwise=True
    ),
    step("function: differentiated twice functorch#296", curved, lambda: Called(Cube.apply)),
    net("pairs of columns by combinations functorch#368", lambda: Called(pairs), rowwise=True),
    step(
        "a teacher moved by foreach lightly#1899", averaged, Target, epochs=3, refused=KEPT | {"lightning_fit": FROZEN}
    ),
    optimised("centralised gradients", centralised),
    optimised("decay of matrices only", decayed_matrices),
    optimised("trust ratios LAMB", trusted),
    optimised("orthogonalised matrices Muon#54", orthogonalised),
    optimised("divided by the size of a parameter", by_size),
    optimised("divided by the first dimension", by_first_dimension),
    net("recurrent convolutions ConvLSTM#21", ConvRecurrent, frames, rowwise=True),
    net("graphs of rows, convolution", lambda: Graph(False), wide, rowwise=True),
    net("graphs of rows, attention", lambda: Graph(True), wide, rowwise=True),
    net("capsules", Capsules, rowwise=True),
    net("points with an alignment", Points, wide, rowwise=True),
    step("chains of labels", chain(False), Field, chains, metrics={}, rowwise=True),
    step("chains of labels, mean of tokens pytorch-crf", chain(True), Field, chains, metrics={}),
    net("couplings with a log-determinant", Coupling, None, average_output, rowwise=True),
    net("squeezed and excited", Squeezed, images(), rowwise=True),
    net("relative places by indices", Places, series(3, 4), rowwise=True),
    net("documents divided by zeros attention-gym#25", Documents, tokens(), rowwise=True),
    net("where with a number, diag_embed functorch#26", Diagonal, rowwise=True),
    net("products of reflections functorch#1019", Reflections, rowwise=True),
    net("bits of numbers pytorch#180727", Bits, rowwise=True),
    net("autocast in a part", Autocast, rowwise=True, dtype=torch.float32, tolerance=1e-2),
]
