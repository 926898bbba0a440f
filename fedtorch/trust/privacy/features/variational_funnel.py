r"""The privacy funnel (9.8) by an encoder: z = f(x) + N(0, I) with little of s and enough of y, for any variables.

The information in z is estimated by a head of some family, a categorical one for classes and a normal one for numbers,

.. math:: \hat I(y; z) = E \log q(y \mid z) - E \log q(y),

with q(y) the best of its family: for classes a lower bound of I(y; z) (Barber and Agakov, 2003), and the information
itself in a linear-Gaussian world with linear heads. The encoder minimises Î(s; z) + λ (R − Î(y; z)) against heads that
are kept near their optimum, by several steps for each of the encoder's, while λ rises as long as information is missing
and falls otherwise. The price is that the leak is a lower bound, too: it is the information available to an adversary
with this family, and no guarantee against another one.

The returned figures come from new heads, trained on half of the rows against the finished encoder, and evaluated on the
other half.

Sources: Jung, "Federated learning: from theory to practice", section 9.4; Makhdoumi et al. (2014), "From the
information bottleneck to the privacy funnel"; Tripathy, Wang and Ishwar (2019), "Privacy-preserving adversarial
networks".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import random
from fedtorch.random.draws import bits
from fedtorch.vfl.model.split_nn import mlp

_STIFF, _LEARNT = 10.0, 0.1  # increase of λ per missing nat, temporary and permanent


class FunnelEncoder(nn.Module):
    """Encode rows `(n, d)` as z `(n, k)`: a network of standardised features, with noise of variance one for a key."""

    centre: Tensor
    scale: Tensor

    def __init__(self, network: nn.Module, centre: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("centre", centre)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Return f(x), or a draw of z."""
        code = self.network((x.to(self.centre) - self.centre) / self.scale)
        return code if key is None else code + random.normal(key, code.shape, code.dtype)


class LearntFunnel(NamedTuple):
    """An encoder, and the predictions of new heads on rows outside their training.

    Example:
        >>> import torch, fedtorch as ft
        >>> x = ft.random.normal(ft.random.key(0), (100, 2))
        >>> s, y = (x > 0).long().T
        >>> found = variational_funnel(x, s, y, information=0.3, width=1, hidden=(), steps=5, inner=1, lr=0.5)
        >>> found.encoder(x).shape, found.leak < 0.1 < found.information  # it has found the second feature
        (torch.Size([100, 1]), True)
    """

    encoder: FunnelEncoder
    leak: float  # Î(s; z) in nats
    information: float  # Î(y; z) in nats


class _Head(nn.Module):
    """Model q(t | z): logits of classes, or a mean beside one standard deviation."""

    def __init__(self, target: Tensor, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.classes = 0 if target.is_floating_point() else int(target.max()) + 1
        self.network = mlp(width, hidden, self.classes or 1, activation=nn.Tanh).double()
        self.log_sd = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def information(self, z: Tensor, target: Tensor) -> Tensor:
        """Return Î(t; z)."""
        output = self.network(z)
        if self.classes:
            shares = torch.bincount(target, minlength=self.classes) / len(target)
            likelihood = output.log_softmax(1).gather(1, target[:, None]).mean()
            return likelihood + torch.special.entr(shares.to(likelihood)).sum()
        centred = target - target.mean()
        spread = centred.square().mean()
        off = (centred - output[:, 0]).square().mean()
        return 0.5 * (spread.log() + 1) - self.log_sd - 0.5 * off * (-2 * self.log_sd).exp()


def variational_funnel(
    features: Tensor,
    private: Tensor,
    label: Tensor,
    information: float,
    *,
    width: int = 2,
    hidden: Sequence[int] = (32,),
    steps: int = 500,
    inner: int = 3,
    lr: float = 3e-2,
    seed: int = 0,
) -> LearntFunnel:
    """Train a map of features with the given `information` about a label, and as little as possible about an attribute.

    Args:
        features: `(n, d)`.
        private: `(n,)` s; whole numbers are classes from 0 on.
        label: `(n,)` y, likewise.
        information: R in nats.
        width: numbers k of z.
        hidden: widths of the hidden layers of encoder and heads; none for linear ones.
        steps: Adam steps of the encoder on all rows.
        inner: steps of the heads for each of them.
        lr: learning rate of both, along a cosine to a tenth.
        seed: seed of starts, noise and halves.

    Raises:
        ValueError: rows that do not match, a constant s or y, or a negative R.

    Example:
        >>> import torch, fedtorch as ft
        >>> x = ft.random.normal(ft.random.key(0), (100, 2))
        >>> s, y = (x > 0).long().T
        >>> found = variational_funnel(x, s, y, information=0.3, width=1, hidden=(), steps=5, inner=1, lr=0.5)
        >>> found.encoder(x).shape, found.leak < 0.1 < found.information  # it has found the second feature
        (torch.Size([100, 1]), True)
    """
    if features.ndim != 2 or not (private.shape == label.shape == features.shape[:1]) or len(features) < 4:
        raise ValueError(
            f"Expected features (n, d), private (n,) and label (n,), but got {tuple(features.shape)}, "
            f"{tuple(private.shape)} and {tuple(label.shape)}"
        )
    if any(each.is_floating_point() and not float(each.std()) > 0 for each in (private, label)):
        raise ValueError("Expected a private attribute and a label that vary, but got a constant")
    if not 0 <= information < math.inf:
        raise ValueError(f"Expected information of at least 0 nats, but got {information}")
    x, s, y = features.to(torch.float64), _in_units(private), _in_units(label)
    key = random.key(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(bits(key, 1)))
        network = mlp(x.shape[1], hidden, width, activation=nn.Tanh).double()
        scale = x.std(0, correction=0)
        encoder = FunnelEncoder(network, x.mean(0), torch.where(scale > 0, scale, 1.0))
        heads = [_Head(each, width, hidden) for each in (s, y)]
        fresh = [_Head(each, width, hidden) for each in (s, y)]
    _play(encoder, heads, (x, s, y), information, (steps, inner, lr), key)
    half = random.permutation(random.fold_in(key, 1), len(x)) < len(x) // 2
    measures = _measured(encoder, fresh, (x, s, y), half, (steps, lr), random.fold_in(key, 2))
    return LearntFunnel(encoder.eval(), *measures)


def _play(
    encoder: FunnelEncoder,
    heads: list[_Head],
    rows: tuple[Tensor, Tensor, Tensor],
    information: float,
    settings: tuple[int, int, float],
    key: Tensor,
) -> None:
    """Train encoder and heads adversarially, in place."""
    (x, s, y), (steps, inner, lr), width = rows, settings, encoder(rows[0][:1]).shape[1]
    encoding = torch.optim.Adam(encoder.parameters(), lr=lr)
    theirs = torch.optim.Adam([value for head in heads for value in head.parameters()], lr=3 * lr)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, steps, 0.1 * lr) for each in (encoding, theirs)]
    price = 1.0
    for step in range(steps):
        noise = random.normal(random.fold_in(key, step), (inner + 1, len(x), width), torch.float64)
        with torch.no_grad():
            mean = encoder(x)
        for draw in noise[1:]:
            theirs.zero_grad()
            (-heads[0].information(mean + draw, s) - heads[1].information(mean + draw, y)).backward()
            theirs.step()
        encoding.zero_grad()
        z = encoder(x) + noise[0]
        retained = heads[1].information(z, y)
        missing = information - float(retained.detach())
        (heads[0].information(z, s) - max(0.0, price + _STIFF * missing) * retained).backward()
        encoding.step()
        price = max(0.0, price + _LEARNT * missing)
        for schedule in schedules:
            schedule.step()


def _measured(
    encoder: FunnelEncoder,
    heads: list[_Head],
    rows: tuple[Tensor, Tensor, Tensor],
    half: Tensor,
    settings: tuple[int, float],
    key: Tensor,
) -> list[float]:
    """Return Î(s; z) and Î(y; z) of new heads, trained on one half of the rows and counted on the other, at least 0."""
    (x, *targets), (steps, lr) = rows, settings
    theirs = torch.optim.Adam([value for head in heads for value in head.parameters()], lr=lr)
    for step in range(steps):
        with torch.no_grad():
            z = encoder(x[half], random.fold_in(key, step))
        theirs.zero_grad()
        torch.stack([-head.information(z, target[half]) for head, target in zip(heads, targets)]).sum().backward()
        theirs.step()
    with torch.no_grad():
        z = encoder(x[~half], random.fold_in(key, steps))
        return [max(0.0, float(head.information(z, target[~half]))) for head, target in zip(heads, targets)]


def _in_units(target: Tensor) -> Tensor:
    """Return classes unchanged and numbers in units of their spread, which preserves information."""
    if not target.is_floating_point():
        return target.to(torch.int64)
    numbers = target.to(torch.float64)
    return (numbers - numbers.mean()) / numbers.std(correction=0)
