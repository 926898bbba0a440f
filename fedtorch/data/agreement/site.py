"""A site's part: answers to the server about the columns of a formula, and rows by the agreed design.

>>> import pandas
>>> sexes = ["f", "m"] * 9 + ["x", "f"]
>>> frame = pandas.DataFrame({"age": [50.0 + i for i in range(20)], "sex": sexes, "y": [0.0] * 20})
>>> site = Answers(frame, Disclosure(minimum=5))
>>> question = {"step": "describe", "minimum": 5, "declared": [], "also": [], "offset": []}
>>> said = site.answer({**question, "formula": "y ~ scale(age) + sex"})
>>> said["levels"], said["histograms"]["age"]
({'sex': ['f', 'm']}, [[43.5, 55.5, 63.5, 75.5], [6, 8, 6], True])
>>> site.answer({**question, "formula": "y ~ I(age)"})["refused"]
"Expected column names, ..., but got the function I(…) at character 4 of the formula, near 'y ~ I(age)'"
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from fedtorch.data.agreement.disclosure import AnswerLog, Disclosure, Refused
from fedtorch.data.agreement.histogram import Histogram, behind, histogram
from fedtorch.data.bad_clients import without_rows
from fedtorch.data.formulas.cells import Cells
from fedtorch.data.formulas.design import Design
from fedtorch.data.formulas.encoding import Scale
from fedtorch.data.formulas.grammar import Formula, Quantity
from fedtorch.data.formulas.parsing import parse
from fedtorch.data.formulas.requirements import Requirements, requirements

if TYPE_CHECKING:
    import pandas

_LOG = logging.getLogger(__name__)
_LARGEST = 100.0  # largest decimal logarithm of scaled numbers


class Answers:
    """Answers to a server's questions about a site's frame.

    Args:
        frame: of the site; it does not leave this process.
        disclosure: limits on the site's answers.
        folder: of states, where it stores its answers; None stores them in this object only.
        name: of the site, for its own messages.
        drop: whether rows that lack a cell of a formula's columns are left out of all that it tells of the formula.

    Attributes:
        agreed: the last design received, None before.
    """

    def __init__(
        self,
        frame: Any,
        disclosure: Disclosure | None = None,
        folder: Path | None = None,
        name: str = "",
        *,
        drop: bool = False,
    ) -> None:
        self.disclosure, self._log, self._drop = disclosure or Disclosure(), AnswerLog(folder), drop
        self._whole = self._cells = Cells(frame, site=name, missing=True)
        self._everybody: numpy.ndarray | None = None  # (N,) whose row each is, where persons count
        if self.disclosure.person is not None:
            self._everybody = self._cells.frame[self.disclosure.person].factorize()[0]
        self._persons = self._everybody
        self.agreed: Design | None = None

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a question, or `refused` with a reason without single rows."""
        try:
            if not isinstance(question, dict) or question.get("step") not in _STEPS:
                raise Refused(f"expected one of the steps {sorted(_STEPS)}")
            return _STEPS[question["step"]](self, question)
        except Refused as error:
            _LOG.warning("refused: %s", error)
            return {"refused": str(error)}
        except Exception as error:  # the server receives only the kind of an error
            _LOG.exception("this site could not answer")
            return {"refused": without_rows(error, "the site failed with ")}

    def describe(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return histograms and levels of the columns of a formula."""
        text, numbers, factors = self._asked(question)
        minimum, declared = question["minimum"], question["declared"]
        return {
            "text": [column for column in text if column not in declared],
            "objects": [column for column in factors if self._cells.objects(column)],
            "histograms": {column: self._histogram(column, minimum) for column in numbers},
            "levels": {column: self._levels(column, minimum) for column in factors},
        }

    def told(self, question: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the columns of which `describe` tells histograms or levels.

        Raises:
            Refused: it tells none, for the same reasons.
        """
        _, numbers, factors = self._asked(question)
        return (*numbers, *factors)

    def _asked(self, question: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
        """Return (the formula's columns of text, those of which histograms are asked for, those of which levels are).

        Raises:
            Refused: the formula or the minimum is outside the site's limits, or a column is not as the formula has it.
        """
        formula = self._formula(_checked(question, "formula", str))
        minimum = _checked(question, "minimum", int)
        declared, also = (_texts(question, name) for name in ("declared", "also"))
        offset, beside = _texts(question, "offset"), _texts({"beside": [], **question}, "beside")
        reads = (*formula.columns, *offset, *beside)
        self._has(reads)
        self.disclosure.check(minimum, reads)
        if self._drop:
            self.leave_out(reads)
        text = [column for column in formula.columns if not self._cells.numeric(column)]
        needs = _needs(formula, {*text, *declared})
        offsets = (*formula.offset, *map(Quantity, offset))
        asked = dict.fromkeys([*described(formula, needs, also), *spread(needs), *offsets])
        for quantity in asked:
            self._values(quantity)
        numbers = list(dict.fromkeys(quantity.column for quantity in asked))
        return text, numbers, [column for column in needs.levels if column not in declared]

    def make(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Accept a design, and return how many rows the site has for it."""
        text = _checked(question, "design", str)
        try:
            design = Design.from_json(text)
        except ValueError as error:
            raise Refused(str(error)) from None
        formula = self._formula(design.formula)
        self.disclosure.check(self.disclosure.minimum, design.reads)
        _check_sizes(design)
        self._has(design.reads)
        if self._drop:
            self.leave_out(design.reads)
        self._log.count(text, self.disclosure.designs)
        for column, levels in design.encoding.levels.items():
            if column in formula.columns and levels.other is None:
                self._refuse_others(column, levels.names)
        self.agreed = design
        return {"rows": len(self._cells)}

    def leave_out(self, columns: Sequence[str]) -> None:
        """Go on with the rows that lack no cell of these columns, of no columns with all rows.

        Where these differ by few rows from those that stayed for other columns it refuses: all that it tells of both,
        sums of rounds too, would differ by what it tells of these few. A site that leaves out no rows remembers that
        all have stayed, for it may leave out some later.

        Raises:
            Refused: as said, or no row stays, or these are too many sets of columns.
        """
        table = self._whole.frame
        stay = complete(table, columns)

        def check(before: Sequence[Sequence[str]]) -> None:
            if not stay.any():
                raise Refused(f"no row of the site has a cell in each of the columns {list(columns)}; leave some out")
            if before:
                self._check_few(stay, before)

        self._log.leave_out(columns, self.disclosure.designs, check)
        self._cells = Cells(table[stay], site=self._whole.site, missing=True)
        self._persons = None if self._everybody is None else self._everybody[stay]

    def _check_few(self, stay: numpy.ndarray, before: Sequence[Sequence[str]]) -> None:
        """Refuse rows that stay `(N,)` where they, with those before, tell few rows apart from all others.

        A client with enough rows answers alone, so that its rows are looked at by themselves.
        """
        table, least = self._whole.frame, self.disclosure.minimum
        stays = numpy.stack([stay, *(complete(table, columns) for columns in before)], 1)
        kinds, kind = numpy.unique(numpy.column_stack([self._clients_of_many(), stays]), axis=0, return_inverse=True)
        stayed = kinds[:, 1:].any(1)  # a kind of rows of a client, for some formula
        if (_behind_each(kind.reshape(-1), self._everybody)[stayed] < least).any():
            raise Refused(
                "the site leaves out rows that lack a cell, and those that stay differ by fewer than "
                f"{least} {self.disclosure.counted} from those that stayed for other columns, at a client or in all; "
                "ask for formulas of the columns that were asked for before, or let its side impute, missing='impute', "
                "or complete its cells"
            )

    def _clients_of_many(self) -> numpy.ndarray:
        """Return the number of each row's client `(N,)`, 0 of all that have few rows."""
        if self.disclosure.client is None:
            return numpy.zeros(len(self._whole), dtype=int)
        number = self._whole.frame[self.disclosure.client].factorize()[0]
        few = _behind_each(number, self._everybody) < self.disclosure.minimum
        return numpy.where(few[number], 0, 1 + number)

    def has_made(self, design: str) -> bool:
        """Return whether rows were made by a design, as JSON."""
        return self._log.has_counted(design)

    def _formula(self, text: str) -> Formula:
        try:
            formula = parse(text)
        except ValueError as error:
            raise Refused(str(error)) from None
        self._has(formula.columns)
        return formula

    def _has(self, columns: Sequence[str]) -> None:
        """Raise for a formula with a missing column."""
        names = list(self._cells.frame.columns)
        if absent := [column for column in columns if names.count(column) != 1]:
            raise Refused(
                f"the site has no column {absent[0]!r} that the formula reads; correct it, or leave the site out"
            )

    def _histogram(self, column: str, minimum: int) -> list[Any] | None:
        """Return the histogram of a column: the stored one, or that of its values.

        With the names of common levels beside it, its counts would be those of the rare ones.
        """
        if self._log.has_told(f"levels of {column!r}"):
            raise Refused(
                f"the site has told which levels of {column!r} are common, and does not tell its histogram too; write "
                "it as a factor"
            )
        bins: list[Any] | None = self._log.once(f"bins of {column!r}", minimum, lambda: self._bins(column, minimum))
        return bins

    def _bins(self, column: str, minimum: int) -> Histogram | None:
        """Return the histogram of a column; if few cells are missing, they count in the bin with most rows."""
        values, persons = self._numbers(Quantity(column)), self._persons
        missing = numpy.isnan(values)
        made = histogram(values[~missing], minimum, None if persons is None else persons[~missing])
        if made is None or behind(missing, persons) >= minimum:
            return made
        counts = list(made.counts)
        counts[counts.index(max(counts))] += int(missing.sum())
        return made._replace(counts=tuple(counts))

    def _values(self, quantity: Quantity) -> numpy.ndarray:
        """Return the observed numbers of a quantity."""
        values = self._numbers(quantity)
        return values[~numpy.isnan(values)]

    def _numbers(self, quantity: Quantity) -> numpy.ndarray:
        """Return the numbers of a quantity, NaN for missing ones."""
        if not self._cells.numeric(quantity.column):
            raise Refused(f"the site's column {quantity.column!r} has no numbers; write it as a factor, on its own")
        values = self._cells.numbers(quantity.column)
        if not quantity.log:
            return values
        if bool((values <= 0).any()):
            raise Refused(
                f"the site's column {quantity.column!r} has others than positive numbers for log; leave log out, "
                "or add a constant"
            )
        return numpy.log(values)

    def _levels(self, column: str, minimum: int) -> list[str]:
        if self._log.has_told(f"bins of {column!r}"):
            raise Refused(
                f"the site has told its histogram of {column!r}, and does not tell which levels are common too; "
                f"declare them, levels={{{column!r}: [...]}}"
            )
        return self._log.once(f"levels of {column!r}", minimum, lambda: self._common(column, minimum))

    def _common(self, column: str, minimum: int) -> list[str]:
        """Return the levels with enough rows, or enough persons."""
        names, counts = self._names(column), Counter[str]()
        if self._persons is None:
            counts.update(names)
        else:
            there = self._cells.frame[column].notna().to_numpy()
            counts.update(level for level, _ in set(zip(names, self._persons[there].tolist(), strict=True)))
        if rare := sorted(level for level, count in counts.items() if count < minimum):
            where, what = self._cells.where(), self.disclosure.counted
            _LOG.info(
                "column %r%s: levels %s have fewer than %d %s and are not told", column, where, rare, minimum, what
            )
        return sorted(level for level, count in counts.items() if count >= minimum)

    def _refuse_others(self, column: str, names: Sequence[str]) -> None:
        if rare := sorted(set(self._names(column)) - set(names)):
            where = self._cells.where()
            _LOG.warning("column %r%s: levels %s are not among those agreed on, %s", column, where, rare, list(names))
            raise Refused(
                f"the site's column {column!r} has levels that are not among those agreed on; declare one as which "
                f"such rows count, other={{{column!r}: 'other'}}, or all levels, levels={{{column!r}: [...]}}"
            )

    def _names(self, column: str) -> list[str]:
        """Return the observed values of a factor."""
        whole = Cells(self._cells.frame[[column]].dropna())
        return whole.levels(column).tolist()


def _behind_each(number: numpy.ndarray, persons: numpy.ndarray | None) -> numpy.ndarray:
    """Return how many rows, or persons, are of each number in `(N,)`.

    >>> _behind_each(numpy.array([0, 1, 1]), None), _behind_each(numpy.array([0, 1, 1]), numpy.array([5, 7, 7]))
    (array([1, 2]), array([1, 1]))
    """
    if persons is not None:
        number = numpy.unique(numpy.column_stack([number, persons]), axis=0)[:, 0]
    return numpy.bincount(number)


def complete(table: pandas.DataFrame, columns: Sequence[str]) -> numpy.ndarray:
    """Return which rows lack no cell of these columns, as far as the frame has them, bool `(N,)`."""
    there = [column for column in dict.fromkeys(columns) if column in table.columns]
    return table[there].notna().all(axis=1).to_numpy()


_STEPS = {"describe": Answers.describe, "make": Answers.make}


def _check_sizes(design: Design) -> None:
    """Refuse a design whose centres and scales together make numbers so large that rows may overflow.

    A design comes from the server. An overflow in rows would disclose the size of the largest value.
    """
    encoding = design.encoding
    for column in design.made:
        size = _size(encoding.standard.get(column.name))
        for variable in (part.variable for part in column.parts):
            if variable.function in ("center", "scale"):
                scale = encoding.scales[variable.name]
                size += _size(scale if variable.function == "scale" else Scale(scale.mean, 1.0))
            elif variable.function == "poly":
                mean, sd, coefficients = encoding.polynomials[variable.name]
                largest = max(abs(number) for row in coefficients for number in row)
                size += len(coefficients) * _size(Scale(mean, sd)) + max(0.0, math.log10(largest or 1.0))
        if size > _LARGEST:
            raise Refused(
                f"the design makes numbers of about 1e{size:.0f} of the column {column.name!r}, and the site makes "
                f"none beyond 1e{_LARGEST:.0f} by centres and scales; agree on the encoding again"
            )


def _size(scale: Scale | None) -> float:
    """Return the decimal logarithm of numbers of about one after centring and scaling, at least 0."""
    return 0.0 if scale is None else max(0.0, math.log10(1.0 + abs(scale.mean)) - math.log10(scale.sd))


def described(formula: Formula, needs: Requirements, also: Sequence[str]) -> tuple[Quantity, ...]:
    """Return the quantities whose mean and sd are needed: scaled ones, and others by their names."""
    every = dict.fromkeys([formula.response, *(variable.quantity for variable in formula.variables)])
    wanted = {*needs.quantities, *(each for each in every if each.name in also and each.column in needs.numbers)}
    return tuple(each for each in every if each in wanted)


def spread(needs: Requirements) -> tuple[Quantity, ...]:
    """Return the quantities whose histogram is needed."""
    return tuple(dict.fromkeys(variable.quantity for variable in (*needs.splines, *needs.polynomials)))


def _needs(formula: Formula, factors: set[str]) -> Requirements:
    try:
        return requirements(formula, factors)
    except ValueError as error:  # a factor in a function of numbers
        raise Refused(str(error)) from None


def _checked(question: Mapping[str, Any], name: str, kind: type) -> Any:
    value = question.get(name)
    if type(value) is not kind:
        raise Refused(f"expected {name} as {kind.__name__}, but got {type(value).__name__}")
    return value


def _texts(question: Mapping[str, Any], name: str) -> list[str]:
    values = _checked(question, name, list)
    if not all(isinstance(value, str) for value in values):
        raise Refused(f"expected {name} as texts")
    return values
