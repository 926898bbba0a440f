r"""A server that proceeds by its clock and waits for no party: parties may be late by any delay.

Time is counted in ticks of the server. A party sends a value and waits for its gradient before its next step. A value
that is late by d ticks arrives d ticks later and is answered in the tick in which it arrives. In every tick the server
evaluates the likelihood at the last value of each party, however old, moves γ, and answers the parties whose values
arrived. So a slow party delays no other party: it makes as many steps as its connection allows, and γ and the other
parties move many steps between two of its own. Without delays it is the synchronous iteration, bit by bit.

*The bias.* Training a plain network on all rows has the same stationary points, since at a stationary point old values
equal new ones. A variational fit has not quite the same. A value that is used for d ticks is one draw of z_j for all of
them, γ moves along it in each, and the gradients of the other parties are correlated over these ticks. To the first
order in the learning rate this is noise and no bias, and both vanish with the rate; `experiments.vfl.clock` measures
it.

Between organisations ticks are seconds: `server_half(…, tick=)` of `fedtorch.vfl.nodes.iteration`. Here the clock
counts ticks and not seconds, and delays are a function of the party and the number of its message, so that a run is
the same on any machine and when it is resumed. A party that waits has not moved since it sent its value, so a resumed
run computes that value anew.

Source: Chen, Jin, Sun, Yin, "VAFL: a method of vertical asynchronous federated learning", 2020, arXiv:2007.06081,
whose server moves at each message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import wire
from fedtorch._representation import without_rows
from fedtorch.protocol.halves import Half, Send, Traffic
from fedtorch.vfl.nodes.iteration import POWER, protocol_of, unbound_half
from fedtorch.vfl.nodes.node import Iteration, PartyNode, ServerNode, Summand, Value

Delays = Callable[[int, int], int]  # (party, from 0 on, number of its message) -> ticks


@without_rows
class _Sent(NamedTuple):
    """A value on its way to the server, and the half of the party that sent it."""

    due: int  # the tick in which it arrives
    value: Value | Summand
    half: Half  # of the party, which waits for the answer


class Clock:
    """The ticks of a server and its parties.

    Args:
        server: the server.
        parties: all parties.
        delays: (party, from 0 on, number of its message) -> by how many ticks the message is late.
        local_steps: steps that a party takes per answer.

    Attributes:
        numbers: how many values each party has sent, `(J,)`.

    Raises:
        ValueError: a power model's protocol, parts that draw no noise of their own, or a negative delay.
    """

    def __init__(self, server: ServerNode, parties: Sequence[PartyNode], delays: Delays, local_steps: int = 1) -> None:
        if protocol_of(server) is POWER:
            raise ValueError("Expected an iteration of one message up and one down, but got a power model")
        if any(node.part.key is None for node in (server, *parties)):
            raise ValueError("Expected parts that draw their own noise, but got others; give vfl.parts(..., key=)")
        self.server, self.parties, self.delays, self.local_steps = server, list(parties), delays, local_steps
        self.numbers = torch.zeros(len(self.parties), dtype=torch.int64)
        self.due = torch.zeros(len(self.parties), dtype=torch.int64)
        self._under_way: dict[int, _Sent] = {}

    def tick(self, now: int) -> tuple[Tensor, Traffic]:
        """Process a tick; return the parties whose values arrived, from 0 on, and the bytes that moved.

        Args:
            now: number of the tick, from 0 on, one after the other.
        """
        for j in range(len(self.parties)):
            if j not in self._under_way:
                self._under_way[j] = self._send(j, now)
        arrived = [j for j, sent in sorted(self._under_way.items()) if sent.due <= now]
        for j in arrived:
            self.server.values[j] = self._under_way[j].value
        if any(value is None for value in self.server.values):
            return torch.tensor([], dtype=torch.int64), Traffic(0, 0)
        up = sum(wire.size(self._under_way[j].value) for j in arrived)
        return torch.tensor(arrived, dtype=torch.int64), Traffic(up, self._answer(now, arrived))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a resumed run needs besides the nodes' own states."""
        return {"numbers": self.numbers.clone(), "due": self.due.clone()}

    def load_state_dict(self, flat: dict[str, Tensor]) -> None:
        """Restore the state that `state_dict` returned; the nodes must have been restored to their states of then."""
        self.numbers, self.due, self._under_way = flat["numbers"].clone(), flat["due"].clone(), {}
        for j, number in enumerate(self.numbers.tolist()):
            if number and int(self.due[j]) >= 0:
                self._under_way[j] = self._proposed(j, number - 1, int(self.due[j]))

    def _send(self, j: int, now: int) -> _Sent:
        """Make a party send its next value."""
        number = int(self.numbers[j])
        delay = self.delays(j, number)
        if delay < 0:
            raise ValueError(f"Expected delays of at least 0 ticks, but got {delay} of {self.parties[j].part.name!r}")
        self.numbers[j] += 1
        self.due[j] = now + delay
        return self._proposed(j, number, now + delay)

    def _proposed(self, j: int, number: int, due: int) -> _Sent:
        half = unbound_half(self.parties[j], [Iteration(step=number)], self.local_steps)
        sent = next(half)
        assert isinstance(sent, Send)
        next(half)
        return _Sent(due, sent.message, half)

    def _answer(self, now: int, arrived: Sequence[int]) -> int:
        """Evaluate the likelihood at all last values and answer the parties whose values arrived; return the bytes."""
        down, ranks = 0, [j + 1 for j in arrived]
        drawn = self.server.draw(Iteration(step=now))
        for step in protocol_of(self.server).server(self.server, drawn, ranks, None):
            assert isinstance(step, Send)
            assert isinstance(step.to, int)
            down += wire.size(step.message)
            _finish(self._under_way.pop(step.to - 1).half, step)
            self.due[step.to - 1] = -1
        return down


def _finish(half: Half, step: Send) -> None:
    """Send a waiting party its answer; the party takes its step."""
    try:
        half.send(step.message)
    except StopIteration:
        return
    raise RuntimeError("Expected a party that ends its step after one answer, but got one that waits for another")
