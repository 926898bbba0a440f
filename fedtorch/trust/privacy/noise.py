"""Distributions of noise on sums, and the norm of one unit's part that has to be bounded for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import log_ndtr, ndtr
from torch import Tensor

Uniforms = Callable[[int], Tensor]  # count -> (count,) uniform numbers of (0, 1), float64


class LossCurve(NamedTuple):
    """δ(ε) of one release at whole multiples of an interval, for a unit that leaves or joins."""

    lowest: int  # the first multiple
    deltas: np.ndarray  # (n,) not increasing


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
    join: Callable[[int], float]  # factor of the noise on each of a number of joint releases
    losses: Callable[[Any, float, float, float], list[LossCurve]]  # (library, noise, rate, interval) -> curves


def _box_muller(uniforms: Uniforms, count: int) -> Tensor:
    first, second = uniforms(count + count % 2).reshape(2, -1)
    radius, angle = first.log_().mul_(-2).sqrt_(), second.mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def _inverse_laplace(uniforms: Uniforms, count: int) -> Tensor:
    centred = uniforms(count).sub_(0.5)
    return -centred.sign() * torch.log1p(-2 * centred.abs())


def _gaussian_losses(library: Any, noise: float, sampling_rate: float, interval: float) -> list[LossCurve]:
    """Return the curves between M = (1 − q) N(0, σ²) + q N(1, σ²) and N = N(0, σ²).

    Their ratio M(x) / N(x) grows with x and is e^r at x = σ² log((e^r − (1 − q)) / q) + 1/2. So δ(ε) is M(X > x) − e^ε
    N(X > x) at r = ε for a unit that leaves, and N(X < x) − e^ε M(X < x) at r = −ε for one that joins.
    """
    q, kinds = sampling_rate, library.privacy_loss_mechanism
    curves = []
    for leaves in (True,) if q == 1 else (True, False):
        kind = kinds.AdjacencyType.REMOVE if leaves else kinds.AdjacencyType.ADD
        lowest, epsilon = _multiples(kinds.GaussianPrivacyLoss(noise, sampling_prob=q, adjacency_type=kind), interval)
        ratio = epsilon if leaves else -epsilon
        deltas = -np.expm1(np.minimum(epsilon, 0.0)) if leaves else np.zeros(len(epsilon))  # beyond the least ratio
        inside = ratio > (math.log1p(-q) if q < 1 else -math.inf)
        ratio, epsilon = ratio[inside], epsilon[inside]
        shift = 0.0 if q == 1 else np.log1p(-(1 - q) * np.exp(-ratio)) - math.log(q)
        x = 0.5 + (ratio + shift) * noise**2
        if leaves:
            normal, shifted = -x / noise, (1 - x) / noise
            deltas[inside] = (1 - q) * ndtr(normal) + q * ndtr(shifted) - np.exp(epsilon + log_ndtr(normal))
        else:
            normal, shifted = x / noise, (x - 1) / noise
            mixed = np.logaddexp(math.log1p(-q) + log_ndtr(normal), math.log(q) + log_ndtr(shifted))
            deltas[inside] = ndtr(normal) - np.exp(epsilon + mixed)
        curves.append(LossCurve(lowest, np.clip(deltas, 0, 1)))
    return curves


def _laplace_losses(library: Any, noise: float, sampling_rate: float, interval: float) -> list[LossCurve]:
    kinds, curves = library.privacy_loss_mechanism, []
    for kind in (kinds.AdjacencyType.REMOVE, kinds.AdjacencyType.ADD)[: 1 if sampling_rate == 1 else 2]:
        loss = kinds.LaplacePrivacyLoss(noise, sampling_prob=sampling_rate, adjacency_type=kind)
        lowest, epsilon = _multiples(loss, interval)
        curves.append(LossCurve(lowest, loss.get_delta_for_epsilon(epsilon)))
    return curves


def _multiples(loss: Any, interval: float) -> tuple[int, np.ndarray]:
    """Return the multiples of an interval between which losses lie, the first by its number."""
    bounds = loss.connect_dots_bounds()
    lowest, highest = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    return lowest, np.arange(lowest, highest + 1) * interval


gaussian = Mechanism("gaussian", lambda rows: rows.norm(dim=1), _box_muller, math.sqrt, _gaussian_losses)
laplace = Mechanism("laplace", lambda rows: rows.abs().sum(1), _inverse_laplace, float, _laplace_losses)
MECHANISMS = {each.name: each for each in (gaussian, laplace)}
