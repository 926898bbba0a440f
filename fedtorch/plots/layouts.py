"""Positions in the plane for the nodes of a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedtorch.networks import Network

_SPRINGS = 300  # most nodes for a spring layout
_SMOOTHED = 400  # averaging steps in the layout of larger networks


def node_places(network: Network) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return positions `(n, 2)`: the given ones, else a spring layout, or smoothed random positions for large networks.

    >>> import fedtorch as ft
    >>> node_places(ft.Network([[0, 1]], positions=[[0.0, 1.0], [2.0, 3.0]])).tolist()
    [[0.0, 1.0], [2.0, 3.0]]
    """
    if network.positions is not None:
        return network.positions[:, :2].numpy()
    if network.nodes <= _SPRINGS:
        import networkx

        laid_out = networkx.spring_layout(network.to_networkx(), seed=0)
        return np.array([laid_out[node] for node in range(network.nodes)]).reshape(-1, 2)
    return _smoothed(network)


def _smoothed(network: Network) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Smooth random positions over neighbours, kept orthonormal: close to the Laplacian's lowest modes."""
    # edge weights are in arbitrary units
    degrees = torch.where(network.degrees > 0, network.degrees, 1.0).numpy()[:, None]
    adjacency = network.scipy_adjacency
    places = torch.randn(network.nodes, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    for step in range(_SMOOTHED):
        places = (places + adjacency @ places / degrees) / 2
        if step % 10 == 9:
            places = np.linalg.qr(places - places.mean(0))[0]
    # Low modes crowd nodes at the ends of the axes; mixing in the ranks of the values spreads them out.
    ranks = places.argsort(0).argsort(0) / network.nodes
    return ranks + (places - places.mean(0)) / (4 * places.std(0) + 1e-12)
