"""Files that appear whole under their names, whatever happens while they are written."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace(path: Path | str, payload: bytes | memoryview) -> None:
    """Writes a file beside its place, to the disk, and then under its name.

    A kill at any moment leaves the old file or the new one, whole, and at most a file `.<name>.*` beside it.
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
