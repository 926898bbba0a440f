"""Cache of compiled programs for later processes, in files that are executed when they are read.

A file is read only if it belongs to this user and nobody else can write to it, and if its SHA-256 matches its data. Its
name is a digest of the program's code and all names in it, of the types of its arguments, of the versions of numba and
Python, of this package's compilation, and of the processor. The folder is used only if each one from the root to it
belongs to this user or to root, and nobody else can write to it; in a folder with the sticky bit, as `/tmp`, others
cannot replace this user's files. In any other case, and after any error, programs are compiled in memory.

numba's own cache stores pickles in folders that others may write to, and reads them without a check. The data here is
such a pickle too, but this module reads only files written by this user.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import platform
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtorch import _files as files

_LOG = logging.getLogger(__name__)
_DIGEST = 32  # bytes before the data


class Cache:
    """numba's interface of a function's cache.

    Args:
        name: of the program.
        text: everything that determines the compiled code, besides the types of arguments, numba, Python and the
            processor.
        missed: called before a signature is compiled that is not there.
    """

    def __init__(self, name: str, text: str, missed: Callable[[], object]) -> None:
        self._name, self._text, self._missed = name, text, missed

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the compiled code for a signature, None if it is missing, or fails a check."""
        from numba.core.compiler import CompileResult

        target.refresh()
        try:
            data = read(self._file(signature, target.codegen()))
            if data is not None:
                return CompileResult._rebuild(target, *pickle.loads(data))
        except Exception as error:  # for any fault in a file, the program is compiled
            _LOG.warning("compiling the program %s again, because its file could not be read: %s", self._name, error)
        self._missed()
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Store the compiled code; log once if that is impossible."""
        from numba.core import serialize

        try:
            write(self._file(signature, result.codegen), serialize.dumps(result._reduce()))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            _once(str(error))

    def _file(self, signature: Any, codegen: Any) -> Path:
        """Return the file of a signature.

        Raises:
            PermissionError: others could write to the folder.
        """
        import numba

        versions = numba.__version__, platform.python_implementation(), platform.python_version(), _how()
        about = repr((self._text, str(signature), codegen.magic_tuple(), versions))
        return folder() / f"{self._name}-{hashlib.sha256(about.encode()).hexdigest()[:32]}"


def folder() -> Path:
    """Return the folder of compiled programs, which is made if necessary.

    Raises:
        PermissionError: it or one above it belongs to somebody else, or others can write to it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative path is ignored, by the XDG specification
    place = (base if base.is_absolute() else Path.home() / ".cache") / "fedtorch" / "programs"
    files.private_folder(place, log=False)
    for each in (place.resolve(), *place.resolve().parents):
        status = each.stat()
        others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if others or status.st_uid not in (0, _user()):
            raise PermissionError(
                f"Expected {each}, above compiled programs, to belong to this user or root and to be writable by no "
                f"other user, but its mode is {stat.filemode(status.st_mode)}, its owner {status.st_uid}; correct this "
                "or set XDG_CACHE_HOME"
            )
    return place


def read(file: Path) -> bytes | None:
    """Return the data of a file, None if there is none.

    Raises:
        PermissionError: it belongs to somebody else, or others can write to it.
        ValueError: its digest does not match its data.
    """
    try:
        place = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return None
    with open(place, "rb") as opened:
        status = os.fstat(place)  # of the opened file, even if the name has been replaced meanwhile
        if status.st_uid != _user() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"Expected {file} to be this user's alone, but others can write to it")
        digest, data = opened.read(_DIGEST), opened.read()
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"Expected {file} to be whole, but its digest is not that of its data")
    return data


def write(file: Path, data: bytes) -> None:
    """Write data after its digest, under a temporary name until complete.

    Raises:
        OSError: there is no space, for example.
    """
    part = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    try:
        place = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(place, "wb") as opened:
            opened.write(hashlib.sha256(data).digest() + data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


@functools.cache
def _how() -> str:
    """Return the digest of the compilation settings and the cache format."""
    texts = [Path(__file__).with_name(name).read_bytes() for name in ("engine.py", "cache.py")]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


@functools.cache
def _once(reason: str) -> None:
    _LOG.warning("compiled programs are not cached, so every process compiles them again: %s", reason)
