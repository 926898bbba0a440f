"""The sections on posteriors: intervals by variable, components with the worst R-hat, a verdict, traces."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from fedtorch.plots.charts import Chart, Series, chart, number
from fedtorch.plots.forests import Forest, Line, forest
from fedtorch.report._words import Words, visible

_PANELS, _ROWS = 8, 16  # the most variables whose intervals are drawn, and components of each
_WORST = 10  # components in the table
_GOOD_RHAT, _GOOD_ESS = 1.01, 400  # thresholds of Vehtari et al. (2021)

Row = dict[str, Any]


class Section(NamedTuple):
    """The section of the page on one posterior."""

    title: str
    verdict: str
    good: bool
    warnings: list[str]
    panels: list[Forest]
    table: Words
    traces: list[Chart]


def posterior(described: dict[str, Any]) -> Section:
    """Return the section on a posterior, as an entry of `posteriors.described` describes it."""
    rows, clients = described["rows"], bool(described.get("clients"))
    measured = any("rhat" in row for row in rows)
    header = ["component", *(["R-hat", "ESS"] * measured), "mean", "sd", "95 % interval"]
    worst = sorted(rows, key=lambda row: -_known(row.get("rhat"), 0.0))[:_WORST]
    verdict, good = _verdict(described, measured)
    drawn = (row for row in rows if row.get("drawn", True))
    variables = groupby(drawn, lambda row: row.get("panel") or row["name"].partition("[")[0])
    panels = [_panel(name, list(group)) for name, group in variables]
    return Section(
        title=described["title"],
        verdict=verdict,
        good=good,
        warnings=described["warnings"],
        panels=[made for made in panels if made is not None][:_PANELS],
        table=Words(
            "Worst R-hat first" if measured else "Numbers",
            header,
            [] if clients else [_cells(row, measured) for row in worst],
        ),
        traces=[made for trace in described["traces"] if (made := _trace(trace)) is not None],
    )


def _panel(name: str, rows: list[Row]) -> Forest | None:
    """Return the forest of a variable's intervals, None if no number is finite."""
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
    return forest(visible(name), "", few, zero=0.0, **(words if others else {}))


def _verdict(described: dict[str, Any], measured: bool) -> tuple[str, bool]:
    """Return a sentence about the diagnostics, and whether they are good."""
    rows = described["rows"]
    part = "" if described["components"] == len(rows) else f", the first of {described['components']:,}"
    count = f"{len(rows):,} component{'s' * (len(rows) != 1)}{part}"
    if described.get("clients"):
        panels = len({row["panel"] for row in rows})
        return f"{len(rows) // panels - 1:,} clients, {panels} coefficient{'s' * (panels > 1)}", True
    if not measured:
        return count, not described["warnings"]
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


def _trace(trace: dict[str, Any]) -> Chart | None:
    chains = [np.array(values, dtype=np.float64) for values in trace["chains"][:6]]
    series = [Series(f"chain {i + 1}", values, i, faint=True) for i, values in enumerate(chains)]
    return chart(f"Draws of {trace['name']}", "draw", np.array(trace["draw"]) + 1.0, series, logarithmic=False)


def _cells(row: Row, measured: bool) -> list[str]:
    value = lambda name: number(_known(row.get(name), math.nan))
    diagnostics = [value("rhat"), value("ess")] if measured else []
    return [row["name"], *diagnostics, value("mean"), value("sd"), f"{value('low')} to {value('high')}"]


def _known(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else float(value)
