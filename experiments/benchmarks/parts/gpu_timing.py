"""What the GPU benchmarks share: clocks that wait for the device, and what the device itself can do."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fedtorch.programs import choice


class Timed(NamedTuple):
    """Seconds of one call over repetitions."""

    median: float
    spread: float  # half the distance of the quartiles


class Rates(NamedTuple):
    """What the device reaches, measured."""

    copy: float  # bytes a second, read and written
    single: float  # float32 operations a second, of a matrix product without TF32
    double: float  # float64 operations a second


@contextmanager
def kernels(mode: str) -> Iterator[None]:
    """`FEDTORCH_PROGRAMS` inside."""
    before = os.environ.get(choice.VARIABLE)
    os.environ[choice.VARIABLE] = mode
    try:
        yield
    finally:
        os.environ.pop(choice.VARIABLE) if before is None else os.environ.update({choice.VARIABLE: before})


def device_of(smoke: bool) -> str | None:
    """Where to measure; None without a device."""
    return "cuda" if torch.cuda.is_available() else "cpu" if smoke else None


def timed(work: Callable[[], object], device: str, seconds: float = 1.0) -> Timed:
    """Seconds of a call, after two that do not count, over 5 to 200 repetitions within so many seconds."""
    repeat = 1 if device == "cpu" else 5
    times: list[float] = []
    for _ in range(1 if device == "cpu" else 2):
        work()
    until = time.perf_counter() + seconds
    while len(times) < repeat or (device == "cuda" and len(times) < 200 and time.perf_counter() < until):
        times.append(_once(work, device))
    cuts = statistics.quantiles(times, n=4) if len(times) > 1 else [0.0, 0.0, 0.0]
    return Timed(statistics.median(times), (cuts[2] - cuts[0]) / 2)


def _once(work: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def rates(device: str, small: bool) -> Rates:
    """Copying, and products of square matrices."""
    count, size = (2**12, 64) if small else (2**28, 8192)
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    copy = 8 * count / timed(lambda: target.copy_(source), device).median
    found = []
    for dtype in (torch.float32, torch.float64):
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        found.append(2 * size**3 / timed(lambda: matrix @ matrix, device).median)  # noqa: B023 (called at once)
    return Rates(copy, *found)


def busy(work: Callable[[], object]) -> float:
    """The share of a call's time in which the device computes."""
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    spent = time.perf_counter() - start
    return sum(event.self_device_time_total for event in seen.key_averages()) / 1e6 / spent


def faster(times: Mapping[str, Timed], than: str, one: str) -> float:
    """How many times faster `one` is than `than`."""
    return times[than].median / times[one].median
