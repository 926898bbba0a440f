"""Curves of runs: losses and scores by round, by group, and against bytes sent.

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import fairness
>>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0])), (torch.eye(2), torch.tensor([3.0, 2.0]))])
>>> run = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data))
>>> error, group = {"error": ft.metrics.mean_squared_error()}, lambda rows: rows[0][:, 0].long()
>>> for _ in run.rounds(3):
...     scores = fairness.watch_groups(run, data, error, group, groups=[0, 1])
>>> [line.get_label() for line in ft.plots.groups(run, "error").axes[0].get_lines()]
['group 0', 'group 1', 'all rows', 'mean over the worst tenth']
>>> ft.plots.curves({"FedAvg": run}, ["error"], against="bytes").axes[0].get_xlabel()
'bytes up and down so far (MB)'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedtorch.plots.charts import GREY, Chart, Series, chart
from fedtorch.plots.history_charts import ROUND, by_round, column, in_words, losses, spread
from fedtorch.plots.style import draw, literal, new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@literal()
def curves(run: Any, values: Sequence[str] | None = None, *, against: Literal["round", "bytes"] = "round") -> Figure:
    """Draw training loss and scores by round; for one run with the spread over clients, for several one line each.

    Args:
        run: a `Run`, `Federation`, `History`, or table; or several of these by name, each of which may be a sequence of
            repetitions: then the line is their mean and the band goes from the lowest to the highest.
        values: columns of the history to draw, one panel each, or names of metrics that were validated, such as
            "accuracy" and "accuracy_min", of the worst client; default: `train_loss` and every `val_<metric>`.
        against: for several runs, the horizontal axis: the round, or the bytes sent so far, up and down together (their
            mean over repetitions).

    Raises:
        ValueError: a value that is not in the history, a history without rounds, or bytes of a single run.
    """
    if not isinstance(run, Mapping):
        if against != "round":
            raise ValueError(f"Expected runs by name to draw against {against}, but got one; pass {{'FedAvg': run}}")
        table = _table(run)
        values = losses(table) if values is None else values
        made = [spread(table, _column_of(table, name)) for name in values]
    else:
        tables = {name: _tables(each) for name, each in run.items()}
        first = next(iter(tables.values()))[0]
        values = losses(first) if values is None else values
        made = [_compared(tables, _column_of(first, name), against) for name in values]
    figure = new_figure(4.2 * max(1, len(values)), 3.8)
    for axes, one in zip(figure.subplots(1, max(1, len(values)), squeeze=False)[0], made):
        if one:
            draw(axes, one)
    parts = {name: part for axes in figure.axes for part, name in zip(*axes.get_legend_handles_labels())}
    figure.legend(parts.values(), parts.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


@literal()
def groups(run: Any, metric: str) -> Figure:
    """Draw a metric by round for each group, with the gap between them as a band, and the mean over the worst tenth.

    Args:
        run: a `Run`, `Federation`, `History` or table, with the columns of `fairness.watch_groups`.
        metric: its name there.

    Raises:
        ValueError: no groups in the history.
    """
    table, name = _table(run), f"val_{metric}"
    names = [each for each in table if each.startswith(f"{name}_group_")]
    if not names:
        raise ValueError(
            f"Expected groups of {metric!r} in the history, but got {sorted(table.columns)}; call "
            "fairness.watch_groups after every round"
        )
    low, high = table[names].min(axis=1).to_numpy(float), table[names].max(axis=1).to_numpy(float)
    series = [Series("gap", high, GREY, low=low)]
    series += [
        Series(f"group {each.removeprefix(f'{name}_group_')}", column(table, each), i) for i, each in enumerate(names)
    ]
    series.append(Series("all rows", column(table, name), GREY))
    series.append(Series("mean over the worst tenth", column(table, f"{name}_worst_decile"), GREY, "dotted"))
    return _figure(by_round(table, name, series), legend=True)


def _compared(tables: Mapping[str, Sequence[pd.DataFrame]], name: str, against: str) -> Chart | None:
    """Return a value of several runs, a line each, with a band over repetitions."""
    series = []
    for i, (label, every) in enumerate(tables.items()):
        rounds = min(len(table) for table in every)
        mean_of = lambda values, rounds=rounds: np.mean([each[:rounds] for each in values], axis=0)
        y = [column(table, name)[:rounds] for table in every]
        x = mean_of([column(table, "round") for table in every])
        if against == "bytes":
            x = mean_of([(column(table, "bytes_up") + column(table, "bytes_down")) / 1e6 for table in every])
        known = np.isfinite(np.mean(y, axis=0))  # scores may be there after some rounds only
        low, high = np.min(y, axis=0)[known], np.max(y, axis=0)[known]
        if len(every) > 1:
            series.append(Series("", high, i, low=low, faint=True, x=x[known]))
        series.append(Series(label, np.mean(y, axis=0)[known], i, x=x[known]))
    x_label = ROUND if against == "round" else "bytes up and down so far (MB)"
    words = in_words(name)
    return chart(words[0].upper() + words[1:], x_label, np.zeros(int(against == "bytes")), series, y_label=words)


def _column_of(table: pd.DataFrame, name: str) -> str:
    """Return the column of a validated metric, or else the column of this name."""
    return f"val_{name}" if f"val_{name}" in table else name


def _tables(runs: Any) -> list[pd.DataFrame]:
    """Return the histories of one run or of repetitions."""
    every = [_table(run) for run in (runs if isinstance(runs, (list, tuple)) else [runs])]
    if not every:
        raise ValueError("Expected at least one run of each name, but got none")
    return every


def _figure(made: Chart | None, legend: bool = False) -> Figure:
    """Return a figure of one chart, empty without numbers."""
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    if made is not None:
        draw(axes, made)
    if legend:
        axes.legend(frameon=False, fontsize="small")
    return figure


def _table(run: Any) -> pd.DataFrame:
    """Return the history of a Run, a Federation or a History, or the given table."""
    table = run.history if hasattr(run, "history") else run.frame() if hasattr(run, "frame") else run
    if not hasattr(table, "columns"):
        raise TypeError(f"Expected a Run, a Federation, a History or its table, but got {type(run).__name__}")
    if len(table) == 0:
        raise ValueError("Expected a history with rounds, but got none; train first")
    return table
