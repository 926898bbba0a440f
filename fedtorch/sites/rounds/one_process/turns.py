"""How many sites of one process work on their answers at once.

Every operation of torch lets other threads run and then waits for its turn again. Where many threads compute, each of
these turns is a switch between threads, and all of them together take several times as long as one after the other.
So a process has as many sites at work as it has processors; the threads of the others sleep.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST = 1.0  # seconds that a site waits for its turn: one that is slow, or hangs, holds up no others for good


class Turns:
    """Let so many threads work at once, and each of the others after a second at the latest.

    >>> turns = Turns(at_once=1)
    >>> with turns.taken():
    ...     "answers"
    'answers'
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self.renew()

    def renew(self) -> None:
        """Have all turns free, as in a process that was forked: the threads that work are not in it."""
        self._free = threading.Semaphore(self._at_once)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a turn, and have it until the end of the block."""
        free = self._free
        in_time = free.acquire(timeout=_LONGEST)
        try:
            yield
        finally:
            if in_time:
                free.release()


TURNS = Turns(os.cpu_count() or 1)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TURNS.renew)
