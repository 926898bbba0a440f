"""Files that are whole under their names and as they were written, and who may read them.

A file takes its name when all of it is on the disk. Its SHA-256 stands in it, so that damage, down to a single bit, is
a `ValueError` that names the file. Whoever changes a file on purpose can change its digest, too.

Files of sites and servers are their owner's alone, `private=True`, in folders that `private_folder` makes.

>>> import tempfile
>>> folder = tempfile.TemporaryDirectory()
>>> path = f"{folder.name}/count.json"
>>> write_json(path, {"rounds": 7})
>>> read_json(path)
{'rounds': 7}
>>> _ = Path(path).write_bytes(Path(path).read_bytes().replace(b"7", b"6"))
>>> read_json(path)
Traceback (most recent call last):
ValueError: Expected ...count.json as it was written, but its content does not fit the SHA-256 that is in it: ...
>>> folder.cleanup()
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from filelock import FileLock

DIGITS = 64  # of a SHA-256 in hexadecimal
_BLOCK = 2**20  # bytes that are read at once
_LOG = logging.getLogger(__name__)
_OPEN: set[Path] = set()  # folders that have been said to be open


@contextmanager
def replacing(path: Path | str, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open a file beside its place, which is forced to the disk at the end, and then takes its name.

    A kill at any moment leaves the old file or the new one, whole, and at most a file `.<name>.*` beside it. The folder
    is forced to the disk as well: afterwards a power cut does not bring the old file back.

    Args:
        path: of the file.
        private: whether it is for its owner alone, 0600; else the process's umask says who may read it.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    mode = 0o600 if private else 0o666
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def replace(path: Path | str, payload: bytes | memoryview, *, private: bool = False) -> None:
    """Write a file that takes its name when it is whole; see `replacing`."""
    with replacing(path, private=private) as file:
        file.write(payload)


def _sync(folder: Path) -> None:
    """Force the names of a folder to the disk, where folders can be opened."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path | str, payload: bytes, *, durable: bool = True) -> None:
    """Write to the end of a file that is there, all of it or nothing where the disk does not take it.

    A kill may leave a part of it: whoever reads next has to know where an entry ends.

    Args:
        path: of the file; no other process may write to it meanwhile.
        payload: what comes behind the rest.
        durable: whether it is forced to the disk.

    Raises:
        OSError: the disk does not take it; the file is as it was.
    """
    path = Path(path)
    size = path.stat().st_size
    try:
        with path.open("ab") as file:
            file.write(payload)
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):  # else whoever reads it next mends it
            os.truncate(path, size)
        raise


def private_folder(folder: Path | str, *, log: bool = True) -> None:
    """Make a folder, and those above it that are missing, for this user alone.

    Args:
        folder: one that is there may be shared on purpose, and stays as it is.
        log: whether it is logged, once, that the mode of one that is there lets others in.
    """
    folder = Path(folder)
    there = folder.is_dir()
    for above in reversed(folder.parents):
        if not above.exists():
            above.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if log and there and os.name != "nt" and (mode := folder.stat().st_mode) & 0o066 and folder.resolve() not in _OPEN:
        _OPEN.add(folder.resolve())
        lets = "change which files are in it" if mode & 0o022 else "see which files are in it"
        _LOG.warning(
            "the folder %s, where private files are kept, has the mode %s: it lets others %s; `chmod 700 %s` if they "
            "should not, or choose another",
            *(folder, stat.filemode(mode), lets, folder),
        )


def private_lock(path: Path | str, timeout: float = -1.0) -> FileLock:
    """Return a lock of processes of one user; `timeout` in seconds, below 0 without end."""
    from filelock import FileLock  # here, for importing it takes long, and few runs need it

    return FileLock(path, timeout=timeout, mode=0o600)


def digest_fits(file: BinaryIO, place: int) -> bool:
    """Return whether the digits at `place` are those of the SHA-256 of the rest of the file.

    The file is read in blocks, and may be larger than memory.
    """
    file.seek(place)
    digits = file.read(DIGITS)
    file.seek(0)
    hashed, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    first, last = place, place + DIGITS  # of the digits, as seen from the block
    while count := file.readinto(block):  # type: ignore[attr-defined]
        hashed.update(block[: max(0, min(first, count))])
        hashed.update(block[max(0, min(last, count)) : count])
        first, last = first - count, last - count
    return hashed.hexdigest().encode() == digits


def write_json(path: Path | str, content: Mapping[str, Any], *, private: bool = True) -> None:
    """Write a dict of JSON and its SHA-256, whole, as lines that people can read."""
    replace(path, _json(content), private=private)


def read_json(path: Path | str) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is not as it was written, by a single bit or altogether.
    """
    try:
        payload = Path(path).read_bytes()
        content = json.loads(payload)
        digits = content.pop("sha256")
        same = _json(content) == payload and isinstance(digits, str)
    except IsADirectoryError:
        raise ValueError(f"Expected a file in {path}, but got a folder; move it away") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        same = False
    if not same:
        raise ValueError(
            f"Expected {path} as it was written, but its content does not fit the SHA-256 that is in it: it is "
            "damaged, was changed by hand, or is of an earlier version; bring back a copy, or move it away if what it "
            "knows may be forgotten"
        )
    return content


def _json(content: Mapping[str, Any]) -> bytes:
    digits = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digits}, indent=1) + "\n").encode()
