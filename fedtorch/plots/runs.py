"""Curves of runs: losses and scores by round, for the worst client, and against what was sent.

>>> import torch, fedtorch as ft
>>> from fedtorch.trust import fairness
>>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0])), (torch.eye(2), torch.tensor([3.0, 2.0]))])
>>> run = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data))
>>> error, group = {"error": ft.metrics.mean_squared_error()}, lambda rows: rows[0][:, 0].long()
>>> for _ in run.rounds(3):
...     scores = fairness.watch_groups(run, data, error, group, groups=[0, 1])
>>> [line.get_label() for line in ft.plots.groups(run, "error").axes[0].get_lines()]
['group 0', 'group 1', 'all rows', 'mean over the worst tenth']
>>> [line.get_label() for line in ft.plots.worst_client({"FedAvg": run}, "error", False).axes[0].get_lines()]
['FedAvg: all rows', 'FedAvg: mean over clients', 'FedAvg: worst client']
>>> ft.plots.bytes_against({"FedAvg": run}, "error").axes[0].get_xlabel()
'bytes up and down so far (MB)'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtorch.plots._style import finish, new_figure, whole_numbers

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def curves(run: Any, values: Sequence[str] | None = None) -> Figure:
    """Training loss and scores by round, with the spread over clients as bands.

    Args:
        run: a `Run`, `Federation`, `History`, or table.
        values: columns of the history to draw, one panel each; default: `train_loss` and every `val_<metric>`.

    Raises:
        ValueError: a value that is not in the history, or a history without rounds.
    """
    table = _table(run)
    if values is None:
        scores = [name for name in table if name.startswith("val_") and f"{name}_mean" in table]
        values = ["train_loss"] * ("train_loss" in table) + scores
    figure = new_figure(4.2 * max(1, len(values)), 3.8)
    for axes, name in zip(figure.subplots(1, max(1, len(values)), squeeze=False)[0], values):
        rounds, value = _column(table, name)
        _band(axes, table, f"{name}_min", f"{name}_max", 0.12, "lowest to highest client")
        _band(axes, table, f"{name}_q25", f"{name}_q75", 0.25, "middle half of the clients")
        if f"{name}_mean" in table:
            axes.plot(rounds, value, color="C0", label="all rows")
            axes.plot(*_column(table, f"{name}_mean"), color="C0", linestyle="--", label="mean over clients")
        else:
            axes.plot(rounds, value, color="C0", linestyle="--", label="mean over clients")
        if f"{name}_median" in table:
            axes.plot(*_column(table, f"{name}_median"), color="C0", linestyle=":", label="median client")
        if f"{name}_worst_decile" in table:
            worst = _column(table, f"{name}_worst_decile")
            axes.plot(*worst, color="C3", linewidth=1, label="mean over the worst tenth")
        finish(axes, "communication round", _in_words(name))
        whole_numbers(axes)
    parts = {name: part for axes in figure.axes for part, name in zip(*axes.get_legend_handles_labels())}
    figure.legend(parts.values(), parts.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


def worst_client(runs: Mapping[str, Any], metric: str, largest_is_best: bool = True) -> Figure:
    """The worst client's score beside that of all rows and the mean over clients, by round.

    Args:
        runs: by name: `Run`, `Federation`, `History`, or table.
        metric: the name of a metric that was validated.
        largest_is_best: whether the worst client is the lowest.
    """
    worst = "min" if largest_is_best else "max"
    lines = {"all rows": ("", "-"), "mean over clients": ("_mean", "--"), "worst client": (f"_{worst}", ":")}
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    for i, (name, run) in enumerate(runs.items()):
        table = _table(run)
        for what, (suffix, style) in lines.items():
            axes.plot(*_column(table, f"val_{metric}{suffix}"), color=f"C{i}", linestyle=style, label=f"{name}: {what}")
    finish(axes, "communication round", _in_words(f"val_{metric}"))
    whole_numbers(axes)
    _two_legends(axes, list(runs), {what: style for what, (_, style) in lines.items()})
    return figure


def groups(run: Any, metric: str) -> Figure:
    """A metric by round for each group, with the gap between them as a band, and the mean over the worst tenth.

    Args:
        run: a `Run`, `Federation`, `History` or table, with the columns of `fairness.watch_groups`.
        metric: its name there.

    Raises:
        ValueError: no groups in the history.
    """
    table, column = _table(run), f"val_{metric}"
    names = [name for name in table if name.startswith(f"{column}_group_")]
    if not names:
        raise ValueError(
            f"Expected groups of {metric!r} in the history, but got {sorted(table.columns)}; call "
            "fairness.watch_groups after every round"
        )
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    known = table.dropna(subset=names, how="all")
    low, high = known[names].min(axis=1).to_numpy(), known[names].max(axis=1).to_numpy()
    axes.fill_between(known["round"].to_numpy(), low, high, color="0.5", alpha=0.2, linewidth=0, label="gap")
    for i, name in enumerate(names):
        label = f"group {name.removeprefix(f'{column}_group_')}"
        axes.plot(*_column(table, name), color=f"C{i}", label=label)  # of rounds in which it has rows
    axes.plot(*_column(table, column), color="0.3", label="all rows")
    axes.plot(*_column(table, f"{column}_worst_decile"), color="0.3", linestyle=":", label="mean over the worst tenth")
    finish(axes, "communication round", _in_words(column))
    whole_numbers(axes)
    axes.legend(frameon=False, fontsize="small")
    return figure


def bytes_against(runs: Mapping[str, Any], metric: str) -> Figure:
    """A score against the bytes sent so far, up and down together.

    Args:
        runs: by name: `Run`, `Federation`, `History`, or table.
        metric: the name of a metric that was validated, or a column of the history such as `train_loss`.
    """
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    column = metric
    for i, (name, run) in enumerate(runs.items()):
        table = _table(run)
        column = f"val_{metric}" if f"val_{metric}" in table else metric
        rounds, values = _column(table, column)
        sent = (table["bytes_up"] + table["bytes_down"])[table[column].notna()].to_numpy()
        axes.plot(sent / 1e6, values, color=f"C{i}", label=name, marker="." if len(rounds) < 30 else "")
    finish(axes, "bytes up and down so far (MB)", _in_words(column))
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize="small")
    return figure


def _band(axes: Axes, table: pd.DataFrame, low: str, high: str, alpha: float, label: str) -> None:
    if low in table and high in table:
        rounds, lowest = _column(table, low)
        axes.fill_between(rounds, lowest, _column(table, high)[1], color="C0", alpha=alpha, linewidth=0, label=label)


def _two_legends(axes: Axes, names: list[str], styles: Mapping[str, str]) -> None:
    """Colours by name and line styles by meaning, beside the axes."""
    from matplotlib.lines import Line2D

    colours = [Line2D([], [], color=f"C{i}", label=name) for i, name in enumerate(names)]
    lines = [Line2D([], [], color="0.3", ls=style, label=what) for what, style in styles.items()]
    assert axes.figure is not None
    axes.figure.legend(handles=[*colours, *lines], loc="outside right upper", frameon=False, fontsize="small")


def _table(run: Any) -> pd.DataFrame:
    """The history of a Run, a Federation or a History, or the table as it is."""
    table = run.history if hasattr(run, "history") else run.frame() if hasattr(run, "frame") else run
    if not hasattr(table, "columns"):
        raise TypeError(f"Expected a Run, a Federation, a History or its table, but got {type(run).__name__}")
    if len(table) == 0:
        raise ValueError("Expected a history with rounds, but got none; train first")
    return table


def _column(table: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(rounds, values) where there is a value."""
    if name not in table:
        raise ValueError(f"Expected one of {sorted(table.columns)}, but got {name!r}; pass validation= to Federation")
    known = table[table[name].notna()]
    return known["round"].to_numpy(), known[name].to_numpy()


def _in_words(name: str) -> str:
    """`val_cross_entropy` as "validation cross entropy"."""
    words = {"train_loss": "training loss"}
    return words.get(name, name.replace("val_", "validation ", 1).replace("_", " "))
