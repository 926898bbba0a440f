"""Ranges of independent work in as many threads as torch has; programs let other threads of Python run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

ENOUGH = 2**20  # bytes, for which a thread is worth starting


def in_threads(call: Callable[[int, int], object], count: int, size: int) -> None:
    """Run `call(begin, end)` for ranges that make up `range(count)`, one for each of torch's threads.

    Args:
        call: of a program.
        count: of what does not depend on each other.
        size: bytes of one, or so many that passing over them takes as long; of few in all one thread takes care.

    >>> in_threads(print, 3, 8)
    0 3
    """
    threads = max(1, min(torch.get_num_threads(), count, count * size // ENOUGH))
    if threads == 1:
        call(0, count)
        return
    ends = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, ends[:-1], ends[1:]))  # raises what one has raised
