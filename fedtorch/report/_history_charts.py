"""The charts of a run's history: losses and scores with their spread over clients, bytes, privacy, faults, time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtorch.report._chart import Chart, Series, chart, size

if TYPE_CHECKING:
    import pandas as pd

ROUND = "communication round"
FAULTS = {
    "lost_before": "did not hear the server",
    "late": "answered too late",
    "lost_after": "message lost",
    "repeated": "message came twice",
    "refused": "refused: NaN or Inf",
}
_SPREAD = ("_min", "_q25", "_median", "_q75", "_max", "_mean", "_worst_decile")
_MOST = 18  # charts of what else was logged
_BLOCKS = 100  # of rounds, over which answers are averaged


def losses(table: pd.DataFrame) -> list[Chart]:
    """The training loss and every validated score, with their spread over clients."""
    names = ["train_loss"] * ("train_loss" in table) + _scores(table)
    return _known(_spread(table, name) for name in names)


def others(table: pd.DataFrame, known: Mapping[str, Any]) -> list[Chart]:
    """What else clients and server have logged, one chart each, but for the columns `known`."""
    shown = {name + end for name in ("train_loss", *_scores(table)) for end in ("", *_SPREAD)} | set(known)
    rest = [name for name in table if name not in shown]
    return _known(_lines(table, in_words(name), {in_words(name): name}) for name in rest[:_MOST])


def traffic(table: pd.DataFrame) -> list[Chart]:
    """Bytes so far, and the loss against them."""
    sent = _lines(table, "Bytes so far", {"up": "bytes_up", "down": "bytes_down"}, unit=size)
    if "train_loss" not in table:
        return _known([sent])
    megabytes = (_column(table, "bytes_up") + _column(table, "bytes_down")) / 1e6
    loss = Series("training loss", _column(table, "train_loss"), "c1")
    return _known([sent, chart("Loss against bytes", "MB up and down", megabytes, [loss])])


def privacy(table: pd.DataFrame, budget: float | None) -> list[Chart]:
    """ε spent, and the budget."""
    if "epsilon" not in table:
        return []
    series = [Series("ε", _column(table, "epsilon"), "c1")]
    if budget is not None:
        series.append(Series("budget", np.full(len(table), budget), "c3 dashed"))
    return _known([chart("Privacy spent, ε", ROUND, _column(table, "round"), series, logarithmic=False)])


def answers(table: pd.DataFrame) -> list[Chart]:
    """The share of the asked clients that answered, and why the others did not, over blocks of rounds."""
    kinds = [name for name in FAULTS if table[name].any()]
    if not kinds:
        return []
    rounds = _column(table, "round")
    blocks = np.array_split(np.arange(len(rounds)), min(_BLOCKS, len(rounds)))
    asked = np.array([_column(table, "asked")[block].sum() for block in blocks])
    share = lambda name: np.array([_column(table, name)[b].sum() for b in blocks]) * 100 / np.maximum(asked, 1)
    series = [Series("answered", share("answered"), "c1")]
    series += [Series(FAULTS[name], share(name), f"c{i % 5 + 2}") for i, name in enumerate(kinds)]
    ends = np.array([rounds[block[-1]] for block in blocks])
    return _known([chart("Of the clients asked, per cent", ROUND, ends, series, logarithmic=False)])


def seconds(table: pd.DataFrame) -> list[Chart]:
    """How long each round took."""
    return _known([_lines(table, "Seconds per round", {"seconds": "seconds"})])


def in_words(name: str) -> str:
    """A column's name as words.

    >>> in_words("val_cross_entropy"), in_words("train_loss")
    ('validation cross entropy', 'training loss')
    """
    words = {"train_loss": "training loss"}
    return words.get(name, name.replace("val_", "validation ", 1).replace("_", " "))


def _scores(table: pd.DataFrame) -> list[str]:
    return [name for name in table if name.startswith("val_") and f"{name}_mean" in table]


def _spread(table: pd.DataFrame, name: str) -> Chart | None:
    """A value by round, with bands from the lowest to the highest client and over the middle half."""
    there = {end: _column(table, name + end) for end in _SPREAD if name + end in table}
    series = []
    for low, high, kind, label in (
        ("_min", "_max", "band-wide", "all clients"),
        ("_q25", "_q75", "band", "middle half of the clients"),
    ):
        if low in there and high in there:
            series.append(Series(label, there[high], kind, there[low]))
    overall = "all rows" if "_mean" in there else "mean over clients"
    series.append(Series(overall, _column(table, name), "c1"))
    for end, kind, label in (
        ("_mean", "c1 dashed", "mean over clients"),
        ("_median", "c1 dotted", "median client"),
        ("_worst_decile", "c2", "mean of the worst tenth"),
    ):
        if end in there:
            series.append(Series(label, there[end], kind))
    title = in_words(name)
    return chart(title[0].upper() + title[1:], ROUND, _column(table, "round"), series)


def _lines(table: pd.DataFrame, title: str, lines: Mapping[str, str], unit: Any = None) -> Chart | None:
    series = [Series(label, _column(table, name), f"c{i + 1}") for i, (label, name) in enumerate(lines.items())]
    title, logarithmic = title[0].upper() + title[1:], None if unit is None else False
    return chart(title, ROUND, _column(table, "round"), series, unit=unit, logarithmic=logarithmic)


def _column(table: pd.DataFrame, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return table[name].to_numpy(dtype=np.float64)


def _known(charts: Any) -> list[Chart]:
    return [each for each in charts if each is not None]
