"""Files that are whole under their names, whatever happens while they are written or grow."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def replace(path: Path | str, payload: bytes | memoryview) -> None:
    """Write a file beside its place, to the disk, and then under its name.

    A kill at any moment leaves the old file or the new one, whole, and at most a file `.<name>.*` beside it. The folder
    is forced to the disk as well: after this function has returned, a power cut does not bring the old file back.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


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
