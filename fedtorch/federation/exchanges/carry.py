"""Transport of messages to their aggregator: readable, in sums under masks, or sealed for neighbours.

An exchange defines who receives which messages; the population's argument `carry=` defines how much intermediaries can
read. `plain` hides nothing. `fedtorch.sites.secure` has sums under masks, `fedtorch.sites.envelopes` sealed envelopes.
An algorithm whose guarantee needs inseparable sums declares so by `Budget.need`, and a run refuses populations that do
not meet it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fedtorch.federation.exchanges.exchange import Exchange, Sum
from fedtorch.federation.exchanges.star import star

if TYPE_CHECKING:
    from fedtorch.federation.algorithm import Algorithm
    from fedtorch.networks.network import Network

MESSAGES = "messages"  # the name of `carry` in fingerprints
_STEPS = 4  # between numbers under masks, in a share of noise


class Carry(Protocol):
    """Transport of messages between clients, which may hide their content."""

    @property
    def minimum(self) -> int:
        """Return the number of clients in the smallest sum that the carrier can read; 1 for single messages."""
        ...

    @property
    def step(self) -> float:
        """Return the distance between numbers that are not the same when they are carried; 0.0 where all differ."""
        ...

    @property
    def masks(self) -> Any:
        """Return the masks under which sites add up, `fedtorch.sites.secure.Masked`, or None."""
        ...

    @property
    def network(self) -> Network | None:
        """Return the network whose neighbours exchange sealed envelopes, or None."""
        ...

    def __str__(self) -> str:
        """Describe the settings on which all parties have to agree; "" if nothing is hidden."""
        ...

    def carried(self, algorithm: Algorithm) -> Algorithm:
        """Adapt `algorithm` to this transport; raise ValueError if it cannot be adapted."""
        ...

    def check(self, clients: int, sites: int | None = None) -> None:
        """Raise ValueError if this number of clients or sites is not supported."""
        ...


@dataclass(frozen=True)
class Plain:
    """Transport of readable messages; see `plain`."""

    minimum: int = 1
    step: float = 0.0
    masks: None = None
    network: None = None

    def __str__(self) -> str:
        return ""

    def __repr__(self) -> str:
        return "plain()"

    def carried(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm unchanged."""
        return algorithm

    def check(self, clients: int, sites: int | None = None) -> None:
        """Accept any number."""


def plain() -> Plain:
    """Build the transport that hides nothing from intermediaries, the default of all populations.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.sites import plain
        >>> ft.InProcess(ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2))]), carry=plain()).carry
        plain()
    """
    return Plain()


def adds_up(exchange: Exchange) -> bool:
    """Return whether the server uses only plain sums of messages, as over a star.

    Example:
        >>> import fedtorch as ft
        >>> adds_up(ft.star()), adds_up(ft.private_rows())
        (True, False)
    """
    sums = star()
    return (exchange.gather, exchange.merge, exchange.finish) == (sums.gather, sums.merge, sums.finish)


def hears_neighbours(exchange: Exchange, network: Network) -> bool:
    """Return whether nodes use only plain sums over their neighbours in `network`.

    Example:
        >>> import fedtorch as ft
        >>> ring = ft.Network.ring(5)
        >>> hears_neighbours(ft.graph(ring), ring), hears_neighbours(ft.graph(ft.Network.ring(6)), ring)
        (True, False)
    """
    from fedtorch.federation.exchanges.graph import Neighbourhood, graph

    if not isinstance(exchange.scatter(torch.zeros(network.nodes, 1), slice(0, 1)), Neighbourhood):
        return False
    one = Sum(torch.ones(1))  # of the first node
    received, wanted = (each.finish(each.gather(one, slice(0, 1))) for each in (exchange, graph(network)))
    return isinstance(received, Sum) and torch.equal(received.value, wanted.value)


def agreed(carry: Carry) -> dict[str, str]:
    """Return the fingerprint entries of `carry`, by name; none if nothing is hidden."""
    return {MESSAGES: str(carry)} if str(carry) else {}


def carried(algorithm: Algorithm, carry: Carry, population: str) -> Algorithm:
    """Return `algorithm` as a population of that name carries its messages.

    Raises:
        ValueError: the algorithm's messages cannot be carried so, or it needs them hidden better.
    """
    check_need(algorithm, carry, f"{population}(…, carry={carry!r})")
    return carry.carried(algorithm)


def check_need(algorithm: Algorithm, carry: Carry, where: str) -> None:
    """Raise ValueError unless `carry` hides as much as `algorithm` needs; `where` names the carrier in the error.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import privacy
        >>> plain_mean = ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))
        >>> noised = plain_mean | privacy.local_level(clip=1.0, noise=4.0, delta=1e-3, quorum=3)
        >>> check_need(noised, plain(), "the sites")
        Traceback (most recent call last):
        ...
        ValueError: Expected sums under masks of at least 3 clients, which privacy.local_level(quorum=3) relies on, ...
    """
    need = None if algorithm.budget is None else algorithm.budget.need
    if need is None:
        return
    if carry.minimum < need.clients:
        raise ValueError(
            f"Expected sums under masks of at least {need.clients} clients, which {need.what} relies on, but got "
            f"{where}: where single messages or smaller sums can be seen, the noise of other clients does not protect "
            f"them; take carry=sites.masked(minimum={need.clients})"
        )
    if not need.noise >= _STEPS * carry.step:
        raise ValueError(
            f"Expected shares of noise of at least {_STEPS * carry.step} on the grid of the masks, but got "
            f"{need.noise} of {need.what}; take more bits"
        )
