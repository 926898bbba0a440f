"""Log what a site does while all goes well."""

from __future__ import annotations

import logging
import time

from fedtorch.sites.rounds._behind import Behind
from fedtorch.sites.rounds.frames import Frame, run_of
from fedtorch.sites.rounds.policy import Policy

_LOG = logging.getLogger(__name__)
_BETWEEN = 10.0  # seconds between two lines about answers
SHOWN = 8  # digits of a run's identity


class SiteLog:
    """Log what a site does while all goes well, at the level INFO.

    Args:
        between: seconds between two lines about answers, at least; the first answer in a run has one at once.
    """

    def __init__(self, between: float = _BETWEEN) -> None:
        self._between, self._next, self._answers, self._began = between, 0.0, 0, 0.0

    def connected(self, clients: int, rows: int) -> None:
        """Note that the server has been reached, and told what the site brings."""
        _LOG.info("connected, with %d clients and %d rows; waiting for a run", clients, rows)

    def minimum(self, policy: Policy, behind: Behind) -> None:
        """Note what a policy's minimum means where a client, or the whole site, has few rows."""
        default, every = Policy().minimum, behind.each(behind.everybody)
        alone = every[every >= policy.minimum]
        if len(alone) and (least := int(alone.min())) < default:
            _LOG.warning(
                "Policy(minimum=%d) lets messages leave that are of %d %s alone: who reads one may learn all that is "
                "in them, values and response",
                *(policy.minimum, least, policy.counted),
            )
        if not behind.is_enough(behind.everybody):
            _LOG.warning(
                "the site has fewer than the %d %s of its Policy(minimum=): it answers in sums under masks only; a "
                "site that is one person says Policy(minimum=1), and its messages are then that person's",
                *(policy.minimum, policy.counted),
            )

    def unlisted(self, reason: str) -> None:
        """Note that the server has a run without this site."""
        _LOG.warning("%s; waiting for a run", reason)

    def begun(self, frame: Frame, first: int, clients: int) -> None:
        """Note that the site takes part in a run."""
        self._next, self._answers = 0.0, 0
        settings = ", ".join(f"{name}={value}" for name, value in frame.names("settings").items())
        what, named = f"{frame.text('algorithm')}({settings})", clients_of(frame, first, clients)
        _LOG.info("run %s has begun: %s with %s", run_of(frame)[:SHOWN], what, named)

    def working(self) -> None:
        """Note that the site has been asked."""
        self._began = time.monotonic()

    def answered(self, frame: Frame) -> None:
        """Note that the site has computed an answer."""
        now, self._answers = time.monotonic(), self._answers + 1
        if now < self._next:
            return
        self._next = now + self._between
        what = f"round {frame.integer('round') + 1}" if frame.kind == "round" else frame.kind
        seconds, run = now - self._began, run_of(frame)[:SHOWN]
        _LOG.info("%s of run %s: answered within %.2f s, %d answers so far", what, run, seconds, self._answers)

    def over(self, frame: Frame) -> None:
        """Note that the run is over."""
        _LOG.info("run %s is over, after %d answers", run_of(frame)[:SHOWN], self._answers)


def clients_of(begin: Frame, first: int, clients: int) -> str:
    """Return in words which clients of a run a site has.

    >>> from fedtorch.sites.rounds import frames
    >>> clients_of(frames.read(frames.encode("begin", clients=6), "the server"), 4, 1)
    'client 4 of 6'
    """
    whose = f"clients {first} to {first + clients - 1}" if clients > 1 else f"client {first}"
    return f"{whose} of {begin.integer('clients')}"
