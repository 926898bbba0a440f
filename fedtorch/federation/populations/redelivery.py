"""Messages that come twice, in a later round, or out of order; and the receiver that takes each of them once.

Every client's message travels as bytes that name its client and its round. A network delivers the messages of a block
in a random order, and some a second time: in the same round or in a later one. The receiver knows which round is open
and whom it has heard in it, and refuses the rest, so that sums are those without repetitions, up to the rounding of
another order. A round is named by its key: two rounds of a run never have the same, so that nothing has to be counted
or saved, and what was on its way when a run was killed is stale after it has been resumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree, wire
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithm import Algorithm, Turn
from fedtorch.federation.exchanges.exchange import Exchange, indices
from fedtorch.federation.populations.clients import Clients, Pending
from fedtorch.federation.populations.in_process import Population
from fedtorch.tree import Rows, Tree

_NETWORK = -1  # folded into a round's key; clients fold in their ids, which are not negative


class Receiver:
    """Takes every client's message of the open round once.

    Attributes:
        refused: how many payloads came again or too late.

    Example:
        >>> import torch
        >>> from fedtorch import wire
        >>> receiver, letter = Receiver(), wire.encode(torch.ones(2), {"client": 3, "round": 7})
        >>> receiver.open(round=7)
        >>> receiver.accepts(letter), receiver.accepts(letter), receiver.refused  # the client; it came again
        (3, None, 1)
    """

    def __init__(self) -> None:
        self.refused = 0
        self._round: int | None = None
        self._heard: set[int] = set()

    def open(self, round: int) -> None:
        """Starts a round; messages of all others are stale from now on."""
        self._round, self._heard = round, set()

    def accepts(self, payload: bytes) -> int | None:
        """The client whose message this is, or None if it is stale or has been heard."""
        sender = wire.metadata(payload)
        client, round = sender.get("client"), sender.get("round")
        if client is None or round != self._round or client in self._heard:
            self.refused += 1
            return None
        self._heard.add(client)
        return client


class Redelivered:
    """A population whose messages pass through an unreliable network: out of order, and some of them twice.

    The sums are those of `population`. Its clients run where they ran before, and `Round.repeated` names those whose
    message came twice. Bytes are what the clients send, without repetitions.

    Args:
        population: whose messages travel.
        probability: that a message is delivered a second time.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=8, seed=0)
        >>> algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1)))
        >>> round = ft.Run(algorithm, ft.Redelivered(ft.InProcess(data), 1.0)).step()
        >>> round.repeated
        tensor([0, 1, 2, 3, 4, 5, 6, 7])

    Raises:
        ValueError: a probability outside [0, 1].
    """

    def __init__(self, population: Population, probability: float = 0.5) -> None:
        if not 0 <= probability <= 1:
            raise ValueError(f"Expected a probability between 0 and 1, but got {probability}")
        self.population, self.probability = population, probability
        self.data, self.names = population.data, population.names
        self.device, self.leads, self.carry = population.device, population.leads, population.carry

    def bind(self, algorithm: Algorithm, state: Tree) -> RedeliveredClients:
        """The clients for one run of `algorithm`, and the network between them and the server."""
        network = _Network(algorithm.exchange, self.probability)
        exchange = algorithm.exchange._replace(gather=network.gather)
        return RedeliveredClients(
            self.population.bind(dataclasses.replace(algorithm, exchange=exchange), state), network
        )

    def __repr__(self) -> str:
        return f"Redelivered({self.population!r}, {self.probability})"


class RedeliveredClients:
    """The clients behind a network.

    Args:
        clients: whose messages travel.
        network: that brings them.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2))] * 3)
        >>> everything_twice = ft.Redelivered(ft.InProcess(data), 1.0)
        >>> algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(1, 1, bias=False)))
        >>> run = ft.run(algorithm, everything_twice, rounds=4)
        >>> run.clients.refused  # of 12 that come again; the others are still on their way
        10
    """

    def __init__(self, clients: Clients, network: _Network) -> None:
        self.clients, self.network = clients, network

    @property
    def refused(self) -> int:
        """How many payloads this process has refused: repetitions, in the same round or in a later one."""
        return self.network.receiver.refused

    def step(self, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None = None) -> Pending:
        """Runs a cohort; see `Clients.step`."""
        self.network.open(turn.key)
        pending = self.clients.step(outbox, cohort, turn, lost)
        return pending._replace(repeated=pending.ids[self.network.repeats(pending.ids)])

    def evaluate(self, outbox: Tree, data: FederatedData, function: Callable[[Tree, ClientData], Tree]) -> Tree:
        """Applies `function` to stacked clients; see `Clients.evaluate`."""
        return self.clients.evaluate(outbox, data, function)

    def total(self) -> Tree:
        """What all clients tell for good, told anew in a round of its own; see `Clients.total`."""
        self.network.open(self.network.next_key())
        return self.clients.total()

    def tensors(self, outbox: Tree, ids: Tensor) -> Tree:
        """The tensors that clients predict with."""
        return self.clients.tensors(outbox, ids)

    def state_dict(self) -> dict[str, Tensor]:
        """The clients' states; what is on its way is not saved, because it would be refused."""
        return self.clients.state_dict()

    def load_state_dict(self, flat: dict[str, Tensor]) -> None:
        """Replaces the clients' states."""
        self.clients.load_state_dict(flat)

    def meet(self) -> None:
        """Waits for the other processes, if there are any."""
        self.clients.meet()

    def introduce(self, about: Callable[[], Mapping[str, str]]) -> None:
        """Says what a run is about to do; see `Clients.introduce`."""
        self.clients.introduce(about)


class _Letter(NamedTuple):
    """A message on its way."""

    arrival: int  # when, within a block; the order of this round's letters does not depend on those of others
    payload: bytes


class _Network:
    """Brings messages to the receiver, and what has arrived to the exchange.

    Args:
        exchange: of the algorithm.
        probability: of a second delivery.
    """

    def __init__(self, exchange: Exchange, probability: float) -> None:
        self.receiver = Receiver()
        self._exchange, self._probability = exchange, probability
        self._round, self._key = 0, random.key(0)
        self._waiting: list[_Letter] = []  # second deliveries that come with the next block or round

    def open(self, key: Tensor) -> None:
        """Starts the round of this key."""
        self._round, self._key = int(key), random.fold_in(key, _NETWORK)
        self.receiver.open(self._round)

    def next_key(self) -> Tensor:
        """The key of a round that follows from the open one."""
        return random.fold_in(self._key, 3)

    def repeats(self, ids: Tensor) -> Tensor:
        """Whose messages are delivered twice, `(M,)` bool."""
        return random.bernoulli(random.fold_in(random.fold_in(self._key, 0), ids), self._probability)

    def gather(self, messages: Tree, ids: Rows) -> Tree:
        """The partial aggregate of what the receiver takes."""
        letters, later = self._send(messages, indices(ids))
        letters, self._waiting = sorted(self._waiting + letters), later
        heard = [(self.receiver.accepts(letter.payload), letter.payload) for letter in letters]
        taken = [(client, payload) for client, payload in heard if client is not None]
        if not taken:
            return self._exchange.gather(messages, ids)
        like = tree.map(lambda leaf: leaf[0], messages)
        rows = tree.stack([wire.decode(payload, like, client=client, finite=False) for client, payload in taken])
        rows = tree.map(lambda new, old: new.to(old.device), rows, messages)
        return self._exchange.gather(rows, torch.tensor([client for client, _ in taken]))

    def _send(self, messages: Tree, ids: Tensor) -> tuple[list[_Letter], list[_Letter]]:
        """(letters that arrive with this block, second deliveries that arrive with the next)."""
        now: list[_Letter] = []
        later: list[_Letter] = []
        arrivals = random.bits(random.fold_in(random.fold_in(self._key, 1), ids), 2).tolist()
        twice = self.repeats(ids).tolist()
        at_once = random.bernoulli(random.fold_in(random.fold_in(self._key, 2), ids), 0.5).tolist()
        for row, client in enumerate(ids.tolist()):
            message = tree.map(lambda leaf, row=row: leaf[row], messages)
            payload = wire.encode(message, {"client": client, "round": self._round})
            now.append(_Letter(arrivals[row][0], payload))
            if twice[row]:
                (now if at_once[row] else later).append(_Letter(arrivals[row][1], payload))
        return now, later
