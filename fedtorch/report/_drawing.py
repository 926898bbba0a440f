"""The drawing of a network, some nodes and edges where there are too many to be seen, and what is true of all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedtorch.networks import Network
from fedtorch.plots.layouts import node_places

_NODES, _EDGES = 1200, 3000  # that are drawn
_SIZE = 440.0
_SHADES = 5


class DrawnNode(NamedTuple):
    """A node as it is drawn."""

    x: float
    y: float
    name: str
    shade: str  # a class of the style sheet, by its value's place among all


class Drawing(NamedTuple):
    """A network as it is drawn."""

    nodes: list[DrawnNode]
    edges: str  # a path
    radius: float
    facts: dict[str, str]
    partly: bool  # whether some are left out
    bounds: list[str]  # of the shades, empty without values


def reduced(network: Network | None) -> dict[str, Any] | None:
    """Return what a drawing needs of a network, as plain data: drawn nodes, their places, edges, and facts."""
    if network is None:
        return None
    shown = np.unique(np.linspace(0, network.nodes - 1, min(_NODES, network.nodes)).round().astype(int))
    place = np.full(network.nodes, -1)
    place[shown] = np.arange(len(shown))
    pairs = place[network.edges.numpy()]
    pairs = pairs[(pairs >= 0).all(1)]
    pairs = pairs[np.unique(np.linspace(0, max(0, len(pairs) - 1), min(_EDGES, len(pairs))).round().astype(int))]
    places = node_places(network)[shown]
    span = np.ptp(places, axis=0).max(initial=1e-12)
    counts = network.neighbour_counts
    return {
        "shown": shown.tolist(),
        "places": ((places - places.min(0)) / span).round(4).tolist(),
        "edges": pairs.tolist(),
        "partly": len(shown) < network.nodes or len(pairs) < len(network.edges),
        "facts": {
            "nodes": network.nodes,
            "edges": len(network.edges),
            "components": network.components.number,
            "neighbours": [int(counts.min()), float(counts.double().mean()), int(counts.max())],
            "connectivity": network.algebraic_connectivity if 1 < network.nodes <= 2000 else None,
        },
    }


def drawing(found: dict[str, Any], names: Sequence[str], values: Sequence[float] | None) -> Drawing:
    """Return a drawing of what `reduced` has left.

    Args:
        found: by `reduced`.
        names: of all nodes.
        values: of all nodes, which shade them, NaN where unknown.
    """
    places = np.array(found["places"], dtype=np.float64).reshape(-1, 2)
    radius = float(np.clip(90 / np.sqrt(max(1, len(places))), 1.6, 7.0))
    places = 2 * radius + places * (_SIZE - 4 * radius)
    places[:, 1] = _SIZE - places[:, 1]
    shades, bounds = _shades(values)
    facts, (least, mean, most) = found["facts"], found["facts"]["neighbours"]
    texts = {"nodes": f"{facts['nodes']:,}", "edges": f"{facts['edges']:,}", "components": f"{facts['components']:,}"}
    texts["neighbours of a node"] = f"{least:,} to {most:,}, {mean:.3g} on average"
    if facts["connectivity"] is not None:
        texts["algebraic connectivity λ₂"] = f"{facts['connectivity']:.3g}"
    name = lambda i: names[i] if i < len(names) else str(i)
    return Drawing(
        nodes=[
            DrawnNode(round(x, 1), round(y, 1), name(i), shades[i] if shades else "s2")
            for i, (x, y) in zip(found["shown"], places.tolist())
        ],
        edges="".join("M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*places[i], *places[j]) for i, j in found["edges"]),
        radius=round(radius, 1),
        facts=texts,
        partly=bool(found["partly"]),
        bounds=bounds,
    )


def _shades(values: Sequence[float] | None) -> tuple[list[str], list[str]]:
    """Return the class of every value's fifth, and the fifths' bounds in words."""
    known = np.array([] if values is None else values, dtype=np.float64)
    finite = known[np.isfinite(known)]
    if not len(finite):
        return [], []
    edges = np.unique(np.quantile(finite, np.linspace(0, 1, _SHADES + 1)))
    place = np.clip(np.searchsorted(edges[1:-1], known, side="right"), 0, _SHADES - 1)
    bounds = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)] or [f"{edges[0]:.3g}"]
    return [f"s{i}" if np.isfinite(value) else "none" for i, value in zip(place.tolist(), known)], bounds
