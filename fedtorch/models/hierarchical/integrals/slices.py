r"""Nodes along one direction of a log-concave density, placed where it bends, where it is far from a normal one.

Rows that all say yes, or all no, cut a side of the prior off. What is left has its mode near the edge and its mass on a
plateau as wide as the prior, of which nodes about the mode see little. Along one direction t, nodes go out from the
mode at first, farther and farther apart; then Gauss–Legendre nodes lie between breakpoints that have equal shares of

.. math:: \int \sqrt{-\tfrac{d^2}{dt^2} \log p(t)}\, dt .

Between two breakpoints the logarithm then bends alike whether there is an edge or a plateau. As log p(t) falls by half
the square of the distance to the mode at least, where t has the prior N(0, 1), it is known how far nodes must go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy
import torch
from torch import Tensor

_FIRST = 25  # nodes from the mode outwards
_PANELS, _POINTS = 10, 4  # then so many intervals with so many nodes each
# Of a breakpoint's share, what a fall of the log density by one has. Of a normal density to 14 below its mode bends
# have 2 · √28 = 10.6, and falls 7 more: where a tail is straight, as a count's, intervals fall by 7 at the most.
_FALLS = 0.25
_DROP = 14.0  # of the log density, beyond which nothing is left: about 1e-6


def outward(mode: Tensor, sd: Tensor) -> Tensor:
    """Return nodes that go out from modes `(...)` with these sds of the curvature there, `(..., Q)`."""
    reach = ((2 * _DROP) ** 0.5 / sd).asinh()
    steps = torch.linspace(-1, 1, _FIRST, dtype=mode.dtype, device=mode.device)
    return mode[..., None] + sd[..., None] * (reach[..., None] * steps).sinh()


def placed(t: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and log weights `(..., Q)` of ∫ dt, from a log density at ascending `t`, both `(..., P)`.

    >>> t = torch.linspace(-6, 6, 25).double()
    >>> nodes, weights = placed(t, -0.5 * t.square())
    >>> (weights.exp() * (-0.5 * nodes.square()).exp()).sum().square().round(decimals=3)  # 2π
    tensor(6.2830, dtype=torch.float64)
    """
    log = log.where(log.isfinite(), -torch.inf)
    top = log.amax(-1, keepdim=True)
    log = log.clamp(min=top - 1.5 * _DROP)
    width = t.diff(dim=-1)
    bend = -(log.diff(dim=-1) / width).diff(dim=-1) / (0.5 * (width[..., 1:] + width[..., :-1]))
    bend = torch.cat([bend[..., :1], bend, bend[..., -1:]], -1).clamp(min=0)
    seen = log > top - _DROP
    either = seen[..., 1:] | seen[..., :-1]
    length = width * torch.maximum(bend[..., 1:], bend[..., :-1]).sqrt() + _FALLS * log.diff(dim=-1).abs()
    length = length * either
    passed = torch.nn.functional.pad(length.cumsum(-1), (1, 0))
    shares = torch.linspace(0, 1, _PANELS + 1, dtype=t.dtype, device=t.device) * passed[..., -1:]
    after = torch.searchsorted(passed.contiguous(), shares.contiguous()).clamp(1, t.shape[-1] - 1)
    first = passed.gather(-1, after - 1)
    part = (shares - first) / (passed.gather(-1, after) - first)
    breaks = t.gather(-1, after - 1) + part.nan_to_num(0.0).clamp(0, 1) * width.gather(-1, after - 1)
    middle, half = 0.5 * (breaks[..., 1:] + breaks[..., :-1]), 0.5 * breaks.diff(dim=-1)
    x, weights = (torch.as_tensor(part).to(t) for part in _legendre())
    nodes = middle[..., None] + half[..., None] * x
    return nodes.flatten(-2), (half[..., None] * weights).log().flatten(-2)


def complement(direction: Tensor) -> Tensor:
    """Return orthonormal columns beside unit vectors `(..., e)`, `(..., e, e - 1)`, each near an axis, in order."""
    size = direction.shape[-1]
    most = direction.abs().argmax(-1, keepdim=True)
    sign = 2 * (direction.gather(-1, most) >= 0).to(direction) - 1
    normal = direction.scatter_add(-1, most, sign)
    mirror = torch.eye(size).to(direction) - (
        2 / normal.square().sum(-1)[..., None, None] * normal[..., :, None] * normal[..., None, :]
    )
    others = torch.arange(size - 1, device=direction.device)
    others = others + (others >= most)
    return mirror.gather(-1, others[..., None, :].expand(*direction.shape, size - 1))


def mixture(
    log: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], mode: Tensor, sd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log ∫ N(t; 0, 1) p(t) dt, and mean and covariance of u.

    Args:
        log: t `(K, R, Q)` -> log p, and mean and covariance of u there, `(K, R, Q, e)` and `(K, R, Q, e, e)`.
        mode, sd: of N(t; 0, 1) p(t), `(K, R)`.
    """
    first = outward(mode, sd)
    nodes, weights = placed(first, log(first)[0] - 0.5 * first.square())
    value, mean, covariance = log(nodes)
    known = value.isfinite()  # elsewhere, far from all that the prior and the rows allow for, no mode was found
    joint = (value - 0.5 * nodes.square() + weights).where(known, -torch.inf)
    mean, covariance = mean.where(known[..., None], 0.0), covariance.where(known[..., None, None], 0.0)
    evidence = joint.logsumexp(-1) - 0.5 * math.log(2 * math.pi)
    shares = joint.softmax(-1)
    centre = (shares[..., None] * mean).sum(-2)
    away = mean - centre[..., None, :]
    spread = (shares[..., None, None] * covariance).sum(-3) + (shares[..., None] * away).mT @ away
    return evidence, centre, spread


@cache
def _legendre() -> tuple[numpy.ndarray, numpy.ndarray]:
    return numpy.polynomial.legendre.leggauss(_POINTS)
