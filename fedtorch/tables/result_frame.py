"""Result frames: pandas frames with the level of their intervals, which write themselves as tables for a paper.

No further library is needed (`tabulate`, `jinja2`), names are escaped, and a row is rounded to two digits of its sd.

>>> frame = ResultFrame.of({"estimate": [0.1234], "sd": [0.0456], "low": [0.034], "high": [0.213]}, ["C(sex)[T.m]"])
>>> print(frame.to_markdown())
|  | estimate | sd | 95 % interval |
| :-- | --: | --: | --: |
| C(sex)\\[T.m\\] | 0.123 | 0.046 | 0.034 to 0.213 |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedtorch.tables import rendering as tables

_COUNTS = ("n", "ess", "df")  # whole numbers
_DIGITS = {"r_hat": 3, "p_positive": 3}  # behind the point
_TITLES = {"r_hat": "R-hat", "ess": "ESS", "p_positive": "P(> 0)"}
_STEMS = {"new_": "of a new response"}  # prefix of `low` and `high`
_UNKNOWN = "–"
_MOST = 8  # digits behind the point


class ResultFrame(pd.DataFrame):
    """A frame of estimates, whose columns `low` and `high` are the ends of intervals; `attrs` has their level.

    The columns' scaling, `attrs["scales"]`, is printed below it.
    """

    @property
    def _constructor(self) -> type[ResultFrame]:
        return ResultFrame

    @staticmethod
    def of(
        columns: Mapping[str, Sequence[Any]], index: Any, names: str = "", *, level: float = 0.95, about: str = ""
    ) -> ResultFrame:
        """Return a frame of these columns; `index` are names of rows, or a pandas index."""
        rows = index if isinstance(index, pd.Index) else pd.Index(list(index), name=names or None)
        frame = ResultFrame(dict(columns), index=rows)
        frame.attrs |= {"level": level, "about": about}
        return frame

    def __repr__(self) -> str:
        scales = self.attrs.get("scales")
        return f"{super().__repr__()}\nscaled by {'; '.join(scales)}" if scales else super().__repr__()

    def to_markdown(self, *, caption: str | None = None) -> str:
        """Return a table in Markdown."""
        return tables.markdown(*self._cells(), self._depth, caption)

    def to_html(self, *, caption: str | None = None) -> str:
        """Return a table in HTML."""
        return tables.html(*self._cells(), self._depth, caption)

    def to_latex(self, *, caption: str | None = None) -> str:
        r"""Return a table in LaTeX, with the rules of its package booktabs (`\usepackage{booktabs}`)."""
        return tables.latex(*self._cells(), self._depth, caption)

    @property
    def _depth(self) -> int:
        return int(self.index.nlevels)

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows as text: the ends of an interval in one column."""
        level = f"{100 * self.attrs.get('level', 0.95):g} % interval"
        header = [str(name or "") for name in self.index.names]
        shown: list[tuple[str, ...]] = []
        for name in map(str, self.columns):
            stem = name.removesuffix("low")
            if name.endswith("low") and f"{stem}high" in self.columns:
                shown.append((name, f"{stem}high"))
                header.append(f"{level} {_STEMS.get(stem, stem)}".rstrip())
            elif not (name.endswith("high") and f"{name.removesuffix('high')}low" in self.columns):
                shown.append((name,))
                header.append(_TITLES.get(name, name))
        return header, [self._row(place, shown) for place in range(len(self))]

    def _row(self, place: int, shown: list[tuple[str, ...]]) -> list[str]:
        label = self.index[place]
        labels = [str(part) for part in (label if self._depth > 1 else (label,))]
        values = dict(zip(map(str, self.columns), self.iloc[place].tolist()))
        places = _places(values)
        ends = ([_text(name, values[name], places) for name in names] for names in shown)
        return labels + [" to ".join(dict.fromkeys(texts) if texts[0] == _UNKNOWN else texts) for texts in ends]


def _places(values: Mapping[str, Any]) -> int:
    """Return the number of decimals for two digits of the sd, or three of the largest number without one."""
    sd = float(values["sd"]) if _is_number(values.get("sd")) else 0.0
    if not sd > 0:
        sizes = [abs(value) for name, value in values.items() if _is_number(value) and name not in (*_COUNTS, *_DIGITS)]
        sd = max(sizes, default=1.0) / 10
    return min(_MOST, max(0, 1 - math.floor(math.log10(sd)))) if sd > 0 else 2


def _text(name: str, value: Any, places: int) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if math.isnan(value):
        return _UNKNOWN
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.0f}" if name in _COUNTS else f"{value:.{_DIGITS.get(name, places)}f}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
