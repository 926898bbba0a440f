"""The server's side: ask sites about the columns of a formula, and make a design of what they tell.

The conversation is a generator: it yields a question for all sites, is given their answers by name, and returns the
design. Questions and answers are JSON.

1. `describe`: the formula, the minimum, offsets beside the formula's, and which levels are declared. A site reads the
   formula against the fixed list, compares it with its policy, and tells of its own columns what at least `minimum` of
   its own rows are behind: histograms of columns that are scaled or have knots, of the response and of offsets, from
   which means and sds follow; names of levels.
2. `make`: the design. Each site makes its own rows by it, or refuses where a row has a level that is in none.

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

import json
import math
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from fedtorch.data.agreement.site import Answers, described
from fedtorch.data.agreement.site_answers import SiteAnswers
from fedtorch.data.formulas.design import Design
from fedtorch.data.formulas.encoding import Encoding, Levels, Scale
from fedtorch.data.formulas.grammar import Formula, Quantity
from fedtorch.data.formulas.parsing import parse
from fedtorch.data.formulas.requirements import (
    declared_levels,
    requirements,
    rounded,
    unordered_response,
    warn_of_numbers,
)

_NONE: Mapping[str, Any] = MappingProxyType({})
Conversation = Generator[dict[str, Any], Mapping[str, Any], Design]


class Request(NamedTuple):
    """What sites are to agree on."""

    formula: str
    minimum: int = 10  # rows that are behind any number or name that a site tells
    group: str = ""  # the column of clients
    levels: Mapping[str, Sequence[Any]] = _NONE  # declared, by column, the reference first
    other: Mapping[str, str] = _NONE  # by column, the level as which rows count whose own is too rare
    bounds: Mapping[str, tuple[float, float]] = _NONE  # by column, the outer knots of splines
    scales: Mapping[str, tuple[float, float]] = _NONE  # declared means and sds, by column or "log(column)"
    standardise: bool = True  # whether columns of x that are numbers as they are get centred and scaled
    offset: str | None = None
    weights: str | None = None
    trials: str | None = None

    def check(self) -> Formula:
        """Return the formula.

        Raises:
            ValueError: what `parse` refuses; a minimum below 1, bounds that are none, columns that it does not read.
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


def conversation(request: Request | Design) -> Conversation:
    """Ask sites, and return the design that all have agreed on.

    Args:
        request: what they are to agree on; or a design, agreed on before, for sites that come later.

    Raises:
        ValueError: a site refuses, or says something else than was asked; what the sites tell is not enough. The
            message names site and column.
    """
    text = (request if isinstance(request, Design) else (yield from _described(request))).to_json()
    design = Design.from_json(text)  # as sites have it, also in the order of its parts
    _check_answers((yield {"step": "make", "design": text}), design.formula)
    return design


def _described(request: Request) -> Conversation:
    """Return the design that follows from what sites tell."""
    formula, declared = request.check(), request.declared()
    question = {
        "step": "describe",
        "formula": request.formula,
        "minimum": request.minimum,
        "declared": sorted(declared),
        "also": _also(request, formula),
        "offset": [] if request.offset is None else [request.offset],
    }
    answers = yield question
    _check_answers(answers, request.formula)
    return _design(request, formula, declared, SiteAnswers(answers, request.minimum, request.bounds))


def agreed(request: Request, sites: Mapping[str, Answers]) -> Design:
    """Go through the conversation in this process.

    Args:
        request: what is to be agreed on.
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
    """Return what arrives where a value is sent as JSON."""
    return json.loads(json.dumps(value))


def _check_answers(answers: Mapping[str, Any], formula: str) -> None:
    """Refuse to go on where a site has refused."""
    refused: dict[str, list[str]] = {}
    for site, answer in answers.items():
        if "refused" in answer:
            refused.setdefault(str(answer["refused"])[:1000], []).append(repr(site))
    if refused:
        reasons = "; ".join(f"from site {', '.join(sites)}: {reason}" for reason, sites in refused.items())
        raise ValueError(f"Expected sites that agree on {formula!r}, but got {reasons}")


def _design(request: Request, formula: Formula, declared: Mapping[str, Levels], known: SiteAnswers) -> Design:
    """Return the design of what sites have told."""
    text = known.text(declared)
    needs = requirements(formula, {*text, *declared})
    for column in text:
        _check_alike(column, known.where_text(column), list(known.answers))
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
    """Return the scale of a response less its offsets; None where no site tells of it, as where it does not vary.

    Its sd is the response's alone. A histogram of the difference would be a second one of the same rows, and which
    offsets make it is for who asks to say.
    """
    offsets = [*formula.offset, *([] if request.offset is None else [Quantity(request.offset)])]
    if formula.response not in wanted or not all(map(known.tells, [formula.response, *offsets])):
        return None
    scale = known.scale(formula.response)
    return rounded(Scale(math.fsum([scale.mean, *(-known.scale(each).mean for each in offsets)]), scale.sd))


def _also(request: Request, formula: Formula) -> list[str]:
    """Return the quantities whose mean and sd are asked for though no encoding needs them."""
    plain = [variable.quantity.name for variable in formula.variables if not variable.function]
    return sorted({*(plain if request.standardise else []), formula.response.name})  # whose units priors are in


def _standardised(design: Design, scales: Mapping[Quantity, Scale], known: SiteAnswers) -> Design:
    """Return the design with columns of x that are numbers of their own centred and scaled; the rest stays.

    Of other columns, indicators, splines and products, no site tells how often they are what.
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


def _check_alike(column: str, text: Sequence[str], sites: Sequence[str]) -> None:
    """Refuse a column that is text at some sites only."""
    if len(text) < len(sites):
        raise ValueError(
            f"Expected column {column!r} to be text at all sites or at none, but got text at {list(text)} only; write "
            f"it as C({column})"
        )
