"""Before anything imports Triton: without a CUDA device its programs are interpreted, which it decides at import.

Nothing that collecting the tests leaves behind becomes garbage: the collector does not run meanwhile, and does not look
at it again later, which takes half a second each time.

Threads share one arena of the C library, which by itself keeps up to 64 MB of what a thread has freed for each of
sixteen arenas: on two cores a gigabyte in the end.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
    libc.mallopt(-8, 1)  # M_ARENA_MAX

gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
