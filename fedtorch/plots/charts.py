"""Charts as data: series over a horizontal axis, with scale, ticks and labels of both axes.

`fedtorch.plots` and `fedtorch.report` draw them in the same way.

>>> import numpy as np
>>> made: Chart = chart("Loss", "round", np.arange(1.0, 4.0), [Series("mean", np.array([0.3, 0.2, 0.1]))])
>>> made.x_ticks == [Tick(1.0, "1"), Tick(2.0, "2"), Tick(3.0, "3")], made.logarithmic
(True, False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]
GREY = -1  # colour of a grey series
_DECADES = 2.5  # range of positive numbers above which the axis is logarithmic


class Series(NamedTuple):
    """Numbers over a chart's horizontal axis, NaN for missing ones."""

    label: str
    y: Numbers  # (n,)
    colour: int = 0  # index of its colour, or `GREY`
    line: str = "solid"  # or dashed, dotted, none for points
    low: Numbers | None = None  # (n,) the other edge of a band
    faint: bool = False
    x: Numbers | None = None  # (n,) in place of the chart's


class Tick(NamedTuple):
    """A value on an axis and its text."""

    value: float
    text: str


class Label(NamedTuple):
    """A name beside a point."""

    x: float
    y: float
    text: str


class Chart(NamedTuple):
    """A chart with its words and numbers."""

    title: str
    x_label: str
    y_label: str
    x: Numbers
    series: Sequence[Series]
    logarithmic: bool  # the vertical axis
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    text_of: Callable[[float], str]  # a number of the vertical axis
    labels: Sequence[Label] = ()  # of points


def chart(
    title: str,
    x_label: str,
    x: Numbers,
    series: Sequence[Series],
    *,
    y_label: str = "",
    logarithmic: bool | None = None,
    text_of: Callable[[float], str] | None = None,
) -> Chart | None:
    """Build a chart of several series, or None without any finite number.

    Args:
        title: above it.
        x_label: label of the horizontal axis.
        x: `(n,)` ascending.
        series: over it.
        y_label: label of the vertical axis.
        logarithmic: whether the vertical axis is; None chooses by the range of positive numbers.
        text_of: format of numbers on the vertical axis; default: `number`.
    """
    known = _finite(each for one in series for each in (one.y, one.low))
    if not len(known):
        return None
    if logarithmic is None:
        logarithmic = bool(known.min() > 0) and math.log10(known.max() / known.min()) > _DECADES
    logarithmic = logarithmic and bool(known.min() > 0)
    low, high = (math.log10(edge) if logarithmic else float(edge) for edge in (known.min(), known.max()))
    space = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - space, high + space
    across = _finite([x, *(one.x for one in series)])
    left, right = float(across.min()), float(across.max())
    left, right = (left, right) if right > left else (left - 0.5, left + 0.5)
    whole = bool((across == across.round()).all())
    levels = decades(low, high) if logarithmic else ticks(low, high)
    return Chart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        x=x,
        series=series,
        logarithmic=logarithmic,
        x_range=(left, right),
        y_range=(10.0**low, 10.0**high) if logarithmic else (low, high),
        x_ticks=[Tick(value, number(value)) for value in ticks(left, right, whole=whole)],
        y_ticks=[Tick(value, (text_of or number)(value)) for value in levels],
        text_of=text_of or number,
    )


def ticks(low: float, high: float, count: int = 6, whole: bool = False) -> list[float]:
    """Return some `count` round numbers from `low` to `high`, which may be whole numbers only."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return powers of ten between two logarithms, with a constant step."""
    first, last = math.ceil(low), math.floor(high)
    return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 5 + 1))]


def number(value: float) -> str:
    """Return a number in a few digits."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if 1000 <= abs(value) < 1e5:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def size(count: float) -> str:
    """Return a number of bytes with its unit."""
    for name in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {name}"
        count /= 1000
    return f"{count:.3g} TB"


def _finite(parts: Iterable[Numbers | None]) -> Numbers:
    known = np.concatenate([part for part in parts if part is not None])
    return known[np.isfinite(known)]
