"""The presentation of posteriors: intervals by variable, the components that mixed worst, a verdict, traces."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from fedtorch.plots.charts import Chart, Series, chart, number
from fedtorch.plots.forests import Forest, Line, forest, shortened
from fedtorch.report._svg import Place, Words
from fedtorch.report._words import visible, width

_PANELS, _ROWS = 8, 16  # variables whose intervals are drawn, and components of each
_WORST = 10  # components that the table names
_MOST_LEFT, _RIGHT = 200.0, 445.0
_GOOD_RHAT, _GOOD_ESS = 1.01, 400  # what Vehtari et al. (2021) ask for

Row = dict[str, Any]


class Interval(NamedTuple):
    """A line of a forest as it is drawn, and in words."""

    name: str
    text: str
    y: float
    low: float
    mean: float
    high: float
    other: float | None  # where the other estimate is
    kind: str  # classes of the style sheet


class Panel(NamedTuple):
    """A forest as a template draws it."""

    title: str
    intervals: list[Interval]
    left: float  # where lines may begin
    x_ticks: list[Place]
    zero: float | None  # where it is, if it is there
    legend: list[tuple[str, str]]  # (what it looks like, what it is)
    header: list[str]  # of the table behind it, empty for none
    rows: list[list[str]]


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
    rows, clients = found["rows"], bool(found.get("clients"))
    measured = any("rhat" in row for row in rows)
    header = ["component", *(["R-hat", "ESS"] * measured), "mean", "sd", "95 % interval"]
    worst = sorted(rows, key=lambda row: -_known(row.get("rhat"), 0.0))[:_WORST]
    verdict, good = _verdict(found, measured)
    variables = groupby(rows, lambda row: row.get("panel") or row["name"].partition("[")[0])
    panels = [_panel(name, list(group)) for name, group in variables]
    return Posterior(
        title=found["title"],
        verdict=verdict,
        good=good,
        warnings=found["warnings"],
        panels=[made for made in panels if made is not None][:_PANELS],
        table=Words(
            "Worst R-hat first" if measured else "Numbers",
            header,
            [] if clients else [_cells(row, measured) for row in worst],
        ),
        traces=[made for trace in found["traces"] if (made := _trace(trace)) is not None],
    )


def _panel(name: str, rows: list[Row]) -> Panel | None:
    """Return a variable's intervals, None where no number is finite."""
    known = lambda row, end: _known(row.get(end), math.nan)
    lines = [
        Line(
            visible(row["name"] if "panel" in row else row["name"].removeprefix(name)) or name,
            known(row, "low"),
            known(row, "mean"),
            known(row, "high"),
            known(row, "other"),
            bool(row.get("all")),
        )
        for row in rows
    ]
    others = any(math.isfinite(line.other) for line in lines)
    few = lines if any(line.all for line in lines) or len(lines) <= _ROWS else lines[:_ROWS]
    words = {"middle": "with all clients' rows, 95 % interval", "other": "its own rows alone", "all": "their mean"}
    made = forest(name, "", few, zero=0.0, **(words if others else {"middle": "", "other": "", "all": ""}))
    return None if made is None else _placed(made)


def _placed(made: Forest) -> Panel:
    """Return a forest as it is drawn: names take what they need, up to less than half of it."""
    names = [line.name for line in made.lines]
    letter = max(width(name) / len(name) for name in names)
    names = shortened(names, max(6, int(_MOST_LEFT / letter)))
    left = min(_MOST_LEFT, max(width(name) for name in names)) + 16
    (low, high), span = made.x_range, _RIGHT - left
    across = lambda value: round(left + (value - low) / (high - low) * span, 1)
    intervals = [
        Interval(
            name,
            made.text_of(line),
            14.0 + 17.0 * i,
            across(line.low),
            across(line.middle),
            across(line.high),
            across(line.other) if math.isfinite(line.other) else None,
            "c2" if line.all else "c1",
        )
        for i, (name, line) in enumerate(zip(names, made.lines))
    ]
    zero = across(made.zero) if made.zero is not None else None
    ticks = [Place(across(tick.value), tick.text) for tick in made.x_ticks]
    legend = [(kind, text) for kind, text in (("c1", made.middle), ("hollow", made.other), ("c2", made.all)) if text]
    header, rows = [], []
    if made.other:
        header = ["", "estimate", "95 % interval", made.other]
        rows = [
            [line.name, number(line.middle), f"{number(line.low)} to {number(line.high)}", number(line.other)]
            for line in made.lines
        ]
    return Panel(made.title, intervals, left, ticks, zero, legend, header, rows)


def _verdict(found: dict[str, Any], measured: bool) -> tuple[str, bool]:
    """Return a sentence about the diagnostics, and whether they are good."""
    rows = found["rows"]
    part = "" if found["components"] == len(rows) else f", the first of {found['components']:,}"
    count = f"{len(rows):,} component{'s' * (len(rows) != 1)}{part}"
    if found.get("clients"):
        panels = len({row["panel"] for row in rows})
        return f"{len(rows) // panels - 1:,} clients, {panels} coefficient{'s' * (panels > 1)}", True
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
