"""What programs that numba compiles for the CPU save beside the operations of torch that they replace.

Processor time on one thread, medians of seven calls in turns. Compiling is timed without a cache; a program is compiled
once on a machine, and kept.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

import fedtorch as ft
from experiments.benchmarks.parts.gpu_kernels import CASES, normal
from experiments.benchmarks.parts.gpu_timing import kernels
from fedtorch.programs import Program, choice, glm_steps
from fedtorch.programs.glm_loop import glm_loop

COLUMNS = [
    "program",
    "sizes",
    "operations of torch, ms",
    "by the program, ms",
    "ratio",
    "s to compile",
    "calls until it has paid",
]


class Work(NamedTuple):
    """A call that runs by programs where there is numba."""

    sizes: str
    call: Callable[[], object]
    operation: str  # the module of its programs


def sizes_of(*numbers: int) -> str:
    """The sizes of an operation."""
    return " × ".join(f"{number:,}" for number in numbers)


def of_kernel(name: str, small: bool) -> Work:
    """What has a program for a GPU as well."""
    kind = CASES[name]
    sizes = kind.small if small else kind.counted
    return Work(sizes_of(*sizes), kind.case(sizes, "cpu").ours, name)


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
    return Work(sizes_of(clients, rows, features) + f", batches of {batch}", call, "glm_loop")


WORK: dict[str, Callable[[bool], Work]] = {
    "philox": partial(of_kernel, "philox"),
    "gibbs_sweeps": partial(of_kernel, "gibbs_sweeps"),
    "glm_loop, linear": partial(regressions, family=glm_steps.GAUSSIAN, batch=200),
    "glm_loop, logistic": partial(regressions, family=glm_steps.BERNOULLI, batch=10),
}


def seconds_to_compile(operation: str) -> float | None:
    """Seconds until programs are there in a process and a cache of its own, with numba's import; None without it."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", __name__, operation]
        environment = {**os.environ, "XDG_CACHE_HOME": folder, choice.VARIABLE: "on"}
        told = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=300)
    seconds: float | None = json.loads(told.stdout)
    return seconds


def compile_here(operation: str) -> None:
    """Print the seconds that the programs of a module of `fedtorch.programs` take to be compiled."""
    values = vars(importlib.import_module(f"fedtorch.programs.{operation}")).values()
    began, found = time.perf_counter(), [each for each in values if isinstance(each, Program) and each.signatures]
    assert found
    usable = all(each.usable() for each in found)
    for each in found if usable else ():
        each.compile()
    sys.stdout.write(json.dumps(time.perf_counter() - began if usable else None))


def line(name: str, small: bool) -> list[str]:
    """Return the line of `COLUMNS` of a program."""
    work = WORK[name](small)
    words, compiling = [name, work.sizes], seconds_to_compile(work.operation)
    if compiling is None:
        return [*words, "", "no numba", "", "", ""]
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


if __name__ == "__main__":
    compile_here(sys.argv[1])
