"""Graphs between sites: neighbours' messages go through the server in sealed letters, and it holds none of them.

A site keeps what its own nodes have told, and tells each site that has neighbours of theirs all that these told last,
in one letter. The server passes a site's last letters on until it has committed newer ones. So a letter that is lost
gets nothing out of step, nor does a site that goes back to an earlier round, and what a node hears is the exchange's
sum over its neighbours, as in one process. Between two clients of one site nothing travels.

The server learns who answers, who is whose neighbour, and how long letters are. It can withhold letters, and which site
plays which node is what it says and each site signs. Its `run.server.total` stays what it was before the first round.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedtorch.federation.algorithm import Algorithm
from fedtorch.networks.network import Network


def sealed(algorithm: Algorithm, network: Network) -> Algorithm:
    """`algorithm` whose nodes' messages no server in between can read, on `ft.Remote`; the same numbers elsewhere.

    Args:
        algorithm: over `graph(network)`, whose nodes tell all that they say for good, such as `ft.gtv`.
        network: of the algorithm.

    Raises:
        ValueError: an algorithm in which somebody has to know more than a sum over neighbours, such as
            `ft.without_server` or any over a star, or whose messages are fresh.

    Example:
        >>> import torch, fedtorch as ft
        >>> network = ft.Network.from_edges([(0, 1)])
        >>> plain = ft.gtv(ft.least_squares(torch.nn.Linear(1, 1, bias=False)), network, alpha=0.5)
        >>> algorithm = sealed(plain, network)  # for ft.Remote, in place of `plain`
        >>> algorithm.exchange.sealed is network, plain.exchange.sealed
        (True, None)
    """
    exchange = algorithm.exchange
    graph = hasattr(exchange.scatter(torch.zeros(network.nodes, 1), slice(0, 1)), "degree") and exchange.masks is None
    if algorithm.told is None or not graph:
        raise ValueError(
            "Expected an algorithm whose nodes tell their neighbours something for good and nobody else anything, such "
            "as ft.gtv, but got one in which somebody needs everybody's sum; over a star take secure.secure_star"
        )
    return replace(algorithm, exchange=exchange._replace(sealed=network))
