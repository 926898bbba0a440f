r"""Log densities of counts, accurate also for huge counts: differences are taken before products.

A log density such as y η − e^η − log y! of a count of 10⁹ is the difference of numbers of 10¹⁰, so rounding leaves five
digits. Here each density is its value at or near its maximum, plus the difference from there:

>>> import torch
>>> y = torch.tensor([1e9], dtype=torch.float64)
>>> poisson(y, y.log() + 1e-4)  # −½ log 2πy − y (e^d − 1 − d), d = 1e-4
tensor([-16.2807], dtype=torch.float64)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SERIES = 1000.0  # from here on three terms of Stirling's series are more exact than log Γ
FURTHEST = 200.0  # largest logarithm of a mean, so that its powers are finite
_NEAR = 1.0  # distances from the base below which ratios are expanded


def rate(eta: Tensor) -> Tensor:
    """Return e^η, a number however large η is."""
    return eta.clamp(max=FURTHEST).exp()


def base(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return η₀ about which a Poisson density is expanded, e^η₀, and log p(y | η₀): at log y, and at 0 where y = 0.

    >>> base(torch.tensor([0.0, 1.0]))
    (tensor([0., 0.]), tensor([1., 1.]), tensor([-1., -1.]))
    """
    mean = torch.where(y > 0, y, 1.0)
    return mean.log(), mean, torch.where(y > 0, _entropy(mean), -1.0)


def poisson(y: Tensor, eta: Tensor) -> Tensor:
    """Return log p(y) of counts of mean e^η."""
    start, mean, largest = base(y)
    away = eta.clamp(max=FURTHEST) - start
    return largest + (y * away - mean * away.expm1())


def binomial_base(y: Tensor, trials: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-odds η₀ about which a binomial density is expanded, (y + ½) / (n − y + ½), and log p(y | η₀)."""
    rest, ties = trials - y, (trials / 2 - y) / (trials + 1)
    shares = torch.log1p(ties / y.clamp(min=1)) * y + torch.log1p(-ties / rest.clamp(min=1)) * rest
    return ((y + 0.5) / (rest + 0.5)).log(), _entropy(y) + _entropy(rest) - _entropy(trials) + shares


def binomial(y: Tensor, eta: Tensor, trials: Tensor) -> Tensor:
    """Return log p(y) of successes in a number of trials with log-odds η.

    >>> binomial(torch.tensor([0.0, 3.0]), torch.zeros(2), torch.tensor([2.0, 3.0])).exp()
    tensor([0.2500, 0.1250])
    """
    start, largest = binomial_base(y, trials)
    return largest + binomial_ratio(y, eta, trials, start)


def binomial_ratio(y: Tensor, eta: Tensor, trials: Tensor, start: Tensor) -> Tensor:
    """Return log p(y | η) − log p(y | η₀)."""
    rest, far = trials - y, torch.nn.functional.logsigmoid
    away = eta - start
    small = away.clamp(-_NEAR, _NEAR)
    up, down = start.sigmoid() * small.expm1(), (-start).sigmoid() * (-small).expm1()
    expanded = -(y * down.log1p() + rest * up.log1p())
    direct = y * (far(eta) - far(start)) + rest * (far(-eta) - far(-start))
    return torch.where(away.abs() < _NEAR, expanded, direct)


def negative_binomial(y: Tensor, eta: Tensor, log_dispersion: Tensor) -> Tensor:
    """Return log p(y) of counts with mean e^η and variance e^η + e^{2η} / r, given log r.

    >>> negative_binomial(torch.arange(3.0), torch.zeros(3), torch.zeros(1)).exp()
    tensor([0.5000, 0.2500, 0.1250])
    """
    start, _, _ = base(y)
    r = log_dispersion.exp()
    largest = _entropy(r) + _entropy(y) - _entropy(r + y) - (y / r).log1p()
    largest = torch.where(y > 0, largest, -r * (1 / r).log1p())
    # As y successes and r failures of log-odds η − log r are.
    return largest + binomial_ratio(y, eta - log_dispersion, y + r, start - log_dispersion)


def _entropy(x: Tensor) -> Tensor:
    """Return x log x − x − log Γ(x + 1), which is −½ log 2πx of large x."""
    large = x.clamp(min=_SERIES)
    small = x.clamp(max=_SERIES)
    series = -0.5 * (2 * math.pi * large).log() - (1 - 1 / (30 * large.square())) / (12 * large)
    return torch.where(x < _SERIES, torch.xlogy(small, small) - small - torch.lgamma(small + 1), series)
