"""Connections to a port that have no stream yet: how many there may be, and for how long.

gRPC accepts connections and shakes hands before it lets anybody know. So the sockets of this process are looked
through, twice a second, for connections to the port; those that are too many, or have been there for too long without
a stream, are closed. This needs `/dev/fd`, which Linux and macOS have. Elsewhere gRPC's own times hold, and no numbers.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote

from fedtorch.protocol.rates import address_of
from fedtorch.sites.streams.hub import Limits

_EVERY = 0.5  # seconds between looks
_DESCRIPTORS = "/dev/fd"


class Connection(NamedTuple):
    """A connection to the port, and a socket of our own for it."""

    peer: str  # address and port, as gRPC writes them
    inode: int
    socket: socket.socket


class IdleConnections:
    """Looks after the connections to a port.

    Args:
        port: that gRPC listens at.
        limits: how many may have no stream, and for how long.
        besides: what else is to be looked after as often.

    Attributes:
        streams: the number of streams of each connection, by address and port.
    """

    def __init__(self, port: int, limits: Limits, besides: Callable[[], None] = lambda: None) -> None:
        self._port, self._limits, self._besides = port, limits, besides
        self.streams: Counter[str] = Counter()
        self._since: dict[int, float] = {}  # when a connection was first seen, by its inode
        self._closed, self._changed = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="fedtorch-idle", daemon=True)
        self._thread.start()

    def enter(self, peer: str) -> None:
        """Note a stream of a connection."""
        with self._changed:
            self.streams[unquote(peer)] += 1

    def leave(self, peer: str) -> None:
        """Note the end of a stream."""
        with self._changed:
            self.streams[unquote(peer)] -= 1
            self.streams += Counter()  # without those at zero

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join()

    def look(self, now: float) -> None:
        """Close the connections without a stream that are too many or too old, the newest of too many."""
        connections = connections_to(self._port)
        try:
            self._since = {each.inode: self._since.get(each.inode, now) for each in connections}
            with self._changed:
                idle = [each for each in connections if not self.streams[each.peer]]
            counts: Counter[str] = Counter()
            for each in sorted(idle, key=lambda each: self._since[each.inode]):
                address = address_of(each.peer)
                many = counts[address] >= self._limits.idle_each or counts.total() >= self._limits.idle
                if many or now - self._since[each.inode] > self._limits.idle_seconds:
                    with suppress(OSError):
                        each.socket.shutdown(socket.SHUT_RDWR)
                else:
                    counts[address] += 1
        finally:
            for each in connections:
                each.socket.close()

    def _watch(self) -> None:
        while not self._closed.wait(min(_EVERY, self._limits.idle_seconds / 2)):
            self.look(time.monotonic())
            self._besides()


def connections_to(port: int) -> list[Connection]:
    """Return the connections to a port of this process; their sockets are copies, to be closed."""
    every: dict[int, Connection] = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and status.st_ino not in every:  # a copy may be listed, too
                    each = _connection(int(name), port)
                    every |= {} if each is None else {each.inode: each}
    return list(every.values())


def _connection(descriptor: int, port: int) -> Connection | None:
    """Return the connection of a socket, if it is one to the port."""
    copy = socket.socket(fileno=os.dup(descriptor))  # the descriptor may soon be another's, its copy stays this one
    try:
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
            host, theirs = copy.getpeername()[:2]
            return Connection(_written(host, theirs), os.fstat(copy.fileno()).st_ino, copy)
    except OSError:  # it listens, or has ended
        pass
    copy.close()
    return None


def _written(host: str, port: int) -> str:
    """Return address and port as gRPC writes them, without its quotes."""
    address = ipaddress.ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return f"ipv4:{address}:{port}" if address.version == 4 else f"ipv6:[{host}]:{port}"
