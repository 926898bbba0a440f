"""Bound the time a site waits for a server that is not there, with pauses between its attempts to connect."""

from __future__ import annotations

import time

_PAUSES = (0.05, 5.0)  # seconds between attempts, the first and the longest


class Timeout:
    """The time since a server was last heard of.

    Args:
        seconds: the longest time without a word from it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.heard(time.monotonic())

    def heard(self, at: float | None) -> None:
        """Note when the server has said something, by `time.monotonic`; None for not at all."""
        if at is not None:
            self._since, self._pause = at, _PAUSES[0]

    def again(self, error: Exception) -> None:
        """Wait before the next attempt, longer each time.

        Raises:
            TimeoutError: it has been too long; `error` is why the last attempt ended.
        """
        if time.monotonic() - self._since > self.seconds:
            raise TimeoutError(f"Expected a server within {self.seconds:g} s, but got none; {error}") from error
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _PAUSES[1])
