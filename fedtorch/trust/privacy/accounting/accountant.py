"""Costs of releases: ε of rounds with noise, the noise for an ε, the rounds for an ε.

Accounts are privacy-loss distributions (Google's `dp-accounting`, rounded pessimistically), and closed forms for
Gaussian sums without sampling. Noise is in units of the sensitivity: the standard deviation of a Gaussian divided by
the largest Euclidean norm with which one unit enters the sum, or the scale of a Laplace by the largest sum of absolute
values. Neighbours differ in one unit (a client, an example) that takes part or contributes zeros; for replaced units
halve the noise. A `sampling_rate` below one means that every round draws each unit independently, in secret: against an
adversary who can compute the draws, the rate is one.

If batches with too many units are cut, the release is that of the whole batch except with a probability τ. All of them
together, with η = Σ τ, are then (ε, δ + (1 + e^ε) η)-private if whole ones are (ε, δ)-private (Chua et al. 2024,
"Scalable DP-SGD: shuffling vs. Poisson subsampling", section 3); ε is chosen so that this is the requested δ.

>>> from fedtorch.trust import privacy
>>> round(privacy.epsilon(noise=1.0, sampling_rate=0.01, rounds=1000, delta=1e-5), 3)
1.828
>>> privacy.rounds_for(epsilon=2.0, noise=20.0, delta=1e-5)
100
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from fedtorch.trust.privacy._checks import check_delta, check_noise, check_rate, check_rounds
from fedtorch.trust.privacy.accounting.analytic import composed_noise, gaussian_epsilon
from fedtorch.trust.privacy.accounting.renyi import ORDERS, best_epsilon, renyi_divergence
from fedtorch.trust.privacy.noise import LossCurve, Mechanism, gaussian, laplace

_LOG = logging.getLogger(__name__)
_INTERVAL = 1e-4  # grid of privacy losses, coarser if little noise makes the losses large
FINE, COARSE, ROUGH = 1_000_000, 20_000, 5_000  # cells of the grid
_EXPONENT = 700.0  # beyond which e^x has no number
_COARSEST = 100.0  # interval, of whose exponential the distributions are made
_LARGEST = 1e6  # losses, beyond which an account is not worth keeping
_CLOSE = 1e-6  # by which ε is rounded up if batches may be cut
_PRECISION = 1e-3  # relative precision of the least noise in `noise_for`, from above
_MOST = 8_000_000  # cells of composed losses, which take a second or two
_SOON, _ROUGHLY = _MOST // 4, 100_000  # cells for the few fine and the many rough computations of `noise_for`
_SPARSE = 10  # compositions up to which sparse losses are stored one by one
_ROUGH_TURNS = 8  # rough steps of `noise_for`, after which all are fine
_TAIL = math.log(2e15)  # logarithm of the probability of losses that a composition leaves out
_WHOLE_ORDERS = tuple(int(order) for order in ORDERS if order == int(order))


class UpperBound(float):
    """A number above the tight one, which would take too long to compute.

    Example:
        >>> bound = UpperBound(2.5)
        >>> bound, bound < 3, round(bound)
        (2.5 (upper bound), True, 2)
    """

    def __repr__(self) -> str:
        return f"{float(self)!r} (upper bound)"

    __str__ = __repr__


class Release(NamedTuple):
    """A released noised sum."""

    noise: float  # in units of the sensitivity
    sampling_rate: float = 1.0  # probability of each unit's participation
    mechanism: Mechanism = gaussian
    excess: float = 0.0  # τ, at most the probability that not all units that were drawn took part


def epsilon(
    *, noise: float, delta: float, rounds: int = 1, sampling_rate: float = 1.0, mechanism: Mechanism = gaussian
) -> float:
    """Return the ε at which `rounds` releases are (ε, δ)-private together, within seconds of any setting.

    Where the tight ε would take longer, a coarser grid gives an `UpperBound`, mostly by less than 1e-5 of ε, and a
    warning is logged.

    Args:
        noise: of each release, in units of the sensitivity.
        delta: between 0 and 1, below one over the number of units.
        rounds: number of releases.
        sampling_rate: probability with which every round draws each unit, independently and in secret.
        mechanism: `gaussian` or `laplace`.

    Raises:
        ValueError: noise, δ, rounds or rate out of range.

    Example:
        >>> from fedtorch.trust import privacy
        >>> privacy.epsilon(noise=0.05, sampling_rate=0.5, rounds=1_000_000, delta=1e-5) > 1e6
        True
    """
    check_rounds(rounds)
    return _warned("epsilon", spent({Release(noise, sampling_rate, mechanism): rounds}, delta))


def _warned(what: str, value: float) -> float:
    """Return a result, with a warning if it is an upper bound."""
    if isinstance(value, UpperBound):
        _LOG.warning("%s: %s, because the tight value would take too long", what, value)
    return value


def spent(releases: Mapping[Release, int], delta: float, cells: int = FINE, most: int = _MOST) -> float:
    """Return the ε of all releases together, with their counts; 0 for none.

    Args:
        releases: of any kinds.
        delta: between 0 and 1.
        cells: approximate number of cells for the losses of a sampled release; `COARSE`, used by ledgers, is ten times
            faster, and gives values larger by some 0.02 %.
        most: cells of the composed losses, beyond which their grid is coarser and ε an `UpperBound`.

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
    curve, tight = _curve(whole, cells, most)
    kind, excess = float if tight else UpperBound, sum(count * release.excess for release, count in releases.items())
    if not excess:
        return kind(curve(delta))
    bound, least = -1.0, 0.0
    while least > bound:  # from below, so that it ends at the least sufficient value
        bound = least * (1 + _CLOSE) + _CLOSE
        left = delta - (1 + math.exp(min(bound, 700.0))) * excess
        least = curve(left) if left > 0 else math.inf
        if least == math.inf:
            return least
    return kind(bound)


def _curve(releases: Mapping[Release, int], cells: int, most: int) -> tuple[Callable[[float], float], bool]:
    """Return the function δ -> ε of releases with whole batches, and whether it is tight."""
    if not releases:
        return lambda delta: 0.0, True
    if all(release.sampling_rate == 1 and release.mechanism is gaussian for release in releases):
        one = composed_noise((release.noise, count) for release, count in releases.items())
        return partial(gaussian_epsilon, one), True
    return _pld_curve(releases, cells, most)


def pld_epsilon(releases: Mapping[Release, int], delta: float) -> float:
    """Return `spent` by privacy-loss distributions, also beside a closed form; infinite for noise below 1e-3."""
    return _pld_curve(releases, FINE, _MOST)[0](delta)


def _pld_curve(releases: Mapping[Release, int], cells: int, most: int) -> tuple[Callable[[float], float], bool]:
    """Return the function δ -> ε of privacy-loss distributions, and whether their grid is as fine as requested.

    How many cells a composition has is known beforehand by Chernoff's bound, from the losses on a rough grid.
    """
    largest = max(_largest(release.noise) for release in releases)
    if largest > _LARGEST:
        return lambda delta: math.inf, False
    if any(r.mechanism is laplace and r.sampling_rate < 1 and r.noise * _EXPONENT < 1 for r in releases):
        return _closed_bound(releases), False
    interval = max(_INTERVAL, largest / cells)
    width = _composed_width(releases, max(interval, largest / ROUGH))
    if width / interval <= most:
        return _composed(releases, interval), True
    closed = _closed_bound(releases)
    if width / (most // 4) > _COARSEST:
        return closed, False
    coarse = _composed(releases, width / (most // 4))
    return lambda delta: min(coarse(delta), closed(delta)), False


def _composed(releases: Mapping[Release, int], interval: float) -> Callable[[float], float]:
    """Return δ -> ε on a grid of losses, each release rounded up to it.

    Of releases without sampling both ways are alike.
    """
    ways: list[Any] = []  # a unit leaves, a unit joins
    for release, count in releases.items():
        parts = _losses(release, interval)
        if count > _SPARSE or len(releases) > 1:  # for a sparse one, the library raises its size to this power
            parts = [part.to_dense_pmf() for part in parts]
        parts = [part.self_compose(count) for part in parts]
        parts = parts if len(parts) == 2 or len(ways) != 2 else parts * 2
        ways = ways * 2 if len(ways) == 1 and len(parts) == 2 else ways
        ways = [way.compose(part) for way, part in zip(ways, parts)] if ways else parts
    return lambda delta: max(_epsilon_at(way, delta) for way in ways)


def _epsilon_at(way: Any, delta: float) -> float:
    """Return the ε of a distribution at δ; where e^−ε is below the smallest numbers, by halving from above."""
    with np.errstate(over="ignore"):
        epsilon = float(way.get_epsilon_for_delta(delta))
    low, high = 0.0, 1000.0
    if epsilon < math.inf or way.get_delta_for_epsilon(high) > delta:
        return epsilon
    while high - low > _CLOSE:
        middle = (low + high) / 2
        low, high = (low, middle) if way.get_delta_for_epsilon(middle) <= delta else (middle, high)
    return high


def _composed_width(releases: Mapping[Release, int], interval: float) -> float:
    """Return the range of a composition's losses up to a tail, or of single losses, whichever is larger.

    Both ways in which neighbours differ count, as well as the single losses, which take a few times as long as others.
    """
    width = 0.0
    for release, count in releases.items():
        for curve in _curves(release, interval):
            masses, size = np.maximum(_masses(curve.deltas, interval), 0.0), len(curve.deltas)
            orders = np.array([*range(-20, 0), *range(1, 21)]) / size
            logs = np.array([np.log(np.exp(np.arange(size) * order) @ masses) for order in orders])
            bounds = (count * logs + _TAIL) / orders
            span = min((size - 1) * count, bounds[20:].min()) - max(0, bounds[:20].max())
            width += interval * (max(span, size) + 3 * size)
    return width


def _masses(deltas: np.ndarray, interval: float) -> np.ndarray:
    """Return the probabilities of losses on a grid by its δ, as if δ(ε) were linear in e^ε between."""
    steps, growth = np.diff(deltas), math.expm1(interval)
    inner = (steps[1:] - math.exp(interval) * steps[:-1]) / growth
    return np.concatenate([[1 - deltas[0] + steps[0] / growth], inner, [steps[-1] / math.expm1(-interval)]])


def _closed_bound(releases: Mapping[Release, int]) -> Callable[[float], float]:
    """Return the function δ -> ε of Rényi divergences, or of whole batches, whichever is less; Laplace noise has ε
    alone.
    """
    pure = 0.0
    for release, count in releases.items():
        if release.mechanism is not gaussian:  # log(1 + q (e^{1/b} − 1)), without overflow
            q, one = release.sampling_rate, 1 / release.noise
            pure += count * (float(np.logaddexp(math.log1p(-q), math.log(q) + one)) if q < 1 else one)
    normal = {release: count for release, count in releases.items() if release.mechanism is gaussian}
    if not normal:
        return lambda delta: pure
    divergences = [
        (order, sum(count * renyi_divergence(r.noise, r.sampling_rate, order) for r, count in normal.items()))
        for order in _WHOLE_ORDERS
    ]
    whole = composed_noise((release.noise, count) for release, count in normal.items())
    return lambda delta: pure + min(best_epsilon(divergences, delta), gaussian_epsilon(whole, delta))


def noise_for(
    *, epsilon: float, delta: float, rounds: int = 1, sampling_rate: float = 1.0, mechanism: Mechanism = gaussian
) -> float:
    """Find the least noise, to 0.1 % from above, with which `rounds` releases are (ε, δ)-private.

    If tight ε would take too long, bounds on ε give an `UpperBound`; see `epsilon`.

    Raises:
        ValueError: an ε that is not positive, or δ, rounds or rate out of range.
    """
    if not epsilon > 0:
        raise ValueError(f"Expected a positive epsilon, but got {epsilon}")
    check_rounds(rounds)
    cost = lambda noise, *grid: spent({Release(noise, sampling_rate, mechanism): rounds}, delta, *grid)
    enough, less, kind, scale = math.inf, 0.0, float, 1.0  # noises that are known to be enough, and not to be
    for turn in itertools.count():  # between the two by a rough grid, whose errors the fine one shows
        grid, scale = ((ROUGH, _ROUGHLY), scale) if turn < _ROUGH_TURNS else ((FINE, _SOON), 1.0)
        fits = lambda noise, e=enough, n=less, s=scale, g=grid: (
            noise >= e or (noise > n and s * cost(noise, *g) <= epsilon)
        )
        low, high = _bracket(fits)
        unknown = [noise for noise in (high, low) if less < noise < enough]
        if not unknown:
            break
        spends = cost(unknown[0], FINE, _SOON)
        kind = UpperBound if isinstance(spends, UpperBound) else kind
        enough, less = (unknown[0], less) if spends <= epsilon else (enough, unknown[0])
        rough = cost(unknown[0], ROUGH, _ROUGHLY)
        scale = spends / rough if 0 < spends < rough < math.inf else 1.0
    return _warned("noise_for", kind(high))


def _bracket(enough: Callable[[float], bool]) -> tuple[float, float]:
    """Return noise that is not enough, and one larger by 0.1 % that is."""
    high = 1.0
    while not enough(high):
        high *= 2
    low = 0.8 * high
    while enough(low):
        low, high = 0.8 * low, low
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low, high


def rounds_for(
    *, epsilon: float, noise: float, delta: float, sampling_rate: float = 1.0, mechanism: Mechanism = gaussian
) -> int:
    """Return how many releases with this noise stay (ε, δ)-private; 0 if the first does not.

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


@lru_cache(maxsize=8)
def _curves(release: Release, interval: float) -> list[LossCurve]:
    """Return δ(ε) of one release on a grid."""
    return release.mechanism.losses(_library(), release.noise, release.sampling_rate, interval)


@lru_cache(maxsize=8)
def _losses(release: Release, interval: float) -> list[Any]:
    """Return the privacy-loss distributions of one release, for a unit that leaves and, if different, one joining."""
    pmf = _library().pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap
    each = _curves(release, interval)
    return [pmf(interval, lowest, lowest + len(deltas) - 1, deltas) for lowest, deltas in each]


def _library() -> Any:
    try:
        from dp_accounting.pld import privacy_loss_distribution as distributions
    except ImportError as error:
        raise ImportError(
            "Expected dp-accounting with privacy-loss distributions, but it does not import: "
            "pip install 'fedtorch[privacy]' (an old dp-accounting, below 0.6, has none)"
        ) from error
    return distributions
