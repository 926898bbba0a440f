"""The status of a server's run: a small file beside the run's checkpoint, for `fedtorch status`.

It lists the sites that are connected, late or refused, with reasons, the finished rounds, the expected time for the
others, and the spent privacy budget.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedtorch import _files as files

ENDING = ".status.json"
_FORMAT, _EVERY, _RECENT = 1, 1.0, 16  # seconds between two states of the file, rounds whose mean is the pace
_OLD = 30.0  # age in seconds of a file whose server may have ended


class Trouble(NamedTuple):
    """Counts of the rounds that a site missed, late or for other reasons, and the last reason."""

    late: int = 0
    other: int = 0
    why: str = ""
    at: str = ""  # in UTC

    def again(self, why: str, late: bool) -> Trouble:
        """Return the counts with one more missed round."""
        return Trouble(self.late + late, self.other + (not late), why, now())

    def in_words(self) -> str:
        """Return a text for people, empty without missed rounds.

        >>> Trouble(late=2, why="it is late", at="2026-11-30T14:01:40Z").in_words()
        'late 2 times; last at 2026-11-30T14:01:40Z: it is late'
        """
        late, other = (
            f"late {self.late} times" if self.late else "",
            f"missing {self.other} times" if self.other else "",
        )
        return "; ".join(filter(None, (late, other, f"last at {self.at}: {self.why}" if self.why else "")))


class Pace:
    """The times at which the last rounds ended.

    >>> pace = Pace()
    >>> pace.ended(5.0), pace.ended(7.0), pace.ended(11.0), pace.left(done=3, rounds=10)
    (None, None, None, 21.0)
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_RECENT)

    def ended(self, now: float) -> None:
        """Add a round that has ended at a time in seconds."""
        self._ends.append(now)

    def left(self, done: int, rounds: int | None) -> float | None:
        """Return an estimate of the seconds left; None before two rounds have ended, or without a number of rounds."""
        if rounds is None or len(self._ends) < 2:
            return None
        return max(rounds - done, 0) * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)


class Status:
    """Writes the status file, at most once a second.

    Args:
        path: path of the checkpoint; None to write nothing.
        content: returns the content.
    """

    def __init__(self, path: Path | str | None, content: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self.content, self._next = None if path is None else Path(f"{path}{ENDING}"), content, 0.0

    def write(self, at_once: bool = False) -> None:
        """Write the file, unless it was written less than a second ago."""
        if self._path is not None and (at_once or time.monotonic() >= self._next):
            files.write_json(self._path, {"format": _FORMAT, "written": now(), **self.content()})
            self._next = time.monotonic() + _EVERY


def now() -> str:
    """Return the time in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def status_files(place: Path | str) -> list[Path]:
    """Return the status files of a folder, or of one checkpoint.

    Raises:
        FileNotFoundError: there is no such file.
    """
    place = Path(place)
    paths = sorted(place.glob(f"*{ENDING}")) if place.is_dir() else [place, Path(f"{place}{ENDING}")]
    paths = [path for path in paths if path.name.endswith(ENDING) and path.is_file()]
    if not paths:
        raise FileNotFoundError(
            f"Expected the status of a run over sites in {place}, but got none; a server writes it beside the "
            "checkpoint that it names, ft.Remote(..., checkpoint=FILE), and without one it writes none"
        )
    return paths


def in_words(path: Path) -> str:
    """Return a status file as a text for people.

    Raises:
        ValueError: the file has another format.
    """
    status = files.read_json(path)
    if status.get("format") != _FORMAT:
        raise ValueError(f"Expected a status of format {_FORMAT} in {path}, but got {status.get('format')!r}")
    age = (datetime.now(UTC) - datetime.fromisoformat(status["written"])).total_seconds()
    total = "" if status["of"] is None else f" of {status['of']}"
    parts = [f"{status['rounds']}{total} rounds"]
    if status["left"] is not None:
        parts.append(f"about {_duration(status['left'])} left")
    if status["privacy"]:
        parts.append("privacy spent: " + " ".join(f"{name} {value:.4g}" for name, value in status["privacy"].items()))
    lines = [f"{path.name.removesuffix(ENDING)}: {status['state']}, {', '.join(parts)}; written {status['written']}"]
    if age > _OLD and status["state"] != "over":
        lines.append(f"  no update for {_duration(age)}: check whether the server still runs")
    for name, site in status["sites"].items():
        trouble = Trouble(*(site[field] for field in Trouble._fields)).in_words()
        lines.append(f"  {name}: {'; '.join(filter(None, (site['is'], trouble)))}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
