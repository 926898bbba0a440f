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

With this in a file of its own, a party takes part by `fedtorch join HOST:PORT --half FILE`.

Nothing is pickled, and a payload of another structure, shape or dtype than expected, or with NaN, is refused with its
sender's name. A party that is lost, late or refused ends the protocol at all nodes, and everybody hears its name:
a half cannot be begun in the middle. When a half's driver returns, everything has arrived, and the stream may be used
for another protocol.
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Iterator, Sequence
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
    if len(set(parties)) < len(parties):
        raise ValueError(f"Expected parties of different names, but got {list(parties)}")
    try:
        peers = _meet(hub, parties, seconds, patience)
        nodes: dict[Name, _Peer] = {**dict(enumerate(peers, start=1)), **dict(zip(parties, peers))}
        result = drive(half, lambda step: nodes[step.to].send(step), lambda step: nodes[step.sender].receive(step))
        for peer in peers:
            peer.hear_end()
        for peer in peers:
            peer.say_end()
    except ConnectionError as error:
        _give_up(hub, parties, str(error))
        raise
    except BaseException as error:
        _give_up(hub, parties, f"the server failed with {type(error).__name__}")
        raise
    return result, Traffic(sum(peer.received for peer in peers), sum(peer.sent for peer in peers))


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
    server = _Peer("the server", link, seconds)
    try:
        result = drive(half, server.send, server.receive)
        server.say_end()
        server.hear_end()
    except BaseException:
        link.close()
        raise
    return result, Traffic(server.sent, server.received)


def read_half(path: Path | str) -> Half:
    """The half that a file of the party's own makes, by its function `half`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no function `half`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"Expected a file with the party's half, but {path} is not there")
    half = runpy.run_path(str(path)).get("half")
    if not callable(half):
        raise ValueError(f"Expected {path} to define a function half(); see fedtorch.vfl.remote")
    return half()


class _Peer:
    """Another node, at the end of a link, and the bytes of payloads to and from it."""

    def __init__(self, name: str, link: Link, seconds: float) -> None:
        self.name, self._link, self._seconds = name, link, seconds
        self.sent = self.received = 0

    def send(self, step: Send) -> None:
        payload = encode(step)
        with _naming(self.name):
            self._link.send(payload)
        self.sent += len(payload)

    def receive(self, step: Receive) -> Tree:
        with _naming(self.name):
            payload = self._link.receive(self._seconds)
        self.received += len(payload)
        if payload == _END:
            raise wire.PayloadError(f"payload of {self.name}: expected another message, but its half is done")
        return decode(payload, step, self.name)

    def say_end(self) -> None:
        with _naming(self.name):
            self._link.send(_END)

    def hear_end(self) -> None:
        with _naming(self.name):
            payload = self._link.receive(self._seconds)
        if payload != _END:
            raise wire.PayloadError(f"payload of {self.name}: expected no more messages, but got {len(payload)} bytes")


def _meet(hub: Hub, parties: Sequence[str], seconds: float, patience: float) -> list[_Peer]:
    """All parties, once they are connected."""
    ends, peers = time.monotonic() + patience, []
    for name in parties:
        with _naming(name):
            peers.append(_Peer(name, hub.meet(name, max(ends - time.monotonic(), 0.0)), seconds))
    return peers


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Says whose stream it was that ended, or on which nothing came."""
    try:
        yield
    except OSError as error:
        raise ConnectionError(f"{name} is lost: {error}") from error


def _give_up(hub: Hub, parties: Sequence[str], reason: str) -> None:
    for name in parties:
        hub.drop(name, f"the protocol has ended: {reason}")
