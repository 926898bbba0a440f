"""Files that appear whole under their names, whatever happens while they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace(path: Path | str, payload: bytes | memoryview) -> None:
    """Writes a file beside its place, to the disk, and then under its name.

    A kill at any moment leaves the old file or the new one, whole, and at most a file `.<name>.*` beside it.
    """
    path = Path(path)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
