"""The cells of frames: numbers and levels, with errors that name site, column and row.

A frame is one of pandas, or anything that offers the dataframe interchange protocol, polars among it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy

from fedtorch.data.bad_clients import BadCells, BadColumn

if TYPE_CHECKING:
    import pandas

_NO_LEVELS = "mMc"  # kinds of NumPy: times, dates, complex numbers
_SHOWN = 5  # values that an error lists


def as_frame(frame: Any) -> pandas.DataFrame:
    """Return a frame as one of pandas.

    Raises:
        TypeError: it is not a frame and has no `__dataframe__`.
    """
    import pandas as pd  # imported at first use, because it is slow to import

    if isinstance(frame, pd.DataFrame):
        return frame
    if hasattr(frame, "__dataframe__") and hasattr(pd.api, "interchange"):
        with warnings.catch_warnings():  # pandas 3 deprecates the protocol of other libraries' frames
            warnings.filterwarnings("ignore", message="The Dataframe Interchange Protocol is deprecated")
            return pd.api.interchange.from_dataframe(frame)
    if hasattr(frame, "to_pandas"):
        return frame.to_pandas()
    raise TypeError(
        f"Expected a frame of pandas, or one that offers __dataframe__, but got {type(frame).__name__}; for tensors "
        "see ft.data.from_tensors"
    )


class Cells:
    """The columns of a frame as numbers and levels.

    >>> import pandas
    >>> frame = pandas.DataFrame({"hospital": ["A", "B"], "age": [50, None]})
    >>> Cells(frame, "hospital").numbers("age")
    Traceback (most recent call last):
    fedtorch.data.bad_clients.BadCells: Expected no missing cells, but got 1 in column 'age', at first of client ...

    Args:
        frame: of pandas, or with `__dataframe__`.
        group: the column of clients, if the frame has it.
        site: site of the frame, if it has no such column.
        missing: whether numbers may be missing (NaN).
        shares: of imputed factors, column -> share of each level in each row, `(n, levels)`.
    """

    def __init__(
        self,
        frame: Any,
        group: str = "",
        site: str = "",
        *,
        missing: bool = False,
        shares: Mapping[str, numpy.ndarray] | None = None,
    ) -> None:
        self.frame = as_frame(frame)
        self.group, self.site, self.missing = group, site, missing
        self.shares = dict(shares or {})

    def __len__(self) -> int:
        return len(self.frame)

    def where(self, row: int | None = None) -> str:
        """Return the rows' owner for messages: " of client 'A'"."""
        if row is not None and self.group in self.frame.columns:
            return f" of client {level_name(self.frame[self.group].iloc[row])!r}"
        return f" of client {self.site!r}" if self.site else ""

    def column(self, name: str) -> pandas.Series:
        """Return a column unchanged.

        Raises:
            ValueError: the frame has none of that name, or several.
        """
        names = list(self.frame.columns)
        if names.count(name) != 1:
            has = "several" if name in names else "none"
            raise BadCells(
                f"Expected one column {name!r}{self.where()}, but got {has}; the frame has {names[:50]}: rename one of "
                "them, or correct what reads it, the formula or client=",
                f"the site has {has} of the column {name!r}; correct the formula, or leave the site out",
            )
        return self.frame[name]

    def numeric(self, name: str) -> bool:
        """Return whether a column holds numbers or booleans."""
        import pandas as pd

        column = self.column(name)
        complex_numbers = pd.api.types.is_complex_dtype(column)
        return bool(pd.api.types.is_numeric_dtype(column) and not complex_numbers)

    def objects(self, name: str) -> bool:
        """Return whether a column holds objects other than text, such as `Decimal`."""
        values = self.column(name)
        held = not self.numeric(name) and not hasattr(values.dtype, "categories")
        return held and not all(isinstance(value, str) for value in values.dropna().unique())

    def numbers(self, name: str, log: bool = False) -> numpy.ndarray:
        """Return a column, or its logarithm, as float64 `(n,)`.

        Raises:
            TypeError: it is not numeric.
            ValueError: a cell is missing or infinite, or has no logarithm.
        """
        column = self.column(name)
        if not self.numeric(name):
            raise BadColumn(
                f"Expected numbers in column {name!r}{self.where()}, but got {column.dtype}; convert it to numbers, or "
                f"write it as a factor, C({name})",
                f"the site's column {name!r} has no numbers; convert it, or write it as a factor",
            )
        values = numpy.array(column.to_numpy(dtype=numpy.float64, na_value=numpy.nan))  # a writable copy
        if not self.missing:
            self.complete(name)
        self.refuse(numpy.isinf(values), name, "finite numbers", values, "correct them")
        if not log:
            return values
        self.refuse(values <= 0, name, f"positive numbers for log({name})", values, "leave log out, or add a constant")
        return numpy.log(values)

    def levels(self, name: str) -> numpy.ndarray:
        """Return a column as strings `(n,)`: whole numbers without a decimal point.

        Raises:
            TypeError: it contains dates, times or complex numbers.
            ValueError: a cell is missing.
        """
        column = self.complete(name)
        if getattr(column.dtype, "kind", "O") in _NO_LEVELS:
            raise BadColumn(
                f"Expected text, categories or whole numbers in the factor {name!r}{self.where()}, but got "
                f"{column.dtype}; convert it, for example to days since the first",
                f"the site's factor {name!r} has dates, times or complex numbers; convert it",
            )
        distinct = {value: level_name(value) for value in column.unique()}
        return column.map(distinct).to_numpy(dtype=object)

    def complete(self, name: str) -> pandas.Series:
        """Return a column without missing cells.

        Raises:
            ValueError: a column is missing.
        """
        column = self.column(name)
        empty = column.isna().to_numpy()
        if empty.any():
            row = int(empty.argmax())
            raise BadCells(
                f"Expected no missing cells, but got {int(empty.sum())} in column {name!r}, at first{self.where(row)}, "
                f"row {self.frame.index[row]}; fill them, or leave such rows out, frame.dropna(subset=[{name!r}]); "
                'from_frame does so by missing="drop", and keeps them for imputation by missing="impute"',
                f"the site's column {name!r} has missing cells; impute them, or leave such rows out",
            )
        return column

    def refuse(self, bad: numpy.ndarray, name: str, wanted: str, values: numpy.ndarray, remedy: str) -> None:
        """Raise `BadCells` that names column, client and first row, if any cell `(n,)` is bad."""
        if bad.any():
            row = int(bad.argmax())
            raise BadCells(
                f"Expected {wanted}, but got {_plain(values[row])!r} in column {name!r}{self.where(row)}, row "
                f"{self.frame.index[row]} ({int(bad.sum())} such rows); {remedy}",
                f"the site's column {name!r} has others than {wanted}; {remedy}",
            )


def level_name(value: Any) -> str:
    """Return a value of a factor as a string, the same at sites that store whole numbers as floats.

    >>> level_name(2.0), level_name(2), level_name(True), level_name("2")
    ('2', '2', 'True', '2')
    """
    if isinstance(value, (float, numpy.floating)) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)


def ordered_levels(names: Any) -> tuple[str, ...]:
    """Return levels in order: by number where all are numbers, by the alphabet otherwise.

    >>> ordered_levels({"10", "9"}), ordered_levels({"b", "10", "a"})
    (('9', '10'), ('10', 'a', 'b'))
    """
    try:
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    except ValueError:
        return tuple(sorted(names))


def _plain(value: Any) -> Any:
    """Convert a number of NumPy to one of Python."""
    return value.item() if isinstance(value, numpy.generic) else value


def shown(values: Any) -> str:
    """Return a few of some values for a message."""
    listed = [repr(value) for value in list(values)[:_SHOWN]]
    return ", ".join(listed) + (", …" if len(values) > _SHOWN else "")
