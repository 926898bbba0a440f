"""Scores of hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtorch.plots.style import finish, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedtorch.federation.runs.search.tuning import GridSearch


def heat_map(grid: GridSearch, name: str = "score") -> Figure:
    """Draw the mean over clients of each setting's score, by colour and number; the best setting has a frame.

    Cells of settings without a trial are empty.

    Hyperparameters of one value are left out. If one is left, the figure is a line with the spread over clients; with
    two they are the axes; with more the first two are, and a cell has the best of the settings that fall into it.

    Args:
        grid: result of `ft.grid` or `ft.tune`.
        name: name of the score.

    Example:
        >>> import torch, fedtorch as ft
        >>> settings = tuple({"lr": lr, "steps": steps} for lr in (0.1, 1.0) for steps in (1, 5))
        >>> scores = tuple(ft.Score(s, torch.tensor([s], dtype=torch.float64)) for s in (0.5, 0.6, 0.7, 0.9))
        >>> from fedtorch.federation.runs.search.tuning import GridSearch
        >>> axes = ft.plots.heat_map(GridSearch(settings, scores, (False,) * 4, largest_is_best=True)).axes[0]
        >>> axes.get_ylabel(), axes.get_xlabel(), [text.get_text() for text in axes.texts]
        ('lr', 'steps', ['0.500', '0.600', '0.700', '0.900'])
    """
    tried = {n: list(dict.fromkeys(setting[n] for setting in grid.settings)) for n in grid.settings[0]}
    varied = [n for n, values in tried.items() if len(values) > 1] or list(tried)[:1]
    if len(varied) == 1:
        return _draw_line(grid, varied[0], tried[varied[0]], name)
    down, across = varied[:2]
    rows, columns = tried[down], tried[across]
    values = np.full((len(rows), len(columns)), np.nan)
    drawn = np.zeros(values.shape, dtype=bool)
    for i in reversed(grid.order):  # the best setting of a cell comes last
        setting = grid.settings[i]
        cell = rows.index(setting[down]), columns.index(setting[across])
        values[cell], drawn[cell] = grid.scores[i].mean(), True
    best = None if all(grid.diverged) else grid.settings[grid.order[0]]
    figure = new_figure(2.6 + 0.75 * len(columns), max(3.2, 1.6 + 0.5 * len(rows)))
    axes = figure.subplots()
    _draw_cells(axes, values, drawn, f"{name}, mean over clients", grid.largest_is_best)
    axes.set_xticks(range(len(columns)), [_short(value) for value in columns])
    axes.set_yticks(range(len(rows)), [_short(value) for value in rows])
    axes.set_xlabel(across)
    axes.set_ylabel(down)
    if best is not None:
        corner = columns.index(best[across]) - 0.5, rows.index(best[down]) - 0.5
        _frame(axes, corner)
    if len(varied) > 2:
        axes.set_title(f"best over {', '.join(varied[2:])}", fontsize="medium")
    return figure


def _draw_cells(axes: Axes, values: np.ndarray, drawn: np.ndarray, label: str, largest_is_best: bool) -> None:
    """Draw coloured cells with numbers; a drawn setting without a number diverged."""
    known = values[np.isfinite(values)]
    image = axes.imshow(
        values, origin="lower", aspect="auto", cmap="viridis" if largest_is_best else "viridis_r", interpolation="none"
    )
    image.set_clim(*((known.min(), known.max()) if len(known) else (0.0, 1.0)))
    axes.set_facecolor("0.85")
    for (i, j), value in np.ndenumerate(values):
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = np.isfinite(value) and 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        text = f"{value:#.3g}" if np.isfinite(value) else "diverged" * int(drawn[i, j])
        axes.text(j, i, text, ha="center", va="center", fontsize="small", color="white" if dark else "black")
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label=label)


def _frame(axes: Axes, corner: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=2, clip_on=False))


def _draw_line(grid: GridSearch, name: str, values: Sequence[Any], score: str) -> Figure:
    """Draw the scores against one hyperparameter."""
    figure = new_figure(5.6, 3.8)
    axes = figure.subplots()
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    order = sorted(range(len(values)), key=lambda i: values[i]) if numbers else list(range(len(values)))
    places = np.array([values[i] for i in order] if numbers else range(len(values)), dtype=float)
    clients = np.array([grid.scores[i].clients.numpy() for i in order])
    fine = np.array([not grid.diverged[i] for i in order])
    quantiles = np.full((4, len(values)), np.nan)
    quantiles[:, fine] = np.nanquantile(clients[fine], [0.0, 0.25, 0.75, 1.0], axis=1)
    means = np.array([grid.scores[i].mean() for i in order])
    axes.fill_between(places, quantiles[0], quantiles[3], color="C0", alpha=0.12, linewidth=0, label="all clients")
    axes.fill_between(places, quantiles[1], quantiles[2], color="C0", alpha=0.25, linewidth=0, label="middle half")
    axes.plot(places, means, "o-", color="C0", label="mean over clients")
    for place in places[~fine]:
        axes.axvline(place, color="0.6", linestyle=":", label="diverged")
    if fine.any():
        best = order.index(grid.order[0])
        axes.plot(places[best], means[best], "o", color="red", markersize=9, fillstyle="none", label="best")
    if not numbers:
        axes.set_xticks(places, [_short(value) for value in values])
    elif places.min() > 0 and places.max() >= 20 * places.min():
        axes.set_xscale("log")
    finish(axes, name, score)
    parts = dict(zip(*axes.get_legend_handles_labels()[::-1]))
    axes.legend(parts.values(), parts.keys(), frameon=False, fontsize="small")
    return figure


def _short(value: Any) -> str:
    """Return a hyperparameter's value as a label."""
    return f"{value:.4g}" if isinstance(value, float) else str(getattr(value, "__name__", value))
