"""An append-only file of JSON lines, each with the hash of the previous line and, optionally, a signature.

An entry is one line of canonical JSON: its number from 1, the time in UTC, the SHA-256 of the previous line, its
content, and the signature of all of that. Several processes may append to one file. A partial last line, after a crash
or on a full disk, is moved to `FILE.partial` by the next writer, with an entry about it.

`read` and `faults` detect entries that were changed, removed, repeated or moved. Missing entries at the *end* cannot be
detected in the file itself: compare its last entry with one that was noted elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fedtorch import _files as files

LONGEST = 2**16  # bytes of a line
_PART = 2**14  # letters of a fact per line, at most two bytes each
REPAIRED = "repaired"  # event of an entry about a removed partial line
CONTEXT = b"fedtorch log entry 1\n"  # signed with every entry, so that its signature fits nothing else
_RESERVED = {"entry", "time", "previous", "signature"}
_LOG = logging.getLogger(__name__)


class Entry(NamedTuple):
    """A parsed line of a log."""

    line: int  # its number in the file
    content: dict[str, Any]  # without the signature; empty if the line is not an entry
    signed: bytes  # signed bytes, after `CONTEXT`
    signature: str
    digest: str  # of the whole line

    @property
    def number(self) -> int:
        """Return the number in the entry, 0 if the line is not an entry."""
        return int(self.content.get("entry", 0))


NONE = Entry(0, {}, b"", "", "")


class ChainedLog:
    """Append entries to a log.

    Args:
        path: of the file; it is made if necessary.
        first: content of the first entry of a new file.
        sign: bytes -> their signature as text; None leaves entries unsigned.
        take: called with every entry of the file in their order, by any writer, when this process reads it; the hash
            chain is then checked. None reads the last entry only.
        durable: whether `append` flushes an entry to disk, or refuses it; see also `sync`.

    Attributes:
        entries: number of entries at this process's last look.
        head: the SHA-256 of the last one.

    Raises:
        ValueError: the file is no log, or `take` does.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = ChainedLog(f"{folder}/log.jsonl", {"event": "opened"})
        ...     number = log.append({"event": "asked", "round": 1})
        ...     [entry.content["event"] for entry in read(log.path)], faults(read(log.path)), number
        (['opened', 'asked'], [], 2)
    """

    def __init__(
        self,
        path: Path | str,
        first: Mapping[str, Any],
        sign: Callable[[bytes], str] | None = None,
        *,
        take: Callable[[Entry], None] | None = None,
        durable: bool = False,
    ) -> None:
        self.path, self._sign, self._take, self._durable = Path(path).resolve(), sign, take, durable
        self.entries, self.head, self._size = 0, "", 0
        files.private_folder(self.path.parent, log=False)  # a ledger may belong to a simulation
        self._lock = files.private_lock(f"{self.path}.lock")
        with self._lock:
            if not self.path.exists():
                files.replace(self.path, self._line(first), private=True)
            self._catch_up()
            if self.entries == 0:
                self._write(first)
                self.sync()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the file against other writers, from reading its present entries to appending inside.

        Raises:
            ValueError: the file has shrunk or is gone.
        """
        with self._lock:
            self._catch_up()
            yield

    def append(self, body: Mapping[str, Any]) -> int:
        """Write an entry and return its number; it survives a kill of the process, and a power cut after `sync`.

        Raises:
            OSError: the disk refuses it; the file is unchanged.
            ValueError: the file has shrunk or is gone, or the entry is too long.
        """
        with self.exclusive():
            self._write(body)
            return self.entries

    def sync(self) -> None:
        """Flush everything appended so far to disk."""
        with self.path.open("rb+") as file:
            os.fsync(file.fileno())

    def digest_at(self, number: int) -> str:
        """Return the SHA-256 of an entry, "" if it does not exist."""
        return next((entry.digest for entry in read(self.path) if entry.number == number), "")

    def _line(self, body: Mapping[str, Any]) -> bytes:
        """Return the text of the next entry."""
        if _RESERVED & body.keys():
            raise ValueError(
                f"Expected no field {sorted(_RESERVED & body.keys())} in an entry, for all entries have it"
            )
        content = {**body, "entry": self.entries + 1, "time": _now(), "previous": self.head}
        if self._sign is not None:
            content["signature"] = self._sign(CONTEXT + canonical(content))
        line = canonical(content) + b"\n"
        if len(line) > LONGEST:
            raise ValueError(f"Expected an entry of at most {LONGEST} bytes, but got one of {len(line)}")
        return line

    def _write(self, body: Mapping[str, Any]) -> None:
        line = self._line(body)
        files.append(self.path, line, durable=self._durable)
        self._size += len(line)
        self._follow(_entry(self.entries + 1, line))

    def _catch_up(self) -> None:
        """Read others' new entries, and remove a partial last line."""
        if not self.path.exists() or self.path.stat().st_size < self._size:
            raise ValueError(
                f"Expected {self.path} only to grow, but it is lost, or shorter than the {self._size} bytes that it "
                "had; bring back what was cut off"
            )
        size = self.path.stat().st_size
        if size == self._size:
            return
        # which contains the last complete line
        start = self._size if self._take else max(self._size, size - 2 * LONGEST)
        with self.path.open("rb") as file:
            file.seek(start)
            news = file.read()
        whole = news.rfind(b"\n") + 1
        if self._take:
            for line in news[:whole].splitlines(keepends=True):
                self._follow(_entry(self.entries + 1, line))
        elif last := news[news.rfind(b"\n", 0, max(whole - 1, 0)) + 1 : whole]:
            entry = _entry(0, last)
            if not entry.content:
                raise ValueError(f"Expected {self.path} to end with an entry of a log, but got {last[:100]!r}")
            self.entries, self.head = entry.number, entry.digest
        elif start > self._size:
            raise ValueError(f"Expected a log of lines of at most {LONGEST} bytes in {self.path}, but got others")
        self._size = start + whole
        if rest := news[whole:]:
            if _entry(0, rest[:-1] + b"\n").content:
                raise ValueError(
                    f"Expected {self.path} to end with a line, but its last byte is {rest[-1:]!r}: the file is "
                    "damaged; bring back a copy"
                )
            self._set_aside(rest)

    def _follow(self, entry: Entry) -> None:
        """Process the next entry."""
        if self._take:
            try:
                if not entry.content:
                    raise ValueError("it is no entry of a log")
                if (entry.number, entry.content["previous"]) != (self.entries + 1, self.head):
                    raise ValueError("it does not follow the line before")
                self._take(entry)
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(f"Line {entry.line} of {self.path} cannot be used: {error}") from error
        self.entries, self.head = entry.number, entry.digest

    def _set_aside(self, rest: bytes) -> None:
        """Move an incomplete last line to a file beside the log."""
        aside = self.path.with_name(f"{self.path.name}.partial")
        aside.touch(0o600)
        with aside.open("ab") as file:
            file.write(rest + b"\n")
        os.truncate(self.path, self._size)
        _LOG.warning(
            "the last line of %s was incomplete (%d bytes), as after a kill or on a full disk; it was moved to %s",
            self.path,
            len(rest),
            aside,
        )
        if self.entries:
            self._write({"event": REPAIRED, "removed_bytes": len(rest), "removed_sha256": digest(rest)})


class Facts:
    """The facts in a log of one kind, also in memory; a new one is written to disk first.

    Every entry has its own digest, so that the last one is checked as well. A fact longer than a line takes several
    entries, and counts from the last of them.

    Args:
        path: of the log, which is made if necessary; None keeps facts in this object only.
        kind: content of the first entry of the log.
        know: called with a fact and its `time`, in UTC, by any writer.
        damaged: makes the error to raise of that of a log which is damaged or lost.

    Example:
        >>> ages = []
        >>> facts = Facts(None, "ages", lambda fact: ages.append(fact["age"]))
        >>> with facts.alone():
        ...     facts.add({"age": 40})
        >>> ages
        [40]
    """

    def __init__(
        self,
        path: Path | None,
        kind: str,
        know: Callable[[dict[str, Any]], object],
        damaged: Callable[[ValueError], Exception] = lambda error: error,
    ) -> None:
        self.path, self._first, self._know, self._damaged = path, {"event": kind}, know, damaged
        self._log: ChainedLog | None = None
        self._part = ""  # of a fact in several entries

    def open(self) -> None:
        """Read the log, once.

        Raises:
            ValueError: it is damaged, or the error made by `damaged`.
        """
        if self._log is None and self.path is not None:
            try:
                if self.path.exists() and not next(read(self.path), NONE).content:
                    raise ValueError(f"{self.path} does not begin with an entry of a log")  # and it is not overwritten
                self._log = ChainedLog(self.path, self._first, digest, take=self._take, durable=True)
            except ValueError as error:
                raise self._damaged(error) from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the log for this process, after reading its latest facts; raise as `open` does."""
        self.open()
        with ExitStack() as stack:
            if self._log is not None:
                try:
                    stack.enter_context(self._log.exclusive())
                except ValueError as error:
                    raise self._damaged(error) from error
            yield

    def add(self, fact: Mapping[str, Any]) -> None:
        """Write a fact, then pass it to `know`."""
        text = canonical(fact).decode()
        if self._log is None:
            self._know({**fact, "time": _now()})
        elif len(text) <= _PART:
            self._log.append(fact)
        else:
            for start in range(0, len(text), _PART):
                self._log.append({"part": text[start : start + _PART], "first": start, "of": len(text)})

    def _take(self, entry: Entry) -> None:
        """Process an entry of the file."""
        content = entry.content
        if entry.signature != digest(CONTEXT + entry.signed):
            raise ValueError("it was changed")
        if entry.number == 1 and content.get("event") != self._first["event"]:
            raise ValueError("it begins otherwise")
        if "part" in content:
            self._part = self._part[: content["first"]] + content["part"]  # a kill may have left a part of another fact
            if len(self._part) == content["of"]:
                self._know({**json.loads(self._part), "time": content["time"]})
        elif "event" not in content:
            self._know(content)


def chained(bodies: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the contents of consecutive entries, with numbers and the previous entries' hashes.

    >>> one, two = chained([{"round": 1}, {"round": 2}])
    >>> two["entry"], two["previous"] == digest(canonical(one) + b"\\n"), faults(entries_of([one, two]))
    (2, True, [])
    """
    contents, head = list[dict[str, Any]](), ""
    for number, body in enumerate(bodies, 1):
        contents.append({**body, "entry": number, "previous": head})
        head = digest(canonical(contents[-1]) + b"\n")
    return contents


def entries_of(contents: Iterable[Any]) -> Iterator[Entry]:
    """Yield contents stored elsewhere than in a file, in the form of `read`."""
    for number, content in enumerate(contents, 1):
        yield _entry(number, canonical(content) + b"\n", ("previous",))


def read(path: Path | str) -> Iterator[Entry]:
    """Yield the entries of a log one by one; an invalid line has empty content."""
    with Path(path).open("rb") as file:
        number = 0
        while line := file.readline(LONGEST + 1):
            number += 1
            yield _entry(number, line)


def faults(entries: Iterator[Entry], verifies: Callable[[bytes, str], bool] | None = None) -> list[str]:
    """Describe the faults in the entries of a log, in their order; a partial last line is not a fault.

    Args:
        entries: from `read`.
        verifies: (bytes, signature) -> whether the signature fits; None checks the hashes only.
    """
    wrong, numbers, before = list[str](), set[int](), Entry(0, {"entry": 0}, b"", "", "")
    moved = list[str]()
    for entry in entries:
        number, fits = entry.number, verifies is None or verifies(CONTEXT + entry.signed, entry.signature)
        if not entry.content:
            if not is_partial(entry):
                wrong.append(f"line {entry.line} is no entry of a log: it was changed")
        elif number in numbers:
            wrong.append(f"entry {number} is there twice")
        elif not fits:
            unsigned = "it has no signature" if not entry.signature else "its signature does not fit"
            wrong.append(f"entry {number} was changed ({unsigned}; hash {entry.digest[:16]})")
        elif number < before.number:
            moved.append(f"entry {number} stands behind entry {before.number}: entries were moved")
        elif number == before.number + 1 and before.digest and entry.content["previous"] != before.digest:
            wrong.append(
                f"entry {before.number} was changed, or entry {number}, which has the hash "
                f"{str(entry.content['previous'])[:16]} of it in place of {before.digest[:16]}"
            )
        elif number == 1 and entry.content["previous"]:
            wrong.append("entry 1 is not the first one that was written")
        # a fault of an entry is not repeated for the next
        before = entry if fits and entry.content else Entry(0, {"entry": number or before.number + 1}, b"", "", "")
        numbers.add(before.number)
    missing = [(one + 1, other - 1) for one, other in pairwise([0, *sorted(numbers - {0})]) if other - one > 1]
    wrong += [
        f"entry {one} is missing" if one == last else f"entries {one} to {last} are missing" for one, last in missing
    ]
    return wrong + moved


def is_partial(entry: Entry) -> bool:
    """Return whether a line is incomplete, which the next writer repairs."""
    return not entry.content and entry.signature == "partial"


def _entry(number: int, line: bytes, texts: Sequence[str] = ("time", "previous")) -> Entry:
    """Return the entry of a line, with empty content unless it is canonical and has a number and these texts."""
    hashed = digest(line)
    if not line.endswith(b"\n"):
        return Entry(number, {}, b"", "partial" if len(line) <= LONGEST else "", hashed)
    try:
        content = json.loads(line)
        whole = type(content["entry"]) is int and content["entry"] > 0 and canonical(content) + b"\n" == line
        values = [*(content[name] for name in texts), signature := content.pop("signature", "")]
        if not whole or not all(isinstance(value, str) for value in values):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        return Entry(number, {}, b"", "", hashed)
    return Entry(number, content, canonical(content), signature, hashed)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def canonical(content: Any) -> bytes:
    """Return a value's canonical JSON.

    >>> canonical({"b": 1, "a": [0.5, "ü"]})
    b'{"a":[0.5,"\\\\u00fc"],"b":1}'
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(line: bytes) -> str:
    """Return the SHA-256 of some bytes in hexadecimal."""
    return hashlib.sha256(line).hexdigest()
