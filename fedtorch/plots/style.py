"""Figures of one style, and charts drawn into them."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedtorch.plots.charts import GREY, Chart
from fedtorch.plots.forests import LONGEST, Forest, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 30  # clients or nodes that are drawn one by one, with their names
MOST_COLOURS = 10  # most labels with distinct colours
_DOTTED = 15  # points of a line up to which each is marked


def new_figure(width: float, height: float) -> Figure:
    """Return a figure without a window, sized in inches, which notebooks display."""
    return _shown_figure()(figsize=(width, height), layout="constrained")


@functools.cache
def _shown_figure() -> type[Figure]:
    """Return the class of figures that notebooks display, even without pyplot."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure with an image for IPython."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return ShownFigure


@contextmanager
def literal() -> Iterator[None]:
    """Show a `$` in a name literally, not as mathematics, in figures of the decorated function."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        yield


def draw(axes: Axes, chart: Chart) -> None:
    """Draw a chart, with its scale and ticks."""
    for one in chart.series:
        x, colour = chart.x if one.x is None else one.x, "0.4" if one.colour == GREY else f"C{one.colour}"
        known = np.isfinite(one.y)
        if one.low is not None:
            shade = 0.12 if one.faint else 0.25
            band = one.low[known], one.y[known]
            axes.fill_between(x[known], *band, color=colour, alpha=shade, linewidth=0, label=one.label)
        else:
            style: dict[str, Any] = {"color": colour, "linestyle": one.line, "linewidth": 1.0 if one.faint else 1.5}
            marker = "o" if one.line == "none" else "." if known.sum() <= _DOTTED else None
            style |= {"markersize": 4} if one.line == "none" else {}
            axes.plot(x[known], one.y[known], marker=marker, label=one.label, **style)
    axes.set_yscale("log" if chart.logarithmic else "linear")
    axes.minorticks_off()
    axes.set_xticks([tick.value for tick in chart.x_ticks], [tick.text for tick in chart.x_ticks])
    axes.set_yticks([tick.value for tick in chart.y_ticks], [tick.text for tick in chart.y_ticks])
    axes.set_ylim(*chart.y_range)
    for label in chart.labels:
        beyond = label.x > sum(chart.x_range) / 2  # names go inwards
        place: dict[str, Any] = {
            "xytext": (-5 if beyond else 5, 0),
            "ha": "right" if beyond else "left",
            "va": "center",
        }
        axes.annotate(label.text, (label.x, label.y), textcoords="offset points", fontsize="x-small", **place)
    finish(axes, chart.x_label, chart.y_label)


def draw_forest(axes: Axes, forest: Forest, longest: int = LONGEST) -> None:
    """Draw a forest, its first line on top, with names of at most this many characters."""
    size = 8 if len(forest.lines) <= 60 else 6.5
    for whole, colour, label in ((False, "C0", forest.middle), (True, "C1", forest.all)):
        lines = [(-i, line) for i, line in enumerate(forest.lines) if line.all is whole]
        if not lines:
            continue
        heights, middles = [y for y, _ in lines], [line.middle for _, line in lines]
        axes.hlines(heights, [line.low for _, line in lines], [line.high for _, line in lines], colors=colour)
        axes.plot(middles, heights, "D" if whole else "o", color=colour, markersize=4, label=label or None)
        others = [line.other for _, line in lines]
        if np.isfinite(others).any():
            axes.hlines(heights, others, middles, colors="0.6", linewidth=0.8, linestyles="dotted")
            axes.plot(others, heights, "o", color="0.35", markersize=4, fillstyle="none", label=forest.other)
    if forest.zero is not None:
        axes.axvline(forest.zero, color="0.7", linewidth=0.8, zorder=0)
    names = shortened([line.name for line in forest.lines], longest)
    axes.set_yticks([-i for i in range(len(names))], names, fontsize=size)
    axes.set_ylim(0.6 - len(forest.lines), 0.6)
    axes.set_xlim(*forest.x_range)
    axes.set_xticks([tick.value for tick in forest.x_ticks], [tick.text for tick in forest.x_ticks])
    axes.set_title(forest.title, fontsize="medium")
    axes.tick_params(left=False)
    finish(axes, forest.x_label, "")


def finish(axes: Axes, x: str, y: str) -> None:
    """Label the axes and leave out the frame's upper and right sides."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def square(values: Tensor, names: Sequence[str]) -> np.ndarray:
    """Return a copy of the matrix `(p, p)`, checked to have a row and a column for each name."""
    p = len(names)
    if tuple(values.shape) != (p, p):
        raise ValueError(f"Expected a matrix ({p}, {p}), a row for each of {p} names, but got {tuple(values.shape)}")
    return values.detach().cpu().to(torch.float64).numpy().copy()
