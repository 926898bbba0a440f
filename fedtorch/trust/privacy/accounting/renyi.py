r"""Rényi accounting of the Gaussian mechanism with Poisson sampling, in closed form.

Each unit takes part with probability q. At a whole order α ≥ 2 a release of noise σ has Rényi divergence at most

.. math:: \frac{1}{\alpha - 1} \log \sum_{k=0}^{\alpha} \binom{\alpha}{k} (1-q)^{\alpha-k} q^k
          \exp\frac{k^2 - k}{2\sigma^2},

which is the α-th moment of 1 − q + q exp((2z − 1)/2σ²) for z ~ N(0, σ²), by quadrature for fractional orders. The
divergences of rounds add up ((9.3)–(9.4) of the GTV book, the latter with the logarithm that (9.3) lacks), and order α
with divergence ρ gives ε = ρ + log((α − 1)/α) − (log δ + log α)/(α − 1). It is looser than the privacy-loss
distributions of `epsilon`, and an independent bound on them.

Sources: Mironov, Talwar and Zhang (2019), "Rényi differential privacy of the sampled Gaussian mechanism", section 3.3;
Canonne, Kamath and Steinke (2020), "The discrete Gaussian for differential privacy", Proposition 12.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, logsumexp

from fedtorch.trust.privacy._checks import check_delta, check_noise, check_rate, check_rounds

ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 65), 80, 96, 128, 192, 256, 512, 1024)
_TAIL, _STEP = 12.0, 1 / 32  # in standard deviations; Gaussian integrands need no finer steps


def renyi_divergence(noise: float, sampling_rate: float, order: float) -> float:
    """Return the divergence of one release at an order above 1.

    >>> renyi_divergence(2.0, sampling_rate=1.0, order=8)  # α / 2σ²
    1.0
    >>> round(renyi_divergence(2.0, 0.5, order=2), 4) == round(math.log(1 + 0.5**2 * (math.exp(1 / 4) - 1)), 4)
    True
    """
    if sampling_rate == 1:
        return order / (2 * noise**2)
    moment = (
        _binomial(noise, sampling_rate, int(order)) if order == int(order) else _quadrature(noise, sampling_rate, order)
    )
    return moment / (order - 1)


def _binomial(noise: float, sampling_rate: float, order: int) -> float:
    """Return the logarithm of the moment of a whole order."""
    k = np.arange(order + 1, dtype=np.float64)
    binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = (
        binomial + (order - k) * math.log1p(-sampling_rate) + k * math.log(sampling_rate) + (k * k - k) / (2 * noise**2)
    )
    return float(logsumexp(terms))


def _quadrature(noise: float, sampling_rate: float, order: float) -> float:
    """Return the logarithm of the moment of any order, by the trapezoidal rule in z/σ."""
    x = np.arange(-_TAIL, order / noise + _TAIL, _STEP)
    ratio = np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + x / noise - 1 / (2 * noise**2))
    density = -x * x / 2 - math.log(2 * math.pi) / 2
    return float(logsumexp(order * ratio + density)) + math.log(_STEP)


def renyi_epsilon(noise: float, delta: float, rounds: int = 1, sampling_rate: float = 1.0) -> float:
    """Return an ε for this many releases of a Gaussian sum, with each unit sampled at this rate.

    Raises:
        ValueError: noise, δ, rounds or rate out of range.

    Example:
        >>> round(renyi_epsilon(1.0, 1e-5, rounds=1000, sampling_rate=0.01), 2)
        2.1
    """
    check_noise(noise)
    check_delta(delta)
    check_rounds(rounds)
    check_rate(sampling_rate)
    return best_epsilon([(order, rounds * renyi_divergence(noise, sampling_rate, order)) for order in ORDERS], delta)


def best_epsilon(divergences: Sequence[tuple[float, float]], delta: float) -> float:
    """Return the least ε from (order, divergence) pairs, such as sums over mechanisms.

    >>> orders = (2, 4, 8)
    >>> both = [(order, renyi_divergence(3.0, 1.0, order) + renyi_divergence(4.0, 1.0, order)) for order in orders]
    >>> one = [(order, renyi_divergence(12 / 5, 1.0, order)) for order in orders]
    >>> round(best_epsilon(both, delta=1e-5), 6) == round(best_epsilon(one, delta=1e-5), 6)
    True
    >>> round(best_epsilon([(2, 1.0)], delta=1 / 4), 6)
    1.0
    """
    bounds = [
        divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        for order, divergence in divergences
    ]
    return max(0.0, min(bounds))
