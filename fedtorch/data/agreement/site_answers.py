"""What the server has been told by sites: read, checked, and asked for by the names of columns."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy

from fedtorch.data.agreement.histogram import (
    Histogram,
    bounds,
    logarithm,
    mean_and_squares,
    power_sums,
    quantiles,
    rows,
)
from fedtorch.data.formulas.cells import ordered_levels, shown
from fedtorch.data.formulas.encoding import MOST_LEVELS, Levels, Polynomial, Scale, Spline
from fedtorch.data.formulas.grammar import Quantity, Variable
from fedtorch.data.formulas.requirements import (
    knot_probabilities,
    nearest,
    polynomial_of_sums,
    rounded,
    scale_of_sums,
    spline_of_quantiles,
)

_LOG = logging.getLogger(__name__)
_MOST_BINS = 100_000


class SiteAnswers(NamedTuple):
    """Answers of all sites, and what follows from them.

    >>> told = [[30.0, 40.0, 50.0, 60.0, 70.0], [20, 30, 40, 20], False]
    >>> answers = SiteAnswers({"a": {"histograms": {"age": told}}, "b": {"histograms": {"age": None}}}, minimum=10)
    >>> answers.scale(Quantity("age"))
    Scale(mean=50.5, sd=10.3)
    """

    answers: Mapping[str, Mapping[str, Any]]  # by site
    minimum: int
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})  # declared, by column

    def scale(self, quantity: Quantity) -> Scale:
        """Return mean and sd of all rows of the sites that tell their histogram, as round numbers.

        Raises:
            ValueError: no site does, or they do not vary.
        """
        parts = self._histograms(quantity)
        mean, squares = mean_and_squares(parts)
        return rounded(scale_of_sums(quantity.name, rows(parts), mean, squares))

    def rows(self, quantity: Quantity) -> int:
        """Return how many rows the sites have that tell their histogram."""
        return rows(self._histograms(quantity))

    def tells(self, quantity: Quantity) -> bool:
        """Return whether any site tells the histogram of a quantity."""
        return bool(self._told(quantity))

    def spline(self, variable: Variable) -> Spline:
        """Return knots at quantiles of the sites' histograms, between declared bounds or their outer ends.

        They are round numbers as means are.
        """
        parts = self._histograms(variable.quantity)
        mean, squares = mean_and_squares(parts)
        sd = scale_of_sums(variable.quantity.name, rows(parts), mean, squares).sd
        near = [nearest(end, sd) for end in bounds(parts)]
        lower, upper = self._bounds(variable.quantity, (near[0], near[1]))
        knots = [nearest(knot, sd) for knot in quantiles(parts, knot_probabilities(variable.number))]
        inner = [min(max(knot, lower), upper) for knot in knots]
        return spline_of_quantiles(variable, inner, lower, upper)

    def polynomial(self, variable: Variable, scale: Scale) -> Polynomial:
        """Return polynomials that are orthogonal over the rows as the sites' histograms have them."""
        sums = power_sums(self._histograms(variable.quantity), scale.mean, scale.sd, variable.number)
        return polynomial_of_sums(variable, scale, numpy.array(sums))

    def levels(self, column: str, other: str | None) -> Levels:
        """Return the levels that any site tells, and `other`.

        Raises:
            ValueError: they are fewer than two.
        """
        names: set[str] = set()
        for site in self.answers:
            entry = self._entry(site, "levels", column)
            if not isinstance(entry, list) or not all(isinstance(name, str) for name in entry):
                raise _wrong(site, f"names of levels of {column!r}", entry)
            names.update(entry)
        every = (*ordered_levels(names - {other}), *([other] if other is not None else []))
        if not 2 <= len(every) <= MOST_LEVELS:
            raise ValueError(
                f"Expected 2 to {MOST_LEVELS} levels of {column!r} of which a site has at least {self.minimum} rows, "
                f"but got {shown(every) or 'none'}; leave the column out, or declare its levels, "
                f"levels={{{column!r}: [...]}}"
            )
        return Levels(every, other)

    def text(self, declared: Mapping[str, Any]) -> set[str]:
        """Return the columns that are text at any site."""
        by_site = {site: answer.get("text") for site, answer in self.answers.items()}
        for site, columns in by_site.items():
            if not isinstance(columns, list) or not all(isinstance(column, str) for column in columns):
                raise _wrong(site, "names of columns of text", columns)
        return {column for columns in by_site.values() for column in columns or () if column not in declared}

    def where_text(self, column: str) -> list[str]:
        """Return the sites at which a column is text."""
        return [site for site, answer in self.answers.items() if column in answer["text"]]

    def where_objects(self, column: str) -> list[str]:
        """Return the sites at which a column holds objects other than text."""
        for site, answer in self.answers.items():
            if not isinstance(answer.get("objects"), list):
                raise _wrong(site, "names of columns of objects", answer.get("objects"))
        return [site for site, answer in self.answers.items() if column in answer["objects"]]

    def _bounds(self, quantity: Quantity, otherwise: tuple[float, float]) -> tuple[float, float]:
        if quantity.column not in self.bounds:
            return otherwise
        lower, upper = self.bounds[quantity.column]
        return (math.log(lower), math.log(upper)) if quantity.log else (lower, upper)

    def _histograms(self, quantity: Quantity) -> list[Histogram]:
        """Return the histograms that the sites tell; raise ValueError where none does."""
        parts = self._told(quantity)
        if not parts:
            example = f"scales={{{quantity.name!r}: (2, 1)}}"
            raise ValueError(
                f"Expected a site that tells its histogram of {quantity.name!r}, but got none: at each, too few rows "
                f"have different values to make bins of at least {self.minimum} rows. Declare a mean and an sd, round "
                f"numbers such as {example}; write it as a factor, C({quantity.column}), or leave it out"
            )
        return parts

    def _told(self, quantity: Quantity) -> list[Histogram]:
        entries = {site: self._entry(site, "histograms", quantity.column) for site in self.answers}
        if silent := [site for site, entry in entries.items() if entry is None]:
            _LOG.info("histograms of %r: without %s, where too few rows are behind it", quantity.column, silent)
        parts = [self._histogram(site, quantity.column, entry) for site, entry in entries.items() if entry is not None]
        return [each for each in map(logarithm, parts) if each is not None] if quantity.log else parts

    def _entry(self, site: str, kind: str, name: str) -> Any:
        entries = self.answers[site].get(kind)
        if not isinstance(entries, dict) or name not in entries:
            raise _wrong(site, f"{kind} of {name!r}", entries)
        return entries[name]

    def _histogram(self, site: str, name: str, entry: Any) -> Histogram:
        good = isinstance(entry, list) and len(entry) == 3 and all(isinstance(part, list) for part in entry[:2])
        ends, counts, whole = entry if good else ([], [], None)
        good = good and _numbers(ends) and 1 <= len(counts) <= _MOST_BINS and len(ends) == len(counts) + 1
        good = good and type(whole) is bool and all(low < high for low, high in itertools.pairwise(ends))
        if not good or not all(type(count) is int and self.minimum <= count < 2**53 for count in counts):
            raise _wrong(site, f"a histogram of {name!r}", entry)
        return Histogram(tuple(map(float, ends)), tuple(counts), whole)


def _numbers(values: list[Any]) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _wrong(site: str, wanted: str, got: Any) -> ValueError:
    return ValueError(f"Expected {wanted} from site {site!r}, but got {str(got)[:100]!r}")
