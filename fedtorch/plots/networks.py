"""Networks of nodes and of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedtorch.networks.network import Network
from fedtorch.plots.layouts import node_places
from fedtorch.plots.style import MOST_BARS, MOST_COLOURS, literal, new_figure, square

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEVELS = 50  # of the darkness of edges


@literal()
def network(
    network: Network, values: Any = None, *, clusters: Any = None, label: str = "parameter", names: bool | None = None
) -> Figure:
    """Draw a network with nodes coloured by a number or a cluster each, and edges darker for larger weights.

    Nodes are drawn at their positions, the first coordinate to the right and the second upwards; for a map, give the
    network positions (longitude, latitude). Without positions springs lay out the nodes, or, of many, averages over
    neighbours.

    Args:
        network: of n nodes.
        values: `(n,)` numbers, such as one parameter of each node, for a colour bar.
        clusters: `(n,)` integers instead, such as from `ft.networks.clustering`, for a legend.
        label: label of the colour bar.
        names: whether to write the nodes' names; default: up to thirty nodes.

    Raises:
        ValueError: both values and clusters, or not one of them per node.
    """
    if values is not None and clusters is not None:
        raise ValueError("Expected values or clusters to colour the nodes by, but got both")
    places = node_places(network)
    figure = new_figure(5.6, 5.0)
    axes = figure.subplots()
    draw_edges(axes, places, network.edges.numpy(), network.weights.numpy())
    style = node_style(network.nodes)
    if clusters is not None:
        _draw_clusters(figure, axes, places, _per_node(network, clusters).astype(int), style)
    elif values is not None:
        points = axes.scatter(places[:, 0], places[:, 1], c=_per_node(network, values), cmap="viridis", **style)
        figure.colorbar(points, ax=axes, label=label, shrink=0.7)
    else:
        axes.scatter(places[:, 0], places[:, 1], c="C0", **style)
    paper = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    if network.nodes <= MOST_BARS if names is None else names:
        for name, place in zip(network.names, places):
            axes.annotate(name, place, xytext=(5, 5), textcoords="offset points", fontsize="x-small", bbox=paper)
    return figure


@literal()
def directed_network(inclusion: Tensor, names: Sequence[str], effects: Tensor | None = None) -> Figure:
    """Draw arrows from causes to effects on a circle of variables, wider the more probable; feedback is two arcs.

    Args:
        inclusion: `(p, p)`, the probability of an arrow from each column to each row; zeros are not drawn, so multiply
            by `graphical.edges`.
        names: of the p variables.
        effects: `(p, p)`, whose signs colour the arrows.

    Raises:
        ValueError: not a square matrix, or not a name for each of its rows.

    Example:
        >>> import torch, fedtorch as ft
        >>> inclusion = torch.tensor([[0.0, 0.0, 0.0], [0.9, 0.0, 0.0], [0.0, 0.6, 0.0]])  # salt → pressure → stroke
        >>> figure = ft.plots.directed_network(inclusion, ["salt", "pressure", "stroke"])
        >>> len(figure.axes[0].patches), [text.get_text() for text in figure.axes[0].texts]
        (2, ['salt', 'pressure', 'stroke'])
    """
    from matplotlib.patches import FancyArrowPatch

    values = square(inclusion, names)
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(names)) / len(names)
    places = np.column_stack((np.cos(angles), np.sin(angles)))
    signs = np.ones_like(values) if effects is None else np.sign(square(effects, names))
    figure = new_figure(6.0, 6.0)
    axes = figure.subplots()
    for effect, cause in zip(*values.nonzero()):
        if effect == cause:
            continue
        bend = 0.18 if values[cause, effect] else 0.06
        arrow = FancyArrowPatch(
            tuple(places[cause]),
            tuple(places[effect]),
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=13,
            linewidth=0.6 + 1.8 * float(values[effect, cause]),
            color="C0" if signs[effect, cause] >= 0 else "C3",
            shrinkA=7,
            shrinkB=8,
        )
        axes.add_patch(arrow)
    axes.scatter(places[:, 0], places[:, 1], s=60, color="0.25", zorder=3)
    for name, angle, (x, y) in zip(names, angles, places):
        side = "center" if abs(x) < 0.15 else ("left" if x > 0 else "right")
        axes.text(1.1 * x, 1.1 * y + (0.03 if np.sin(angle) > 0.98 else 0.0), name, ha=side, va="center")
    if effects is not None:
        for colour, sign in (("C0", "positive"), ("C3", "negative")):
            axes.plot([], [], color=colour, label=sign)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    axes.set_xlim(-1.45, 1.45)
    axes.set_ylim(-1.25, 1.25)
    axes.set_aspect("equal")
    axes.set_axis_off()
    return figure


def draw_edges(axes: Axes, places: np.ndarray, edges: np.ndarray, weights: np.ndarray) -> None:
    """Draw edges, darker for larger weights, with one line object per level of weight.

    Args:
        axes: without frame or ticks afterwards, and as wide as high.
        places: `(n, 2)` of the nodes.
        edges: `(m, 2)`, the numbers of their ends.
        weights: `(m,)`.
    """
    from matplotlib.collections import LineCollection

    level = np.round(_LEVELS * weights / weights.max(initial=1e-300))
    known = np.unique(level)
    gap = np.full((len(edges), 1, 2), np.nan)
    lines = np.concatenate([places[edges], gap], axis=1)
    strength = 0.15 + 0.55 * known / _LEVELS
    colours = np.column_stack((np.full((len(known), 3), 0.3), strength))
    every = [lines[level == each].reshape(-1, 2) for each in known]
    axes.add_collection(LineCollection(every, colors=colours, linewidths=0.8, zorder=1))
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_axis_off()


def node_style(nodes: int) -> dict[str, Any]:
    """Return the scatter style for this many nodes."""
    return {"s": float(np.clip(4000 / max(1, nodes), 4, 120)), "zorder": 2, "linewidths": 0.4, "edgecolors": "white"}


def _draw_clusters(figure: Figure, axes: Axes, places: np.ndarray, clusters: np.ndarray, style: dict[str, Any]) -> None:
    """Draw the largest clusters in one colour each, and the rest in grey."""
    known, counts = np.unique(clusters, return_counts=True)
    shown = np.sort(known[np.argsort(-counts, kind="stable")[:MOST_COLOURS]])
    for i, cluster in enumerate(shown):
        inside = clusters == cluster
        axes.scatter(*places[inside].T, color=f"C{i}", label=f"{cluster} ({inside.sum()})", **style)
    rest = ~np.isin(clusters, shown)
    if rest.any():
        axes.scatter(*places[rest].T, color="0.6", label=f"others ({rest.sum()})", **style)
    figure.legend(title="cluster (nodes)", loc="outside right upper", frameon=False, fontsize="small")


def _per_node(network: Network, values: Any) -> np.ndarray:
    array = torch.as_tensor(values).detach().cpu().numpy()
    if array.shape != (network.nodes,):
        raise ValueError(f"Expected one value per node, ({network.nodes},), but got shape {array.shape}")
    return array
