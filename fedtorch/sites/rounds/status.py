"""What a server says of its run while it goes on: a small file beside the run's checkpoint, for `fedtorch status`.

It says which sites are connected, which are late or were refused and why, how many rounds are done, how long the others
will take, and what of a privacy budget is spent.
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
_OLD = 30.0  # seconds without a word after which the server may have ended


class Trouble(NamedTuple):
    """Hold how often a site was late, or was not in a round for another reason, and the last reason."""

    late: int = 0
    other: int = 0
    why: str = ""
    at: str = ""  # in UTC

    def again(self, why: str, late: bool) -> Trouble:
        """Return it with one more."""
        return Trouble(self.late + late, self.other + (not late), why, now())

    def in_words(self) -> str:
        """Return it for people; nothing of none.

        >>> Trouble(late=2, why="it is late", at="2026-11-30T14:01:40Z").in_words()
        'late 2 times; last at 2026-11-30T14:01:40Z: it is late'
        """
        late, other = (
            f"late {self.late} times" if self.late else "",
            f"missing {self.other} times" if self.other else "",
        )
        return "; ".join(filter(None, (late, other, f"last at {self.at}: {self.why}" if self.why else "")))


class Pace:
    """Hold how long rounds of late have taken.

    >>> pace = Pace()
    >>> pace.took(2.0), pace.took(4.0), pace.left(done=2, rounds=10)
    (None, None, 24.0)
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_RECENT)

    def took(self, seconds: float) -> None:
        """Note a round."""
        self._seconds.append(seconds)

    def left(self, done: int, rounds: int | None) -> float | None:
        """Return about how many seconds are left; None where nobody knows how many rounds there are to be."""
        if rounds is None or not self._seconds:
            return None
        return max(rounds - done, 0) * sum(self._seconds) / len(self._seconds)


class Status:
    """The file, which is written whole, once a second at most.

    Args:
        path: of the checkpoint; None writes nothing.
        content: makes what it says.
    """

    def __init__(self, path: Path | str | None, content: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self.content, self._next = None if path is None else Path(f"{path}{ENDING}"), content, 0.0

    def write(self, at_once: bool = False) -> None:
        """Write it, unless it has just been written."""
        if self._path is not None and (at_once or time.monotonic() >= self._next):
            files.write_json(self._path, {"format": _FORMAT, "written": now(), **self.content()})
            self._next = time.monotonic() + _EVERY


def now() -> str:
    """Return the time in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def found(place: Path | str) -> list[Path]:
    """Return the files in a folder, or the one of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
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
    """Return what a file says, for people.

    Raises:
        ValueError: it is none of this version.
    """
    said = files.read_json(path)
    if said.get("format") != _FORMAT:
        raise ValueError(f"Expected a status of format {_FORMAT} in {path}, but got {said.get('format')!r}")
    age = (datetime.now(UTC) - datetime.fromisoformat(said["written"])).total_seconds()
    of = "" if said["of"] is None else f" of {said['of']}"
    parts = [f"{said['rounds']}{of} rounds"]
    if said["left"] is not None:
        parts.append(f"about {_duration(said['left'])} left")
    if said["privacy"]:
        parts.append("privacy spent: " + " ".join(f"{name} {value:.4g}" for name, value in said["privacy"].items()))
    lines = [f"{path.name.removesuffix(ENDING)}: {said['state']}, {', '.join(parts)}; written {said['written']}"]
    if age > _OLD and said["state"] != "over":
        lines.append(f"  no word for {_duration(age)}: look whether the server still runs")
    for name, site in said["sites"].items():
        trouble = Trouble(*(site[field] for field in Trouble._fields)).in_words()
        lines.append(f"  {name}: {'; '.join(filter(None, (site['is'], trouble)))}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
