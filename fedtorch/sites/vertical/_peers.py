"""The other nodes of a protocol at the ends of links, for the drivers in `_once` and `_resuming`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedtorch import wire
from fedtorch.protocol.halves import Half, Heard, Name, Receive, Send, decode, drive, encode
from fedtorch.sites.streams.hub import Hub, Link
from fedtorch.tree import Tree

_END = b""  # no payload is empty


class PeerLost(ConnectionError):
    """Raised if a node's stream has ended, or nothing came on it in time; the node may reconnect."""


class PeerLate(PeerLost):
    """Raised if nothing came from a node in time."""


class Peer:
    """Another node at the end of a link, with counts of the payloads' bytes to and from it."""

    def __init__(self, name: str, link: Link, seconds: float) -> None:
        self.name, self.link, self._seconds = name, link, seconds
        self.sent = self.received = 0

    def send(self, step: Send) -> None:
        """Send a message; raise `PeerLost` if the stream has ended or is not read."""
        payload = encode(step)
        with naming(self.name):
            self.link.send(payload)
        self.sent += len(payload)

    def receive(self, step: Receive) -> Tree:
        """Return the next message; raise `PeerLost` if none comes, and `PayloadError` if it is not the expected one."""
        with naming(self.name):
            payload = self.link.receive(self._seconds if step.seconds is None else step.seconds)
        self.received += len(payload)
        if payload == _END:
            raise wire.PayloadError(f"payload of {self.name}: expected another message, but its half is done")
        return decode(payload, step, self.name)

    def send_end(self) -> None:
        """Send that this node's half is done."""
        with naming(self.name):
            self.link.send(_END)

    def receive_end(self) -> None:
        """Wait until the other node's half is done."""
        with naming(self.name):
            payload = self.link.receive(self._seconds)
        if payload != _END:
            raise wire.PayloadError(f"payload of {self.name}: expected no more messages, but got {len(payload)} bytes")


def check_names(parties: Sequence[str]) -> None:
    """Raise ValueError for two parties with one name."""
    if len(set(parties)) < len(parties):
        raise ValueError(f"Expected parties with different names, but got {list(parties)}")


def meet(hub: Hub, parties: Sequence[str], seconds: float, timeout: float) -> dict[str, Peer]:
    """Return all parties by name, once they are connected; raise `PeerLost` if one does not connect in time."""
    ends, peers = time.monotonic() + timeout, {}
    for name in parties:
        with naming(name):
            peers[name] = Peer(name, hub.meet(name, max(ends - time.monotonic(), 0.0)), seconds)
    return peers


def drive_with(half: Half, peers: Mapping[str, Peer]) -> Any:
    """Run the server's half with parties by their names and, in the same order, by number from 1 on."""
    nodes: dict[Name, Peer] = dict(enumerate(peers.values(), start=1))
    nodes.update(peers)

    def several(step: Receive) -> Heard:
        """Receive a message from each sender, until the time is over."""
        ends, received = None if step.seconds is None else time.monotonic() + step.seconds, Heard({}, {})
        for name in step.sender:
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            try:
                received.messages[name] = nodes[name].receive(step.of(name, left))
            except PeerLate as error:
                if ends is None:
                    raise
                received.missing[name] = str(error)
        return received

    return drive(half, lambda step: nodes[step.to].send(step), lambda step: nodes[step.sender].receive(step), several)


def give_up(hub: Hub, parties: Sequence[str], error: BaseException) -> None:
    """End the parties' streams, with the message of a connection error and only the kind of any other error."""
    reason = str(error) if isinstance(error, ConnectionError) else f"the server failed with {type(error).__name__}"
    for name in parties:
        hub.drop(name, f"the protocol has ended: {reason}")


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Add the node's name to errors of its stream; they become `PeerLost` if the node may reconnect."""
    try:
        yield
    except PermissionError as error:
        raise ConnectionError(f"{name} is lost: {error}") from error
    except TimeoutError as error:
        raise PeerLate(f"{name} is lost: {error}") from error
    except OSError as error:
        raise PeerLost(f"{name} is lost: {error}") from error
