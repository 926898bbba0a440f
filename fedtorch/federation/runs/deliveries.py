"""Simulated duplicate and reordered deliveries of messages, and a receiver that accepts each message once.

Every client's message travels as bytes that name its client and its round. A network delivers the messages of a block
in a random order, and some a second time: in the same round or in a later one. The receiver knows which round is open
and which clients it has heard in it, and refuses the rest, so that sums are those without repetitions, up to the
rounding of another order. A round is named by its key: two rounds of a run never have the same, so that nothing has to
be counted or saved, and what was on its way when a run was killed is stale after it has been resumed.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random, tree, wire
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.exchange import indices
from fedtorch.federation.populations.population import Clients, Pending
from fedtorch.federation.runs.faults import Hit
from fedtorch.federation.turn import Turn
from fedtorch.random.draws import bits
from fedtorch.tree import Rows, Tree

_NETWORK = -1  # folded into a round's key; clients fold in the numbers of their names, which are not negative


class Receiver:
    """Accepts every client's message of the open round once.

    Attributes:
        refused: number of payloads that were repeated or stale.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._round: int | None = None
        self._heard: set[int] = set()

    def open(self, round: int) -> None:
        """Start a round; messages of all other rounds are stale from now on."""
        self._round, self._heard = round, set()

    def accepts(self, payload: bytes) -> int | None:
        """Return the client of a payload, or None if the payload is stale or a repetition."""
        sender = wire.metadata(payload)
        client, round = sender.get("client"), sender.get("round")
        if client is None or round != self._round or client in self._heard:
            self.refused += 1
            return None
        self._heard.add(client)
        return client


class _Delivery(NamedTuple):
    """A message in transit."""

    arrival: int  # position within a block; this round's order does not depend on other rounds' messages
    payload: bytes


class Deliveries:
    """Delivers the messages of an algorithm's clients in a random order, and some of them twice.

    Args:
        algorithm: the algorithm whose messages are delivered.
        twice: which clients' messages are delivered twice.

    Attributes:
        algorithm: the same, with an exchange that gathers the accepted messages of a round.
        receiver: accepts each message once.
    """

    def __init__(self, algorithm: Algorithm, twice: Hit) -> None:
        self.receiver = Receiver()
        self._exchange, self._twice = algorithm.exchange, twice
        self.algorithm = dataclasses.replace(algorithm, exchange=algorithm.exchange._replace(gather=self._gather))
        self._round: int | None = None  # None between rounds, when nothing is delivered
        self._turn = Turn(random.key(0), 0)  # the network's own, with one draw per client name
        self._waiting: list[_Delivery] = []  # second deliveries due with the next block or round

    def step(
        self, clients: Clients, outbox: Tree, cohort: Tensor | None, turn: Turn, lost: Tensor | None = None
    ) -> Pending:
        """Run the clients of a cohort and deliver their messages; see `Clients.step`."""
        self._round, self._turn = int(turn.key), turn.with_key(random.fold_in(turn.key, _NETWORK))
        self.receiver.open(self._round)
        try:
            pending = clients.step(outbox, cohort, turn, lost)
        finally:
            self._round = None
        return pending._replace(repeated=pending.ids[self._repeats(pending.ids)])

    def _repeats(self, ids: Tensor) -> Tensor:
        """Return which clients' messages are delivered twice, `(M,)` bool."""
        return self._twice(self._keys(0, ids), ids)

    def _keys(self, purpose: int, ids: Tensor) -> Tensor:
        return self._turn.with_key(random.fold_in(self._turn.key, purpose)).keys(ids)

    def _gather(self, messages: Tree, ids: Rows) -> Tree:
        """Return the partial aggregate of the accepted messages, which are all but repetitions."""
        if self._round is None:
            return self._exchange.gather(messages, ids)
        arrived, later = self._send(messages, indices(ids), self._round)
        arrived, self._waiting = sorted(self._waiting + arrived), later
        accepted = [(self.receiver.accepts(delivery.payload), delivery.payload) for delivery in arrived]
        taken = [(client, payload) for client, payload in accepted if client is not None]
        if not taken:
            return self._exchange.gather(messages, ids)
        like = tree.map(lambda leaf: leaf[0], messages)
        rows = tree.stack([wire.decode(payload, like, client=client, finite=False) for client, payload in taken])
        rows = tree.map(lambda new, old: new.to(old.device), rows, messages)
        return self._exchange.gather(rows, torch.tensor([client for client, _ in taken]))

    def _send(self, messages: Tree, ids: Tensor, round: int) -> tuple[list[_Delivery], list[_Delivery]]:
        """Return (messages that arrive with this block, second deliveries that arrive with the next)."""
        now: list[_Delivery] = []
        later: list[_Delivery] = []
        arrivals = bits(self._keys(1, ids), 2).tolist()
        twice = self._repeats(ids).tolist()
        at_once = random.bernoulli(self._keys(2, ids), 0.5).tolist()
        for row, client in enumerate(ids.tolist()):
            message = tree.map(lambda leaf, row=row: leaf[row], messages)
            payload = wire.encode(message, {"client": client, "round": round})
            now.append(_Delivery(arrivals[row][0], payload))
            if twice[row]:
                (now if at_once[row] else later).append(_Delivery(arrivals[row][1], payload))
        return now, later
