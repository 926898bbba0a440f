"""Mean and sum of squares of a column, of a site and of all sites together.

>>> import numpy
>>> ages = numpy.array([40.0, 50.0, 60.0, 70.0])
>>> parts = [moments(ages[:2], minimum=2), moments(ages[2:], minimum=2)]
>>> joined(parts)
Moments(rows=4, mean=55.0, squares=500.0)
>>> bool(joined(parts).sd == ages.std(ddof=1))
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy


class Moments(NamedTuple):
    """Rows, their mean, and the sum of squared differences from it."""

    rows: int
    mean: float
    squares: float

    @property
    def sd(self) -> float:
        """Return the standard deviation, with n - 1 in the denominator."""
        return math.sqrt(self.squares / (self.rows - 1)) if self.rows > 1 else 0.0


def moments(values: numpy.ndarray, minimum: int) -> Moments | None:
    """Return the moments of a site's values, None where they would tell something of fewer rows than `minimum`.

    That is where there are fewer rows, and where all but fewer have one value: the mean of a column of zeros and ones
    is the number of ones.

    >>> moments(numpy.array([0.0] * 30 + [1.0] * 3), minimum=10) is None
    True
    """
    if len(values) < minimum:
        return None
    most = int(numpy.unique(values, return_counts=True)[1].max())
    if most > 1 and 0 < len(values) - most < minimum:
        return None
    mean = math.fsum(values.tolist()) / len(values)
    return Moments(len(values), mean, math.fsum(((values - mean) ** 2).tolist()))


def joined(parts: Iterable[Moments]) -> Moments:
    """Return the moments of all rows together, the same to the bit in whichever order sites are."""
    parts = list(parts)
    rows = sum(part.rows for part in parts)
    mean = math.fsum(part.rows * part.mean for part in parts) / rows
    between = (part.rows * (part.mean - mean) ** 2 for part in parts)
    return Moments(rows, mean, math.fsum([*(part.squares for part in parts), *between]))
