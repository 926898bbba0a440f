"""The labels and the numbers of rows of the clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import FederatedData
from fedtorch.plots.style import MOST_BARS, MOST_COLOURS, finish, literal, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@literal()
def client_distribution(data: FederatedData, label: int | str = 1) -> Figure:
    """Draw the clients' labels and their numbers of rows.

    Up to thirty clients and ten labels are stacked bars, whose heights are the clients' rows; more are a map of each
    label's share, with the rows below. Labels that are real numbers are drawn as quantiles.

    Args:
        data: the clients' rows.
        label: the field of the rows that has the labels `(total,)`: a place in a tuple or a name.

    Raises:
        ValueError: there is no such field, or it has more than one number per row.
    """
    target = _labels(data, label).cpu()
    if target.is_floating_point():
        return _draw_quantiles(data, target)
    known, index = target.unique(return_inverse=True)
    client = torch.arange(len(data)).repeat_interleave(data.counts)
    counts = torch.bincount(client * len(known) + index, minlength=len(data) * len(known)).reshape(len(data), -1)
    if len(data) <= MOST_BARS and len(known) <= MOST_COLOURS:
        return _draw_bars(data, known.tolist(), counts.numpy())
    return _draw_map(data, known.tolist(), counts.numpy())


def _draw_bars(data: FederatedData, known: list[int], counts: np.ndarray) -> Figure:
    figure = new_figure(max(5.0, 1.6 + 0.25 * len(data)), 3.6)
    axes = figure.subplots()
    below = np.zeros(len(data))
    for i, value in enumerate(known):
        axes.bar(range(len(data)), counts[:, i], 0.8, below, color=f"C{i}", label=str(value))
        below = below + counts[:, i]
    axes.set_ylim(0, 1.05 * float(data.counts.max()))
    finish(axes, "client", "rows")
    _name_clients(axes, data)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], title="label", loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _draw_map(data: FederatedData, known: list[int], counts: np.ndarray) -> Figure:
    figure = new_figure(min(14.0, max(6.0, 2.0 + 0.07 * len(data))), 4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = above.imshow(share.T, aspect="auto", origin="lower", vmin=0, vmax=1, cmap="Blues", interpolation="nearest")
    step = -(-len(known) // 20)
    above.set_yticks(range(0, len(known), step), [str(value) for value in known[::step]])
    above.set_ylabel("label")
    above.tick_params(bottom=False)
    figure.colorbar(image, ax=above, label="share of the client's rows")
    _draw_sizes(below, data)
    return figure


def _draw_quantiles(data: FederatedData, target: Tensor) -> Figure:
    figure = new_figure(min(14.0, max(6.0, 2.0 + 0.07 * len(data))), 4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
    parts = [values.double().numpy() for values in target.split(data.counts.tolist())]
    every = np.array([np.quantile(v, [0.05, 0.25, 0.5, 0.75, 0.95]) if len(v) else np.full(5, np.nan) for v in parts]).T
    places = np.arange(len(data))
    above.vlines(places, every[0], every[4], color="C0", alpha=0.4, linewidth=1, label="middle 90 %")
    above.vlines(places, every[1], every[3], color="C0", linewidth=3, label="middle half")
    above.plot(places, every[2], "o", color="white", markeredgecolor="C0", markersize=4, label="median")
    finish(above, "", "label")
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize="small")
    _draw_sizes(below, data)
    return figure


def _draw_sizes(axes: Axes, data: FederatedData) -> None:
    axes.bar(range(len(data)), data.counts.numpy(), 0.8, color="0.5")
    finish(axes, "client", "rows")
    _name_clients(axes, data)


def _name_clients(axes: Axes, data: FederatedData) -> None:
    """Write the names of some clients: of all where they fit."""
    step = -(-len(data) // MOST_BARS)
    names = data.names[::step]
    long = max(map(len, names)) > 3
    axes.set_xticks(range(0, len(data), step), names, rotation=45 if long else 0, ha="right" if long else "center")
    axes.set_xlim(-0.5, len(data) - 0.5)


def _labels(data: FederatedData, label: int | str) -> Tensor:
    fields = dict(tree.items(data.rows))
    if str(label) not in fields:
        raise ValueError(f"Expected label= one of the fields {sorted(fields)}, but got {label!r}")
    target = fields[str(label)]
    if target.numel() != len(target):
        raise ValueError(f"Expected one label per row, but got shape {tuple(target.shape)} in field {label!r}")
    return target.flatten()
