"""Exact moments of a normal density of one coordinate times a factor of a sparse prior.

Source: Seeger (2008), "Bayesian inference and optimal design for the sparse linear model".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG_SCALES = torch.linspace(-14, 14, 71, dtype=torch.float64)  # log s of the horseshoe
_DEEP = 50.0


class Moments1(NamedTuple):
    """Of N(u; m, v) t(u): log normaliser, mean, variance."""

    log_normaliser: Tensor
    mean: Tensor
    variance: Tensor


def laplace(mean: Tensor, variance: Tensor, rate: Tensor) -> Moments1:
    """Return moments of N(u; m, v) exp(−a|u|): two normal densities, each cut off at 0."""
    sd = variance.sqrt()
    z = mean / sd
    right, left = _cut(z - rate * sd), _cut(-z - rate * sd)
    log_right, log_left = right[0] - rate * mean, left[0] + rate * mean
    log_total = torch.logaddexp(log_right, log_left)
    p = (log_right - log_total).exp()
    first = sd * (p * right[1] - (1 - p) * left[1])
    spread = p * right[2] + (1 - p) * left[2] + p * (1 - p) * (right[1] + left[1]).square()
    return Moments1(log_total + (rate * sd).square() / 2, first, variance * spread)


def _cut(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Φ(z), and mean and variance of N(z, 1) above 0."""
    ratio = (-0.5 * z.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(z)).exp()
    mean = z + ratio
    variance = (1 - ratio * mean).clamp(min=0)
    deep = z < -_DEEP  # there both differences cancel: the density is exponential of rate |z|
    tail = -1 / torch.where(deep, z, -_DEEP)
    mean = torch.where(deep, tail - 2 * tail**3 + 10 * tail**5, mean)
    variance = torch.where(deep, tail.square() - 6 * tail**4, variance)
    return torch.special.log_ndtr(z), mean, variance


def horseshoe(mean: Tensor, variance: Tensor, scale: Tensor) -> Moments1:
    """Return moments of N(u; m, v) times the horseshoe density of this scale: a mixture over the local scale."""
    log_scales = LOG_SCALES.to(mean)
    # log of the half-Cauchy density of e^x, its Jacobian and the width of a node
    log_weight = math.log(2 / math.pi) + log_scales - torch.nn.functional.softplus(2 * log_scales)
    log_weight = log_weight + (log_scales[1] - log_scales[0]).log()
    prior = (scale[..., None] * log_scales.exp()).square()
    total = prior + variance[..., None]
    log = log_weight - 0.5 * (2 * math.pi * total).log() - 0.5 * mean[..., None].square() / total
    responsibility = torch.softmax(log, -1)
    gain = prior / total
    at = gain * mean[..., None]
    first = (responsibility * at).sum(-1)
    spread = (responsibility * (gain * variance[..., None] + (at - first[..., None]).square())).sum(-1)
    return Moments1(log.logsumexp(-1), first, spread)
