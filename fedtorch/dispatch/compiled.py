"""Compile C programs for the CPU with the system's compiler, once, and load them.

The compiler is `CC`, or else cc, gcc or clang, whichever is found. Libraries are kept in `fedtorch/compiled` below
`XDG_CACHE_HOME` or the home's `.cache`, a folder that nobody else may write to, by the digest of source, headers,
options, compiler and processor; what others may have written is not loaded. Where there is no compiler, or it fails, or
`FEDTORCH_KERNELS` is off, there is no program, and operations run as torch does them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from fedtorch import _files as files
from fedtorch.dispatch import choice

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_OPTIONS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-shared", "-fPIC")
_LIBRARIES = ("-lm",)
_INCLUDED = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)
_PATIENCE = 60.0  # seconds
ENOUGH = 2**20  # bytes, for which a thread is worth starting


def library(source: Path, **macros: str) -> ctypes.CDLL | None:
    """Return the compiled library of a C file, None where there is none.

    Args:
        source: the file.
        macros: defined in it, by name.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "twice.c"
    ...     _ = file.write_text("int times(int number) { return FACTOR * number; }")
    ...     program = library(file, FACTOR="2")
    >>> program is None or program.times(21) == 42
    True
    """
    return _loaded(source, tuple(macros.items())) if choice.enabled() else None


def in_threads(call: Callable[[int, int], T], count: int, size: int) -> list[T]:
    """Return what `call(begin, end)` gives of ranges that make up `range(count)`, one for each of torch's threads.

    Args:
        call: into a program, which lets other threads of Python run.
        count: of what does not depend on each other.
        size: bytes of one, or so many that passing over them takes as long; of few in all one thread takes care.

    >>> in_threads(lambda begin, end: end - begin, 3, 8)
    [3]
    """
    threads = max(1, min(torch.get_num_threads(), count, count * size // ENOUGH))
    if threads == 1:
        return [call(0, count)]
    ends = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, ends[:-1], ends[1:]))


@functools.cache
def _loaded(source: Path, macros: tuple[tuple[str, str], ...]) -> ctypes.CDLL | None:
    """Return the library of a file with its macros, from the cache or compiled now."""
    compiler = _compiler()
    if compiler is None:
        _LOG.info("no C compiler is found: %s runs without its program", source.stem)
        return None
    text, options = _text(source), (*_OPTIONS, *(f"-D{name}={value}" for name, value in macros))
    digest = hashlib.sha256("\0".join((*options, *compiler, _processor())).encode() + text)
    try:
        kept = _folder() / f"{source.stem}-{digest.hexdigest()[:32]}.so"
        if not kept.exists():
            _compile(compiler[0], source, options, kept)
        return ctypes.CDLL(str(kept))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home
        said = getattr(error, "stderr", None) or error
        _LOG.warning("%s could not be compiled, and runs without its program: %s", source.name, said)
        return None


def _text(source: Path) -> bytes:
    """Return the text of a file and of the files of ours that it includes, which a digest is made of."""
    text = source.read_bytes()
    return text + b"".join(_text(source.parent / name.decode()) for name in _INCLUDED.findall(text))


def _compile(compiler: str, source: Path, options: tuple[str, ...], kept: Path) -> None:
    """Compile into a file of its own and rename it, so that processes that do so at once do not disturb each other."""
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / kept.name
        command = [compiler, *options, str(source), "-o", str(made), *_LIBRARIES]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE)
        made.replace(kept)


@functools.cache
def _compiler() -> tuple[str, str] | None:
    """Return the compiler's path and what its file is; to ask for its version takes longer than to load a program."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if (path := shutil.which(name)) is not None:
            file = Path(path).resolve()
            status = file.stat()
            return path, f"{file} {status.st_size} {status.st_mtime_ns}"
    return None


def _processor() -> str:
    """Return what tells processors with other instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return "\n".join([platform.machine(), platform.processor(), *named])


def _folder() -> Path:
    """Return the folder of compiled libraries, which belongs to this user and which nobody else can write to.

    Raises:
        PermissionError: it belongs to somebody else, or others can write to it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative path is ignored, as the XDG specification asks
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "fedtorch" / "compiled"
    files.private_folder(folder, log=False)
    status = folder.stat()
    owned = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    if not owned or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"Expected {folder}, of which programs are loaded, to belong to this user and nobody else to write to it, "
            f"but its mode is {stat.filemode(status.st_mode)}, its owner {status.st_uid}; mend it or set XDG_CACHE_HOME"
        )
    return folder
