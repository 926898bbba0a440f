"""Conversion between a formula's original columns and numbers, some of which may be missing.

Missing cells are drawn on the scale of the columns, and splines, products and powers of a formula are computed from the
completed column ("impute, then transform"). A column whose logarithm is in the formula is drawn as a logarithm. A
factor is represented by indicators of its levels except the first. Drawn indicators are not rounded, so rows may count
as parts of several levels: rounding would bias a linear predictor's effects of the levels.

Source: van Buuren (2018), "Flexible Imputation of Missing Data", section 6.4; Horton, Lipsitz, Parzen (2003), "A
potential for bias when rounding in multiple imputation", The American Statistician 57; Allison (2005), "Imputation of
categorical variables with PROC MI", SUGI 30.

>>> import pandas
>>> from fedtorch.data.formulas.encoding import Encoding, Levels
>>> design = Design("y ~ log(dose) + sex", Encoding(levels={"sex": Levels(("f", "m"))}))
>>> raw = RawColumns(design)
>>> frame = pandas.DataFrame({"y": [1.0, None], "dose": [None, 1.0], "sex": ["m", "f"]})
>>> rows = raw.rows(frame)
>>> raw.names, rows.values[1], rows.observed[1]
(('log(dose)', 'sex[T.m]', 'y'), tensor([0., 0., 0.], dtype=torch.float64), tensor([ True,  True, False]))
>>> cells = raw.cells(torch.tensor([[0.0, 0.75, 2.0]]))
>>> cells.frame
   dose    y
0   1.0  2.0
>>> cells.shares  # a row that counts as one of m to three quarters
{'sex': array([[0.25, 0.75]], dtype=float32)}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from torch import Tensor

from fedtorch.data.formulas.cells import Cells, as_frame
from fedtorch.data.formulas.design import Design
from fedtorch.data.frames.incomplete import Incomplete, incomplete_cells

if TYPE_CHECKING:
    import pandas


class _Column(NamedTuple):
    name: str
    log: bool
    levels: tuple[str, ...]  # of a factor
    other: str | None  # the level that replaces every other value
    whole: bool  # no cell of it may be missing

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the numbers that represent it."""
        if self.levels:
            return tuple(f"{self.name}[T.{level}]" for level in self.levels[1:])
        return (f"log({self.name})" if self.log else self.name,)


class RawColumns:
    """The columns that a design reads, the response last.

    Attributes:
        names: of the numbers that represent them, q.
        sources: the column that each of these numbers represents.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        response, *others = design.reads
        self._columns = [_column(name, design) for name in (*others, response)]
        self.names = tuple(name for column in self._columns for name in column.names)
        self.sources = tuple(column.name for column in self._columns for _ in column.names)

    def rows(self, frame: Any) -> Incomplete:
        """Return the rows of a frame, `(n, q)`.

        Raises:
            TypeError: a column of another kind than was agreed on.
            ValueError: a column is missing; a cell of weights or of trials is; a level that is not known.
        """
        cells = Cells(frame, self.design.group, missing=True)
        parts = [_numbers(cells, column) for column in self._columns]
        return incomplete_cells(torch.from_numpy(numpy.concatenate(parts, 1)))

    def cells(self, values: Tensor) -> Cells:
        """Return completed rows `(n, q)` as cells that the design reads."""
        import pandas as pd  # imported at first use, because it is slow to import

        numbers, start, made, shares = values.detach().cpu().numpy(), 0, {}, {}
        for column in self._columns:
            part = numbers[:, start : start + len(column.names)]
            start += len(column.names)
            if not column.levels:
                made[column.name] = numpy.exp(part[:, 0]) if column.log else part[:, 0]
            elif column is self._columns[-1]:  # a response, with two levels and observed
                made[column.name] = numpy.array(column.levels, dtype=object)[part[:, 0].round().astype(numpy.int64)]
            else:
                shares[column.name] = numpy.concatenate([1 - part.sum(1, keepdims=True), part], 1)
        return Cells(pd.DataFrame(made, index=range(len(numbers))), self.design.group, shares=shares)


def observed_values(frame: Any, columns: tuple[str, ...]) -> pandas.DataFrame:
    """Return a frame with missing cells filled by observed values of their column, in turn, for computing its encoding
    only.

    Means, sds and quantiles of a column are then practically those of its observed cells.

    >>> import pandas
    >>> observed_values(pandas.DataFrame({"a": [None, 2.0, 3.0, None]}), ("a",))["a"].tolist()
    [2.0, 2.0, 3.0, 3.0]
    """
    table = as_frame(frame).copy()
    for name in columns:
        column = Cells(table).column(name)
        empty = column.isna().to_numpy()
        if empty.all():
            raise ValueError(f"Expected values in column {name!r}, but all of its cells are missing; leave it out")
        if empty.any():
            known = column[~empty].to_numpy()
            table.loc[empty, name] = known[numpy.arange(int(empty.sum())) % len(known)]
    return table


def _column(name: str, design: Design) -> _Column:
    parsed = design.parsed
    quantities = [parsed.response, *parsed.offset, *(variable.quantity for variable in parsed.variables)]
    levels = design.encoding.levels.get(name)
    return _Column(
        name,
        any(quantity.log for quantity in quantities if quantity.column == name),
        () if levels is None else levels.names,
        None if levels is None else levels.other,
        name in (design.weights, design.trials, parsed.trials),
    )


def _numbers(cells: Cells, column: _Column) -> numpy.ndarray:
    """Return the numbers that represent a column, `(n, …)`, NaN for missing cells."""
    if not column.levels:
        cells = Cells(cells.frame, cells.group) if column.whole else cells
        return cells.numbers(column.name, log=column.log)[:, None]
    empty = cells.column(column.name).isna().to_numpy()
    indicators = numpy.full((len(cells), len(column.levels) - 1), numpy.nan)
    known = Cells(cells.frame[~empty], cells.group)
    values = known.levels(column.name)
    if column.other is not None:
        values = numpy.array([value if value in column.levels else column.other for value in values], dtype=object)
    bad = numpy.array([value not in column.levels for value in values], dtype=bool)
    known.refuse(bad, column.name, f"levels {list(column.levels)}", values, "declare all levels")
    indicators[~empty] = values[:, None] == numpy.array(column.levels[1:], dtype=object)
    return indicators
