"""Process-wide switch to plain attention, counted over threads.

PyTorch's choice of attention kernels is global to the process. If two threads switch to the plain kernel for
overlapping periods, each would restore the setting that it found, and the last one would leave the process in the wrong
state. So users are counted: the first forbids the fused kernels, and the last one restores the original setting.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from torch.nn.attention import SDPBackend, sdpa_kernel

_LOCK = threading.Lock()
_ENTERED: list[AbstractContextManager[None]] = []  # shared by all threads
_count = 0


def enter() -> None:
    """Forbid the fused kernels until every call of `enter` has been followed by one of `leave`.

    >>> import torch
    >>> enter(), torch.backends.cuda.flash_sdp_enabled(), leave(), torch.backends.cuda.flash_sdp_enabled()
    (None, False, None, True)
    """
    global _count
    with _LOCK:
        if not _count:
            only = sdpa_kernel(SDPBackend.MATH)
            only.__enter__()
            _ENTERED.append(only)
        _count += 1


def leave() -> None:
    """Restore the original setting if this was the last user."""
    global _count
    with _LOCK:
        _count -= 1
        if not _count:
            _ENTERED.pop().__exit__(None, None, None)
