"""The server's part: questions to sites about the columns of a formula, and the design from their answers.

The conversation is a generator: it yields a question for all sites, receives their answers by name, and returns the
design. Questions and answers are JSON.

1. `describe`: the formula, the minimum, offsets and other columns besides the formula's, and which levels are
   declared. A site parses the formula, checks it against its policy, and answers about its own columns with numbers and
   names behind which are at least `minimum` of its own rows: histograms of columns that are scaled or have knots, of
   the response and of offsets, which give means and sds; names of levels.
2. `make`: the design. Each site makes its own rows by it, or refuses if a row has an unknown level.

>>> import pandas
>>> from fedtorch.data.agreement.site import Answers, Disclosure
>>> frame = pandas.DataFrame({"age": [30.0 + i for i in range(60)], "sex": ["f", "m"] * 30, "y": [0.5, 1.5] * 30})
>>> design = agreed(Request("y ~ scale(age) + sex", minimum=5), {"a": Answers(frame), "b": Answers(frame)})
Traceback (most recent call last):
ValueError: Expected sites that agree on 'y ~ scale(age) + sex', but got from site 'a', 'b': the site tells
nothing of fewer than 10 rows, but was asked for 5
>>> design = agreed(Request("y ~ scale(age) + sex"), {"a": Answers(frame), "b": Answers(frame)})
>>> design.columns, design.encoding.scales["scale(age)"].mean
(('Intercept', 'scale(age)', 'sex[T.m]'), 57.6)
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy

from fedtorch.data.agreement.alike import check_alike
from fedtorch.data.agreement.histogram import (
    Histogram,
    bounds,
    logarithm,
    mean_and_squares,
    power_sums,
    quantiles,
    rows,
)
from fedtorch.data.agreement.site import Answers, described
from fedtorch.data.formulas.cells import ordered_levels, shown
from fedtorch.data.formulas.design import Design
from fedtorch.data.formulas.encoding import MOST_LEVELS, Encoding, Levels, Polynomial, Scale, Spline
from fedtorch.data.formulas.grammar import Formula, Quantity, Variable
from fedtorch.data.formulas.parsing import parse
from fedtorch.data.formulas.requirements import (
    declared_levels,
    knot_probabilities,
    nearest,
    polynomial_of_sums,
    requirements,
    rounded,
    scale_of_sums,
    spline_of_quantiles,
    unordered_response,
    warn_of_numbers,
)

_NONE: Mapping[str, Any] = MappingProxyType({})
Conversation = Generator[dict[str, Any], Mapping[str, Any], Design]
_LOG = logging.getLogger(__name__)
_MOST_BINS = 100_000


class Request(NamedTuple):
    """Settings of an agreement between sites."""

    formula: str
    minimum: int = 10  # least rows behind any number or name in an answer
    group: str = ""  # the column of clients
    levels: Mapping[str, Sequence[Any]] = _NONE  # declared levels by column, the reference first
    other: Mapping[str, str] = _NONE  # by column, the level that replaces rare levels
    bounds: Mapping[str, tuple[float, float]] = _NONE  # by column, the outer knots of splines
    scales: Mapping[str, tuple[float, float]] = _NONE  # declared means and sds, by column or "log(column)"
    standardise: bool = True  # whether numeric columns of x are centred and scaled
    offset: str | None = None
    weights: str | None = None
    trials: str | None = None

    def check(self) -> Formula:
        """Return the formula.

        Raises:
            ValueError: the errors of `parse`; a minimum below 1, invalid bounds, columns that the formula does not
                read.
        """
        formula = parse(self.formula)
        if self.minimum < 1:
            raise ValueError(f"Expected a minimum of at least 1 row, but got {self.minimum}")
        for name, part in {"levels": self.levels, "other": self.other, "bounds": self.bounds}.items():
            if unknown := [column for column in part if column not in formula.columns]:
                raise ValueError(f"Expected {name}= of columns {list(formula.columns)}, but got {unknown}")
        quantities = [formula.response, *(variable.quantity for variable in formula.variables)]
        if unknown := [name for name in self.scales if name not in [quantity.name for quantity in quantities]]:
            raise ValueError(f"Expected scales= of {[quantity.name for quantity in quantities]}, but got {unknown}")
        for name, (mean, sd) in self.scales.items():
            if not (math.isfinite(mean) and 0 < sd < math.inf):
                raise ValueError(f"Expected a mean and a positive sd of {name!r}, but got {mean} and {sd}")
        for column, (lower, upper) in self.bounds.items():
            if not lower < upper:
                raise ValueError(f"Expected bounds of {column!r} in ascending order, but got {lower} and {upper}")
        return formula

    def declared(self) -> dict[str, Levels]:
        """Return the levels that are declared."""
        levels = {column: declared_levels(column, names) for column, names in self.levels.items()}
        for column, other in self.other.items():
            if column in levels:
                names = levels[column].names
                levels[column] = Levels(names if other in names else (*names, other), other)
        return levels


class SiteAnswers(NamedTuple):
    """Answers of all sites, and quantities derived from them.

    >>> told = [[30.0, 40.0, 50.0, 60.0, 70.0], [20, 30, 40, 20], False]
    >>> answers = SiteAnswers({"a": {"histograms": {"age": told}}, "b": {"histograms": {"age": None}}}, minimum=10)
    >>> answers.scale(Quantity("age"))
    Scale(mean=50.5, sd=10.3)
    """

    answers: Mapping[str, Mapping[str, Any]]  # by site
    minimum: int
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})  # declared, by column

    def scale(self, quantity: Quantity) -> Scale:
        """Return mean and sd over all sites with a histogram, as round numbers.

        Raises:
            ValueError: no site does, or they do not vary.
        """
        parts = self._histograms(quantity)
        mean, squares = mean_and_squares(parts)
        return rounded(scale_of_sums(quantity.name, rows(parts), mean, squares))

    def rows(self, quantity: Quantity) -> int:
        """Return the number of rows of the sites with a histogram."""
        return rows(self._histograms(quantity))

    def has_histogram(self, quantity: Quantity) -> bool:
        """Return whether any site has sent a histogram of a quantity."""
        return bool(self._known_histograms(quantity))

    def spline(self, variable: Variable) -> Spline:
        """Return knots at quantiles of the sites' histograms, between declared bounds or their outer ends.

        Knots are round numbers, like means.
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
        """Return polynomials that are orthogonal over the rows of the sites' histograms."""
        sums = power_sums(self._histograms(variable.quantity), scale.mean, scale.sd, variable.number)
        return polynomial_of_sums(variable, scale, numpy.array(sums))

    def levels(self, column: str, other: str | None) -> Levels:
        """Return the levels that any site reports, and `other`.

        Raises:
            ValueError: there are fewer than two.
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
        """Return the histograms that sites have sent; raise ValueError if none has."""
        parts = self._known_histograms(quantity)
        if not parts:
            example = f"scales={{{quantity.name!r}: (2, 1)}}"
            raise ValueError(
                f"Expected a site that tells its histogram of {quantity.name!r}, but got none: at each, too few rows "
                f"have different values to make bins of at least {self.minimum} rows. Declare a mean and an sd, round "
                f"numbers such as {example}; write it as a factor, C({quantity.column}), or leave it out"
            )
        return parts

    def _known_histograms(self, quantity: Quantity) -> list[Histogram]:
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


def conversation(request: Request | Design) -> Conversation:
    """Ask sites, and return the agreed design.

    Args:
        request: settings of the agreement; or an earlier design, for sites that join later.

    Raises:
        ValueError: a site refuses, or sends an unexpected answer; or the answers do not suffice. The message names site
            and column.
    """
    text = (request if isinstance(request, Design) else (yield from _described(request))).to_json()
    design = Design.from_json(text)  # in the sites' form, also in the order of its parts
    check_answers((yield {"step": "make", "design": text}), design.formula)
    return design


def _described(request: Request) -> Conversation:
    """Return the design that follows from the sites' answers."""
    formula, declared = request.check(), request.declared()
    question = {
        "step": "describe",
        "formula": request.formula,
        "minimum": request.minimum,
        "declared": sorted(declared),
        "also": _also(request, formula),
        "offset": [] if request.offset is None else [request.offset],
        "beside": [column for column in (request.weights, request.trials) if column is not None],
    }
    answers = yield question
    check_answers(answers, request.formula)
    return _design(request, formula, declared, SiteAnswers(answers, request.minimum, request.bounds))


def agreed(request: Request, sites: Mapping[str, Answers]) -> Design:
    """Run the conversation in this process.

    Args:
        request: settings of the agreement.
        sites: by name.

    Raises:
        ValueError: see `conversation`.
    """
    talk = conversation(request)
    question = next(talk)
    while True:
        try:
            question = talk.send({name: _as_sent(site.answer(_as_sent(question))) for name, site in sites.items()})
        except StopIteration as done:
            return done.value


def _as_sent(value: Any) -> Any:
    """Return a value after a round trip through JSON."""
    return json.loads(json.dumps(value))


def check_answers(answers: Mapping[str, Any], formula: str) -> None:
    """Raise an error if a site has refused."""
    refused: dict[str, list[str]] = {}
    for site, answer in answers.items():
        if "refused" in answer:
            refused.setdefault(str(answer["refused"])[:1000], []).append(repr(site))
    if refused:
        reasons = "; ".join(f"from site {', '.join(sites)}: {reason}" for reason, sites in refused.items())
        raise ValueError(f"Expected sites that agree on {formula!r}, but got {reasons}")


def _design(request: Request, formula: Formula, declared: Mapping[str, Levels], known: SiteAnswers) -> Design:
    """Build the design from the sites' answers."""
    text = known.text(declared)
    needs = requirements(formula, {*text, *declared})
    for column in text:
        where = known.where_text(column)
        kinds = {site: "text" if site in where else "numbers" for site in known.answers}
        check_alike(f"column {column!r} of one kind", kinds, f"write it as C({column})")
    wanted = described(formula, needs, _also(request, formula))
    given = {name: Scale(float(mean), float(sd)) for name, (mean, sd) in request.scales.items()}
    scales = {
        quantity: given.get(quantity.name) or known.scale(quantity)
        for quantity in wanted
        if quantity != formula.response
    }
    levels = {
        column: declared.get(column) or known.levels(column, request.other.get(column)) for column in needs.levels
    }
    for column in set(levels) - set(declared):
        if where := known.where_objects(column):
            warn_of_numbers(formula, column, levels[column].names, f" at {', '.join(map(repr, where))}")
    if formula.response.column not in declared:
        unordered_response(formula, levels.get(formula.response.column))
    encoding = Encoding(
        levels=levels,
        splines={variable.name: known.spline(variable) for variable in needs.splines},
        polynomials={
            variable.name: known.polynomial(variable, scales[variable.quantity]) for variable in needs.polynomials
        },
        scales={variable.name: scales[variable.quantity] for variable in needs.scales},
        response=given.get(formula.response.name) or _response(request, formula, wanted, known),
    )
    design = Design(request.formula, encoding, request.group, request.offset, request.weights, request.trials)
    return _standardised(design, scales, known) if request.standardise else design


def _response(request: Request, formula: Formula, wanted: Sequence[Quantity], known: SiteAnswers) -> Scale | None:
    """Return the scale of a response minus its offsets; None without a site's histogram, for example if it is constant.

    Its sd is the response's alone. A histogram of the difference would be a second one of the same rows, with offsets
    chosen by the server.
    """
    offsets = [*formula.offset, *([] if request.offset is None else [Quantity(request.offset)])]
    if formula.response not in wanted or not all(map(known.has_histogram, [formula.response, *offsets])):
        return None
    scale = known.scale(formula.response)
    return rounded(Scale(math.fsum([scale.mean, *(-known.scale(each).mean for each in offsets)]), scale.sd))


def _also(request: Request, formula: Formula) -> list[str]:
    """Return further quantities whose mean and sd are needed, though not for an encoding."""
    plain = [variable.quantity.name for variable in formula.variables if not variable.function]
    return sorted({*(plain if request.standardise else []), formula.response.name})  # in whose units priors are


def _standardised(design: Design, scales: Mapping[Quantity, Scale], known: SiteAnswers) -> Design:
    """Return the design with numeric columns of x centred and scaled; the rest is unchanged.

    For other columns, indicators, splines and products, sites send no frequencies.
    """
    chosen = {quantity.name: scale for quantity, scale in scales.items()}
    for variable in design.parsed.variables:
        scale = scales.get(variable.quantity)
        if variable.function == "center" and scale is not None:
            chosen[variable.name] = Scale(0.0, scale.sd)
        if variable.function == "poly":  # whose sum of squares is about 1
            sd = rounded(Scale(0.0, 1.0 / math.sqrt(max(known.rows(variable.quantity) - 1, 1)))).sd
            chosen |= {f"{variable.name}[{i + 1}]": Scale(0.0, sd) for i in range(variable.number)}
    every = [chosen.get(name, Scale(0.0, 0.0)) for name in design.columns]
    return design.standardised([scale.mean for scale in every], [scale.sd for scale in every])
