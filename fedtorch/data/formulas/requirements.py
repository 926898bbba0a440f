"""The shared numbers of an encoding, and their computation from counts, quantiles and sums.

`requirements` lists the encoding that a formula needs. `pooled_design` computes all of it from the rows of one place.
Without pooled rows the same functions use sums over clients: `scale_of_sums` for a mean and an sd, `polynomial_of_sums`
for the coefficients of orthogonal polynomials, `spline_of_quantiles` for knots.

>>> from fedtorch.data.formulas.parsing import parse
>>> needs = requirements(parse("death ~ age * sex + bs(sbp, 4) + scale(bmi)"), factors={"sex"})
>>> needs.levels, [variable.name for variable in needs.splines], needs.numbers
(('sex',), ['bs(sbp, 4)'], ('death', 'age', 'sbp', 'bmi'))
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy

from fedtorch.data.formulas.cells import level_name
from fedtorch.data.formulas.encoding import Levels, Polynomial, Scale, Spline
from fedtorch.data.formulas.evaluation import DEGREE
from fedtorch.data.formulas.grammar import Formula, Quantity, Variable

_MANY = 20  # number of whole-number levels above which a column of objects gives a warning


class Requirements(NamedTuple):
    """The parts of an encoding that a formula needs."""

    levels: tuple[str, ...]  # columns that are factors
    splines: tuple[Variable, ...]  # bs(quantity, number): `number - 3` knots at quantiles, and bounds
    polynomials: tuple[Variable, ...]  # poly(quantity, number): sums of powers up to 2 · number
    scales: tuple[Variable, ...]  # center and scale of quantities: mean and sd
    numbers: tuple[str, ...]  # columns that must hold numbers

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """Return the quantities of which mean and sd are needed, each once."""
        return tuple(dict.fromkeys(variable.quantity for variable in (*self.polynomials, *self.scales)))


def requirements(formula: Formula, factors: Collection[str]) -> Requirements:
    """Return the statistics that an encoding of a formula needs.

    Args:
        formula: from `parse`.
        factors: the columns of text, categories or declared levels; a column in C(column) is one, too.

    Raises:
        ValueError: a factor in a function of numbers, or in a logarithm.
    """
    written = {variable.quantity.column for variable in formula.variables if variable.function == "C"}
    columns = [column for column in formula.columns if column in written or column in factors]
    for variable in formula.variables:
        if variable.quantity.column in columns and (variable.function not in ("", "C") or variable.quantity.log):
            raise ValueError(
                f"Expected a column of numbers in {variable.name}, but got {variable.quantity.column!r}, which is a "
                "factor; write it on its own"
            )
    by_function = {
        function: tuple(variable for variable in formula.variables if variable.function in function.split())
        for function in ("bs", "poly", "center scale")
    }
    numbers = tuple(column for column in formula.columns if column not in columns)
    return Requirements(tuple(columns), by_function["bs"], by_function["poly"], by_function["center scale"], numbers)


def declared_levels(column: str, names: Any) -> Levels:
    """Return levels as a caller declares them: a sequence of values, the reference first, or `Levels`.

    >>> declared_levels("stage", [1, 2, 3])
    Levels(names=('1', '2', '3'), other=None)
    """
    if isinstance(names, Levels):
        return Levels(tuple(map(level_name, names.names)), names.other)
    if isinstance(names, (str, bytes)) or not isinstance(names, Sequence):
        raise TypeError(f"Expected levels of {column!r} as a list, the reference first, but got {names!r}")
    return Levels(tuple(map(level_name, names)))


def unordered_response(formula: Formula, levels: Levels | None) -> None:
    """Refuse a response of more than two levels without a declared order.

    Args:
        formula: of the response.
        levels: of its column; None for numbers.
    """
    among = any(variable.quantity.column == formula.response.column for variable in formula.variables)
    if levels is not None and len(levels.names) > 2 and not among:  # a response among the terms has its own error
        raise ValueError(
            f"Expected a response of numbers or of two levels, but got {len(levels.names)} levels of "
            f"{formula.response.name!r}; choose one of them, as a column of True and False, or declare their order, "
            f"levels={{{formula.response.column!r}: [...]}}, for the family 'cumulative'"
        )


def knot_probabilities(df: int) -> list[float]:
    """Return the probabilities of the quantiles that are knots of a spline.

    >>> knot_probabilities(6)
    [0.25, 0.5, 0.75]
    """
    inner = df - DEGREE
    return [(i + 1) / (inner + 1) for i in range(inner)]


def spline_of_quantiles(variable: Variable, inner: Sequence[float], lower: float, upper: float) -> Spline:
    """Return a spline with these knots.

    Raises:
        ValueError: knots that are not all different and within the bounds.
    """
    every = [lower, *inner, upper]
    if not all(a < b for a, b in itertools.pairwise(every)):
        raise ValueError(
            f"Expected {len(every)} different knots for {variable.name}, but got {every}: too many rows have the same "
            "value; take a smaller df, or the column as it is"
        )
    return Spline(tuple(inner), lower, upper)


def warn_of_numbers(formula: Formula, column: str, names: Sequence[str], where: str = "") -> None:
    """Warn about a factor with many levels that are all whole numbers, unless the formula has C().

    Args:
        formula: the parsed formula.
        column: of objects that are not text, such as `Decimal`.
        names: of its levels.
        where: owner of such columns, for the message.
    """
    chosen = any(v.function == "C" and v.quantity.column == column for v in formula.variables)
    if len(names) >= _MANY and not chosen and all(re.fullmatch(r"[+-]?\d+", name) for name in names):
        warnings.warn(
            f"Expected numbers or names in the column {column!r}, but got {len(names)} levels that are whole numbers, "
            f"held as objects{where}: it counts as a factor. Write C({column}) if one is meant, or convert it, "
            f"pandas.to_numeric(frame[{column!r}])",
            stacklevel=2,
        )


def scale_of_sums(name: str, count: float, mean: float, squares: float) -> Scale:
    """Return a mean and an sd.

    Args:
        name: of the column, for messages.
        count: number of rows.
        mean: of the values.
        squares: the sum of squares about the mean; the sd divides by the count less 1.

    Raises:
        ValueError: the column does not vary.
    """
    sd = math.sqrt(max(squares, 0.0) / max(count - 1, 1))
    if not sd > 1e-12 * abs(mean):
        raise ValueError(
            f"Expected a column that varies, but got {name!r} with the same value {mean:.6g} in all rows; leave it out "
            "of the formula"
        )
    return Scale(mean, sd)


def nearest(value: float, sd: float) -> float:
    """Return a round number near a value: a multiple of 1, 2 or 5 times a power of ten, at most 1 % of an sd.

    >>> nearest(61.5432, 9.87), nearest(-0.0, 3.0)
    (61.55, 0.0)
    """
    if not sd > 0:
        return value
    exponent = math.floor(math.log10(sd / 100))
    step = max(factor for factor in (1, 2, 5) if factor * 10.0**exponent <= sd / 100 * (1 + 1e-9))
    ticks = Fraction(value) / (step * Fraction(10) ** exponent)
    return float(round(ticks) * step * Fraction(10) ** exponent)


def rounded(scale: Scale) -> Scale:
    """Return a mean and an sd as round numbers.

    >>> rounded(Scale(61.5432, 9.8765))
    Scale(mean=61.55, sd=9.9)
    """
    return Scale(nearest(scale.mean, scale.sd), nearest(scale.sd, scale.sd))


def power_sums(values: numpy.ndarray, scale: Scale, degree: int) -> numpy.ndarray:
    """Return Σ z^p for p = 0 … 2 · degree, z = (value − mean) / sd."""
    z = (values - scale.mean) / scale.sd
    return numpy.vander(z, 2 * degree + 1, increasing=True).sum(0)


def polynomial_of_sums(variable: Variable, scale: Scale, sums: numpy.ndarray) -> Polynomial:
    """Return polynomials that are orthogonal over the rows, each of sum of squares 1, from sums of powers.

    Args:
        variable: poly(quantity, degree).
        scale: mean and sd by which z is standardised.
        sums: Σ z^p over the rows for p = 0 … 2 · degree.

    Raises:
        ValueError: the quantity has too few different values.
    """
    size = variable.number + 1
    gram = numpy.asarray(sums, dtype=numpy.float64)[numpy.add.outer(numpy.arange(size), numpy.arange(size))]
    try:
        inverse = numpy.linalg.inv(numpy.linalg.cholesky(gram))
    except numpy.linalg.LinAlgError:
        raise ValueError(
            f"Expected more than {variable.number} different values for {variable.name}, but got fewer; take a smaller "
            "degree"
        ) from None
    return Polynomial(scale.mean, scale.sd, tuple(tuple(row) for row in inverse[1:].tolist()))
