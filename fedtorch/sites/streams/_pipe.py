"""Queues of frames in one direction, in bounded memory."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator


class Room:
    """A limit on the bytes of several pipes together, which share one condition.

    Args:
        limit: most bytes.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.used = limit, 0

    def fits(self, size: int) -> bool:
        """Return whether `size` more bytes may be stored; always true if none are."""
        return self.used == 0 or self.used + size <= self.limit


class Pipe:
    """A bounded first-in, first-out queue of frames in one direction.

    `put` waits until there is room for the whole frame, so that a frame that has begun to arrive can always be
    completed. A frame larger than the limits waits until the queue is empty.

    Args:
        ahead: most frames that wait.
        changed: condition notified of every change, which several pipes may share.
        limit: most bytes that wait.
        shared: limit on the bytes of several pipes with the same `changed`.
        unasked: most bytes of an unrequested frame, see `ask`; None for no limit.
        arrived: called, with `changed` held, when a frame has arrived.
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
        self._room, self._shared = Room(limit), Room(math.inf) if shared is None else shared
        self._unasked, self._arrived = math.inf if unasked is None else unasked, arrived
        self._asked: float | None = None  # number of requested long frames; None before the first `ask`
        self._ended: tuple[type[Exception], tuple[object, ...]] | None = None
        self._moved = time.monotonic()  # time of the last part of the arriving frame

    @property
    def waiting(self) -> bool:
        """Return whether a frame waits."""
        return bool(self._frames)

    @property
    def held(self) -> int:
        """Return the bytes of waiting and arriving frames."""
        return self._room.used

    def ask(self, frames: float) -> None:
        """Allow `frames` more long frames."""
        with self.changed:
            self._asked = (self._asked or 0) + frames
            self.changed.notify_all()

    def put(self, frame: bytes, seconds: float | None = None) -> None:
        """Add a frame, once there is room.

        Raises:
            TimeoutError: there was no room in time.
            PermissionError: the frame is long and was not requested.
            OSError: the pipe has ended; the message gives the reason.
        """
        with self.changed:
            self._make_room(len(frame), seconds)
            self._add(frame)

    def reserve(self, size: int, seconds: float | None = None) -> None:
        """Reserve room for a frame that `fill` then adds; raise as `put` does."""
        with self.changed:
            self._make_room(size, seconds)
            self._arriving.append(size)
            self._moved = time.monotonic()

    def fill(self, frame: bytes) -> None:
        """Add the frame for which room is reserved; it is dropped if the pipe has ended."""
        with self.changed:
            if self._arriving:
                self._arriving.popleft()
                self._add(frame)

    def note_part(self) -> None:
        """Note the arrival of a part of a frame."""
        self._moved = time.monotonic()

    def stalled(self, seconds: float) -> bool:
        """Return whether a frame is arriving, and no part of it has come for `seconds`."""
        return bool(self._arriving) and time.monotonic() - self._moved > seconds

    def get(self, seconds: float | None = None) -> bytes:
        """Return the next frame, also of an ended pipe as long as some wait.

        Raises:
            TimeoutError: none came in time.
            OSError: the pipe has ended; the message gives the reason.
        """
        with self.changed:
            come = self._frames or self._ended or self.changed.wait_for(lambda: self._frames or self._ended, seconds)
            if not come:
                raise TimeoutError(f"Expected a frame within {seconds:g} s, but got none")
            if not self._frames:
                self._raise_ended()
            return self.take()

    def take(self) -> bytes:
        """Return the oldest frame; the caller holds `changed` and knows that a frame waits."""
        frame = self._frames.popleft()
        self._use(-len(frame))
        self.changed.notify_all()
        return frame

    def answer_only(self) -> None:
        """Allow only requested long frames from now on, unless `ask` has been called before."""
        with self.changed:
            if self._asked is None:
                self.ask(0)

    def end(self, reason: Exception) -> None:
        """Accept no more frames; only the first call sets the reason."""
        with self.changed:  # the exception itself is not stored: its traceback refers to the pipe and its frames
            self._ended = self._ended or (type(reason), reason.args)
            self._use(-sum(self._arriving))
            self._arriving.clear()
            self._shared.used -= self._room.used  # waiting frames may be dropped with the pipe, without notice
            self._shared = Room(math.inf)
            self.changed.notify_all()

    def abandon(self) -> None:
        """Drop the waiting frames, unless a link receives them: then any number of frames is allowed."""
        if self._asked != math.inf:
            self.clear()

    def clear(self) -> None:
        """Drop the waiting frames."""
        with self.changed:
            self._use(-sum(map(len, self._frames)))
            self._frames.clear()
            self.changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        """Yield all frames until the end, for the transport."""
        while True:
            try:
                yield self.get()
            except OSError:
                return

    def _make_room(self, size: int, seconds: float | None) -> None:
        """Reserve room for a frame of this size, or raise as `put` does; `changed` is held."""
        decided = lambda: self._ended or self._may_decide(size)
        if not (decided() or self.changed.wait_for(decided, seconds)):
            raise TimeoutError(
                f"Expected a frame to be taken within {seconds:g} s, but {len(self._frames)} wait, with "
                f"{self.held} bytes"
            )
        self._raise_ended()
        if size > self._unasked and not self._asked:
            raise PermissionError(
                f"Expected frames of at most {self._unasked} bytes unless they were requested, but got one of "
                f"{size}; raise `unasked` in the limits of the server if it should accept them"
            )
        self._asked = None if self._asked is None else max(self._asked - 1, 0)
        self._use(size)

    def _add(self, frame: bytes) -> None:
        """Add a frame with reserved room; `changed` is held."""
        self._frames.append(frame)
        if self._arrived is not None:
            self._arrived()
        self.changed.notify_all()

    def _may_decide(self, size: int) -> bool:
        """Return whether a frame of this size can now be either accepted or refused."""
        if size > self._unasked and not self._asked:
            return self._asked is not None
        if len(self._frames) + len(self._arriving) >= self._ahead:
            return False
        return self._room.fits(size) and self._shared.fits(size)

    def _use(self, size: int) -> None:
        self._room.used += size
        self._shared.used += size

    def _raise_ended(self) -> None:
        if self._ended:
            kind, arguments = self._ended
            raise kind(*arguments)
