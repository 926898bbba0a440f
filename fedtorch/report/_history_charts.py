"""The charts of a run's history: losses and scores with their spread over clients, bytes, privacy, faults, time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtorch.plots import history_charts as history
from fedtorch.plots.charts import Chart, Series, chart, size
from fedtorch.plots.history_charts import ROUND, SPREAD, column, in_words

if TYPE_CHECKING:
    import pandas as pd

FAULTS = {
    "lost_before": "the server's message lost",
    "late": "answered too late",
    "lost_after": "the answer lost",
    "repeated": "the answer came twice",
    "refused": "refused: NaN or Inf",
}
_MOST = 18  # charts of other logged quantities
_BLOCKS = 100  # the most blocks of rounds over which answers are averaged


def losses(table: pd.DataFrame) -> list[Chart]:
    """Return the training loss and every validated score, with their spread over clients."""
    return _known(history.spread(table, name) for name in history.losses(table))


def others(table: pd.DataFrame, known: Mapping[str, Any]) -> list[Chart]:
    """Return a chart of each other logged quantity, without the columns `known`."""
    shown = {name + end for name in ("train_loss", *history.losses(table)) for end in ("", *SPREAD)} | set(known)
    rest = [name for name in table if name not in shown]
    return _known(_lines(table, in_words(name), {in_words(name): name}) for name in rest[:_MOST])


def traffic(table: pd.DataFrame) -> list[Chart]:
    """Return charts of the bytes so far, and of the loss against bytes."""
    sent = _lines(table, "Bytes so far", {"up": "bytes_up", "down": "bytes_down"}, text_of=size)
    if "train_loss" not in table:
        return _known([sent])
    megabytes = (column(table, "bytes_up") + column(table, "bytes_down")) / 1e6
    loss = Series("training loss", column(table, "train_loss"))
    return _known([sent, chart("Loss against bytes", "MB up and down", megabytes, [loss])])


def privacy(table: pd.DataFrame, budget: float | None) -> list[Chart]:
    """Return a chart of the ε spent, with the budget."""
    if "epsilon" not in table:
        return []
    series = [Series("ε", column(table, "epsilon"))]
    if budget is not None:
        series.append(Series("budget", np.full(len(table), budget), 2, "dashed"))
    return _known([chart("Privacy spent, ε", ROUND, column(table, "round"), series, logarithmic=False)])


def answers(table: pd.DataFrame) -> list[Chart]:
    """Return a chart of answers and of the faults of missing ones, in shares of requests over blocks of rounds."""
    kinds = [name for name in FAULTS if table[name].any()]
    if not kinds:
        return []
    rounds = column(table, "round")
    blocks = np.array_split(np.arange(len(rounds)), min(_BLOCKS, len(rounds)))
    requests = np.array([column(table, "asked")[block].sum() for block in blocks])
    share = lambda name: np.array([column(table, name)[b].sum() for b in blocks]) * 100 / np.maximum(requests, 1)
    series = [Series("answered", share("answered"))]
    series += [Series(FAULTS[name], share(name), i % 5 + 1) for i, name in enumerate(kinds)]
    ends = np.array([rounds[block[-1]] for block in blocks])
    return _known([chart("Of the clients asked, per cent", ROUND, ends, series, logarithmic=False)])


def seconds(table: pd.DataFrame) -> list[Chart]:
    """Return a chart of the duration of each round."""
    return _known([_lines(table, "Seconds per round", {"seconds": "seconds"})])


def _lines(
    table: pd.DataFrame, title: str, lines: Mapping[str, str], text_of: Callable[[float], str] | None = None
) -> Chart | None:
    series = [Series(label, column(table, name), i) for i, (label, name) in enumerate(lines.items())]
    title, logarithmic = title[0].upper() + title[1:], None if text_of is None else False
    return chart(title, ROUND, column(table, "round"), series, text_of=text_of, logarithmic=logarithmic)


def _known(charts: Iterable[Chart | None]) -> list[Chart]:
    return [each for each in charts if each is not None]
