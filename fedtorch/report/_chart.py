"""The geometry of a chart: numbers become paths of as many points as can be seen.

Templates draw what is computed here, so that all markup stands in one place and all text is escaped there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]

WIDTH, HEIGHT = 460.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 14.0, 12.0, 38.0
_BINS = 180  # of a chart's width, each with its lowest and its highest value
_DOTTED = 15  # points up to which each is marked
_TABLE = 12  # rows of the table behind a chart
_DECADES = 2.5  # from which positive numbers are drawn on a logarithmic axis


class Series(NamedTuple):
    """Numbers over a chart's horizontal axis, NaN where there is none."""

    label: str
    y: Numbers  # (n,)
    kind: str  # how it is drawn: a class of the style sheet
    low: Numbers | None = None  # (n,) the other edge of a band


class Tick(NamedTuple):
    """A place on an axis and what stands there."""

    place: float
    text: str


class Mark(NamedTuple):
    """A series as it is drawn."""

    label: str
    kind: str
    path: str
    dots: str  # a path of points, empty where there are many
    band: bool


class Chart(NamedTuple):
    """A chart with its words and numbers."""

    title: str
    text: str  # what it shows, for who cannot see it
    x_label: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    marks: list[Mark]
    header: list[str]
    rows: list[list[str]]  # of the table behind it
    logarithmic: bool


class Table(NamedTuple):
    """A table of words."""

    title: str
    header: list[str]
    rows: list[list[str]]


def chart(
    title: str,
    x_label: str,
    x: Numbers,
    series: Sequence[Series],
    *,
    logarithmic: bool | None = None,
    unit: Callable[[float], str] | None = None,
) -> Chart | None:
    """A chart of several series, or None where there is no finite number.

    Args:
        title: above it.
        x_label: of the horizontal axis.
        x: `(n,)` ascending.
        series: over it.
        logarithmic: whether the vertical axis is; None lets positive numbers over some decades decide.
        unit: how numbers of the vertical axis are written; default: `number`.
    """
    known = np.concatenate([each for one in series for each in (one.y, one.low) if each is not None])
    known = known[np.isfinite(known)]
    if not len(known):
        return None
    shown = unit or number
    if logarithmic is None:
        logarithmic = bool(known.min() > 0) and math.log10(known.max() / known.min()) > _DECADES
    logarithmic = logarithmic and bool(known.min() > 0)
    scale: Callable[[Any], Any] = np.log10 if logarithmic else lambda values: values
    low, high = _room(*(float(scale(edge)) for edge in (known.min(), known.max())))
    left, right = (float(x[0]), float(x[-1])) if x[-1] > x[0] else (float(x[0]) - 0.5, float(x[0]) + 0.5)
    across = lambda values: LEFT + (values - left) / (right - left) * (WIDTH - LEFT - RIGHT)
    up = lambda values: HEIGHT - BOTTOM - (scale(values) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
    whole = bool((x == x.round()).all())
    levels = decades(low, high) if logarithmic else ticks(low, high)
    return Chart(
        title=title,
        text=_in_words(x_label, x, series, shown),
        x_label=x_label,
        x_ticks=[Tick(round(across(value), 1), number(value)) for value in ticks(left, right, whole=whole)],
        y_ticks=[Tick(round(float(up(value)), 1), shown(value)) for value in levels],
        marks=[_mark(one, x, across, up) for one in series if bool(np.isfinite(one.y).any())],
        header=[x_label, *(one.label for one in series)],
        rows=_table(x, series, shown),
        logarithmic=logarithmic,
    )


def thinned(x: Numbers, y: Numbers, pick: Callable[[Numbers], Sequence[int]]) -> Iterator[tuple[float, float]]:
    """The points of each bin of a series that `pick` names by their places in the bin."""
    for part in np.array_split(np.arange(len(x)), min(_BINS, len(x))):
        for place in pick(y[part]):
            yield float(x[part][place]), float(y[part][place])


def ticks(low: float, high: float, count: int = 6, whole: bool = False) -> list[float]:
    """Some `count` round numbers from `low` to `high`, which may be whole numbers only.

    >>> ticks(0.2, 1.4), ticks(1.0, 3.0, whole=True), ticks(1e-15, 5e-15, 2)
    ([0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4], [1.0, 2.0, 3.0], [2e-15, 4e-15])
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten between two logarithms, every so many."""
    first, last = math.ceil(low), math.floor(high)
    return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 5 + 1))]


def number(value: float) -> str:
    """A number in a few digits.

    >>> [number(value) for value in (0.123456, 5.0, 12345.678, 3e6, 1.5e-7, 2e-12, float("nan"))]
    ['0.1235', '5', '12,346', '3e6', '1.5e-7', '2e-12', '–']
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if 1000 <= abs(value) < 1e5:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def size(count: float) -> str:
    """Bytes in words.

    >>> [size(count) for count in (0, 512, 1.5e6, 2e12)]
    ['0 B', '512 B', '1.5 MB', '2 TB']
    """
    for name in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {name}"
        count /= 1000
    return f"{count:.3g} TB"


def _room(low: float, high: float) -> tuple[float, float]:
    """A range with some space at both ends."""
    space = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    return low - space, high + space


def _extremes(values: Numbers) -> list[int]:
    return sorted({0, int(values.argmin()), int(values.argmax()), len(values) - 1})


def _mark(one: Series, x: Numbers, across: Callable[[Any], Any], up: Callable[[Any], Any]) -> Mark:
    known = np.isfinite(one.y) if one.low is None else np.isfinite(one.y) & np.isfinite(one.low)
    place = lambda points: [f"{across(a):.1f} {float(up(b)):.1f}" for a, b in points]
    here, y = x[known], one.y[known]
    if one.low is None:
        points = place(thinned(here, y, _extremes))
        dots = "".join(f"M{point}h0" for point in points) if len(here) <= _DOTTED else ""
        return Mark(one.label, one.kind, "M" + "L".join(points), dots, False)
    above = place(thinned(here, y, lambda part: [int(part.argmax())]))
    below = place(thinned(here, one.low[known], lambda part: [int(part.argmin())]))
    return Mark(one.label, one.kind, "M" + "L".join([*above, *below[::-1]]) + "Z", "", True)


def _table(x: Numbers, series: Sequence[Series], shown: Callable[[float], str]) -> list[list[str]]:
    rows = np.unique(np.linspace(0, len(x) - 1, min(_TABLE, len(x))).round().astype(int))
    cell = lambda one, i: shown(one.y[i]) if one.low is None else f"{shown(one.low[i])} to {shown(one.y[i])}"
    return [[number(x[i]), *(cell(one, i) for one in series)] for i in rows]


def _in_words(x_label: str, x: Numbers, series: Sequence[Series], shown: Callable[[float], str]) -> str:
    """A sentence per line."""
    said = []
    for one in series:
        known = np.isfinite(one.y)
        if one.low is not None or not known.any():
            continue
        y, here = one.y[known], x[known]
        span = f"from {shown(y[0])} to {shown(y[-1])}" if len(y) > 1 else shown(y[0])
        lowest, highest = int(y.argmin()), int(y.argmax())
        said.append(
            f"{one.label}: {span}, lowest {shown(y[lowest])} at {number(here[lowest])}, highest {shown(y[highest])} at "
            f"{number(here[highest])}."
        )
    return f"By {x_label}. {' '.join(said)}"
