"""A formula with its encoding: rows from frames, names of coefficients, and conversion to the units of the columns.

>>> import pandas
>>> frame = pandas.DataFrame({"y": [1.0, 2, 4], "age": [40, 50, 60], "sex": ["f", "m", "f"], "clinic": ["A", "A", "B"]})
>>> encoding = Encoding(levels={"sex": Levels(("f", "m"))})
>>> design = Design("y ~ age + sex + (1 | clinic)", encoding, group="clinic")
>>> design.columns, design.random, design.response
(('Intercept', 'age', 'sex[T.m]'), (0,), 'y')
>>> design.rows(frame)[0]
tensor([[ 1., 40.,  0.],
        [ 1., 50.,  1.],
        [ 1., 60.,  0.]], dtype=torch.float64)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fedtorch import checkpoint
from fedtorch.data.formulas.cells import Cells
from fedtorch.data.formulas.coding import Column, columns, is_factor
from fedtorch.data.formulas.encoding import Encoding, Levels, Scale
from fedtorch.data.formulas.evaluation import design_matrix, outside
from fedtorch.data.formulas.grammar import INTERCEPT, Formula
from fedtorch.data.formulas.parsing import parse
from fedtorch.data.formulas.requirements import rounded

_FAR = 30.0  # sds from 0 beyond which slopes uncorrelated with intercepts make no sense
_SERIAL = ("formula", "group", "offset", "weights", "trials")
_INSTEAD = (
    ", which is there where the formula has neither 0 nor - 1: clients' intercepts differ about it, and the levels of "
    "a factor then count from its first"
)


@dataclass(frozen=True)
class Design:
    """Definition of a formula's rows: the formula, and the encoding that clients' rows share.

    Args:
        formula: such as `"death ~ age + C(sex) + (1 + age | hospital)"`.
        encoding: levels, knots, means and scales.
        group: the column with each row's client.
        offset: a column that is added to the linear predictor.
        weights: a column of row weights; precisions for Gaussian responses, numbers of rows for others, see
            `from_frame`.
        trials: a column of the numbers of trials of binomial responses.

    Raises:
        ValueError: the errors of `parse`; random terms by another column than `group`, or without a supported
            covariance; an encoding that lacks something the formula needs.
    """

    formula: str
    encoding: Encoding
    group: str = ""
    offset: str | None = None
    weights: str | None = None
    trials: str | None = None
    columns: tuple[str, ...] = field(init=False)  # names of the coefficients, which are the columns of x
    random: tuple[int, ...] = field(init=False)  # numbers of the coefficients that differ between clients
    correlated: bool = field(init=False)  # whether these are
    response: str = field(init=False)
    parsed: Formula = field(init=False, repr=False, compare=False)
    made: tuple[Column, ...] = field(init=False, repr=False, compare=False)  # each column of x is a product of these

    def __post_init__(self) -> None:
        parsed = parse(self.formula)
        _check_encoding(parsed, self.encoding)
        made = columns(parsed.terms, self.encoding)
        if not made:
            raise ValueError(f"Expected at least one coefficient, but got none in {self.formula!r}; add a term or 1")
        names = tuple(column.name for column in made)
        unknown = [name for name, scale in self.encoding.standard.items() if name not in names or _stuck(scale, names)]
        if unknown:
            raise ValueError(f"Expected scales of the coefficients {list(names)}, but got some of {unknown}")
        if self.trials is not None and parsed.trials is not None:
            raise ValueError(f"Expected trials once, but got trials({parsed.trials}) and trials={self.trials!r}")
        random, correlated = random_columns(parsed, names, self.encoding, self.group)
        values = {
            "columns": names, "random": random, "correlated": correlated, "response": parsed.response.name,
            "parsed": parsed, "made": tuple(made),
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return hash(self.to_json())

    def rows(self, frame: Any, response: bool = True, *, site: str = "", missing: bool = False) -> Any:
        """Return the rows of a frame: `(x, y)`, and `{"offset": …, "weight": …, "trials": …}` where it has any.

        Args:
            frame: of pandas, or one that offers `__dataframe__`.
            response: whether y is read, too. If not, the result is `(x, extra)`, with a dict that may be empty and has
                no weights; values beyond the knots of a spline, which count as its bound, give a warning.
            site: site of the frame, for messages, if no column contains it.
            missing: whether numbers may be missing; they become NaN.

        Raises:
            TypeError: a column of another kind than was agreed on.
            ValueError: a column or a cell is missing, or a level was not agreed on; the message names it.
        """
        cells = Cells(frame, self.group, site, missing=missing)
        if not response and (lines := outside(self.parsed.variables, self.encoding, cells)):
            warnings.warn(f"Some values count as the bound of their spline: {'; '.join(lines)}", stacklevel=2)
        return self.rows_of(cells, response)

    def rows_of(self, cells: Cells, response: bool = True) -> Any:
        """Return the rows of cells, as `rows` does, but without a warning."""
        x = self.matrix(cells)
        for j, name in enumerate(self.columns):
            if (scale := self.encoding.standard.get(name)) is not None:
                x[:, j] -= scale.mean
                x[:, j] /= scale.sd
        extra, columns = self._extra(cells, response), torch.from_numpy(x).contiguous()
        if response:
            y = torch.from_numpy(self._response(cells))
            return (columns, y, extra) if extra else (columns, y)
        return columns, extra

    def matrix(self, cells: Cells) -> numpy.ndarray:
        """Return x `(n, d)` in the units of the columns."""
        return design_matrix(self.made, self.encoding, cells)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the columns of a frame that the design reads, except that of clients: the response first."""
        more = [column for column in (self.offset, self.weights, self.trials) if column is not None]
        return tuple(dict.fromkeys([*self.parsed.columns, *more]))

    @property
    def constants(self) -> tuple[str, ...]:
        """Return the means and sds by which columns are standardised, where clients have agreed on them.

        >>> encoding = Encoding(standard={"age": Scale(50.0, 10.0)}, response=Scale(1.234567, 2.0))
        >>> Design("y ~ age", encoding).constants
        ('age: 50 ± 10',)
        """
        known = {self.response: self.encoding.response}
        for variable in self.parsed.variables:
            scale = self.encoding.standard.get(variable.name)
            known[variable.quantity.name] = self.encoding.scales.get(variable.name) or (
                None if variable.number else scale
            )
        shown = {name: scale for name, scale in known.items() if scale is not None and rounded(scale) == scale}
        return tuple(f"{name}: {scale.mean:g} ± {scale.sd:g}" for name, scale in shown.items())

    def original(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean `(..., d)` and covariance `(..., d, d)` of coefficients in the units of the columns.

        The covariance between clients' coefficients is converted likewise: `design.original(zeros, between)[1]`.

        Args:
            mean: of coefficients of the standardised columns.
            covariance: of these coefficients.
        """
        back = self.back().to(mean)
        return mean @ back.mT, back @ covariance @ back.mT

    def back(self) -> Tensor:
        """Return the matrix `(d, d)` that maps coefficients to the units of the columns."""
        matrix = torch.eye(len(self.columns), dtype=torch.float64)
        for j, name in enumerate(self.columns):
            if (scale := self.encoding.standard.get(name)) is not None:
                matrix[j, j] = 1 / scale.sd
                if scale.mean:
                    matrix[self.columns.index(INTERCEPT), j] = -scale.mean / scale.sd
        return matrix

    def standardised(self, mean: Any, sd: Any) -> Design:
        """Return the design whose columns of x are centred and scaled by these means and sds, if the model stays the
        same.

        All columns but the intercept are divided by their sd. A mean is subtracted if the intercept can absorb it: of a
        fixed effect if there is an intercept, and of a random one if the intercept is random and correlated with it;
        otherwise the model would change.

        Args:
            mean: of the original columns of x, `(d,)`.
            sd: of them; a constant column keeps its scale.
        """
        standard: dict[str, Scale] = {}
        centres: dict[str, float] = {}
        intercept = self.columns.index(INTERCEPT) if INTERCEPT in self.columns else None
        together = intercept in self.random and self.correlated
        for j, (name, centre, scale) in enumerate(zip(self.columns, map(float, mean), map(float, sd))):
            if j == intercept or not scale > 1e-12 * abs(centre):
                continue
            movable = intercept is not None and (j not in self.random or together)
            standard[name] = Scale(centre if movable else 0.0, scale)
            if not movable:
                centres[name] = centre / scale
        far = [name for name, centre in centres.items() if intercept in self.random and abs(centre) > _FAR]
        if far:
            warnings.warn(
                f"Expected columns near 0, but got means of {far} more than {_FAR:.0f} sds away, which cannot be taken "
                f"out of slopes that differ by {self.group} but not correlated with the intercept; write center(…), or "
                f"(… | {self.group}) in place of ||",
                stacklevel=2,
            )
        return replace(self, encoding=replace(self.encoding, standard=standard, centres=centres))

    def to_json(self) -> str:
        """Return the design as JSON, to be saved or sent."""
        parts: dict[str, Any] = {name: getattr(self, name) for name in _SERIAL}
        return json.dumps({**parts, "encoding": json.loads(self.encoding.to_json())}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Design:
        """Read and check a design.

        Raises:
            ValueError: not a design.
        """
        try:
            parts = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"Expected a design as JSON, but got something else: {error}") from None
        good = isinstance(parts, dict) and set(parts) == {*_SERIAL, "encoding"}
        good = good and all(isinstance(parts[name], str) for name in _SERIAL[:2])
        if not good or not all(parts[name] is None or isinstance(parts[name], str) for name in _SERIAL):
            raise ValueError(f"Expected a design with {[*_SERIAL, 'encoding']}, but got {text[:200]!r}")
        encoding = Encoding.from_json(json.dumps(parts.pop("encoding")))
        return cls(encoding=encoding, **parts)

    @classmethod
    def of_run(cls, path: Path | str) -> Design:
        """Return the design saved with a run by `run.save`.

        Raises:
            ValueError: no checkpoint of a run, or one without a design.
        """
        flat = checkpoint.read_run(path)
        if "design" not in flat:
            raise ValueError(f"Expected a checkpoint with a design, but {path} has none; its run was of no formula")
        return cls.from_json(bytes(flat["design"].tolist()).decode())

    def _response(self, cells: Cells) -> numpy.ndarray:
        column, log = self.parsed.response
        if column not in self.encoding.levels:
            return cells.numbers(column, log=log)
        values, names = cells.levels(column), self.encoding.levels[column].names
        bad = numpy.array([value not in names for value in values], dtype=bool)
        cells.refuse(bad, column, f"responses {names}", values, "correct them")
        return numpy.array([names.index(value) for value in values], dtype=numpy.float64)

    def _extra(self, cells: Cells, response: bool) -> dict[str, Tensor]:
        extra: dict[str, numpy.ndarray] = {}
        offsets = [cells.numbers(*quantity) for quantity in self.parsed.offset]
        offsets += [cells.numbers(self.offset)] if self.offset else []
        if offsets:
            extra["offset"] = numpy.sum(offsets, axis=0)
        if self.weights and response:
            extra["weight"] = cells.numbers(self.weights)
            cells.refuse(
                ~(extra["weight"] >= 0), self.weights, "weights of at least 0", extra["weight"], "correct them"
            )
        trials = self.trials or self.parsed.trials
        if isinstance(trials, int):
            extra["trials"] = numpy.full(len(cells), float(trials))
        elif trials and (response or trials in cells.frame.columns):
            values = cells.numbers(trials)
            bad = ~((values >= 0) & (values == numpy.round(values)))
            cells.refuse(bad, trials, "numbers of trials", values, "correct them")
            extra["trials"] = values
        return {name: torch.from_numpy(values) for name, values in extra.items()}


def _stuck(scale: Scale, names: tuple[str, ...]) -> bool:
    """Return whether a mean is subtracted that no intercept absorbs."""
    return bool(scale.mean) and INTERCEPT not in names


def _check_encoding(formula: Formula, encoding: Encoding) -> None:
    """Refuse an encoding that lacks parts of a formula, and a response that is among the terms."""
    parts = {"bs": encoding.splines, "poly": encoding.polynomials, "center": encoding.scales, "scale": encoding.scales}
    for variable in formula.variables:
        column = variable.quantity.column
        if column == formula.response.column:
            raise ValueError(f"Expected terms without the response {column!r}, but got {variable.name}; leave it out")
        lacking = variable.function == "C" and column not in encoding.levels
        lacking = lacking or (variable.function in parts and variable.name not in parts[variable.function])
        if lacking or (column in encoding.levels and not is_factor(variable, encoding)):
            what = f"levels of {column!r}" if variable.function == "C" else f"numbers for {variable.name}"
            raise ValueError(f"Expected an encoding with {what}, but got none; agree on it for this formula")
        if variable.number:
            _check_size(variable.name, variable.number, variable.function, encoding)
    levels = encoding.levels.get(formula.response.column, Levels(("0", "1")))
    if levels.other is not None or (formula.response.log and levels.names != ("0", "1")):
        raise ValueError(
            f"Expected a response of numbers or of levels, none of which pools other levels, but got "
            f"{len(levels.names)} levels of {formula.response.name!r}; choose one of them, as a column of True or False"
        )


def _check_size(name: str, number: int, function: str, encoding: Encoding) -> None:
    size = len(encoding.splines[name].knots) + 3 if function == "bs" else len(encoding.polynomials[name].coefficients)
    if size != number:
        raise ValueError(f"Expected an encoding of {number} columns for {name}, but got {size}; agree on it again")


def random_columns(
    formula: Formula, names: Sequence[str], encoding: Encoding, group: str
) -> tuple[tuple[int, ...], bool]:
    """Return the numbers of the coefficients that differ between clients, and whether they are correlated.

    Raises:
        ValueError: terms by another column than `group`, with coefficients that have no fixed effect or are in two
            terms, or of which some but not all are correlated; the message names the term.

    >>> random_columns(parse("y ~ age + (1 + age | clinic)"), ("Intercept", "age"), Encoding(), "clinic")
    ((0, 1), True)
    >>> random_columns(parse("y ~ age + (1 | clinic) + (0 + age | clinic)"), ("Intercept", "age"), Encoding(), "clinic")
    ((0, 1), False)
    """
    blocks: list[list[int]] = []
    for random in formula.random:
        if random.group != group:
            raise ValueError(
                f"Expected random terms by the column of clients, {group!r}, but got {random.name}: rows of one "
                f"{random.group} may lie at several clients; leave it out, or, where it has few levels and does not "
                f"name the persons whose rows they are, write it as a factor, C({random.group})"
            )
        inner = [column.name for column in columns(random.terms, encoding)]
        lacking = [name for name in inner if name not in names]
        if lacking or not inner:
            absent = ", ".join("1" if name == INTERCEPT else name for name in lacking) or "1"
            raise ValueError(
                f"Expected fixed effects for the coefficients of {random.name}, but got none for {lacking}; the "
                f"formula has {list(names)}: add {absent} as a fixed effect too{_INSTEAD * (INTERCEPT in lacking)}"
            )
        places = [names.index(name) for name in inner]
        blocks += [places] if random.correlated else [[place] for place in places]
    every = [place for block in blocks for place in block]
    twice = [names[place] for place in dict.fromkeys(every) if every.count(place) > 1]
    if twice:
        raise ValueError(
            f"Expected each coefficient in one random term, but got {twice} in several of "
            f"{', '.join(random.name for random in formula.random)}; write (0 + … | {group}) in the second"
        )
    large = [block for block in blocks if len(block) > 1]
    if large and len(blocks) > 1:
        raise ValueError(
            f"Expected random coefficients that are all correlated or all not, but got some of "
            f"{', '.join(random.name for random in formula.random)}; write one term (… | {group}) or (… || {group})"
        )
    return tuple(sorted(every)), bool(large)
