"""What programs in C, made by the system's compiler, save beside the operations of torch that they replace.

Processor time on one thread, medians of seven calls in turns. Compiling is timed without a cache; a program is compiled
once on a machine, and kept.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import fedtorch as ft
from experiments.benchmarks.parts.gpu_kernels import normal
from experiments.benchmarks.parts.gpu_timing import kernels
from fedtorch.dispatch import choice, compiled
from fedtorch.kernels import glm_steps
from fedtorch.kernels.glm_loop import glm_loop

COLUMNS = [
    "program",
    "sizes",
    "operations of torch, ms",
    "in C, ms",
    "ratio",
    "s to compile",
    "calls until it has paid",
]


class Work(NamedTuple):
    """A call that runs by a program in C where there is one."""

    sizes: str
    call: Callable[[], object]
    sources: Sequence[str]  # of its programs, below `fedtorch`


def sizes_of(*numbers: int) -> str:
    """The sizes of an operation."""
    return " × ".join(f"{number:,}" for number in numbers)


def regressions(small: bool, family: glm_steps.Family, batch: int) -> Work:
    """An epoch of clients with as many rows, by batches."""
    clients, rows, features = (3, 8, 2) if small else (100, 200, 20)
    batch = min(batch, rows)
    x = normal(1, clients, rows, features, device="cpu", dtype=torch.float64)
    y = (x.sum(2) > 0).double()
    order = ft.random.permutation(ft.random.fold_in(ft.random.key(2), torch.arange(clients)), rows)
    place = order.reshape(clients, -1, batch).movedim(1, 0).contiguous()
    size = torch.full(place.shape[:2], batch)
    start, total = torch.zeros(clients, features, dtype=torch.float64), torch.full((clients,), len(place))

    def runs(most: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        steps = len(place) if most is None else max(1, most // batch)
        yield from zip(place.split(steps), size.split(steps))

    call = partial(glm_loop, family, x, y, start, runs, lr=0.1, total=total)
    return Work(sizes_of(clients, rows, features) + f", batches of {batch}", call, ["kernels/programs/glm_loop.c"])


WORK: dict[str, Callable[[bool], Work]] = {
    "glm_loop, linear": partial(regressions, family=glm_steps.GAUSSIAN, batch=200),
    "glm_loop, logistic": partial(regressions, family=glm_steps.BERNOULLI, batch=10),
}


def seconds_to_compile(source: str) -> float | None:
    """Seconds until a program is there in a process and a cache of its own, None where there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", __name__, source]
        environment = {**os.environ, "XDG_CACHE_HOME": folder, choice.VARIABLE: "on"}
        told = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=300)
    seconds: float | None = json.loads(told.stdout)
    return seconds


def compile_here(source: str) -> None:
    """Print the seconds that a program takes to be compiled and loaded."""
    began = time.perf_counter()
    made = compiled.library(Path(ft.__file__).parent / source, **macros(source))
    sys.stdout.write(json.dumps(None if made is None else time.perf_counter() - began))


def line(name: str, small: bool) -> list[str]:
    """Return the line of `COLUMNS` of a program."""
    work = WORK[name](small)
    words, each = [name, work.sizes], [seconds_to_compile(source) for source in work.sources]
    if None in each:
        return [*words, "", "no compiler", "", "", ""]
    compiling = sum(seconds for seconds in each if seconds is not None)
    times: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(8):
        for mode, spent in times.items():
            with kernels(mode):
                began = time.process_time()
                work.call()
                spent.append(time.process_time() - began)
    plain, program = (statistics.median(spent[1:]) for spent in times.values())
    words += [f"{1e3 * plain:.3g}", f"{1e3 * program:.3g}", f"{plain / program:.1f}", f"{compiling:.2g}"]
    return [*words, f"{compiling / (plain - program):,.0f}" if plain > program else "never"]


def macros(source: str) -> dict[str, str]:
    """Those that a file is compiled with for float64."""
    return {"REAL": "double"} if "glm_loop" in source else {}


if __name__ == "__main__":
    compile_here(sys.argv[1])
