"""Attention by plain operations, in all threads, for as long as any of them asks for it.

PyTorch keeps for the whole process which kernels of attention are allowed. Two threads that allow the plain one only,
each for its own while, would bring back what they found, and whichever ends last would leave the process as it is
within them. So they are counted: the first forbids the fused kernels, and the last one allows what was allowed before.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from torch.nn.attention import SDPBackend, sdpa_kernel

_LOCK = threading.Lock()
_ENTERED: list[AbstractContextManager[None]] = []  # one for all
_count = 0


def enter() -> None:
    """Forbid the fused kernels until `leave` has been called as often as this.

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
    """Allow what was allowed, if nobody else is within."""
    global _count
    with _LOCK:
        _count -= 1
        if not _count:
            _ENTERED.pop().__exit__(None, None, None)
