"""Figures of one style, and charts drawn into them."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedtorch.plots.charts import GREY, Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 30  # clients or nodes that are drawn one by one, with their names
MOST_COLOURS = 10  # labels that colours tell apart
_DOTTED = 15  # points of a line up to which each is marked


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of no window, in inches, which notebooks show as it is."""
    return _shown_figure()(figsize=(width, height), layout="constrained")


@functools.cache
def _shown_figure() -> type[Figure]:
    """Return the class of figures that notebooks show, also where nobody has imported pyplot."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that tells IPython its image."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return ShownFigure


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
            marker = "." if known.sum() <= _DOTTED else None
            axes.plot(x[known], one.y[known], marker=marker, label=one.label, **style)
    axes.set_yscale("log" if chart.logarithmic else "linear")
    axes.minorticks_off()
    axes.set_xticks([tick.value for tick in chart.x_ticks], [tick.text for tick in chart.x_ticks])
    axes.set_yticks([tick.value for tick in chart.y_ticks], [tick.text for tick in chart.y_ticks])
    axes.set_ylim(*chart.y_range)
    finish(axes, chart.x_label, chart.y_label)


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
