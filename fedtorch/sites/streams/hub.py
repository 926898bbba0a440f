"""The two ends of streams of frames, over any transport: a hub with many peers, and a link to one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fedtorch.protocol.rates import Rate
from fedtorch.sites.streams._pipe import Pipe, Room


class Limits(NamedTuple):
    """Limits on waiting times, numbers of connections and memory.

    >>> from fedtorch.sites.streams import memory
    >>> site = memory.link(Hub(Limits(frame=8)), "ward 7")
    >>> site.send(b"too long a frame")
    Traceback (most recent call last):
    ValueError: Expected frames of at most 8 bytes, but got one of 16; raise `frame` in the limits of both sides, ...
    """

    frame: int = 2**28  # bytes of a frame
    ahead: int = 4  # frames of one peer that wait to be received, and as many that wait to be sent
    seconds: float = 30.0  # wait for a connection, or for room to send
    keepalive: float = 10.0  # seconds of silence before a peer is pinged
    peers: int = 256  # peers connected at once
    each: Rate = Rate(256, 2.0)  # new streams of one address, which many peers may share
    all: Rate = Rate(1024, 20.0)  # new streams
    unasked: int = 2**24  # bytes of a frame that was not requested
    member: int = 2**28  # bytes of one peer's frames that wait to be received
    total: int = 2**30  # bytes of all peers' frames that wait to be received
    idle_each: int = 4  # connections of one address without a stream
    idle: int = 64  # connections without a stream
    idle_seconds: float = 10.0  # age at which a connection without a stream is closed

    def check(self) -> None:
        """Raise ValueError unless frame <= member <= total bytes."""
        if not 0 < self.frame <= self.member <= self.total:
            raise ValueError(
                f"Expected frame <= member <= total bytes, but got {self.frame}, {self.member} and {self.total}; raise "
                "`member` and `total` together with `frame`"
            )


LIMITS = Limits()


class Line(NamedTuple):
    """The two directions of a peer's stream, for the transport."""

    inward: Pipe
    outward: Pipe
    admitted: Callable[[], None] | None = None  # raises PermissionError if the peer is not admitted any more

    def end(self, reason: Exception) -> None:
        """End both directions."""
        self.inward.end(reason)
        self.outward.end(reason)


class Hub:
    """A server's end: a line to every connected peer. The transport opens and ends the lines.

    Args:
        limits: limits of every line.

    Attributes:
        port: the port at which it listens; 0 for none.
        closed: whether it accepts no more connections.
    """

    def __init__(self, limits: Limits = LIMITS) -> None:
        limits.check()
        self.limits, self.port, self.closed = limits, 0, False
        self._changed, self._room = threading.Condition(), Room(limits.total)
        self._lines: dict[str, Line] = {}
        self._waiting: dict[str, None] = {}  # peers to be received from in turn; a link may have taken their frames
        self._closing: list[Callable[[], None]] = []

    @property
    def connected(self) -> frozenset[str]:
        """Return the peers that have a stream now."""
        with self._changed:
            return frozenset(self._lines)

    @property
    def held(self) -> dict[str, int]:
        """Return the bytes of each peer's frames that wait to be received."""
        with self._changed:
            return {peer: line.inward.held for peer, line in self._lines.items()}

    def send(self, peer: str, frame: bytes, answers: int = 1) -> None:
        """Put a frame on the peer's stream; it may not have arrived when this returns.

        Args:
            peer: name of the peer.
            frame: frame for the peer.
            answers: number of answers of any length; unrequested frames have at most `limits.unasked` bytes.

        Raises:
            ConnectionError: the peer is not connected.
            TimeoutError: the peer does not receive earlier frames; it is disconnected.
            ValueError: the frame is too long.
        """
        _check_frame(frame, self.limits)
        with self._changed:
            line = self._lines.get(peer)
            if line is None:
                raise ConnectionError(f"Expected {peer!r} to be connected, but it is not")
            line.inward.ask(answers)
        try:
            line.outward.put(frame, self.limits.seconds)
        except TimeoutError as error:
            self.leave(peer, line, ConnectionAbortedError(str(error)))  # it may reconnect
            raise

    def receive(self, seconds: float) -> tuple[str, bytes]:
        """Return (the sender, its next frame); peers with several waiting frames take turns.

        Raises:
            TimeoutError: none came in time.
        """
        ends = time.monotonic() + seconds
        while True:
            with self._changed:
                next_one = self._next() or self._changed.wait_for(self._next, max(0.0, ends - time.monotonic()))
                if next_one is None:
                    raise TimeoutError(f"Expected a frame within {seconds:g} s, but got none")
                peer, line = next_one
                frame = line.inward.take()
                line.inward.answer_only()
                del self._waiting[peer]
                if line.inward.waiting:
                    self._waiting[peer] = None  # at the end of the queue
            if self._may_speak(peer, line):
                return peer, frame

    def meet(self, peer: str, seconds: float) -> Link:
        """Return a link to one peer on its current stream, once it has connected; the link ends with that stream.

        Frames received from the link are not returned by the hub's `receive`.

        Raises:
            TimeoutError: the peer did not connect in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: peer in self._lines, seconds):
                raise TimeoutError(f"Expected {peer!r} to connect within {seconds:g} s, but it did not")
            line = self._lines[peer]
            line.inward.ask(math.inf)
        return Link(line, self.limits, partial(self.leave, peer, line, ConnectionAbortedError("the server hung up")))

    def drop(self, peer: str, reason: str) -> None:
        """End a peer's stream, and send it the reason."""
        with self._changed:
            line = self._lines.get(peer)
        if line is not None:
            self.leave(peer, line, PermissionError(reason))

    def join(self, peer: str, admitted: Callable[[], None] | None = None) -> Line:
        """Return a line for a newly connected peer, which replaces an earlier line of the same name.

        Args:
            peer: name of the peer.
            admitted: raises PermissionError if the peer is not admitted any more; called at every frame.

        Raises:
            ConnectionRefusedError: too many are connected, or the hub has closed.
        """
        with self._changed:
            if self.closed:
                raise ConnectionRefusedError("the server has closed")
            before = self._lines.get(peer)
            if before is None and len(self._lines) >= self.limits.peers:
                raise ConnectionRefusedError(f"Expected at most {self.limits.peers} peers; try again later")
            limits = self.limits
            arrived = partial(self._waiting.setdefault, peer)
            inward = Pipe(limits.ahead, self._changed, limits.member, self._room, limits.unasked, arrived)
            line = Line(inward, Pipe(limits.ahead), admitted)
            self._lines[peer] = line
            self._changed.notify_all()
        if before is not None:
            before.end(ConnectionAbortedError(f"{peer!r} has connected anew"))
            before.inward.abandon()
        return line

    def leave(self, peer: str, line: Line, reason: Exception) -> None:
        """End a line, and remove the peer unless it has a newer one; frames that wait for `receive` are dropped."""
        with self._changed:
            if self._lines.get(peer) is line:
                del self._lines[peer]
        line.end(reason)
        line.inward.abandon()

    def end_stalled(self) -> None:
        """End the lines of peers that have begun a frame, which has its room reserved, and stopped sending it."""
        with self._changed:
            lines = dict(self._lines)
        for peer, line in lines.items():
            if line.inward.stalled(self.limits.seconds):
                reason = f"Expected a complete frame, but no part of it came for {self.limits.seconds:g} s"
                self.leave(peer, line, ConnectionAbortedError(reason))

    def on_close(self, action: Callable[[], None]) -> None:
        """Register an action for the hub's `close`."""
        self._closing.append(action)

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all streams."""
        with self._changed:
            self.closed = True
            lines = dict(self._lines)
        for peer, line in lines.items():
            self.leave(peer, line, ConnectionAbortedError("the server has closed"))
        while self._closing:
            self._closing.pop()()

    def _next(self) -> tuple[str, Line] | None:
        """Return the peer and line of the next frame; None if none waits."""
        while self._waiting:
            peer = next(iter(self._waiting))
            line = self._lines.get(peer)
            if line is not None and line.inward.waiting:
                return peer, line
            del self._waiting[peer]
        return None

    def _may_speak(self, peer: str, line: Line) -> bool:
        try:
            if line.admitted is not None:
                line.admitted()
        except PermissionError as error:
            self.leave(peer, line, error)
            return False
        return True


class Link:
    """An end of one stream: a site's, or a server's to one of its sites.

    Args:
        line: line to the other side.
        limits: limits of the line.
        hang_up: ends the stream.

    Attributes:
        heard: time of the last received frame, by `time.monotonic`; None before the first.

    >>> from fedtorch.sites.streams import memory
    >>> host = Hub()
    >>> at_site: Link = memory.link(host, "ward 7")
    >>> at_server: Link = host.meet("ward 7", seconds=1.0)
    >>> at_site.send(b"hello")
    >>> at_server.receive(1.0)
    b'hello'
    >>> at_site.close()
    """

    def __init__(self, line: Line, limits: Limits, hang_up: Callable[[], None]) -> None:
        self._line, self._limits, self._hang_up = line, limits, hang_up
        self.heard: float | None = None

    def send(self, frame: bytes) -> None:
        """Put a frame on the stream.

        Raises:
            ConnectionError: the stream has ended; the message gives the reason.
            TimeoutError: the other side does not receive earlier frames.
            ValueError: the frame is too long.
        """
        _check_frame(frame, self._limits)
        self._line.outward.put(frame, self._limits.seconds)

    def receive(self, seconds: float) -> bytes:
        """Return the next frame of the other side.

        Raises:
            TimeoutError: none came in time.
            ConnectionError: the stream has ended; the message gives the reason.
            PermissionError: the server has ended it, or the site is not admitted any more; with the reason.
        """
        frame = self._line.inward.get(seconds)
        if self._line.admitted is not None:
            self._line.admitted()
        self.heard = time.monotonic()
        return frame

    def close(self) -> None:
        """End the stream."""
        self._hang_up()
        self._line.end(ConnectionAbortedError("this side has closed the stream"))
        self._line.inward.clear()


def _check_frame(frame: bytes, limits: Limits) -> None:
    """Raise ValueError for a frame that the other side would refuse."""
    if len(frame) > limits.frame:
        raise ValueError(
            f"Expected frames of at most {limits.frame} bytes, but got one of {len(frame)}; raise `frame` in the "
            "limits of both sides, or send fewer clients' values at once"
        )
