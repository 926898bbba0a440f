"""A node's states at earlier moments to which a protocol may return.

A version has a number: at a site that of the request (`session`), at a party that of the protocol's point
(`protocol.journal`). It is stored, on disk if there is a folder, before any message about it, so that after a kill of
either side the node has the state on which the others rely.

>>> import tempfile, torch
>>> from pathlib import Path
>>> from fedtorch.protocol.versions import Kept, Versions, alone_in, clean, runs
>>> folder = tempfile.TemporaryDirectory()
>>> run = 32 * "a"
>>> with alone_in(folder.name):  # no other process
...     versions = Versions(Path(folder.name) / run)
...     for number in (1, 2, 3):
...         versions.put(number, {"ids": torch.arange(number)})
...     versions.retain({2, 3})
>>> sorted(versions.numbers), versions.get(2)
([0, 2, 3], {'ids': tensor([0, 1])})
>>> versions.finish()
>>> gone: list[Kept] = clean(folder.name, days=0.0)
>>> [(kept.run == run, kept.over) for kept in gone], runs(folder.name)
([(True, True)], [])
>>> folder.cleanup()
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import Timeout
from torch import Tensor

from fedtorch import _files as files, checkpoint

FIRST = 0  # the initial version
_BEGAN = "began.safetensors"
_OVER = "over"  # the file that marks an ended run
_RUN = re.compile(r"[0-9a-f]{32}")

Flat = dict[str, Tensor]


class Versions:
    """The versions of one run.

    Args:
        folder: of this run alone; None keeps them in memory, where they end with the process.

    Attributes:
        over: whether the run has ended.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._held: dict[int, Flat] = {}
        self.over = folder is not None and (folder / _OVER).exists()
        if folder is not None:
            files.private_folder(folder)

    @property
    def numbers(self) -> set[int]:
        """Return the available versions; the first always is, because a node can start anew."""
        return {FIRST, *self._held, *self._on_disk()}

    def put(self, version: int, states: Flat) -> None:
        """Store a version; the run is not over. Raises OSError if it cannot be written."""
        if self.folder is not None and version != FIRST:
            checkpoint.write(self._path(version), states, private=True)
            if self.over:
                (self.folder / _OVER).unlink(missing_ok=True)
        self.over = self.over and version == FIRST
        self._held[version] = states

    def finish(self) -> None:
        """Mark the run as over, with no pending states."""
        self.over = True
        if self.folder is not None:
            files.replace(self.folder / _OVER, b"", private=True)

    def note_beginning(self, about: Flat) -> None:
        """Store the run's start with its versions, if there is a folder."""
        if self.folder is not None:
            checkpoint.write(self.folder / _BEGAN, about, private=True)

    def beginning(self) -> Flat | None:
        """Return the run's start, None if it was not stored; raise ValueError for a damaged file."""
        return checkpoint.read(self.folder / _BEGAN) if self.folder and (self.folder / _BEGAN).exists() else None

    def get(self, version: int) -> Flat | None:
        """Return a version, None if it is missing; raise ValueError for a damaged file."""
        if version not in self._held and self.folder is not None and self._path(version).exists():
            self._held[version] = checkpoint.read(self._path(version))
        return self._held.get(version)

    def retain(self, versions: Collection[int]) -> None:
        """Delete all versions except these and the first."""
        for version in [v for v in self._held if v not in versions and v != FIRST]:
            del self._held[version]
        for version in self._on_disk().difference(versions):
            self._path(version).unlink(missing_ok=True)

    def _on_disk(self) -> set[int]:
        """Return the versions that have a file."""
        if self.folder is None:
            return set()
        try:
            parts = [name.partition(".") for name in os.listdir(self.folder)]
        except FileNotFoundError:
            return set()
        return {int(number) for number, _, kind in parts if kind == "safetensors" and number.isdecimal()}

    def _path(self, version: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{version}.safetensors"


class Kept(NamedTuple):
    """A node's stored versions of a run."""

    run: str  # its identity
    over: bool  # whether it has ended; else its states are pending
    days: float  # since its last change
    bytes: int


def runs(folder: Path | str) -> list[Kept]:
    """Return the versions of each run in a folder of states, the most recently changed run last."""
    stored = []
    for each in Path(folder).iterdir() if Path(folder).is_dir() else ():
        if _RUN.fullmatch(each.name) and each.is_dir():
            stats = [each.stat()]
            for path in each.iterdir():
                with suppress(FileNotFoundError):  # the node is at work
                    stats.append(path.stat())
            days = (time.time() - max(stat.st_mtime for stat in stats)) / 86_400
            stored.append(Kept(each.name, (each / _OVER).exists(), days, sum(stat.st_size for stat in stats[1:])))
    return sorted(stored, key=lambda kept: -kept.days)


def clean(folder: Path | str, days: float, abandoned: Collection[str] = ()) -> list[Kept]:
    """Delete runs that are over and have not changed for this many days; return them.

    Args:
        folder: of states.
        days: for which a run is kept after its end.
        abandoned: runs to delete although they have not ended; they can then no longer be resumed.

    Raises:
        ValueError: no such run.
        FileExistsError: a process takes part with this folder.
    """
    with alone_in(folder):
        every = runs(folder)
        if unknown := set(abandoned) - {kept.run for kept in every}:
            raise ValueError(
                f"Expected runs in {folder}, but got {sorted(unknown)}; there are {[k.run for k in every]}"
            )
        gone = [kept for kept in every if kept.run in abandoned or (kept.over and kept.days >= days)]
        for kept in gone:
            shutil.rmtree(Path(folder) / kept.run)
    return gone


@contextmanager
def alone_in(folder: Path | str | None) -> Iterator[None]:
    """Make a folder of states, for this user alone, and lock it; None is no folder.

    Raises:
        FileExistsError: another process does.
    """
    if folder is None:
        yield
        return
    files.private_folder(folder)
    lock = files.private_lock(Path(folder) / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise FileExistsError(
            f"Expected a folder that no other process uses, but one uses {folder}; end that process, or choose another "
            "folder for another site"
        ) from error
    try:
        yield
    finally:
        lock.release()
