"""Noise on sums: what it is, and which norm of one unit's part has to be bounded for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Uniforms = Callable[[int], Tensor]  # count -> (count,) uniform numbers of (0, 1), float64


class Mechanism(NamedTuple):
    """Describe a kind of noise.

    Example:
        >>> row = torch.tensor([[3.0, -4.0]])  # what one unit adds to a sum
        >>> [(each.name, each.norm(row).tolist(), each.join(4)) for each in (gaussian, laplace)]
        [('gaussian', [5.0], 2.0), ('laplace', [7.0], 4.0)]
    """

    name: str  # in ledgers
    norm: Callable[[Tensor], Tensor]  # numbers (K, D) -> (K,), in which one unit's part is clipped
    draw: Callable[[Uniforms, int], Tensor]  # (source of uniform numbers, D) -> noise (D,) of unit scale
    join: Callable[[int], float]  # how many times the noise of one part each of several parts needs
    losses: Callable[[Any, float, float, float], Any]  # (library, noise, rate, interval) -> privacy-loss distribution


def _box_muller(uniforms: Uniforms, count: int) -> Tensor:
    first, second = uniforms(count + count % 2).reshape(2, -1)
    radius, angle = first.log_().mul_(-2).sqrt_(), second.mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def _inverse_laplace(uniforms: Uniforms, count: int) -> Tensor:
    centred = uniforms(count).sub_(0.5)
    return -centred.sign() * torch.log1p(-2 * centred.abs())


def _gaussian_losses(library: Any, noise: float, sampling_rate: float, interval: float) -> Any:
    return library.from_gaussian_mechanism(noise, value_discretization_interval=interval, sampling_prob=sampling_rate)


def _laplace_losses(library: Any, noise: float, sampling_rate: float, interval: float) -> Any:
    return library.from_laplace_mechanism(noise, value_discretization_interval=interval, sampling_prob=sampling_rate)


gaussian = Mechanism("gaussian", lambda rows: rows.norm(dim=1), _box_muller, math.sqrt, _gaussian_losses)
laplace = Mechanism("laplace", lambda rows: rows.abs().sum(1), _inverse_laplace, float, _laplace_losses)
MECHANISMS = {each.name: each for each in (gaussian, laplace)}
