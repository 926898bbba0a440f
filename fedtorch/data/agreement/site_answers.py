"""What the server has been told by sites: read, checked, and asked for by the names of columns."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy

from fedtorch.data.agreement.histogram import Histogram, bounds, logarithm, power_sums, quantiles
from fedtorch.data.agreement.moments import Moments, joined
from fedtorch.data.formulas.cells import ordered_levels, shown
from fedtorch.data.formulas.encoding import MOST_LEVELS, Levels, Polynomial, Scale, Spline
from fedtorch.data.formulas.grammar import Quantity, Variable
from fedtorch.data.formulas.requirements import (
    knot_probabilities,
    polynomial_of_sums,
    scale_of_sums,
    spline_of_quantiles,
)

_LOG = logging.getLogger(__name__)
_MOST_BINS = 100_000


class SiteAnswers(NamedTuple):
    """Answers of all sites, and what follows from them.

    >>> by_site = {"a": {"moments": {"age": [20, 50.0, 1900.0]}}, "b": {"moments": {"age": None}}}
    >>> answers = SiteAnswers(by_site, minimum=10)
    >>> answers.scale(Quantity("age"))
    Scale(mean=50.0, sd=10.0)
    """

    answers: Mapping[str, Mapping[str, Any]]  # by site
    minimum: int
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})  # declared, by column

    def scale(self, quantity: Quantity) -> Scale:
        """Return mean and sd of all rows.

        Raises:
            ValueError: no site tells them, or they do not vary.
        """
        return scale_of_sums(quantity.name, *self.moments(quantity))

    def moments(self, quantity: Quantity) -> Moments:
        """Return the moments of all rows of the sites that tell them; raise ValueError where none does."""
        return joined(self._parts("moments", quantity.name, self._moments))

    def varies(self, quantity: Quantity) -> bool:
        """Return whether a quantity is not the same in all rows."""
        return self.moments(quantity).squares > 0

    def tells(self, quantity: Quantity) -> bool:
        """Return whether any site tells the mean of a quantity."""
        return any(self._entry(site, "moments", quantity.name) is not None for site in self.answers)

    def spline(self, variable: Variable) -> Spline:
        """Return knots at quantiles of the sites' histograms, between declared bounds or their outer ends."""
        parts = self._histograms(variable)
        lower, upper = self._bounds(variable.quantity, bounds(parts))
        inner = [min(max(knot, lower), upper) for knot in quantiles(parts, knot_probabilities(variable.number))]
        return spline_of_quantiles(variable, inner, lower, upper)

    def polynomial(self, variable: Variable, scale: Scale) -> Polynomial:
        """Return polynomials that are orthogonal over the rows as the sites' histograms have them."""
        sums = power_sums(self._histograms(variable), scale.mean, scale.sd, variable.number)
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

    def _histograms(self, variable: Variable) -> list[Histogram]:
        parts = self._parts("histograms", variable.quantity.column, self._histogram)
        if variable.quantity.log:
            parts = [each for each in map(logarithm, parts) if each is not None]
        if not parts:
            raise self._nobody("histogram", variable.quantity.name)
        return parts

    def _parts(self, kind: str, name: str, read: Any) -> list[Any]:
        """Return what the sites tell that tell it."""
        entries = {site: self._entry(site, kind, name) for site in self.answers}
        if silent := [site for site, entry in entries.items() if entry is None]:
            _LOG.info("%s of %r: without %s, where too few rows are behind it", kind, name, silent)
        parts = [read(site, name, entry) for site, entry in entries.items() if entry is not None]
        if not parts:
            raise self._nobody(kind, name)
        return parts

    def _nobody(self, kind: str, name: str) -> ValueError:
        return ValueError(
            f"Expected a site that tells its {kind} of {name!r}, but got none: at each fewer than {self.minimum} rows "
            "have a value, or all but fewer have the same one; leave it out, or write it as a factor"
        )

    def _entry(self, site: str, kind: str, name: str) -> Any:
        entries = self.answers[site].get(kind)
        if not isinstance(entries, dict) or name not in entries:
            raise _wrong(site, f"{kind} of {name!r}", entries)
        return entries[name]

    def _moments(self, site: str, name: str, entry: Any) -> Moments:
        good = isinstance(entry, list) and len(entry) == 3 and _numbers(entry) and type(entry[0]) is int
        if not good or entry[0] < self.minimum or entry[2] < 0:
            raise _wrong(site, f"rows, mean and squares of {name!r}", entry)
        return Moments(*entry)

    def _histogram(self, site: str, name: str, entry: Any) -> Histogram:
        good = isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, list) for part in entry)
        ends, counts = entry if good else ([], [])
        good = good and _numbers(ends) and 1 <= len(counts) <= _MOST_BINS and len(ends) == len(counts) + 1
        good = good and all(low < high for low, high in itertools.pairwise(ends))
        if not good or not all(type(count) is int and self.minimum <= count < 2**53 for count in counts):
            raise _wrong(site, f"a histogram of {name!r}", entry)
        return Histogram(tuple(map(float, ends)), tuple(counts))


def _numbers(values: list[Any]) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _wrong(site: str, wanted: str, got: Any) -> ValueError:
    return ValueError(f"Expected {wanted} from site {site!r}, but got {str(got)[:100]!r}")
