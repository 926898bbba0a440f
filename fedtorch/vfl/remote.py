"""One node per organisation: halves of a protocol over `fedtorch.transport`, with bounded sizes and waits.

The server (or leader) has a hub, a party a link to it. Every node runs its own half with its own data, and nothing else
leaves it:

    over_hub(server_half(server, iterations), hub, ["clinic", "laboratory"])      # the server
    over_link(party_half(party, iterations), link)                                # a party

A half may be several, one after the other, so that rows are aligned and models of them trained on one stream:

    def half():
        rows = yield from following(Holder(identifiers, "clinic"), "leader")
        party = PartyNode(network.parties[0], VerticalData((x[rows],), unknown))
        yield from party_half(party, iterations)

Nothing is pickled, and a payload of another structure, shape or dtype than expected, or with NaN, is refused with its
sender's name. A party that is lost, late or refused ends the protocol at all nodes, and everybody hears its name:
a half cannot be begun in the middle; `resuming` has drivers that go on. When a half's driver returns, everything has
arrived, and the stream may be used for another protocol.
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtorch import expected, wire
from fedtorch.transport.hub import Hub, Link
from fedtorch.tree import Tree
from fedtorch.vfl.protocol import Half, Name, Receive, Send, Traffic, decode, drive, encode

SECONDS = 600.0
_END = b""  # no payload is empty


def over_hub(
    half: Half, hub: Hub, parties: Sequence[str], *, seconds: float = SECONDS, patience: float = SECONDS
) -> tuple[Any, Traffic]:
    """Runs the server's half; returns its result, and the bytes of payloads.

    Args:
        half: of the server, or of the leader of an alignment.
        hub: where the parties connect; meanwhile it is used for nothing else with them.
        parties: the names under which they connect; in the protocol party j from 1 on, or by its name.
        seconds: the longest wait for a message.
        patience: the longest wait for all parties to connect at first.

    Raises:
        ConnectionError: a party did not come, was lost or late, or may not be here any more.
        fedtorch.wire.PayloadError: a message that is not what was expected.
        ValueError: two parties of one name.
    """
    expected.positive(seconds=seconds, patience=patience)
    check_names(parties)
    try:
        peers = meet(hub, parties, seconds, patience)
        result = drive_with(half, peers)
        for peer in peers.values():
            peer.hear_end()
        for peer in peers.values():
            peer.say_end()
    except BaseException as error:
        give_up(hub, parties, error)
        raise
    return result, Traffic(sum(peer.received for peer in peers.values()), sum(peer.sent for peer in peers.values()))


def over_link(half: Half, link: Link, *, seconds: float = SECONDS) -> tuple[Any, Traffic]:
    """Runs a party's half; returns its result, and the bytes of payloads.

    Args:
        half: of this party; all its messages are to and from the server.
        link: to the server; closed where the half fails.
        seconds: the longest wait for a message, which may be one for all other parties.

    Raises:
        ConnectionError: the server was lost or late, or has given up; why.
        fedtorch.wire.PayloadError: a message that is not what was expected.
    """
    expected.positive(seconds=seconds)
    server = Peer("the server", link, seconds)
    try:
        result = drive(half, server.send, server.receive)
        server.say_end()
        server.hear_end()
    except BaseException:
        link.close()
        raise
    return result, Traffic(server.sent, server.received)


def read_half(path: Path | str) -> Callable[[Any], Half]:
    """The function `half` of a party's own file: from a `fedtorch.vfl.journal.Journal` to the party's half.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no function `half`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"Expected a file with the party's half, but {path} is not there")
    half = runpy.run_path(str(path)).get("half")
    if not callable(half):
        raise ValueError(f"Expected {path} to define a function half(journal); see fedtorch.vfl.journal")
    return half


class Lost(ConnectionError):
    """A node's stream has ended, or nothing came on it in time; it may connect again."""


class Peer:
    """Another node, at the end of a link, and the bytes of payloads to and from it."""

    def __init__(self, name: str, link: Link, seconds: float) -> None:
        self.name, self.link, self._seconds = name, link, seconds
        self.sent = self.received = 0

    def send(self, step: Send) -> None:
        """Sends a message; raises `Lost` where it is not taken."""
        payload = encode(step)
        with naming(self.name):
            self.link.send(payload)
        self.sent += len(payload)

    def receive(self, step: Receive) -> Tree:
        """The next message; raises `Lost` where none comes, and `PayloadError` where it is another."""
        with naming(self.name):
            payload = self.link.receive(self._seconds)
        self.received += len(payload)
        if payload == _END:
            raise wire.PayloadError(f"payload of {self.name}: expected another message, but its half is done")
        return decode(payload, step, self.name)

    def say_end(self) -> None:
        """Says that this node's half is done."""
        with naming(self.name):
            self.link.send(_END)

    def hear_end(self) -> None:
        """Waits until the other's half is done."""
        with naming(self.name):
            payload = self.link.receive(self._seconds)
        if payload != _END:
            raise wire.PayloadError(f"payload of {self.name}: expected no more messages, but got {len(payload)} bytes")


def check_names(parties: Sequence[str]) -> None:
    """Raises ValueError for two parties of one name."""
    if len(set(parties)) < len(parties):
        raise ValueError(f"Expected parties of different names, but got {list(parties)}")


def meet(hub: Hub, parties: Sequence[str], seconds: float, patience: float) -> dict[str, Peer]:
    """All parties by name, once they are connected; raises `Lost` where one does not come."""
    ends, peers = time.monotonic() + patience, {}
    for name in parties:
        with naming(name):
            peers[name] = Peer(name, hub.meet(name, max(ends - time.monotonic(), 0.0)), seconds)
    return peers


def drive_with(half: Half, peers: Mapping[str, Peer]) -> Any:
    """Runs the server's half with parties by their names and, in the same order, by number from 1 on."""
    nodes: dict[Name, Peer] = dict(enumerate(peers.values(), start=1))
    nodes.update(peers)
    return drive(half, lambda step: nodes[step.to].send(step), lambda step: nodes[step.sender].receive(step))


def give_up(hub: Hub, parties: Sequence[str], error: BaseException) -> None:
    """Ends the parties' streams; of an error that is not about connections they hear only its kind."""
    reason = str(error) if isinstance(error, ConnectionError) else f"the server failed with {type(error).__name__}"
    for name in parties:
        hub.drop(name, f"the protocol has ended: {reason}")


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Says whose stream it was that ended, or on which nothing came; `Lost` where it may come back."""
    try:
        yield
    except PermissionError as error:
        raise ConnectionError(f"{name} is lost: {error}") from error
    except OSError as error:
        raise Lost(f"{name} is lost: {error}") from error
