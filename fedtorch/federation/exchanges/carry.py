"""Carry messages to whoever adds them up: readable, in sums under masks, or sealed for neighbours.

An exchange says who hears whom; how much of it those in between can read is the population's argument `carry=`. `plain`
hides nothing. `fedtorch.sites.secure` has sums under masks, `fedtorch.sites.envelopes` sealed envelopes. What rests on
sums that nobody can take apart declares it, `Budget.need`, and no run begins where its population does not meet that.
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
    """Carry messages between clients, and hides as much of them as it says."""

    @property
    def minimum(self) -> int:
        """Count the clients of the smallest sum that whoever carries messages can read; 1 for single messages."""
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
        """Return the network whose neighbours hear each other in sealed envelopes, or None."""
        ...

    def __str__(self) -> str:
        """Say what all parties have to agree on; empty where nothing is hidden."""
        ...

    def carried(self, algorithm: Algorithm) -> Algorithm:
        """Return `algorithm` as it works where its messages are carried so; raise ValueError where it cannot."""
        ...

    def check(self, clients: int, sites: int | None = None) -> None:
        """Raise ValueError where messages of so many clients, or of so many sites, cannot be carried so."""
        ...


@dataclass(frozen=True)
class Plain:
    """Carry messages readable; see `plain`."""

    minimum: int = 1
    step: float = 0.0
    masks: None = None
    network: None = None

    def __str__(self) -> str:
        return ""

    def __repr__(self) -> str:
        return "plain()"

    def carried(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm as it is."""
        return algorithm

    def check(self, clients: int, sites: int | None = None) -> None:
        """Accept any number."""


def plain() -> Plain:
    """Return the carrying of messages that hides nothing from whoever is in between, the default of all populations.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.sites import plain
        >>> ft.InProcess(ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2))]), carry=plain()).carry
        plain()
    """
    return Plain()


def adds_up(exchange: Exchange) -> bool:
    """Return whether the server needs the plain sums of messages and nothing else of them, as over a star.

    Example:
        >>> import fedtorch as ft
        >>> adds_up(ft.star()), adds_up(ft.private_rows())
        (True, False)
    """
    sums = star()
    return (exchange.gather, exchange.merge, exchange.finish) == (sums.gather, sums.merge, sums.finish)


def hears_neighbours(exchange: Exchange, network: Network) -> bool:
    """Return whether nodes hear the plain sums over their neighbours in `network` and nothing else.

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
    """Return what fingerprints say of `carry`, by name; nothing where nothing is hidden."""
    return {MESSAGES: str(carry)} if str(carry) else {}


def carried(algorithm: Algorithm, carry: Carry, population: str) -> Algorithm:
    """Return `algorithm` as a population of that name carries its messages.

    Raises:
        ValueError: the algorithm's messages cannot be carried so, or it needs them hidden better.
    """
    check_need(algorithm, carry, f"{population}(…, carry={carry!r})")
    return carry.carried(algorithm)


def check_need(algorithm: Algorithm, carry: Carry, where: str) -> None:
    """Raise ValueError unless `carry` hides what `algorithm` needs to be hidden; `where` names who carries.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import privacy
        >>> plain_mean = ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))
        >>> noised = plain_mean | privacy.local_level(clip=1.0, noise=4.0, delta=1e-3, quorum=3)
        >>> check_need(noised, plain(), "the sites")
        Traceback (most recent call last):
        ...
        ValueError: Expected sums under masks of at least 3 clients, on which privacy.local_level(quorum=3) rests, ...
    """
    need = None if algorithm.budget is None else algorithm.budget.need
    if need is None:
        return
    if carry.minimum < need.clients:
        raise ValueError(
            f"Expected sums under masks of at least {need.clients} clients, on which {need.what} rests, but got "
            f"{where}: where single messages or smaller sums can be seen, others' noise protects nobody; take "
            f"carry=sites.masked(minimum={need.clients})"
        )
    if not need.noise >= _STEPS * carry.step:
        raise ValueError(
            f"Expected shares of noise of at least {_STEPS * carry.step} on the grid of the masks, but got "
            f"{need.noise} of {need.what}; take more bits"
        )
