"""Files that get their name when complete, with digests against damage, and with restricted permissions.

A file gets its name when all of it is on disk. It contains its SHA-256, so that damage, down to a single bit, raises a
`ValueError` that names the file. Deliberate changes can include the digest, too.

Files of sites and servers are readable by their owner alone, `private=True`, in folders of `private_folder`.

>>> import tempfile
>>> folder = tempfile.TemporaryDirectory()
>>> path = f"{folder.name}/count.json"
>>> write_json(path, {"rounds": 7})
>>> read_json(path)
{'rounds': 7}
>>> _ = Path(path).write_bytes(Path(path).read_bytes().replace(b"7", b"6"))
>>> read_json(path)
Traceback (most recent call last):
ValueError: Expected ...count.json as it was written, but its content does not match its SHA-256: ...
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
_BLOCK = 2**20  # bytes per read
_LOG = logging.getLogger(__name__)
_OPEN: set[Path] = set()  # folders that have been logged as readable by others


@contextmanager
def replacing(path: Path | str, *, private: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file beside the target, which is flushed to disk at the end and then renamed to it.

    A kill at any moment leaves the old file or the new one, complete, and at most a file `.<name>.*` beside it. The
    folder is flushed as well: afterwards a power cut does not bring the old file back.

    Args:
        path: of the file.
        private: whether only its owner may read it, mode 0600; else the process's umask decides.
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
    """Write a file that gets its name when it is complete; see `replacing`."""
    with replacing(path, private=private) as file:
        file.write(payload)


def _sync(folder: Path) -> None:
    """Flush the names of a folder to disk, on systems where folders can be opened."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path | str, payload: bytes, *, durable: bool = True) -> None:
    """Append to an existing file: all of the payload, or nothing if the disk refuses it.

    A kill may leave a part of it, so readers have to know where an entry ends.

    Args:
        path: of the file; no other process may write to it meanwhile.
        payload: bytes to append.
        durable: whether to flush it to disk.

    Raises:
        OSError: the disk refuses it; the file is unchanged.
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
        with suppress(OSError):  # otherwise the next reader repairs it
            os.truncate(path, size)
        raise


def private_folder(folder: Path | str, *, log: bool = True) -> None:
    """Make a folder, and missing ones above it, for this user alone.

    Args:
        folder: an existing one may be shared on purpose, and is not changed.
        log: whether to log, once, that an existing one is open to others.
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
            "the folder %s of private files has the mode %s, which lets others %s; run `chmod 700 %s`, or choose "
            "another folder",
            *(folder, stat.filemode(mode), lets, folder),
        )


def private_lock(path: Path | str, timeout: float = -1.0) -> FileLock:
    """Return a lock between processes of one user; `timeout` in seconds, negative for no limit."""
    from filelock import FileLock  # imported here, because it is slow to import and few runs need it

    return FileLock(path, timeout=timeout, mode=0o600)


def digest_fits(file: BinaryIO, place: int) -> bool:
    """Return whether the digits at `place` are those of the SHA-256 of the rest of the file.

    The file is read in blocks, and may be larger than memory.
    """
    file.seek(place)
    digits = file.read(DIGITS)
    file.seek(0)
    hashed, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    first, last = place, place + DIGITS  # of the digits, relative to the block
    while count := file.readinto(block):  # type: ignore[attr-defined]
        hashed.update(block[: max(0, min(first, count))])
        hashed.update(block[max(0, min(last, count)) : count])
        first, last = first - count, last - count
    return hashed.hexdigest().encode() == digits


def write_json(path: Path | str, content: Mapping[str, Any], *, private: bool = True) -> None:
    """Write a dict as JSON with its SHA-256, in readable lines; the file gets its name when complete."""
    replace(path, _json(content), private=private)


def read_json(path: Path | str) -> dict[str, Any]:
    """Read a file of `write_json`.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is damaged or of another form.
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
            f"Expected {path} as it was written, but its content does not match its SHA-256: it is damaged, was "
            "changed by hand, or is of an earlier version; restore a copy, or move it away to start without it"
        )
    return content


def _json(content: Mapping[str, Any]) -> bytes:
    digits = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digits}, indent=1) + "\n").encode()
