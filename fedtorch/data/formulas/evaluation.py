"""Columns of x from the cells of a frame and an encoding: indicators, splines, polynomials and products only.

>>> import pandas
>>> from fedtorch.data.formulas.coding import columns
>>> from fedtorch.data.formulas.encoding import Levels
>>> from fedtorch.data.formulas.parsing import parse
>>> encoding = Encoding(levels={"sex": Levels(("f", "m"))})
>>> frame = pandas.DataFrame({"age": [50.0, 60.0], "sex": ["m", "f"]})
>>> design_matrix(columns(parse("y ~ age * sex").terms, encoding), encoding, Cells(frame))
array([[ 1., 50.,  1., 50.],
       [ 1., 60.,  0.,  0.]])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

from fedtorch.data.formulas.cells import Cells, shown
from fedtorch.data.formulas.coding import Column, is_factor
from fedtorch.data.formulas.encoding import Encoding, Levels, Polynomial, Spline
from fedtorch.data.formulas.grammar import Variable

DEGREE = 3  # of splines


def design_matrix(columns: Sequence[Column], encoding: Encoding, cells: Cells) -> numpy.ndarray:
    """Return x `(n, d)`, not standardised.

    Raises:
        TypeError: a column of another kind than was agreed on.
        ValueError: a column or a cell is missing; a level that was not agreed on.
    """
    variables = {part.variable: None for column in columns for part in column.parts}
    values = {variable: _variable(variable, encoding, cells) for variable in variables}
    x = numpy.ones((len(cells), len(columns)), order="F")  # columns are written one by one
    for j, column in enumerate(columns):
        for part in column.parts:
            x[:, j] *= values[part.variable](part.place)
    return x


def outside(variables: Sequence[Variable], encoding: Encoding, cells: Cells) -> list[str]:
    """Describe, in one line each, the splines with values beyond their bounds, which count as the bound."""
    lines = []
    for variable in variables:
        if variable.function == "bs":
            spline = encoding.splines[variable.name]
            values = cells.numbers(*variable.quantity)
            count = int(((values < spline.lower) | (values > spline.upper)).sum())
            if count:
                lines.append(f"{count} of {variable.name} beyond {spline.lower:.6g}…{spline.upper:.6g}")
    return lines


def _variable(variable: Variable, encoding: Encoding, cells: Cells) -> Callable[[int], numpy.ndarray]:
    """Return the columns that a variable can make, `(n,)` each, by their places."""
    column, log = variable.quantity
    if is_factor(variable, encoding):
        if column in cells.shares:
            return lambda place: cells.shares[column][:, place]
        codes = level_codes(column, encoding.levels[column], cells)
        return lambda place: codes == place
    values, name = cells.numbers(column, log=log), variable.name
    makers: dict[str, Callable[[], numpy.ndarray]] = {
        "": lambda: values[:, None],
        "bs": lambda: splines(values, encoding.splines[name]),
        "poly": lambda: polynomials(values, encoding.polynomials[name]),
        "center": lambda: values[:, None] - encoding.scales[name].mean,
        "scale": lambda: (values[:, None] - encoding.scales[name].mean) / encoding.scales[name].sd,
    }
    made = makers[variable.function]()
    return lambda place: made[:, place]


def level_codes(column: str, levels: Levels, cells: Cells) -> numpy.ndarray:
    """Return the index of each row's level, `(n,)`.

    Raises:
        ValueError: a level that was not agreed on, which the message names.
    """
    import pandas as pd  # imported at first use, because it is slow to import

    codes, present = pd.factorize(cells.levels(column))
    number = {name: i for i, name in enumerate(levels.names)}
    unseen = [i for i, name in enumerate(present) if name not in number]
    if unseen and levels.other is None:
        row = int(numpy.isin(codes, unseen).argmax())
        raise ValueError(
            f"Expected levels {shown(levels.names)} in column {column!r}{cells.where(row)}, but got "
            f"{shown(sorted(present[unseen]))}; give such rows one of these, or leave them out; levels are chosen "
            f"where the formula is, from_frame(…, levels={{{column!r}: [...]}})"
        )
    other = number.get(levels.other or "", 0)
    return numpy.array([number.get(name, other) for name in present], dtype=numpy.int64)[codes]


def splines(values: numpy.ndarray, spline: Spline) -> numpy.ndarray:
    """Return B-splines of third degree without the first, `(n, df)`: values beyond the bounds count as the bound.

    >>> splines(numpy.array([0.0, 0.5, 2.0]), Spline((), 0.0, 1.0))
    array([[0.   , 0.   , 0.   ],
           [0.375, 0.375, 0.125],
           [0.   , 0.   , 1.   ]])
    """
    from scipy.interpolate import BSpline  # imported at first use, because it is slow to import

    ends = DEGREE + 1
    knots = numpy.array([*[spline.lower] * ends, *spline.knots, *[spline.upper] * ends])
    basis = BSpline(knots, numpy.eye(len(knots) - ends), DEGREE)
    return basis(numpy.clip(values, spline.lower, spline.upper))[:, 1:]


def polynomials(values: numpy.ndarray, polynomial: Polynomial) -> numpy.ndarray:
    """Return orthogonal polynomials `(n, degree)`."""
    z = (values - polynomial.mean) / polynomial.sd
    coefficients = numpy.array(polynomial.coefficients)
    return numpy.vander(z, coefficients.shape[1], increasing=True) @ coefficients.T
