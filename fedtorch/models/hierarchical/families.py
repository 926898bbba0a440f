r"""The distribution of one response given its linear predictor: what model criticism asks of a likelihood.

A likelihood itself only needs sums over a client's rows. Leaving out rows, calibration and replicated responses need
the density, the mean and draws of each one, which a `Family` has.

>>> import torch
>>> eta, one = torch.zeros(1).double(), torch.ones(1).double()
>>> LOGISTIC.log_density(one, eta, one).exp(), POISSON.mean(eta)  # of y = 1 at log-odds 0; a rate of e⁰
(tensor([0.5000], dtype=torch.float64), tensor([1.], dtype=torch.float64))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_FURTHEST = 30.0  # of a linear predictor, before its exponential
_SMALL, _COUNTS = 30.0, 120  # rates whose counts are found one after the other, and how many of these


class Family(NamedTuple):
    """The distribution of y given η = x'θ, and given a scale: the noise variance, or the number of trials."""

    name: str
    mean: Callable[[Tensor], Tensor]  # η -> E y, of one trial
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor]  # (y, η, scale) -> log p
    draw: Callable[[Tensor, Tensor, Tensor], Tensor]  # (uniform numbers, η, scale) -> y, by the inverse distribution
    scale: Callable[[Any], Tensor] | None = None  # a model's prepared rows -> the scale that is known, (K,)
    precise: bool = False  # whether a row's weight divides the scale, and is not a power of the density


def _gaussian_density(y: Tensor, eta: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((y - eta).square() / variance + variance.log() + math.log(2 * math.pi))


def _binomial_density(y: Tensor, eta: Tensor, trials: Tensor) -> Tensor:
    ways = torch.lgamma(trials + 1) - torch.lgamma(y + 1) - torch.lgamma(trials - y + 1)
    return ways + y * eta - trials * torch.nn.functional.softplus(eta)


def _poisson_density(y: Tensor, eta: Tensor, scale: Tensor) -> Tensor:
    return y * eta - eta.clamp(max=_FURTHEST).exp() - torch.lgamma(y + 1)


def _binomial_draw(uniform: Tensor, eta: Tensor, trials: Tensor) -> Tensor:
    p = eta.sigmoid()
    if bool((trials == 1).all()):
        return (uniform > 1 - p).to(p.dtype)
    from scipy import stats

    return _by_quantiles(stats.binom.ppf, uniform, trials.expand_as(p), p)


def _poisson_draw(uniform: Tensor, eta: Tensor, scale: Tensor) -> Tensor:
    rate = eta.clamp(max=_FURTHEST).exp()
    if rate.numel() and float(rate.max()) > _SMALL:
        from scipy import stats

        return _by_quantiles(stats.poisson.ppf, uniform, rate)
    y, mass = torch.zeros_like(rate), (-rate).exp()
    below = mass.clone()
    for count in range(1, _COUNTS):
        above = uniform > below
        if not bool(above.any()):
            break
        y += above
        mass *= rate / count
        below += mass
    return y


def _by_quantiles(quantile: Callable[..., np.ndarray], uniform: Tensor, *parameters: Tensor) -> Tensor:
    return torch.from_numpy(quantile(uniform.cpu().numpy(), *(part.cpu().numpy() for part in parameters))).to(uniform)


GAUSSIAN = Family(
    "gaussian",
    lambda eta: eta,
    _gaussian_density,
    lambda uniform, eta, variance: eta + variance.sqrt() * torch.special.ndtri(uniform),
    lambda prepared: prepared.log_noise.exp(),
    precise=True,
)
LOGISTIC = Family("logistic", torch.sigmoid, _binomial_density, _binomial_draw)
POISSON = Family("poisson", lambda eta: eta.clamp(max=_FURTHEST).exp(), _poisson_density, _poisson_draw)
