"""What the figures share."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 30  # clients or nodes that are drawn one by one, with their names
MOST_COLOURS = 10  # labels that colours tell apart


def new_figure(width: float, height: float) -> Figure:
    """A figure of no window, in inches, which notebooks show as it is."""
    return _shown_figure()(figsize=(width, height), layout="constrained")


@functools.cache
def _shown_figure() -> type[Figure]:
    """The class of figures that notebooks show, also where nobody has imported pyplot."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that tells IPython its image."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return ShownFigure


def finish(axes: Axes, x: str, y: str) -> None:
    """Labels the axes and leaves out the frame's upper and right sides."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def whole_numbers(axes: Axes) -> None:
    """Ticks of the horizontal axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def square(values: Tensor, names: Sequence[str]) -> np.ndarray:
    """A copy of the matrix `(p, p)`, checked to have a row and a column for each name."""
    p = len(names)
    if tuple(values.shape) != (p, p):
        raise ValueError(f"Expected a matrix ({p}, {p}), a row for each of {p} names, but got {tuple(values.shape)}")
    return values.detach().cpu().to(torch.float64).numpy().copy()
