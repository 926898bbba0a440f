"""Graphs between sites: neighbours' messages pass through the server in sealed envelopes, which it cannot read.

A site keeps the contributions of its own nodes. It sends one envelope to each site with neighbours of these nodes, with
their complete last contributions. The server passes on a site's last envelopes until it has committed newer ones. So
neither a lost envelope nor a site that returns to an earlier round causes errors, and a node's inbox is the exchange's
sum over its neighbours, as in one process. Nothing is sent between two clients of one site.

The server learns who answers, which nodes are neighbours, and how long envelopes are. It can withhold envelopes. It
assigns nodes to sites, and each site signs its own assignment. `run.server.total` stays as before the first round.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import hears_neighbours
from fedtorch.networks.network import Network


@dataclass(frozen=True)
class Sealed:
    """Carries neighbours' messages in sealed envelopes; see `sealed`."""

    network: Network
    minimum: int = 1  # neighbours read each other's messages
    step: float = 0.0
    masks: None = None

    def __str__(self) -> str:
        return "sealed envelopes"

    def __repr__(self) -> str:
        return f"sealed({self.network!r})"

    def carried(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm unchanged, if it needs nothing but sums over neighbours.

        Raises:
            ValueError: a node or the server needs more than a sum over neighbours, as in `ft.without_server` or over a
                star; its contributions are not persistent; or it is over another network.
        """
        if algorithm.told is None or not hears_neighbours(algorithm.exchange, self.network):
            raise ValueError(
                "Expected an algorithm whose nodes send persistent contributions to their neighbours in the network of "
                "sealed(…) and nothing else, such as ft.gtv, but got one that needs other messages; over a star use "
                "sites.masked"
            )
        return algorithm

    def check(self, clients: int, sites: int | None = None) -> None:
        """Raise ValueError unless the network's nodes are the clients."""
        if clients != self.network.nodes:
            raise ValueError(f"Expected a client for each of {self.network.nodes} nodes, but got {clients} clients")


def sealed(network: Network) -> Sealed:
    """Return a transport of neighbours' messages that the server of `ft.Remote` cannot read.

    In one process nothing is sealed, because there is no server in between, and the numbers are the same.

    Args:
        network: network of the algorithm, over `graph(network)`, with only persistent contributions, such as `ft.gtv`.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.sites import sealed
        >>> network = ft.Network.from_edges([(0, 1)])
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.tensor([y])) for y in (1.0, 3.0)])
        >>> algorithm = ft.gtv(ft.least_squares(torch.nn.Linear(1, 1, bias=False)), network, alpha=0.5)
        >>> run = ft.run(algorithm, ft.InProcess(data, carry=sealed(network)), rounds=1)  # as for ft.Remote
        >>> run.fingerprint()["messages"]
        'sealed envelopes'
    """
    return Sealed(network)
