"""Frames on their way in one direction, in bounded memory."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator


class Room:
    """Bytes that several pipes hold together; all of them share one condition.

    Args:
        limit: the most bytes.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.used = limit, 0

    def fits(self, size: int) -> bool:
        """Return whether so many bytes more may be held; any number where there are none."""
        return self.used == 0 or self.used + size <= self.limit


class Pipe:
    """Frames on their way in one direction, first in first out, of which a few may wait.

    Whoever puts a frame waits until there is room for all of it, so that a frame that has begun to arrive can always
    be completed. A frame that is larger than the limits waits until there is nothing else.

    Args:
        ahead: how many frames may wait.
        changed: notified of every change, for whoever waits for several pipes.
        limit: bytes that may wait.
        shared: bytes that may wait in several pipes with the same `changed`.
        unasked: bytes of a frame that comes without having been asked for, see `ask`; None where all frames may come.
        arrived: called with `changed` held when a frame has come.
    """

    def __init__(
        self,
        ahead: int,
        changed: threading.Condition | None = None,
        limit: float = math.inf,
        shared: Room | None = None,
        unasked: int | None = None,
        arrived: Callable[[], object] | None = None,
    ) -> None:
        self.changed = threading.Condition() if changed is None else changed
        self._ahead, self._frames, self._arriving = ahead, deque[bytes](), deque[int]()
        self._own, self._shared = Room(limit), Room(math.inf) if shared is None else shared
        self._unasked, self._arrived = math.inf if unasked is None else unasked, arrived
        self._asked: float | None = None  # long frames that may come; None until somebody has said so
        self._ended: tuple[type[Exception], tuple[object, ...]] | None = None
        self._moved = time.monotonic()  # when a part of the arriving frame came last

    @property
    def waiting(self) -> bool:
        """Return whether there is a frame to take."""
        return bool(self._frames)

    @property
    def held(self) -> int:
        """Return bytes of frames that wait, and of one that is arriving."""
        return self._own.used

    def ask(self, frames: float) -> None:
        """Let so many more long frames come."""
        with self.changed:
            self._asked = (self._asked or 0) + frames
            self.changed.notify_all()

    def put(self, frame: bytes, seconds: float | None = None) -> None:
        """Add a frame, once there is room.

        Raises:
            TimeoutError: there was no room in time.
            PermissionError: nobody has asked for so long a frame.
            OSError: the pipe has ended; the reason.
        """
        with self.changed:
            self._make_room(len(frame), seconds)
            self._add(frame)

    def reserve(self, size: int, seconds: float | None = None) -> None:
        """Wait for room for a frame that `fill` then adds; raise what `put` does."""
        with self.changed:
            self._make_room(size, seconds)
            self._arriving.append(size)
            self._moved = time.monotonic()

    def fill(self, frame: bytes) -> None:
        """Add the frame for which there is room; of a pipe that has ended it is dropped."""
        with self.changed:
            if self._arriving:
                self._arriving.popleft()
                self._add(frame)

    def note_part(self) -> None:
        """Note that a part of the arriving frame has come."""
        self._moved = time.monotonic()

    def stalled(self, seconds: float) -> bool:
        """Return whether a frame is arriving of which nothing has come for so long."""
        return bool(self._arriving) and time.monotonic() - self._moved > seconds

    def get(self, seconds: float | None = None) -> bytes:
        """Return the next frame; those that came before an end are still given.

        Raises:
            TimeoutError: none came in time.
            OSError: the pipe has ended; the reason.
        """
        with self.changed:
            come = self._frames or self._ended or self.changed.wait_for(lambda: self._frames or self._ended, seconds)
            if not come:
                raise TimeoutError(f"Expected a frame within {seconds:g} s, but got none")
            if not self._frames:
                self._raise_ended()
            return self.take()

    def take(self) -> bytes:
        """Return the frame that has waited longest, for whoever holds `changed` and has seen that one waits."""
        frame = self._frames.popleft()
        self._use(-len(frame))
        self.changed.notify_all()
        return frame

    def answer_only(self) -> None:
        """Let long frames come only once they are asked for, where nobody has said anything of them before."""
        with self.changed:
            if self._asked is None:
                self.ask(0)

    def end(self, reason: Exception) -> None:
        """Let nothing more in; the first reason stays."""
        with self.changed:  # no exception is kept: its traceback would refer back to the pipe and its frames
            self._ended = self._ended or (type(reason), reason.args)
            self._use(-sum(self._arriving))
            self._arriving.clear()
            self._shared.used -= self._own.used  # what waits may be dropped with the pipe, unseen
            self._shared = Room(math.inf)
            self.changed.notify_all()

    def abandon(self) -> None:
        """Drop the frames that wait, unless any may come because a link takes them."""
        if self._asked != math.inf:
            self.clear()

    def clear(self) -> None:
        """Drop the frames that wait."""
        with self.changed:
            self._use(-sum(map(len, self._frames)))
            self._frames.clear()
            self.changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        """Return all frames until the end, for whoever carries them."""
        while True:
            try:
                yield self.get()
            except OSError:
                return

    def _make_room(self, size: int, seconds: float | None) -> None:
        """Wait for room for a frame of this size and take it, or raise what `put` does; `changed` is held."""
        decided = lambda: self._ended or self._may_decide(size)
        if not (decided() or self.changed.wait_for(decided, seconds)):
            raise TimeoutError(
                f"Expected a frame to be taken within {seconds:g} s, but {len(self._frames)} wait, with "
                f"{self.held} bytes"
            )
        self._raise_ended()
        if size > self._unasked and not self._asked:
            raise PermissionError(
                f"Expected frames of at most {self._unasked} bytes unless they were asked for, but got one of "
                f"{size}; raise `unasked` in the limits of the server if it should take them"
            )
        self._asked = None if self._asked is None else max(self._asked - 1, 0)
        self._use(size)

    def _add(self, frame: bytes) -> None:
        """Add a frame that has its room; `changed` is held."""
        self._frames.append(frame)
        if self._arrived is not None:
            self._arrived()
        self.changed.notify_all()

    def _may_decide(self, size: int) -> bool:
        """Return whether a frame of this size may come now, or is refused."""
        if size > self._unasked and not self._asked:
            return self._asked is not None
        if len(self._frames) + len(self._arriving) >= self._ahead:
            return False
        return self._own.fits(size) and self._shared.fits(size)

    def _use(self, size: int) -> None:
        self._own.used += size
        self._shared.used += size

    def _raise_ended(self) -> None:
        if self._ended:
            kind, said = self._ended
            raise kind(*said)
