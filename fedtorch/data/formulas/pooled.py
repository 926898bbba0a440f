"""A design from rows in one place: levels that occur, knots at exact quantiles, exact means.

>>> import pandas
>>> from fedtorch.data.formulas.parsing import parse
>>> frame = pandas.DataFrame({"y": [1.0, 2, 4, 3], "age": [40, 50, 60, 50], "clinic": ["A", "A", "B", "B"]})
>>> design = pooled_design(parse("y ~ age + (1 | clinic)"), Cells(frame, "clinic"))
>>> design.encoding.standard["age"]
Scale(mean=50.0, sd=8.16496580927726)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from fedtorch.data.formulas.cells import Cells, level_name, ordered_levels, shown
from fedtorch.data.formulas.design import Design
from fedtorch.data.formulas.encoding import Encoding, Levels, Scale, Spline
from fedtorch.data.formulas.grammar import Formula, Quantity, Variable
from fedtorch.data.formulas.requirements import (
    declared_levels,
    knot_probabilities,
    polynomial_of_sums,
    power_sums,
    requirements,
    scale_of_sums,
    spline_of_quantiles,
    unordered_response,
    warn_of_numbers,
)


def pooled_design(
    formula: Formula,
    cells: Cells,
    *,
    levels: Mapping[str, Any] | None = None,
    standardise: bool = True,
    offset: str | None = None,
    weights: str | None = None,
    trials: str | None = None,
) -> Design:
    """Return the design of a formula for these rows.

    Args:
        formula: from `parse`.
        cells: of all rows; its group is the column of clients.
        levels: declared levels of columns, the reference first: a sequence, or `Levels`.
        standardise: whether columns of x are centred and scaled, if the model stays the same.
        offset, weights, trials: columns; see `Design`.

    Raises:
        ValueError: the errors of `Design`; a factor of one level; a constant column, too few values for the knots of a
            spline.
    """
    design = Design(formula.text, encoding(formula, cells, levels, offset), cells.group, offset, weights, trials)
    x = design.matrix(cells)
    return design.standardised(x.mean(0), x.std(0, ddof=min(1, len(x) - 1))) if standardise and len(x) else design


def factors(formula: Formula, cells: Cells) -> set[str]:
    """Return the columns of a formula that are not numeric: text and categories."""
    return {column for column in formula.columns if not cells.numeric(column)}


def encoding(
    formula: Formula, cells: Cells, levels: Mapping[str, Any] | None = None, offset: str | None = None
) -> Encoding:
    """Return the encoding from the rows of one place; columns of x are not standardised.

    Args:
        formula: from `parse`.
        cells: of all rows.
        levels: declared levels of columns, the reference first: a sequence, or `Levels`.
        offset: a column that is an offset, besides those of the formula.

    Raises:
        ValueError: a factor of one level; a column that does not vary, too few values for the knots of a spline.
    """
    declared = {column: declared_levels(column, names) for column, names in (levels or {}).items()}
    needs = requirements(formula, factors(formula, cells) | set(declared))
    unused = sorted(set(declared) - set(needs.levels))
    if unused:
        raise ValueError(f"Expected levels of factors of the formula, but got some of {unused}; leave them out")
    for variable in formula.variables:
        if variable.quantity.column in needs.numbers:
            scale_of(cells.numbers(*variable.quantity), variable.quantity.name)  # refuses constant columns
    quantities = {quantity: cells.numbers(*quantity) for quantity in needs.quantities}
    means = {quantity: scale_of(values, quantity.name) for quantity, values in quantities.items()}
    known = {column: declared.get(column) or levels_of(column, cells) for column in needs.levels}
    for column in set(known) - set(declared):
        if cells.objects(column):
            warn_of_numbers(formula, column, known[column].names)
    target = formula.response.column
    if target not in declared and not getattr(cells.column(target).dtype, "ordered", False):
        unordered_response(formula, known.get(target))
    return Encoding(
        levels=known,
        splines={variable.name: spline_of(variable, cells.numbers(*variable.quantity)) for variable in needs.splines},
        polynomials={
            variable.name: polynomial_of_sums(
                variable,
                means[variable.quantity],
                power_sums(quantities[variable.quantity], means[variable.quantity], variable.number),
            )
            for variable in needs.polynomials
        },
        scales={variable.name: means[variable.quantity] for variable in needs.scales},
        response=None if formula.response.column in needs.levels else _response_scale(formula, cells, offset),
    )


def levels_of(column: str, cells: Cells) -> Levels:
    """Return the levels of a column: categories with rows, in their order; others sorted."""
    seen = set(cells.levels(column))
    dtype = cells.column(column).dtype
    categories = [level_name(value) for value in getattr(dtype, "categories", ())]
    names = tuple(name for name in categories if name in seen) or ordered_levels(seen)
    if len(names) < 2:
        raise ValueError(
            f"Expected at least two levels in the factor {column!r}, but got {shown(names) or 'none'}{cells.where()}; "
            "leave it out of the formula, or declare all levels it has elsewhere"
        )
    return Levels(names)


def spline_of(variable: Variable, values: numpy.ndarray) -> Spline:
    """Return knots at quantiles of given values, between the smallest and the largest."""
    inner = numpy.quantile(values, knot_probabilities(variable.number))
    return spline_of_quantiles(variable, inner.tolist(), float(values.min()), float(values.max()))


def _response_scale(formula: Formula, cells: Cells, offset: str | None) -> Scale | None:
    """Return mean and sd of a response minus its offsets; None if it is constant."""
    values = cells.numbers(*formula.response)
    for quantity in (*formula.offset, *([] if offset is None else [Quantity(offset)])):
        values = values - cells.numbers(*quantity)
    sd = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return Scale(float(values.mean()), sd) if sd > 0 else None


def scale_of(values: numpy.ndarray, name: str) -> Scale:
    """Return mean and sd of given values."""
    mean = float(values.mean()) if len(values) else 0.0
    return scale_of_sums(name, len(values), mean, float(numpy.square(values - mean).sum()))
