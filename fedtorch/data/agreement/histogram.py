"""Histograms of a column that disclose nothing about few rows, and quantities derived from all sites' histograms.

Cells are repeated halves of the number line: [0, 128) of [0, 64) and [64, 128), and so on, the same for every column
and site. A cell is halved if both halves have `minimum` rows, at most six times. If one has fewer, its rows count with
the other's, which is halved further: rare values in the tails thus do not affect where bins end. A histogram contains
where cells were halved, and how many rows lie between.

*Disclosure.* For any set of values, the rows that are surely in it are none, or at least `minimum`: each bin has a cell
that is not halved any further, with `minimum` rows of its own, and all rows of the bin might have any one value of this
cell, with the same halvings and counts. Nobody can therefore infer, for any value or tail, that some rows have it and
fewer than `minimum`, with any knowledge of the column's possible values. Means and sums of squares have no such bound,
rounded or not: with a histogram, or few possible values, they are equations whose solution is the counts. So a site
sends none, and mean and sd are derived from histograms, also those of logarithms.

If several rows may belong to one person, persons count for `minimum` in place of rows, in both halves if they have rows
in both. Bins still contain numbers of rows.

Bins of whole numbers end half-way between two of these, and rows of a bin are spread over its whole numbers. The outer
two bins have no end of their own, which would disclose the smallest and the largest value: they end as if the number of
rows fell exponentially from the density in the adjacent bins.

>>> values = numpy.arange(1.0, 101.0)
>>> ours = histogram(values, minimum=10)
>>> ours.ends, ours.counts
((-0.5, 15.5, 31.5, 47.5, 63.5, 79.5, 121.5), (15, 16, 16, 16, 16, 21))
>>> mean_and_squares([ours])
(52.63, 105601.31)
>>> quantiles([ours], [0.25, 0.5])
[25.5..., 50...]
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy

_HALVED = 6  # most halvings: at most 64 bins
_TAIL = 2  # widths of even spread with the same mean as an exponential tail


class Histogram(NamedTuple):
    """The ends of bins, ascending, how many rows are in each, and whether they are whole numbers."""

    ends: tuple[float, ...]  # (bins + 1,)
    counts: tuple[int, ...]  # (bins,)
    whole: bool = False


class _Halved(NamedTuple):
    """Positions at which a cell and its halves were halved, and the ends of the first halved one."""

    ends: list[float]
    lower: float
    upper: float


def histogram(values: numpy.ndarray, minimum: int, persons: numpy.ndarray | None = None) -> Histogram | None:
    """Return a site's histogram, None if it would have fewer than three bins, too few to estimate a scale.

    Two adjacent whole numbers, such as 0 and 1 for a yes/no column, need only two bins.

    Args:
        values: of the rows `(N,)`.
        minimum: rows of a bin, at least.
        persons: number of each row's person `(N,)`: a bin then has at least `minimum` persons.

    >>> histogram(numpy.array([1.0, 2.0, 3.0]), minimum=10) is None
    True
    >>> histogram(numpy.array([0.0, 1.0] * 10), minimum=10)
    Histogram(ends=(-0.5, 0.5, 1.5), counts=(10, 10), whole=True)
    >>> histogram(numpy.array([0.0, 1.0] * 10), minimum=10, persons=numpy.arange(20) // 4) is None
    True
    """
    order = numpy.argsort(values, kind="stable")
    values, persons = values[order], None if persons is None else persons[order]
    count = _between(persons)
    if count(0, len(values)) < 2 * minimum:
        return None
    top = math.ldexp(1.0, min(math.frexp(max(abs(values[0]), abs(values[-1])))[1], 1023))
    halved = _halved(values, count, (0, len(values)), (-top, top), minimum, _HALVED)
    if halved is None:
        return None
    whole = behind(values != numpy.floor(values), persons) < minimum
    if len(halved.ends) < 2 and not (whole and halved.upper - halved.lower == 2):
        return None
    below = numpy.searchsorted(values, halved.ends).tolist()
    counts = [high - low for low, high in itertools.pairwise([0, *below, len(values)])]
    shift = 0.5 if whole else 0.0
    lower, *inner, upper = (end - shift for end in (halved.lower, *halved.ends, halved.upper))
    if len(inner) > 1:
        lower = max(lower, inner[0] - _tail(counts[0], inner[1] - inner[0], counts[1], whole))
        upper = min(upper, inner[-1] + _tail(counts[-1], inner[-1] - inner[-2], counts[-2], whole))
    return Histogram((lower, *inner, upper), tuple(counts), whole)


def _tail(count: int, width: float, beside: int, whole: bool) -> float:
    """Return the width of an outer bin, from the width and the rows of the bin beside it."""
    if whole and width == 1:  # classes, which have no tail
        return 1.0
    return _TAIL * count / beside * width


def behind(chosen: numpy.ndarray, persons: numpy.ndarray | None) -> int:
    """Return the number of chosen rows, bool `(N,)`, or of their persons."""
    return int(chosen.sum()) if persons is None else len(numpy.unique(persons[chosen]))


def _between(persons: numpy.ndarray | None) -> Callable[[int, int], int]:
    """Return a function of two positions that counts the rows between them, or their persons."""
    if persons is None:
        return lambda first, last: last - first
    return functools.cache(lambda first, last: len(numpy.unique(persons[first:last])))


def _halved(
    values: numpy.ndarray,
    count: Callable[[int, int], int],
    rows: tuple[int, int],
    ends: tuple[float, float],
    minimum: int,
    times: int,
) -> _Halved | None:
    """Return where to halve a cell with a range of ascending values, or None."""
    (first, last), (low, high) = rows, ends
    while times and count(first, last) >= 2 * minimum and values[first] < values[last - 1]:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        cut = first + int(numpy.searchsorted(values[first:last], middle))
        left, right = count(first, cut), count(cut, last)
        if left >= minimum and right >= minimum:
            parts = (
                _halved(values, count, (first, cut), (low, middle), minimum, times - 1),
                _halved(values, count, (cut, last), (middle, high), minimum, times - 1),
            )
            lower, upper = ([] if part is None else part.ends for part in parts)
            return _Halved([*lower, middle, *upper], low, high)
        if left > right:
            last, high = cut, middle
        else:
            first, low = cut, middle
    return None


def logarithm(part: Histogram) -> Histogram | None:
    """Return the histogram of the logarithms of positive values; None if too few bins determine their start.

    >>> logarithm(Histogram((1.0, 10.0, 100.0), (5, 5))).counts
    (5, 5)
    """
    if part.ends[0] > 0:
        return part._replace(ends=tuple(map(math.log, part.ends)), whole=False)
    inner = [math.log(end) for end in part.ends[1:]]
    if len(inner) < 3:
        return None
    lower = inner[0] - _tail(part.counts[0], inner[1] - inner[0], part.counts[1], whole=False)
    return part._replace(ends=(lower, *inner), whole=False)


def mean_and_squares(parts: Sequence[Histogram]) -> tuple[float, float]:
    """Return the mean of all rows and the sum of squares about it; the same bits in any order of sites.

    >>> mean_and_squares([Histogram((-0.5, 0.5, 1.5), (10, 10), whole=True)])
    (0.5, 5.0)
    """
    bins = [
        (count, (low + high) / 2, max((high - low) ** 2 - part.whole, 0.0) / 12)
        for part in parts
        for (low, high), count in zip(itertools.pairwise(part.ends), part.counts, strict=True)
    ]
    mean = math.fsum(count * middle for count, middle, _ in bins) / rows(parts)
    return mean, math.fsum(count * ((middle - mean) ** 2 + within) for count, middle, within in bins)


def rows(parts: Sequence[Histogram]) -> int:
    """Return the number of rows."""
    return sum(sum(part.counts) for part in parts)


def quantiles(parts: Sequence[Histogram], probabilities: Sequence[float]) -> list[float]:
    """Return quantiles of all rows together, with rows spread evenly in bins; the same bits in any order of sites."""
    points = sorted({end for part in parts for end in part.ends})
    below = [numpy.interp(points, part.ends, numpy.cumsum([0, *part.counts])).tolist() for part in parts]
    total = [math.fsum(counts) for counts in zip(*below, strict=True)]
    rising = [0, *(i for i in range(1, len(total)) if total[i] > total[i - 1])]  # no rows in between
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
