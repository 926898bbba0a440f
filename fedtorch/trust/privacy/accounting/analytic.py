r"""The Gaussian mechanism without sampling, exactly.

A sum of sensitivity one (Euclidean) with noise N(0, σ² I) is (ε, δ)-private if and only if

.. math:: \delta \ge \Phi\!\left(\tfrac{1}{2\sigma} - \varepsilon\sigma\right)
          - e^\varepsilon\, \Phi\!\left(-\tfrac{1}{2\sigma} - \varepsilon\sigma\right),

for every ε ≥ 0; the usual σ = √(2 ln(1.25/δ))/ε is proved for ε < 1 only, and is larger than needed there. Releases of
noises σ_t compose to a single one of noise (Σ_t σ_t⁻²)^{−1/2}, without any loss.

Source: Balle and Wang (2018), "Improving the Gaussian mechanism for differential privacy", Theorem 8 and Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from fedtorch.trust.privacy._checks import check_delta, check_noise, check_rounds


def gaussian_delta(noise: float, epsilon: float) -> float:
    """Return the least δ at which noise of standard deviation `noise` sensitivities is (ε, δ)-private.

    Raises:
        ValueError: noise that is not positive, or a negative ε.

    Example:
        >>> round(gaussian_delta(1.0, 0.0), 4)  # the total variation of normals one apart, 2 Φ(½) − 1
        0.3829
    """
    check_noise(noise)
    if not epsilon >= 0:
        raise ValueError(f"Expected epsilon of at least 0, but got {epsilon}")
    near, far = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
    first = float(log_ndtr(near))
    return math.exp(first) * -math.expm1(min(epsilon + float(log_ndtr(far)) - first, 0.0))


def gaussian_epsilon(noise: float, delta: float, rounds: int = 1) -> float:
    """Return the least ε at which `rounds` releases with this noise are (ε, δ)-private together.

    Raises:
        ValueError: noise that is not positive, δ outside (0, 1), or fewer than one round.

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 4)
        4.3772
    """
    check_noise(noise)
    check_delta(delta)
    check_rounds(rounds)
    noise = noise / math.sqrt(rounds)
    if gaussian_delta(noise, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(noise, high) > delta:
        high *= 2
    return float(brentq(lambda epsilon: gaussian_delta(noise, epsilon) - delta, 0.0, high, xtol=1e-12))


def gaussian_noise(epsilon: float, delta: float, rounds: int = 1) -> float:
    """Return the least noise, in sensitivities, with which `rounds` releases are (ε, δ)-private together: Algorithm 1.

    Raises:
        ValueError: an ε that is not positive, δ outside (0, 1), or fewer than one round.
    """
    if not epsilon > 0:
        raise ValueError(f"Expected a positive epsilon, but got {epsilon}")
    check_delta(delta)
    check_rounds(rounds)
    tail = lambda v: math.exp(epsilon + float(log_ndtr(-math.sqrt(epsilon * (v + 2)))))
    if delta >= 0.5 - tail(0.0):
        v = _crossing(lambda v: float(ndtr(math.sqrt(epsilon * v))) - tail(v) - delta)
        factor = math.sqrt(1 + v / 2) - math.sqrt(v / 2)
    else:
        v = _crossing(lambda v: delta - (float(ndtr(-math.sqrt(epsilon * v))) - tail(v)))
        factor = math.sqrt(1 + v / 2) + math.sqrt(v / 2)
    return factor / math.sqrt(2 * epsilon) * math.sqrt(rounds)


def composed_noise(releases: Iterable[tuple[float, int]]) -> float:
    """Return the noise of the one release that is equivalent to releases of (noise, how often) together.

    Example:
        >>> round(composed_noise([(3.0, 1), (4.0, 1)]), 6), composed_noise([(2.0, 4)])  # 12 / 5, and 2 / √4
        (2.4, 1.0)
    """
    return float(sum(count * noise**-2 for noise, count in releases) ** -0.5)


def _crossing(increasing: Callable[[float], float]) -> float:
    """Find the zero at which a function becomes positive, from a value at 0 that is not."""
    high = 1.0
    while increasing(high) < 0:
        high *= 2
    return float(brentq(increasing, 0.0, high, xtol=1e-14)) if increasing(0.0) < 0 else 0.0
