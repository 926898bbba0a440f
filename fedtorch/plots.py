"""Figures of federations and their data.

Every function returns a matplotlib `Figure` that belongs to no window: save it with `figure.savefig`, or let a notebook
show it. Where a function takes a run, that is a `Federation`, a `History`, or the table that either gives.

>>> import fedtorch as ft
>>> data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3), clients=20, seed=0)
>>> figure = ft.plots.client_distribution(data)
>>> figure.axes[0].get_ylabel()
'rows'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import FederatedData
from fedtorch.federation.graphs import Network

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedtorch.federation.tuning import Grid
    from fedtorch.models.low_rank import LowRank

__all__ = [
    "bytes_against",
    "client_distribution",
    "curves",
    "device_correlation",
    "directed_network",
    "heat_map",
    "inclusion_map",
    "network",
    "worst_client",
]

_MOST_BARS = 30  # clients whose labels are drawn as bars; more make a map
_MOST_DEVICES = 500  # of a correlation matrix that is drawn
_MOST_COLOURS = 10  # labels that colours tell apart


def curves(run: Any, values: Sequence[str] | None = None) -> Figure:
    """Training loss and scores by round, with the spread over clients as bands.

    Args:
        run: a `Federation`, `History`, or table.
        values: columns of the history to draw, one panel each; default: `train_loss` and every `val_<metric>`.

    Raises:
        ValueError: a value that is not in the history, or a history without rounds.
    """
    table = _table(run)
    if values is None:
        scores = [name for name in table if name.startswith("val_") and f"{name}_mean" in table]
        values = ["train_loss"] * ("train_loss" in table) + scores
    figure = _figure(4.2 * max(1, len(values)), 3.8)
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
        _finish(axes, "communication round", _in_words(name))
        _whole_numbers(axes)
    parts = {name: part for axes in figure.axes for part, name in zip(*axes.get_legend_handles_labels())}
    figure.legend(parts.values(), parts.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


def client_distribution(data: FederatedData, label: int | str = 1) -> Figure:
    """Which labels the clients have, and how many rows.

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
    if len(data) <= _MOST_BARS and len(known) <= _MOST_COLOURS:
        return _draw_bars(data, known.tolist(), counts.numpy())
    return _draw_map(data, known.tolist(), counts.numpy())


def worst_client(runs: Mapping[str, Any], metric: str, largest_is_best: bool = True) -> Figure:
    """The worst client's score beside that of all rows and the mean over clients, by round.

    Args:
        runs: by name: `Federation`, `History`, or table.
        metric: the name of a metric that was validated.
        largest_is_best: whether the worst client is the lowest.
    """
    worst = "min" if largest_is_best else "max"
    lines = {"all rows": ("", "-"), "mean over clients": ("_mean", "--"), "worst client": (f"_{worst}", ":")}
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    for i, (name, run) in enumerate(runs.items()):
        table = _table(run)
        for what, (suffix, style) in lines.items():
            axes.plot(*_column(table, f"val_{metric}{suffix}"), color=f"C{i}", linestyle=style, label=f"{name}: {what}")
    _finish(axes, "communication round", _in_words(f"val_{metric}"))
    _whole_numbers(axes)
    _two_legends(axes, list(runs), {what: style for what, (_, style) in lines.items()})
    return figure


def bytes_against(runs: Mapping[str, Any], metric: str) -> Figure:
    """A score against the bytes sent so far, up and down together.

    Args:
        runs: by name: `Federation`, `History`, or table.
        metric: the name of a metric that was validated, or a column of the history such as `train_loss`.
    """
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    column = metric
    for i, (name, run) in enumerate(runs.items()):
        table = _table(run)
        column = f"val_{metric}" if f"val_{metric}" in table else metric
        rounds, values = _column(table, column)
        sent = (table["bytes_up"] + table["bytes_down"])[table[column].notna()].to_numpy()
        axes.plot(sent / 1e6, values, color=f"C{i}", label=name, marker="." if len(rounds) < 30 else "")
    _finish(axes, "bytes up and down so far (MB)", _in_words(column))
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize="small")
    return figure


def network(
    network: Network, values: Any = None, *, clusters: Any = None, label: str = "parameter", names: bool | None = None
) -> Figure:
    """A network, its nodes coloured by a number or a cluster each, its edges darker the more they weigh.

    Nodes are drawn at their positions, the first coordinate to the right and the second upwards; for a map, give the
    network positions (longitude, latitude). Without positions networkx lays the nodes out by springs.

    Args:
        network: of n nodes.
        values: `(n,)` numbers, such as one parameter of each node, for a colour bar.
        clusters: `(n,)` integers instead, such as from `ft.graphs.clustering`, for a legend.
        label: of the colour bar.
        names: whether to write the nodes' names; default: up to thirty nodes.

    Raises:
        ValueError: both values and clusters, or not one of them per node.
    """
    if values is not None and clusters is not None:
        raise ValueError("Expected values or clusters to colour the nodes by, but got both")
    places = _positions(network)
    figure = _figure(5.6, 5.0)
    axes = figure.subplots()
    _draw_edges(axes, network, places)
    size = float(np.clip(4000 / max(1, network.nodes), 4, 120))
    style: dict[str, Any] = {"s": size, "zorder": 2, "linewidths": 0.4, "edgecolors": "white"}
    if clusters is not None:
        _draw_clusters(figure, axes, places, _per_node(network, clusters).astype(int), style)
    elif values is not None:
        points = axes.scatter(places[:, 0], places[:, 1], c=_per_node(network, values), cmap="viridis", **style)
        figure.colorbar(points, ax=axes, label=label, shrink=0.7)
    else:
        axes.scatter(places[:, 0], places[:, 1], c="C0", **style)
    if network.nodes <= _MOST_BARS if names is None else names:
        for name, place in zip(network.names, places):
            axes.annotate(name, place, xytext=(5, 5), textcoords="offset points", fontsize="x-small")
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_axis_off()
    return figure


def inclusion_map(inclusion: Tensor, names: Sequence[str], down: str = "response", across: str = "covariate") -> Figure:
    """Posterior inclusion probabilities of all ordered pairs of variables, darker the higher; the diagonal is left out.

    Args:
        inclusion: `(p, p)`, such as `graphical.square` gives; row j is the regression of variable j.
        names: of the p variables.
        down: what a row stands for.
        across: what a column stands for.

    Raises:
        ValueError: not a square matrix, or not a name for each of its rows.
    """
    values = _pairs(inclusion, names)
    np.fill_diagonal(values, np.nan)
    figure = _figure(2.6 + 0.36 * len(names), 1.8 + 0.36 * len(names))
    axes = figure.subplots()
    axes.set_facecolor("0.93")
    image = axes.imshow(values, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="none")
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(across)
    axes.set_ylabel(down)
    figure.colorbar(image, ax=axes, label="posterior inclusion probability", shrink=0.8)
    return figure


def directed_network(inclusion: Tensor, names: Sequence[str], effects: Tensor | None = None) -> Figure:
    """Arrows from causes to effects on a circle of variables, wider the more probable; feedback is a pair of arcs.

    Args:
        inclusion: `(p, p)`, the probability of an arrow from each column to each row; what is zero is not drawn, so
            multiply by `graphical.arrows`.
        names: of the p variables.
        effects: `(p, p)`, whose signs colour the arrows.

    Raises:
        ValueError: not a square matrix, or not a name for each of its rows.
    """
    from matplotlib.patches import FancyArrowPatch

    values = _pairs(inclusion, names)
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(names)) / len(names)
    places = np.column_stack((np.cos(angles), np.sin(angles)))
    signs = np.ones_like(values) if effects is None else np.sign(_pairs(effects, names))
    figure = _figure(6.0, 6.0)
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


def _pairs(values: Tensor, names: Sequence[str]) -> np.ndarray:
    """A copy of the matrix, checked."""
    p = len(names)
    if tuple(values.shape) != (p, p):
        raise ValueError(f"Expected a matrix ({p}, {p}), a row for each of {p} names, but got {tuple(values.shape)}")
    return values.detach().cpu().to(torch.float64).numpy().copy()


def _positions(network: Network) -> np.ndarray:
    if network.positions is not None:
        return network.positions[:, :2].numpy()
    import networkx

    laid_out = networkx.spring_layout(network.to_networkx(), seed=0)
    return np.array([laid_out[node] for node in range(network.nodes)]).reshape(-1, 2)


def _draw_edges(axes: Axes, network: Network, places: np.ndarray) -> None:
    from matplotlib.collections import LineCollection

    weights = network.weights.numpy()
    strength = 0.15 + 0.55 * weights / weights.max(initial=1e-300)
    colours = np.column_stack((np.full((len(weights), 3), 0.3), strength))
    axes.add_collection(LineCollection(places[network.edges.numpy()], colors=colours, linewidths=0.8, zorder=1))


def _draw_clusters(figure: Figure, axes: Axes, places: np.ndarray, clusters: np.ndarray, style: dict[str, Any]) -> None:
    """The largest clusters in a colour each, and what is left in grey."""
    known, counts = np.unique(clusters, return_counts=True)
    shown = np.sort(known[np.argsort(-counts, kind="stable")[:_MOST_COLOURS]])
    for i, cluster in enumerate(shown):
        inside = clusters == cluster
        axes.scatter(*places[inside].T, color=f"C{i}", label=f"{cluster} ({inside.sum()})", **style)
    rest = ~np.isin(clusters, shown)
    if rest.any():
        axes.scatter(*places[rest].T, color="0.6", label=f"others ({rest.sum()})", **style)
    figure.legend(title="cluster (nodes)", loc="outside right upper", frameon=False, fontsize="small")


def _per_node(network: Network, values: Any) -> np.ndarray:
    found = torch.as_tensor(values).detach().cpu().numpy()
    if found.shape != (network.nodes,):
        raise ValueError(f"Expected one value per node, ({network.nodes},), but got shape {found.shape}")
    return found


def heat_map(grid: Grid, name: str = "score") -> Figure:
    """The mean over clients of each setting's score, by colour and number; the best setting has a frame.

    Hyperparameters of one value are left out. If one is left, the figure is a line with the spread over clients; with
    two they are the axes; with more the first two are, and a cell has the best of the settings that fall into it.

    Args:
        grid: what `ft.grid` returns.
        name: what the score is called.
    """
    tried = {n: list(dict.fromkeys(setting[n] for setting in grid.settings)) for n in grid.settings[0]}
    varied = [n for n, values in tried.items() if len(values) > 1] or list(tried)[:1]
    if len(varied) == 1:
        return _draw_line(grid, varied[0], tried[varied[0]], name)
    down, across = varied[:2]
    rows, columns = tried[down], tried[across]
    values = np.full((len(rows), len(columns)), np.nan)
    for i in reversed(grid.order):  # the best setting of a cell comes last
        setting = grid.settings[i]
        values[rows.index(setting[down]), columns.index(setting[across])] = grid.scores[i].mean()
    best = None if all(grid.diverged) else grid.settings[grid.order[0]]
    figure = _figure(2.6 + 0.75 * len(columns), max(3.2, 1.6 + 0.5 * len(rows)))
    axes = figure.subplots()
    _draw_cells(axes, values, f"{name}, mean over clients", grid.largest_is_best)
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


def _draw_cells(axes: Axes, values: np.ndarray, label: str, largest_is_best: bool) -> None:
    """Colours with numbers on them; a cell without a number diverged."""
    known = values[np.isfinite(values)]
    image = axes.imshow(
        values, origin="lower", aspect="auto", cmap="viridis" if largest_is_best else "viridis_r", interpolation="none"
    )
    image.set_clim(*((known.min(), known.max()) if len(known) else (0.0, 1.0)))
    axes.set_facecolor("0.85")
    for (i, j), value in np.ndenumerate(values):
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = np.isfinite(value) and 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        text = f"{value:#.3g}" if np.isfinite(value) else "diverged"
        axes.text(j, i, text, ha="center", va="center", fontsize="small", color="white" if dark else "black")
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label=label)


def _frame(axes: Axes, corner: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=2, clip_on=False))


def _draw_line(grid: Grid, name: str, values: Sequence[Any], score: str) -> Figure:
    """The scores against one hyperparameter."""
    figure = _figure(5.6, 3.8)
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
    _finish(axes, name, score)
    parts = dict(zip(*axes.get_legend_handles_labels()[::-1]))
    axes.legend(parts.values(), parts.keys(), frameon=False, fontsize="small")
    return figure


def _short(value: Any) -> str:
    """A hyperparameter's value as a label."""
    return f"{value:.4g}" if isinstance(value, float) else str(getattr(value, "__name__", value))


def device_correlation(covariance: LowRank, names: Sequence[str] | None = None) -> Figure:
    """The correlation between devices that `ft.matrix_normal` has learnt, related devices side by side.

    Devices are ordered by their angle in the plane of the two leading directions of Ω.

    Args:
        covariance: Ω, such as `round.server.covariance`; of many devices, some are drawn, evenly spaced.
        names: of all devices, to label a few with.

    Raises:
        ValueError: another number of names than of devices.
    """
    devices = len(covariance.vectors)
    if names is not None and len(names) != devices:
        raise ValueError(f"Expected {devices} names, one per device, but got {len(names)}")
    shown = torch.linspace(0, devices - 1, min(devices, _MOST_DEVICES)).round().long()
    plane = (covariance.vectors * covariance.values.sqrt())[shown, :2]
    plane = torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
    shown = shown[torch.atan2(plane[:, 1], plane[:, 0]).argsort(stable=True).cpu()]
    figure = _figure(5.2, 4.4)
    axes = figure.subplots()
    matrix = covariance.correlation(shown.to(covariance.vectors.device)).cpu().numpy()
    image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="correlation")
    axes.set_xlabel("device")
    axes.set_ylabel("device")
    step = -(-len(shown) // _MOST_BARS)
    if names is not None:
        axes.set_yticks(range(0, len(shown), step), [names[k] for k in shown[::step].tolist()])
        axes.set_xticks([])
    return figure


def _draw_bars(data: FederatedData, known: list[int], counts: np.ndarray) -> Figure:
    figure = _figure(max(5.0, 1.6 + 0.25 * len(data)), 3.6)
    axes = figure.subplots()
    below = np.zeros(len(data))
    for i, value in enumerate(known):
        axes.bar(range(len(data)), counts[:, i], 0.8, below, color=f"C{i}", label=str(value))
        below = below + counts[:, i]
    axes.set_ylim(0, 1.05 * float(data.counts.max()))
    _finish(axes, "client", "rows")
    _name_clients(axes, data)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], title="label", loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _draw_map(data: FederatedData, known: list[int], counts: np.ndarray) -> Figure:
    figure = _figure(min(14.0, max(6.0, 2.0 + 0.07 * len(data))), 4.6)
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
    figure = _figure(min(14.0, max(6.0, 2.0 + 0.07 * len(data))), 4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
    parts = [values.double().numpy() for values in target.split(data.counts.tolist())]
    every = np.array([np.quantile(v, [0.05, 0.25, 0.5, 0.75, 0.95]) if len(v) else np.full(5, np.nan) for v in parts]).T
    places = np.arange(len(data))
    above.vlines(places, every[0], every[4], color="C0", alpha=0.4, linewidth=1, label="middle 90 %")
    above.vlines(places, every[1], every[3], color="C0", linewidth=3, label="middle half")
    above.plot(places, every[2], "o", color="white", markeredgecolor="C0", markersize=4, label="median")
    _finish(above, "", "label")
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize="small")
    _draw_sizes(below, data)
    return figure


def _draw_sizes(axes: Axes, data: FederatedData) -> None:
    axes.bar(range(len(data)), data.counts.numpy(), 0.8, color="0.5")
    _finish(axes, "client", "rows")
    _name_clients(axes, data)


def _name_clients(axes: Axes, data: FederatedData) -> None:
    """The names of some clients: of all where they fit."""
    step = -(-len(data) // _MOST_BARS)
    names = data.names[::step]
    long = max(map(len, names)) > 3
    axes.set_xticks(range(0, len(data), step), names, rotation=45 if long else 0, ha="right" if long else "center")
    axes.set_xlim(-0.5, len(data) - 0.5)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _two_legends(axes: Axes, names: list[str], styles: Mapping[str, str]) -> None:
    """Colours by name and line styles by meaning, beside the axes."""
    from matplotlib.lines import Line2D

    colours = [Line2D([], [], color=f"C{i}", label=name) for i, name in enumerate(names)]
    lines = [Line2D([], [], color="0.3", ls=style, label=what) for what, style in styles.items()]
    assert axes.figure is not None
    axes.figure.legend(handles=[*colours, *lines], loc="outside right upper", frameon=False, fontsize="small")


def _band(axes: Axes, table: pd.DataFrame, low: str, high: str, alpha: float, label: str) -> None:
    if low in table and high in table:
        rounds, lowest = _column(table, low)
        axes.fill_between(rounds, lowest, _column(table, high)[1], color="C0", alpha=alpha, linewidth=0, label=label)


def _table(run: Any) -> pd.DataFrame:
    """The history of a Federation or a History, or the table as it is."""
    table = run.history if hasattr(run, "history") else run.frame() if hasattr(run, "frame") else run
    if not hasattr(table, "columns"):
        raise TypeError(f"Expected a Federation, a History or its table, but got {type(run).__name__}")
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


def _labels(data: FederatedData, label: int | str) -> Tensor:
    fields = dict(tree.items(data.rows))
    if str(label) not in fields:
        raise ValueError(f"Expected label= one of the fields {sorted(fields)}, but got {label!r}")
    target = fields[str(label)]
    if target.numel() != len(target):
        raise ValueError(f"Expected one label per row, but got shape {tuple(target.shape)} in field {label!r}")
    return target.flatten()
