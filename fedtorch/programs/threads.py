"""Ranges of independent work in torch's number of threads; programs release Python's lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

ENOUGH = 2**20  # bytes, for which a thread is worth starting


def in_threads(call: Callable[[int, int], object], count: int, size: int) -> None:
    """Run `call(begin, end)` for ranges that make up `range(count)`, one for each of torch's threads.

    Args:
        call: of a program.
        count: number of independent items.
        size: bytes of an item, or an equivalent cost; small totals run in one thread.

    >>> in_threads(print, 3, 8)
    0 3
    """
    threads = max(1, min(torch.get_num_threads(), count, count * size // ENOUGH))
    if threads == 1:
        call(0, count)
        return
    ends = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, ends[:-1], ends[1:]))  # raises the first error of a thread
