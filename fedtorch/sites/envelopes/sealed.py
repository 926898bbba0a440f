"""Graphs between sites: neighbours' messages go through the server in sealed envelopes, and it holds none of them.

A site keeps what its own nodes have told, and tells each site that has neighbours of theirs all that these told last,
in one envelope. The server passes a site's last envelopes on until it has committed newer ones. So an envelope that is
lost gets nothing out of step, nor does a site that goes back to an earlier round, and what a node hears is the
exchange's sum over its neighbours, as in one process. Between two clients of one site nothing travels.

The server learns who answers, who is whose neighbour, and how long envelopes are. It can withhold envelopes, and which
site plays which node is what it says and each site signs. Its `run.server.total` stays what it was before the first
round.
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
        """Return the algorithm as it is, if neighbours' sums are all that anybody needs.

        Raises:
            ValueError: somebody in it has to know more than a sum over neighbours, as in `ft.without_server` or any
                over a star; its messages are fresh; or it is over another network.
        """
        if algorithm.told is None or not hears_neighbours(algorithm.exchange, self.network):
            raise ValueError(
                "Expected an algorithm whose nodes tell their neighbours in the network of sealed(…) something for "
                "good and nobody else anything, such as ft.gtv, but got one in which somebody needs everybody's sum; "
                "over a star take sites.masked"
            )
        return algorithm

    def check(self, clients: int, sites: int | None = None) -> None:
        """Raise ValueError unless the network's nodes are the clients."""
        if clients != self.network.nodes:
            raise ValueError(f"Expected a client for each of {self.network.nodes} nodes, but got {clients} clients")


def sealed(network: Network) -> Sealed:
    """Return the carrying of neighbours' messages that no server in between can read, on `ft.Remote`.

    In one process, where nothing is in between, the numbers are the same and nothing is sealed.

    Args:
        network: of the algorithm, over `graph(network)`, whose nodes tell all that they say for good, as in `ft.gtv`.

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
