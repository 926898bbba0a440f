"""Before anything imports Triton: without a CUDA device its programs are interpreted, which it decides at import.

Nothing that collecting the tests leaves behind becomes garbage: the collector does not run meanwhile, and does not look
at it again later, which takes half a second each time.
"""

from __future__ import annotations

import atexit
import gc
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
