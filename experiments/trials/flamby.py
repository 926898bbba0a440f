"""Rows and figures that the trials of FLamby's data sets have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments import common

Runs = Mapping[str, Sequence[Mapping[str, float]]]  # scores of seeds or splits, by method


def beside(name: str, runs: Sequence[Mapping[str, float]], theirs: Mapping[str, list[float]]) -> list[common.Row]:
    """Rows of ours beside FLamby's, with the sd over its seeds where its seeds differ."""
    made = []
    for metric, values in common.by_metric(runs).items():
        known = theirs.get(metric)
        figures = () if known is None else (float(np.mean(known)), common.spread(known) or None)
        made.append(common.row(name, metric, values, *figures))
    return made


def compared(
    ours: Runs,
    own: Runs,
    splits: Runs,
    known: Callable[[str], dict[str, list[float]]],
    best: str,
    others: Sequence[str],
) -> list[common.Row]:
    """Rows of FLamby's methods, of models of our own on its split and on others, and of the best less others."""
    made = [row for name, runs in ours.items() for row in beside(name, runs, known(name))]
    for where, methods in (("published split", own), ("other splits", splits)):
        for name, runs in methods.items():
            made += common.over_seeds(f"{name}, {where}", runs)
    for other in others if splits else ():
        gaps = [{test: a[test] - b[test] for test in a} for a, b in zip(splits[best], splits[other])]
        made += common.over_seeds(f"{best} minus {other}, other splits", gaps)
    return made


def drawn(rows: Sequence[common.Row], metric: str, name: str, score: str) -> dict[str, Figure]:
    """A metric by method, FLamby's beside ours."""
    shown = [row for row in rows if row.metric == metric and "minus" not in row.setting]
    figure, axis = common.subplots(figsize=(7.5, 0.24 * len(shown) + 1))
    places = np.arange(len(shown))[::-1]
    axis.errorbar([row.ours for row in shown], places, xerr=[row.sd or 0.0 for row in shown], fmt="o", label="ours")
    theirs = [(place, row) for place, row in zip(places, shown) if row.published is not None]
    axis.plot([row.published for _, row in theirs], [place for place, _ in theirs], "|", ms=14, label="published")
    axis.set_yticks(places, [row.setting for row in shown])
    axis.set_xlabel(f"{score}, {metric}")
    axis.legend(frameon=False)
    return {name: figure}
