"""The presentation of posteriors: intervals by variable, the components that mixed worst, a verdict, traces."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from fedtorch.plots.charts import Chart, Series, chart, number, ticks
from fedtorch.report._svg import Place, Words

_PANELS, _ROWS = 8, 16  # variables whose intervals are drawn, and components of each
_WORST = 10  # components that the table names
_LEFT, _RIGHT = 150.0, 445.0
_GOOD_RHAT, _GOOD_ESS = 1.01, 400  # what Vehtari et al. (2021) ask for

Row = dict[str, Any]


class Interval(NamedTuple):
    """A component's mean and 95 % interval as they are drawn, and in words."""

    name: str
    text: str
    y: float
    low: float
    mean: float
    high: float


class Panel(NamedTuple):
    """A variable's intervals."""

    name: str
    intervals: list[Interval]
    x_ticks: list[Place]
    zero: float | None  # where it is, if it is there


class Posterior(NamedTuple):
    """One source of distributions."""

    title: str
    verdict: str
    good: bool
    warnings: list[str]
    panels: list[Panel]
    table: Words
    traces: list[Chart]


def posterior(found: dict[str, Any]) -> Posterior:
    """Return what is shown of a source of distributions, as `posteriors.found` describes it."""
    rows = found["rows"]
    measured = any("rhat" in row for row in rows)
    header = ["component", *(["R-hat", "ESS"] * measured), "mean", "sd", "95 % interval"]
    worst = sorted(rows, key=lambda row: -_known(row.get("rhat"), 0.0))[:_WORST]
    verdict, good = _verdict(found, measured)
    variables = groupby(rows, lambda row: row["name"].partition("[")[0])
    panels = [_panel(name, list(group)) for name, group in variables]
    return Posterior(
        title=found["title"],
        verdict=verdict,
        good=good,
        warnings=found["warnings"],
        panels=[made for made in panels if made is not None][:_PANELS],
        table=Words("Worst R-hat first" if measured else "Numbers", header, [_cells(row, measured) for row in worst]),
        traces=[made for trace in found["traces"] if (made := _trace(trace)) is not None],
    )


def _panel(name: str, rows: list[Row]) -> Panel | None:
    """Return a variable's intervals, None where no number is finite."""
    shown = [row for row in rows[:_ROWS] if None not in (row["low"], row["mean"], row["high"])]
    if not shown:
        return None
    low, high = min(row["low"] for row in shown), max(row["high"] for row in shown)
    low, high = (low, high) if high > low else (low - 0.5, low + 0.5)
    across = lambda value: round(_LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT), 1)
    intervals = [
        Interval(
            row["name"].removeprefix(name) or name,
            f"{number(row['mean'])}, {number(row['low'])} to {number(row['high'])}",
            14.0 + 17.0 * i,
            *(across(row[end]) for end in ("low", "mean", "high")),
        )
        for i, row in enumerate(shown)
    ]
    zero = across(0.0) if low <= 0 <= high else None
    return Panel(name, intervals, [Place(across(value), number(value)) for value in ticks(low, high, 4)], zero)


def _verdict(found: dict[str, Any], measured: bool) -> tuple[str, bool]:
    """Return a sentence about the diagnostics, and whether they are good."""
    rows = found["rows"]
    part = "" if found["components"] == len(rows) else f", the first of {found['components']:,}"
    count = f"{len(rows):,} component{'s' * (len(rows) != 1)}{part}"
    if not measured:
        return count, not found["warnings"]
    rhat = [row["rhat"] for row in rows if row["rhat"] is not None]
    ess = [row["ess"] for row in rows if row["ess"] is not None]
    if not ess:
        return f"{count}, too few draws for diagnostics", False
    high, low = sum(value > _GOOD_RHAT for value in rhat), sum(value < _GOOD_ESS for value in ess)
    verdict = f"{count}; R-hat at most {max(rhat):.4g}" if rhat else f"{count}; no R-hat, which needs several chains"
    verdict += f", effective draws at least {number(min(ess))}"
    if high or low:
        verdict += f". R-hat is above {_GOOD_RHAT} for {high:,}, effective draws are below {_GOOD_ESS} for {low:,}"
    return verdict, not (high or low)


def _trace(found: dict[str, Any]) -> Chart | None:
    chains = [np.array(values, dtype=np.float64) for values in found["chains"][:6]]
    series = [Series(f"chain {i + 1}", values, i, faint=True) for i, values in enumerate(chains)]
    return chart(f"Draws of {found['name']}", "draw", np.array(found["draw"]) + 1.0, series, logarithmic=False)


def _cells(row: Row, measured: bool) -> list[str]:
    value = lambda name: number(_known(row.get(name), math.nan))
    diagnostics = [value("rhat"), value("ess")] if measured else []
    return [row["name"], *diagnostics, value("mean"), value("sd"), f"{value('low')} to {value('high')}"]


def _known(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else float(value)
