"""A limit on a site's wait for an unreachable server, with pauses between its attempts to connect."""

from __future__ import annotations

import time

_PAUSES = (0.05, 5.0)  # seconds between attempts, the first and the longest


class Timeout:
    """The time since the last frame of a server.

    Args:
        seconds: longest time without a frame.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.heard(time.monotonic())

    def heard(self, at: float | None) -> None:
        """Set the time of the server's last frame, by `time.monotonic`; None changes nothing."""
        if at is not None:
            self._since, self._pause = at, _PAUSES[0]

    def again(self, error: Exception) -> None:
        """Wait before the next attempt, longer each time.

        Raises:
            TimeoutError: the time is up; `error` is the reason why the last attempt ended.
        """
        if time.monotonic() - self._since > self.seconds:
            raise TimeoutError(f"Expected a server within {self.seconds:g} s, but got none; {error}") from error
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _PAUSES[1])
