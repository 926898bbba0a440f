"""A daily limit on the identifiers that others may test at a party, counted in a file across alignments and processes.

A party that puts guessed identifiers into its list learns which of them another party has, and no intersection can
prevent it. So a party limits how many points it answers a day. One point tests one identifier, or, for a party that
violates the protocol by sending sums of points, several identifiers of a small domain. The limit is a bucket that
refills over the day, so that nearly twice as many points pass within 24 hours: a full bucket, and its refill.

    limit = DailyLimit("guesses.json", 20_000)           # about the length of the other party's true list
    Holder(identifiers, "clinic", limit=limit).following("leader")
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fedtorch import _files as files, expected
from fedtorch.protocol.rates import Bucket, Rate

_DAY = 86_400.0
_SECONDS = 30.0  # for another process that counts


class DailyLimit:
    """A limit on the identifiers that others test: `a_day` at once, and as many again in the course of each day.

    Args:
        path: of the file with the count; where there is no file yet, nothing has been counted.
        a_day: identifiers a day, one a point.
        now: seconds since 1970. After the clock is set back, nothing is refilled until it has caught up.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     limit = DailyLimit(f"{folder}/guesses.json", 3, now=lambda: 0.0)
    ...     limit.take(2, "clinic")
    ...     limit.take(2, "clinic")
    Traceback (most recent call last):
    ValueError: Expected at most 1 identifiers to be tested at 'clinic' now, at 3 a day, but got 2;
    wait 8.0 hours, or agree on more
    """

    def __init__(self, path: Path | str, a_day: int, now: Callable[[], float] = time.time) -> None:
        expected.positive(a_day=a_day)
        self.path, self.a_day, self._now = Path(path), a_day, now

    def take(self, count: int, name: str) -> None:
        """Count identifiers to be tested, before any of them is answered.

        Args:
            count: of identifiers.
            name: of the party, for the message.

        Raises:
            ValueError: more identifiers than are left, of which none is counted; or a file that holds no count.
        """
        files.private_folder(self.path.parent)
        with files.private_lock(f"{self.path}.lock", _SECONDS):
            bucket = self._read()
            if wait := bucket.take(count, max(self._now(), bucket.at)):
                never = "split the list, or" if count > self.a_day else f"wait {wait / 3600:.1f} hours, or"
                raise ValueError(
                    f"Expected at most {int(bucket.level)} identifiers to be tested at {name!r} now, at {self.a_day} a "
                    f"day, but got {count}; {never} agree on more"
                )
            files.write_json(self.path, {"left": bucket.level, "at": bucket.at})

    def _read(self) -> Bucket:
        bucket = Bucket(Rate(self.a_day, self.a_day / _DAY))
        try:
            if self.path.exists():
                saved = files.read_json(self.path)
                bucket.level, bucket.at = min(float(saved["left"]), self.a_day), float(saved["at"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Expected a count of identifiers in {self.path}, but got something else: {error}"
            ) from None
        return bucket
