"""Costs of releases: ε of rounds with noise, the noise for an ε, the rounds for an ε.

Accounts are privacy-loss distributions (Google's `dp-accounting`, rounded against us), and closed forms where Gaussian
sums are not sampled. Noise is in units of the sensitivity: the standard deviation of a Gaussian divided by the largest
Euclidean norm with which one unit enters the sum, or the scale of a Laplace by the largest sum of absolute values.
Neighbours differ in one unit (a client, an example) that takes part or leaves the sum with zeros; for replaced units
halve the noise. A `sampling_rate` below one says that every round draws each unit independently, in secret: for who
can compute the draws, the rate is one.

Where a batch with more units than fit is cut, the release is that of the whole batch but for a probability τ. All of
them together, with η = Σ τ, then are (ε, δ + (1 + e^ε) η)-private where whole ones are (ε, δ)-private (Chua et al.
2024, "Scalable DP-SGD: shuffling vs. Poisson subsampling", section 3); ε is found so that this is the δ asked for.

>>> from fedtorch.trust import privacy
>>> round(privacy.epsilon(noise=1.0, sampling_rate=0.01, rounds=1000, delta=1e-5), 3)
1.828
>>> privacy.rounds_for(epsilon=2.0, noise=20.0, delta=1e-5)
100
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from fedtorch.trust.privacy._checks import check_delta, check_noise, check_rate, check_rounds
from fedtorch.trust.privacy.accounting.analytic import composed_noise, gaussian_epsilon
from fedtorch.trust.privacy.noise import Mechanism, gaussian

_INTERVAL = 1e-4  # of the grid of privacy losses, coarser where the losses of little noise are large
FINE, COARSE = 1_000_000, 20_000  # cells of the grid
_LARGEST = 1e6  # losses, beyond which an account is not worth keeping
_CLOSE = 1e-6  # by which ε is rounded up where batches may be cut
_PRECISION = 1e-3  # to which `noise_for` finds the least noise, from above


class Release(NamedTuple):
    """Describe a noised sum that somebody saw."""

    noise: float  # in units of the sensitivity
    sampling_rate: float = 1.0  # with which each unit took part
    mechanism: Mechanism = gaussian
    excess: float = 0.0  # τ, at most the probability that not all units that were drawn took part


def epsilon(
    *, noise: float, delta: float, rounds: int = 1, sampling_rate: float = 1.0, mechanism: Mechanism = gaussian
) -> float:
    """Return the ε at which `rounds` releases are (ε, δ)-private together.

    Args:
        noise: of each release, in units of the sensitivity.
        delta: between 0 and 1, below one over the number of units.
        rounds: of releases of one noise.
        sampling_rate: with which every round draws each unit, independently and in secret.
        mechanism: `gaussian` or `laplace`.

    Raises:
        ValueError: noise, δ, rounds or rate out of range.
    """
    check_rounds(rounds)
    return spent({Release(noise, sampling_rate, mechanism): rounds}, delta)


def spent(releases: Mapping[Release, int], delta: float, cells: int = FINE) -> float:
    """Return the ε of releases of all kinds together, each as often as it says; 0 of none.

    Args:
        releases: of any kinds.
        delta: between 0 and 1.
        cells: at most about so many for the losses of a sampled release; with `COARSE`, which ledgers take, it is found
            ten times sooner, and is larger by some 0.02 %.

    Example:
        >>> from fedtorch.trust import privacy
        >>> two = {Release(noise=3.0): 1, Release(noise=4.0): 1}
        >>> from fedtorch.trust.privacy.accounting.analytic import gaussian_epsilon
        >>> round(spent(two, delta=1e-5), 4) == round(gaussian_epsilon(12 / 5, delta=1e-5), 4)
        True
    """
    check_delta(delta)
    releases = {release: count for release, count in releases.items() if count}
    for release in releases:
        check_noise(release.noise)
        check_rate(release.sampling_rate)
    whole: Counter[Release] = Counter()
    for release, count in releases.items():
        whole[release._replace(excess=0.0)] += count
    curve, excess = _curve(whole, cells), sum(count * release.excess for release, count in releases.items())
    if not excess:
        return curve(delta)
    bound, least = -1.0, 0.0
    while least > bound:  # from below, so that it ends at the least that will do
        bound = least * (1 + _CLOSE) + _CLOSE
        left = delta - (1 + math.exp(min(bound, 700.0))) * excess
        least = curve(left) if left > 0 else math.inf
        if least == math.inf:
            return least
    return bound


def _curve(releases: Mapping[Release, int], cells: int) -> Callable[[float], float]:
    """Return δ -> ε of releases whose batches are whole."""
    if not releases:
        return lambda delta: 0.0
    if all(release.sampling_rate == 1 and release.mechanism is gaussian for release in releases):
        one = composed_noise((release.noise, count) for release, count in releases.items())
        return partial(gaussian_epsilon, one)
    return _pld_curve(releases, cells)


def pld_epsilon(releases: Mapping[Release, int], delta: float) -> float:
    """Return `spent` by privacy-loss distributions, also beside a closed form; infinite for noise below 1e-3."""
    return _pld_curve(releases, FINE)(delta)


def _pld_curve(releases: Mapping[Release, int], cells: int) -> Callable[[float], float]:
    largest = max(_largest(release.noise) for release in releases)
    if largest > _LARGEST:
        return lambda delta: math.inf
    interval = max(_INTERVAL, largest / cells)
    parts = [_loss(release, interval).self_compose(count) for release, count in releases.items()]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.compose(part)
    return lambda delta: float(whole.get_epsilon_for_delta(delta))


def noise_for(
    *, epsilon: float, delta: float, rounds: int = 1, sampling_rate: float = 1.0, mechanism: Mechanism = gaussian
) -> float:
    """Find the least noise, to 0.1 % from above, with which `rounds` releases are (ε, δ)-private.

    Raises:
        ValueError: an ε that is not positive, or δ, rounds or rate out of range.
    """
    if not epsilon > 0:
        raise ValueError(f"Expected a positive epsilon, but got {epsilon}")
    check_rounds(rounds)
    enough = lambda noise: spent({Release(noise, sampling_rate, mechanism): rounds}, delta) <= epsilon
    high = 1.0
    while not enough(high):
        high *= 2
    low = 0.8 * high  # small steps down: a distribution takes the longer to make the less noise there is
    while enough(low):
        low, high = 0.8 * low, low
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def rounds_for(
    *, epsilon: float, noise: float, delta: float, sampling_rate: float = 1.0, mechanism: Mechanism = gaussian
) -> int:
    """Return how many releases with this noise stay (ε, δ)-private; 0 where the first would not.

    Raises:
        ValueError: an ε that is not positive, or noise, δ or rate out of range.
    """
    if not epsilon > 0:
        raise ValueError(f"Expected a positive epsilon, but got {epsilon}")
    fits = lambda rounds: spent({Release(noise, sampling_rate, mechanism): rounds}, delta) <= epsilon
    return _last(fits)


def _last(fits: Callable[[int], bool]) -> int:
    """Return the largest whole number with a property that all smaller ones share, 0 if not even one has it."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _largest(noise: float) -> float:
    """Estimate the largest privacy loss of a release."""
    return 12 / noise + 0.5 / noise**2


@lru_cache(maxsize=64)
def _loss(release: Release, interval: float) -> Any:
    try:
        from dp_accounting.pld import privacy_loss_distribution as distributions
    except ImportError as error:
        raise ImportError(
            "Expected dp-accounting with privacy-loss distributions, but it does not import: "
            "pip install 'fedtorch[privacy]' (an old dp-accounting, below 0.6, has none)"
        ) from error
    return release.mechanism.losses(distributions, release.noise, release.sampling_rate, interval)
