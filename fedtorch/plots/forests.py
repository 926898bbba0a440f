"""Data of forest plots: one line with an interval per name, for sites' effects and coefficients.

`fedtorch.plots` and `fedtorch.report` draw them alike.

>>> made = forest("Age", "effect", [Line("north", -0.1, 0.2, 0.5), Line("south", 0.1, 0.3, 0.5)], zero=0.0)
>>> made.x_ticks[0], made.text_of(made.lines[0])
(Tick(value=0.0, text='0'), '0.2, -0.1 to 0.5')
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedtorch.plots.charts import Tick, number, ticks

LONGEST = 36  # longest name beside its line, in characters


class Line(NamedTuple):
    """An estimate with its interval, and optionally a second estimate of the same quantity."""

    name: str
    low: float
    middle: float
    high: float
    other: float = math.nan
    all: bool = False  # whether it belongs to all sites together


class Forest(NamedTuple):
    """A chart with one line per name."""

    title: str
    x_label: str
    lines: Sequence[Line]
    x_range: tuple[float, float]
    x_ticks: list[Tick]
    zero: float | None  # reference value, if it is within the plot
    middle: str = ""  # meaning of the estimate
    other: str = ""  # meaning of the other estimate
    all: str = ""  # meaning of the lines of all sites

    def text_of(self, line: Line) -> str:
        """Return a text version of a line."""
        text = f"{number(line.middle)}, {number(line.low)} to {number(line.high)}"
        return text if math.isnan(line.other) else f"{text}; {self.other} {number(line.other)}"


def forest(
    title: str,
    x_label: str,
    lines: Sequence[Line],
    *,
    zero: float | None = None,
    middle: str = "",
    other: str = "",
    all: str = "",
) -> Forest | None:
    """Build a forest, or None if no line has finite numbers.

    Args:
        title: of the chart.
        x_label: label of the horizontal axis.
        lines: from top to bottom; those without finite intervals are left out.
        zero: reference value; left out if it is far from all lines.
        middle, other, all: legend texts of the estimates, the other estimates and the lines of all sites.
    """
    shown = [line for line in lines if all_finite(line.low, line.middle, line.high)]
    if not shown:
        return None
    known = [value for line in shown for value in (line.low, line.high, line.other) if math.isfinite(value)]
    low, high = min(known), max(known)
    low, high = (low, high) if high > low else (low - 0.5, low + 0.5)
    if zero is not None and not low - 0.25 * (high - low) <= zero <= high + 0.25 * (high - low):
        zero = None
    if zero is not None:
        low, high = min(low, zero), max(high, zero)
    space = 0.03 * (high - low)
    low, high = low - space, high + space
    places = [Tick(value, number(value)) for value in ticks(low, high, 4)]
    return Forest(title, x_label, shown, (low, high), places, zero, middle, other, all)


def all_finite(*values: float) -> bool:
    """Return whether all numbers are finite.

    >>> all_finite(1.0, 2.0), all_finite(1.0, float("nan"))
    (True, False)
    """
    return all(map(math.isfinite, values))


def shortened(names: Sequence[str], longest: int = LONGEST) -> list[str]:
    """Shorten names to fit beside their lines, keeping distinct names distinct.

    >>> shortened(["Clinic of cardiology, north", "Clinic of cardiology, south"], longest=12)
    ['…logy, north', '…logy, south']
    >>> shortened(["Ward 1 of the old clinic", "Ward 2 of the old clinic"], longest=12)
    ['Ward 1 of t…', 'Ward 2 of t…']
    """
    length, known = longest - 1, len(set(names))
    long = [name for name in names if len(name) > longest]
    # the first position at which they differ
    start = next((i for i, letters in enumerate(zip(*long)) if len(set(letters)) > 1), 0)
    ways = (
        lambda name: f"{name[:length]}…",
        lambda name: f"…{name[-length:]}",
        lambda name: f"{name[: length // 2]}…{name[-(length - length // 2) :]}",
        lambda name: f"{name[: length // 3]}…{name[start : start + length - length // 3]}",
    )
    for way in ways:
        made = [name if len(name) <= longest else way(name) for name in names]
        if len(set(made)) == known:
            return made
    return made
