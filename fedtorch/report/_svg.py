"""Charts as SVG: numbers become paths of as many points as can be seen, and a table and a sentence beside them.

Templates draw what is computed here, so that all markup stands in one place and all text is escaped there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedtorch.plots.charts import Chart, Numbers, Series, number

WIDTH, HEIGHT = 460.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 14.0, 12.0, 38.0
_COLOURS = 6  # of the style sheet
_BINS = 180  # of a chart's width, each with its lowest and its highest value
_DOTTED = 15  # points up to which each is marked
_TABLE = 12  # rows of the table behind a chart


class Place(NamedTuple):
    """A place on an axis and what stands there."""

    place: float
    text: str


class Mark(NamedTuple):
    """A series as it is drawn."""

    label: str
    kind: str  # classes of the style sheet
    path: str
    dots: str  # a path of points, empty where there are many
    band: bool


class Picture(NamedTuple):
    """A chart as a template draws it."""

    title: str
    text: str  # what it shows, for who cannot see it
    x_label: str
    x_ticks: list[Place]
    y_ticks: list[Place]
    marks: list[Mark]
    header: list[str]
    rows: list[list[str]]  # of the table behind it
    logarithmic: bool


class Words(NamedTuple):
    """A table of words."""

    title: str
    header: list[str]
    rows: list[list[str]]


def picture(chart: Chart) -> Picture:
    """Return a chart as a template draws it."""
    scale: Callable[[Any], Any] = np.log10 if chart.logarithmic else lambda values: values
    (left, right), (low, high) = chart.x_range, (float(scale(edge)) for edge in chart.y_range)
    across = lambda values: LEFT + (values - left) / (right - left) * (WIDTH - LEFT - RIGHT)
    up = lambda values: HEIGHT - BOTTOM - (scale(values) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
    return Picture(
        title=chart.title,
        text=_sentences(chart),
        x_label=chart.x_label,
        x_ticks=[Place(round(across(tick.value), 1), tick.text) for tick in chart.x_ticks],
        y_ticks=[Place(round(float(up(tick.value)), 1), tick.text) for tick in chart.y_ticks],
        marks=[_mark(one, chart.x, across, up) for one in chart.series if bool(np.isfinite(one.y).any())],
        header=[chart.x_label, *(one.label for one in chart.series)],
        rows=_table(chart),
        logarithmic=chart.logarithmic,
    )


def _thinned(x: Numbers, y: Numbers, pick: Callable[[Numbers], Sequence[int]]) -> Iterator[tuple[float, float]]:
    """Yield the points of each bin of a series that `pick` names by their places in the bin."""
    for part in np.array_split(np.arange(len(x)), min(_BINS, len(x))):
        for place in pick(y[part]):
            yield float(x[part][place]), float(y[part][place])


def _extremes(values: Numbers) -> list[int]:
    return sorted({0, int(values.argmin()), int(values.argmax()), len(values) - 1})


def _mark(one: Series, x: Numbers, across: Callable[[Any], Any], up: Callable[[Any], Any]) -> Mark:
    known = np.isfinite(one.y) if one.low is None else np.isfinite(one.y) & np.isfinite(one.low)
    place = lambda points: [f"{across(a):.1f} {float(up(b)):.1f}" for a, b in points]
    x, y = (x if one.x is None else one.x)[known], one.y[known]
    if one.low is None:
        points = place(_thinned(x, y, _extremes))
        dots = "".join(f"M{point}h0" for point in points) if len(x) <= _DOTTED else ""
        line = "" if one.line == "solid" else f" {one.line}"
        kind = f"c{one.colour % _COLOURS + 1}{line}{' thin' * one.faint}"
        return Mark(one.label, kind, "M" + "L".join(points), dots, False)
    above = place(_thinned(x, y, lambda part: [int(part.argmax())]))
    below = place(_thinned(x, one.low[known], lambda part: [int(part.argmin())]))
    return Mark(one.label, "band-wide" if one.faint else "band", "M" + "L".join([*above, *below[::-1]]) + "Z", "", True)


def _table(chart: Chart) -> list[list[str]]:
    """Return some rows of the numbers."""
    rows = np.unique(np.linspace(0, len(chart.x) - 1, min(_TABLE, len(chart.x))).round().astype(int))
    shown = chart.text_of
    cell = lambda one, i: shown(one.y[i]) if one.low is None else f"{shown(one.low[i])} to {shown(one.y[i])}"
    return [[number(chart.x[i]), *(cell(one, i) for one in chart.series)] for i in rows]


def _sentences(chart: Chart) -> str:
    """Return a sentence per line."""
    sentences, shown = [], chart.text_of
    for one in chart.series:
        known = np.isfinite(one.y)
        if one.low is not None or not known.any():
            continue
        y, x = one.y[known], chart.x[known]
        span = f"from {shown(y[0])} to {shown(y[-1])}" if len(y) > 1 else shown(y[0])
        lowest, highest = int(y.argmin()), int(y.argmax())
        sentences.append(
            f"{one.label}: {span}, lowest {shown(y[lowest])} at {number(x[lowest])}, highest {shown(y[highest])} at "
            f"{number(x[highest])}."
        )
    return f"By {chart.x_label}. {' '.join(sentences)}"
