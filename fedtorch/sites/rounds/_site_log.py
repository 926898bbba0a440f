"""Log messages about a site's normal work."""

from __future__ import annotations

import logging
import time

from fedtorch.sites.rounds._behind import Behind
from fedtorch.sites.rounds.frames import Frame, run_of
from fedtorch.sites.rounds.policy import Policy

_LOG = logging.getLogger(__name__)
_BETWEEN = 10.0  # seconds between two messages about answers
SHOWN = 8  # digits of a run's identity


class SiteLog:
    """Log messages about a site's normal work, at the level INFO, and warnings about small row counts.

    Args:
        between: least number of seconds between two messages about answers; a run's first answer is logged at once.
    """

    def __init__(self, between: float = _BETWEEN) -> None:
        self._between, self._next, self._answers, self._began = between, 0.0, 0, 0.0

    def connected(self, clients: int, rows: int) -> None:
        """Log that the site has connected and announced its clients."""
        _LOG.info("connected, with %d clients and %d rows; waiting for a run", clients, rows)

    def minimum(self, policy: Policy, behind: Behind) -> None:
        """Warn if the policy's minimum is low for a client's own messages, or too high for the whole site."""
        default, every = Policy().minimum, behind.each(behind.everybody)
        alone = every[every >= policy.minimum]
        if len(alone) and (least := int(alone.min())) < default:
            _LOG.warning(
                "Policy(minimum=%d) allows messages from only %d %s: a reader may learn everything in these, values "
                "and response",
                *(policy.minimum, least, policy.counted),
            )
        if not behind.is_enough(behind.everybody):
            _LOG.warning(
                "the site has fewer than the %d %s of its Policy(minimum=): it answers only in sums under masks; a "
                "site that is one person sets Policy(minimum=1), and its messages are then that person's",
                *(policy.minimum, policy.counted),
            )

    def unlisted(self, reason: str) -> None:
        """Log that the server's run does not include this site."""
        _LOG.warning("%s; waiting for a run", reason)

    def begun(self, frame: Frame, first: int, clients: int) -> None:
        """Log that the site takes part in a run."""
        self._next, self._answers = 0.0, 0
        settings = ", ".join(f"{name}={value}" for name, value in frame.names("settings").items())
        what, named = f"{frame.text('algorithm')}({settings})", clients_of(frame, first, clients)
        _LOG.info("run %s has begun: %s with %s", run_of(frame)[:SHOWN], what, named)

    def working(self) -> None:
        """Start the time of an answer."""
        self._began = time.monotonic()

    def answered(self, frame: Frame) -> None:
        """Log an answer, unless another was logged shortly before."""
        now, self._answers = time.monotonic(), self._answers + 1
        if now < self._next:
            return
        self._next = now + self._between
        what = f"round {frame.integer('round') + 1}" if frame.kind == "round" else frame.kind
        seconds, run = now - self._began, run_of(frame)[:SHOWN]
        _LOG.info("%s of run %s: answered within %.2f s, %d answers so far", what, run, seconds, self._answers)

    def over(self, frame: Frame) -> None:
        """Log that the run is over."""
        _LOG.info("run %s is over, after %d answers", run_of(frame)[:SHOWN], self._answers)


def clients_of(begin: Frame, first: int, clients: int) -> str:
    """Return in words the numbers of a site's clients in a run.

    >>> from fedtorch.sites.rounds import frames
    >>> clients_of(frames.read(frames.encode("begin", clients=6), "the server"), 4, 1)
    'client 4 of 6'
    """
    whose = f"clients {first} to {first + clients - 1}" if clients > 1 else f"client {first}"
    return f"{whose} of {begin.integer('clients')}"
