"""Charts of a run's history: values by round with their spread over clients, or against bytes.

>>> import torch, fedtorch as ft
>>> data = ft.data.from_tensors([(torch.eye(2), torch.tensor([1.0, 2.0]))] * 3)
>>> run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data), rounds=3)
>>> losses(run.history), [series.label for series in spread(run.history, "train_loss").series]
(['train_loss'], ['lowest to highest client', 'middle half of the clients', 'mean over clients', ...])
>>> by_round(run.history, "seconds", [Series("time", column(run.history, "seconds"))]).x_label
'communication round'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedtorch.plots.charts import Chart, Numbers, Series, chart

if TYPE_CHECKING:
    import pandas as pd

ROUND = "communication round"
SPREAD = ("_min", "_q25", "_median", "_q75", "_max", "_mean", "_worst_decile")


def losses(table: pd.DataFrame) -> list[str]:
    """Return the columns of the training loss and of every validated score."""
    scores = [name for name in table if name.startswith("val_") and f"{name}_mean" in table]
    return ["train_loss"] * ("train_loss" in table) + scores


def spread(table: pd.DataFrame, name: str) -> Chart | None:
    """Return a value by round, with bands from the lowest to the highest client and over the middle half."""
    column_of = lambda end: column(table, f"{name}{end}")
    there = {end for end in SPREAD if f"{name}{end}" in table}
    series = []
    if {"_min", "_max"} <= there:
        low, high = column_of("_min"), column_of("_max")
        series.append(Series("lowest to highest client", high, low=low, faint=True))
    if {"_q25", "_q75"} <= there:
        series.append(Series("middle half of the clients", column_of("_q75"), low=column_of("_q25")))
    if "_mean" in there:
        series.append(Series("all rows", column_of("")))
    mean = column_of("_mean" if "_mean" in there else "")
    series.append(Series("mean over clients", mean, line="dashed" if "_mean" in there else "solid"))
    if "_median" in there:
        series.append(Series("median client", column_of("_median"), line="dotted"))
    if "_worst_decile" in there:
        series.append(Series("mean over the worst tenth", column_of("_worst_decile"), colour=1))
    return by_round(table, name, series)


def by_round(table: pd.DataFrame, name: str, series: list[Series]) -> Chart | None:
    """Return series by round, named by a column."""
    words = in_words(name)
    return chart(words[0].upper() + words[1:], ROUND, column(table, "round"), series, y_label=words)


def column(table: pd.DataFrame, name: str) -> Numbers:
    """Return a column of a history, NaN for missing values.

    Raises:
        ValueError: the history does not have it.
    """
    if name not in table:
        raise ValueError(f"Expected one of {sorted(table.columns)}, but got {name!r}; pass validation= to Federation")
    values: Numbers = table[name].to_numpy(dtype=np.float64)
    return values


def in_words(name: str) -> str:
    """Return a column's name as words.

    >>> in_words("val_cross_entropy"), in_words("train_loss")
    ('validation cross entropy', 'training loss')
    """
    words = {"train_loss": "training loss"}
    return words.get(name, name.replace("val_", "validation ", 1).replace("_", " "))
