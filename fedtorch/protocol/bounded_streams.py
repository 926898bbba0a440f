"""Byte streams between the ranks of a process group, from which each side reads no more than it requests.

gloo ends the whole process when a message is longer than the room for it, so that any party could end the server's.
Here gloo carries one broadcast only, in which rank 0 sends and reads nothing: where it listens, and a token. The others
connect to it, tell it where they listen, and hear that of all; then every two ranks have a stream. What a peer sends
beyond what it announced stays in the stream and is taken for the next message, which is then refused.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PLACE = struct.Struct("!64s16sI")  # host, token, port or rank
_PART = 2**18  # bytes read at a time
_AHEAD = 2**30  # most bytes buffered from a peer while writing to it


class Streams:
    """A stream to every other rank of the process group.

    Args:
        rank: the rank of this process.
        ranks: the number of ranks.
        timeout: the longest wait for another rank.
        group: process group of CPU tensors over which ranks exchange addresses; default: the default group.

    Raises:
        RuntimeError: a rank cannot be reached, or breaks the protocol.
    """

    def __init__(self, rank: int, ranks: int, timeout: timedelta, group: Any = None) -> None:
        self.seconds = timeout.total_seconds()
        self.sockets: dict[int, socket.socket] = {}
        self.ahead = {other: bytearray() for other in range(ranks)}
        with socket.create_server(("", 0), backlog=ranks) as listener:
            listener.settimeout(self.seconds)
            try:
                self._meet(listener, rank, ranks, group)
            except OSError as error:
                raise RuntimeError(f"Expected streams among {ranks} ranks, but got {error}") from error

    def _meet(self, listener: socket.socket, rank: int, ranks: int, group: Any) -> None:
        port = listener.getsockname()[1]
        first = torch.frombuffer(bytearray(_PLACE.pack(_host(), secrets.token_bytes(16), port)), dtype=torch.uint8)
        dist.broadcast(first, 0, group=group)
        host, token, first_port = _PLACE.unpack(first.numpy().tobytes())
        places = {0: (host, first_port)}
        if rank:
            self._connect(0, places[0], token, rank)
            address = self.sockets[0].getsockname()[0].encode()
            self.write(0, _PLACE.pack(address, token, port))
            places |= {j: self._heard(0, token) for j in range(1, ranks)}
        else:
            self._accept(listener, token, ranks - 1)
            places |= {j: self._heard(j, token) for j in range(1, ranks)}
            for j in range(1, ranks):
                self.write(j, b"".join(_PLACE.pack(places[k][0], token, places[k][1]) for k in range(1, ranks)))
        for other in range(1, rank):
            self._connect(other, places[other], token, rank)
        if rank:
            self._accept(listener, token, ranks - 1 - len(self.sockets))

    def _connect(self, other: int, place: tuple[bytes, int], token: bytes, rank: int) -> None:
        address = place[0].rstrip(b"\0").decode(), place[1]
        self.sockets[other] = socket.create_connection(address, self.seconds)
        self.write(other, _PLACE.pack(b"", token, rank))

    def _accept(self, listener: socket.socket, token: bytes, count: int) -> None:
        """Accept connections until a given number have shown the token; close all others."""
        while count:
            joined, _ = listener.accept()
            joined.settimeout(self.seconds)
            greeting = joined.recv(_PLACE.size, socket.MSG_WAITALL)
            _, shown, other = _PLACE.unpack(greeting) if len(greeting) == _PLACE.size else (b"", b"", -1)
            if not secrets.compare_digest(shown, token) or other not in self.ahead or other in self.sockets:
                joined.close()
                continue
            self.sockets[other], count = joined, count - 1

    def _heard(self, other: int, token: bytes) -> tuple[bytes, int]:
        host, shown, port = _PLACE.unpack(self.read(other, _PLACE.size))
        if not secrets.compare_digest(shown, token):
            raise RuntimeError(f"Expected the address of rank {other}, but got a message with another token")
        return host, port

    def write(self, other: int, data: bytes) -> None:
        """Send all bytes; incoming bytes are buffered meanwhile, so that two ranks may write to each other.

        Raises:
            RuntimeError: the other rank has gone, or does not read in time.
        """
        stream, left, ahead = self.sockets[other], memoryview(data), self.ahead[other]
        while left:
            wanted = [stream] if len(ahead) < _AHEAD else []
            readable, writable, _ = select.select(wanted, [stream], [], self.seconds)
            if not readable and not writable:
                raise self._silent(other, self.seconds)
            if writable:
                left = left[self._do(other, stream.send, left[:_PART]) :]
            elif not self._fill(other):
                raise self._gone(other)

    def read(self, other: int, count: int, seconds: float | None = None) -> bytes:
        """Return a number of bytes; the timeout applies to each part, or to each stream's parts together.

        Raises:
            RuntimeError: the other rank has gone, or sends nothing in time.
        """
        ahead = self.ahead[other]
        self.sockets[other].settimeout(self.seconds if seconds is None else seconds)
        while len(ahead) < count:
            if not self._fill(other, count - len(ahead)):
                raise self._gone(other)
        chunk = bytes(ahead[:count])
        del ahead[:count]
        return chunk

    def _fill(self, other: int, most: int = _PART) -> int:
        part = self._do(other, self.sockets[other].recv, min(most, _PART))
        self.ahead[other] += part
        return len(part)

    def _do(self, other: int, call: Any, argument: Any) -> Any:
        try:
            return call(argument)
        except TimeoutError:
            raise self._silent(other, self.sockets[other].gettimeout()) from None
        except OSError as error:
            raise self._gone(other) from error

    def _silent(self, other: int, seconds: float | None) -> RuntimeError:
        return RuntimeError(f"Expected rank {other} to answer within {seconds:g} s, but got nothing")

    def _gone(self, other: int) -> RuntimeError:
        return RuntimeError(f"Expected rank {other} to answer, but got the end of its stream; see its own error")

    def close(self) -> None:
        """Close all streams after the written bytes have arrived."""
        for stream in self.sockets.values():
            stream.close()


def _host() -> bytes:
    """Return the address of rank 0 that the process group uses."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1").encode()
