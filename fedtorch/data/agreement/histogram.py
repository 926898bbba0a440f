"""Histograms of a column in which every bin has at least so many rows, and the quantiles of all sites' together.

A site's bins end at multiples of a round number (1, 2 or 5 times a power of ten) near an eighth of its standard
deviation, within four of them on either side of its mean; bins of fewer rows than the minimum are merged with the next.
The outer two have no end of their own, for that would tell where the smallest and the largest value are: they end where
they would if rows were as dense in them as in the bins beside them, and a row beyond is counted in them. Nothing of it
is chosen by who asks, so that no two questions give bins that differ by few rows.

>>> values = numpy.arange(1.0, 101.0)
>>> ours = histogram(values, minimum=10)
>>> ours.ends[:3], min(ours.counts), sum(ours.counts)
((1.0, 12.0, 22.0), 10, 100)
>>> quantiles([ours], [0.25, 0.5])
[26.0, 51.0]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from fedtorch.data.agreement.moments import Moments, moments

_WITHIN = 4  # standard deviations on either side of the mean
_FINE = 8  # bins in a standard deviation, at least
_FLAT_ENOUGH = 1e-9  # an sd beside the mean, below which rows count as equal
_FLAT = math.sqrt(3.0)  # half the width of evenly spread rows, in standard deviations


class Histogram(NamedTuple):
    """The ends of bins, ascending, and how many rows are in each."""

    ends: tuple[float, ...]  # (bins + 1,)
    counts: tuple[int, ...]  # (bins,)


def histogram(values: numpy.ndarray, minimum: int) -> Histogram | None:
    """Return a site's histogram, None where it has fewer rows than `minimum`, or all but fewer have one value.

    >>> histogram(numpy.array([1.0, 2.0, 3.0]), minimum=10) is None
    True
    """
    known = moments(values, minimum)
    if known is None or known.sd <= _FLAT_ENOUGH * abs(known.mean):
        return None
    step = _round_down(known.sd / _FINE)
    first, last = (math.floor((known.mean + sign * _WITHIN * known.sd) / step) for sign in (-1, 1))
    grid = numpy.array([number * step for number in range(first, last + 2)])
    places = numpy.clip(numpy.searchsorted(grid, values, side="right") - 1, 0, len(grid) - 2)
    counts = numpy.bincount(places, minlength=len(grid) - 1)
    return _closed(*_merged(grid.tolist(), counts.tolist(), minimum), known)


def _merged(grid: list[float], counts: list[int], minimum: int) -> tuple[list[float], list[int]]:
    """Return the inner ends and the counts of bins, merged from the left until each has enough rows."""
    ends, sums, waiting = list[float](), list[int](), 0
    for end, count in zip(grid[1:], counts, strict=True):
        waiting += count
        if waiting >= minimum:
            ends.append(end)
            sums.append(waiting)
            waiting = 0
    sums[-1] += waiting
    return ends[:-1], sums


def _closed(inner: list[float], counts: list[int], known: Moments) -> Histogram:
    """Return the histogram with outer ends that follow from the rest."""
    lower, upper = (known.mean + sign * _FLAT * known.sd for sign in (-1, 1))
    if len(counts) > 2:
        lower = inner[0] - (inner[1] - inner[0]) * counts[0] / counts[1]
        upper = inner[-1] + (inner[-1] - inner[-2]) * counts[-1] / counts[-2]
    elif inner:  # two bins
        lower, upper = min(lower, 2 * inner[0] - upper), max(upper, 2 * inner[0] - lower)
    return Histogram((lower, *inner, upper), tuple(counts))


def logarithm(part: Histogram) -> Histogram | None:
    """Return the histogram of the logarithms of positive values; None where too few bins say where they begin.

    >>> logarithm(Histogram((1.0, 10.0, 100.0), (5, 5))).counts
    (5, 5)
    """
    if part.ends[0] > 0:
        return part._replace(ends=tuple(map(math.log, part.ends)))
    inner = [math.log(end) for end in part.ends[1:]]
    if len(inner) < 3:
        return None
    return part._replace(ends=(inner[0] - (inner[1] - inner[0]) * part.counts[0] / part.counts[1], *inner))


def quantiles(parts: Sequence[Histogram], probabilities: Sequence[float]) -> list[float]:
    """Return quantiles of all rows together, those of a bin spread evenly; the same bits in any order of sites."""
    points = sorted({end for part in parts for end in part.ends})
    below = [numpy.interp(points, part.ends, numpy.cumsum([0, *part.counts])).tolist() for part in parts]
    total = [math.fsum(counts) for counts in zip(*below, strict=True)]
    rising = [0, *(i for i in range(1, len(total)) if total[i] > total[i - 1])]  # no rows between two others
    wanted = [probability * total[-1] for probability in probabilities]
    return numpy.interp(wanted, [total[i] for i in rising], [points[i] for i in rising]).tolist()


def bounds(parts: Sequence[Histogram]) -> tuple[float, float]:
    """Return the outer ends of all histograms."""
    return min(part.ends[0] for part in parts), max(part.ends[-1] for part in parts)


def power_sums(parts: Sequence[Histogram], mean: float, sd: float, degree: int) -> list[float]:
    """Return Σ z^p for p = 0 … 2 · degree, z = (value − mean) / sd, where rows of a bin are spread evenly.

    >>> ours = Histogram((-1.0, 1.0), (6,))
    >>> [round(total, 12) for total in power_sums([ours], 0.0, 1.0, 1)]
    [6.0, 0.0, 2.0]
    """
    sums: list[list[float]] = [[] for _ in range(2 * degree + 1)]
    for part in parts:
        z = [(end - mean) / sd for end in part.ends]
        for (low, high), count in zip(itertools.pairwise(z), part.counts, strict=True):
            for p, terms in enumerate(sums, start=1):
                terms.append(count * (high**p - low**p) / (p * (high - low)))
    return [math.fsum(terms) for terms in sums]


def _round_down(value: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is at most `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return max(factor * power for factor in (1.0, 2.0, 5.0) if factor * power <= value * (1 + 1e-9))
