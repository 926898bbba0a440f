"""Limits on the number and age of connections to a port that have no stream yet.

gRPC accepts connections and completes handshakes without notice. So twice a second the sockets of this process are
searched for connections to the port, and those without a stream are closed if they are too many or too old. This needs
`/dev/fd`, which Linux and macOS have. Elsewhere only gRPC's own time limits apply, and none on numbers.
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

_EVERY = 0.5  # seconds between checks
_DESCRIPTORS = "/dev/fd"


class Connection(NamedTuple):
    """A connection to the port, with a duplicate of its socket."""

    peer: str  # address and port, as gRPC writes them
    inode: int
    socket: socket.socket


class IdleConnections:
    """Closes connections to a port that have no stream and are too many or too old.

    Args:
        port: the port at which gRPC listens.
        limits: limits on the number and age of connections without a stream.
        besides: called after every check.

    Attributes:
        streams: number of streams of each connection, by address and port.
    """

    def __init__(self, port: int, limits: Limits, besides: Callable[[], None] = lambda: None) -> None:
        self._port, self._limits, self._besides = port, limits, besides
        self.streams: Counter[str] = Counter()
        self._since: dict[int, float] = {}  # when a connection was first seen, by its inode
        self._closed, self._changed = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="fedtorch-idle", daemon=True)
        self._thread.start()

    def enter(self, peer: str) -> None:
        """Count a new stream of a connection."""
        with self._changed:
            self.streams[unquote(peer)] += 1

    def leave(self, peer: str) -> None:
        """Count the end of a stream."""
        with self._changed:
            self.streams[unquote(peer)] -= 1
            self.streams += Counter()  # removes zeros

    def close(self) -> None:
        """Stop the checks."""
        self._closed.set()
        self._thread.join()

    def look(self, now: float) -> None:
        """Close connections without a stream that are too old, and the newest of too many."""
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
    """Return the connections to a port of this process; the caller closes their sockets, which are duplicates."""
    every: dict[int, Connection] = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and status.st_ino not in every:  # duplicates may be listed, too
                    each = _connection(int(name), port)
                    every |= {} if each is None else {each.inode: each}
    return list(every.values())


def _connection(descriptor: int, port: int) -> Connection | None:
    """Return the connection of a socket; None if it is not one to the port."""
    copy = socket.socket(fileno=os.dup(descriptor))  # the descriptor may be reused soon, its duplicate not
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
