r"""Pólya–Gamma numbers, which turn a logistic likelihood into a Gaussian one.

For ω ~ PG(1, ψ),
:math:`\frac{e^{y\psi}}{1 + e^\psi} \propto e^{(y - 1/2)\psi} E_{\omega \sim PG(1, 0)} e^{-\omega \psi^2/2}`, so that
given ω the coefficients of a logistic regression are normal.

Source: Polson, Scott and Windle (2013), "Bayesian inference for logistic models using Pólya–Gamma latent variables",
JASA 108, sections 2 and 4 and supplement S6: Devroye's exact sampler by an alternating series.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedtorch import random

_CUT = 0.64  # boundary between the two forms of the series
_SERIES = 30  # terms after which the remaining ones are below 1e-300 at any x


def polya_gamma(key: Tensor, tilt: Tensor) -> Tensor:
    """Return PG(1, ψ) numbers; number i of a key depends on (key, i, its own ψ) only.

    Args:
        key: `(...)`.
        tilt: ψ, `(*key.shape, n)`, float64.

    Returns:
        `(*key.shape, n)`, positive; the mean is tanh(ψ/2) / (2ψ), a quarter at 0.
    """
    elements = random.fold_in(key.unsqueeze(-1), torch.arange(tilt.shape[-1], device=key.device)).flatten()
    z = tilt.abs().flatten() / 2
    rate = math.pi**2 / 8 + z.square() / 2
    right = _probability_beyond_the_cut(z, rate)
    result, beyond = torch.zeros_like(z), torch.zeros_like(z, dtype=torch.bool)
    left, fresh, attempt = torch.arange(len(z), device=z.device), None, 0
    while len(left):
        u = random.uniform(random.fold_in(elements[left], attempt), (5,), torch.float64).unbind(-1)
        side = u[0] < right[left]
        beyond[left] = side if fresh is None else torch.where(fresh[left], side, beyond[left])
        x, proposed = _propose(beyond[left], z[left], rate[left], u)
        accepted = proposed & _series_accepts(x, u[4])
        result[left] = torch.where(accepted, x, 0.0)
        fresh = torch.zeros_like(beyond) if fresh is None else fresh
        fresh[left] = proposed  # a rejected truncated draw is repeated on its side, a rejected x from the start
        left, attempt = left[~accepted], attempt + 1
    return result.reshape(tilt.shape) / 4


def _probability_beyond_the_cut(z: Tensor, rate: Tensor) -> Tensor:
    """Return the share of the exponential part of the proposal."""
    root = math.sqrt(_CUT)
    exponential = math.log(math.pi / 2) - rate.log() - rate * _CUT
    below = torch.special.log_ndtr((_CUT * z - 1) / root)
    inverse = math.log(2) - z + torch.logaddexp(below, 2 * z + torch.special.log_ndtr(-(_CUT * z + 1) / root))
    return torch.sigmoid(exponential - inverse)


def _propose(beyond: Tensor, z: Tensor, rate: Tensor, u: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Propose numbers, and whether each is final: exponential past the cut, inverse Gaussian of mean 1/z before it."""
    first, second = -torch.log1p(-u[1]), -torch.log1p(-u[2])
    tail = _CUT + first / rate
    # of large mean: a stable law below the cut, thinned
    stable = _CUT / (1 + _CUT * first).square()
    accepted = (first.square() <= 2 * second / _CUT) & (u[3] <= (-z.square() * stable / 2).exp())
    # of small mean: a root of a quadratic, refused beyond the cut
    square = 2 * first * (2 * math.pi * u[2]).cos().square()
    scaled = square / z
    root = 2 / (2 + scaled + (scaled * (scaled + 4)).sqrt())
    inverse = torch.where(u[3] * (1 + root) <= 1, root, 1 / root) / z
    small = z > 1 / _CUT
    before = torch.where(small, inverse, stable)
    return torch.where(beyond, tail, before), beyond | torch.where(small, inverse <= _CUT, accepted)


def _series_accepts(x: Tensor, u: Tensor) -> Tensor:
    """Return whether u a₀(x) < Σ (−1)ⁿ aₙ(x), an alternating sum that its partial sums bound from both sides."""
    ratio = torch.where(x > _CUT, math.pi**2 * x / 2, 2 / x)
    total = torch.ones_like(x)
    accepted = torch.zeros_like(x, dtype=torch.bool)
    open = torch.ones_like(accepted)
    for n in range(1, _SERIES):
        term = (2 * n + 1) * (-(n * n + n) * ratio).exp()  # aₙ/a₀ in either form of the series
        total = total - term if n % 2 else total + term
        decided = u <= total if n % 2 else u > total
        if n % 2:
            accepted |= open & decided
        open &= ~decided
        if not bool(open.any()):
            break
    return accepted
