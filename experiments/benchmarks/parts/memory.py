"""What a piece of work adds to the peak of the resident memory, measured in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from experiments.benchmarks.parts import forked


def peak(reset: bool = False) -> int:
    """The peak of the resident memory in bytes; with `reset` it begins anew from the present one, which is returned."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    name = "VmRSS" if reset else "VmHWM"
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1]) * 1024


def give_back() -> None:
    """Give memory that was freed back to the system, where the C library can, so that using it again counts."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        gc.collect()
        trim(0)


def added(warm: Callable[[], object], work: Callable[[], object]) -> float:
    """MiB that `work` adds to the peak of a child of this process, `warm` having been done in it before.

    `warm` is the same work, but small: it loads what libraries load at first use.

    Raises:
        RuntimeError: the child ended with an error, which it has printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "added.json"

        def body() -> None:
            warm()
            give_back()
            before = peak(reset=True)
            kept = work()
            answer.write_text(json.dumps((peak() - before) / 2**20))
            del kept

        sys.stdout.flush()
        _, status = os.waitpid(forked.fork(body), 0)
        if status != 0:
            raise RuntimeError(f"Expected the child that measures memory to end well, but its status is {status}")
        mebibytes: float = json.loads(answer.read_text())
        return mebibytes
