"""Compiles the launches of every Triton program to cubins for an A100 and an H100, without a device.

`python -m support.ahead_of_time` runs in a process of its own, without `TRITON_INTERPRET`. Operations are called with
tensors of torch's device `meta`, which have shapes of real problems and no memory, and are taken for CUDA's; the one
place where programs start compiles what it is given as Triton would there. A line is JSON: the program and its call,
the architecture; how many programs start, of how many threads; arguments that have strides of their own; registers of a
thread, bytes that it spills and of its stack, as the assembler tells; and bytes of shared memory.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from fedtorch import random
from fedtorch.models.gibbs.gibbs_sweeps import Chains, Rows, SweepPrior, gibbs_sweeps
from fedtorch.programs import choice, glm_steps as glm, launch, stacked_step
from fedtorch.programs.stacked_step import ClientValues
from fedtorch.random import draws, philox

ARCHITECTURES = (80, 90)
NARROW = (torch.float16, torch.bfloat16, torch.float32)
FLOATS = (torch.float32, torch.float64)


class Call(NamedTuple):
    """A call of an operation that starts one program."""

    kernel: str  # module.function
    name: str
    operation: Callable[[], Any]


def absent(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of which there is no more than its shape."""
    return torch.empty(shape, dtype=dtype, device="meta")


def whole(*shape: int) -> Tensor:
    """Whole numbers."""
    return absent(*shape, dtype=torch.int64)


def turned(tensor: Tensor) -> Tensor:
    """The tensor in a memory that has its last two dimensions the other way round."""
    return tensor.mT.contiguous().mT


def philox_calls() -> Iterator[Call]:
    for keys, shape in ((whole(10_000), (4097, 3)), (whole(1), ())):
        size = f"{len(keys)} keys, {shape}"
        called = lambda name, draw, size=size: Call("philox.draw", f"{name}, {size}", draw)
        yield called("bits", partial(draws.bits, keys, torch.Size(shape).numel()))
        yield called("coins", partial(random.bernoulli, keys, 0.3, shape))
        yield called("integers", partial(random.randint, keys, 10**12, shape))
        for dtype in (*NARROW, torch.float64):
            for draw in (random.uniform, random.normal, random.exponential):
                yield called(f"{draw.__name__}, {dtype}", partial(draw, keys, shape, dtype))
    for dtype in (*FLOATS, torch.float16):
        gamma = partial(philox.gamma, whole(10_000), turned(absent(10_000, 77)), dtype)
        yield Call("philox.gamma", f"{dtype}, 10 000 keys, 77", gamma)
    yield Call("philox.gamma", "float32, 1 key, 1", partial(philox.gamma, whole(1), absent(1, 1), torch.float32))
    for count in (10**7, 1):
        yield Call("philox.fold", f"{count} keys", partial(philox.folded, whole(count), 7))


def step_calls() -> Iterator[Call]:
    sizes = [(10_000, 1_000_003, dtype) for dtype in FLOATS] + [(1_000_000, 7, torch.float32), (1, 1, torch.float32)]
    for clients, size, dtype in sizes:
        x, held = (absent(clients, size, dtype=dtype) for _ in range(2))
        g = turned(x)
        rate, taken = absent(dtype=dtype), whole(clients)
        pulled = ClientValues(3, absent(clients), g, absent(clients, dtype=dtype))
        plain = ClientValues(taken)
        name = f"{clients} clients of {size}, {dtype}"
        for most, values in (("pulled", pulled), ("plain", plain)):
            squares = partial(stacked_step.clipped, [x], [g], [values], 1.0)
            yield Call("stacked_step.squares", f"{name}, {most}", squares)
        sgd = partial(stacked_step.sgd, x, g)
        yield Call(
            "stacked_step.sgd", f"{name}, pulled", partial(sgd, held, pulled, lr=0.1, momentum=0.9, nesterov=True)
        )
        yield Call("stacked_step.sgd", f"{name}, momentum", partial(sgd, held, plain, lr=rate, momentum=0.9))
        yield Call("stacked_step.sgd", f"{name}, plain", partial(sgd, None, plain, lr=0.1))
        adam = partial(stacked_step.adam, x, g, held, absent(clients, size, dtype=dtype))
        yield Call("stacked_step.adam", f"{name}, pulled", partial(adam, pulled, lr=0.1, decoupled=True))
        yield Call("stacked_step.adam", f"{name}, plain", partial(adam, plain, lr=rate, weight_decay=0.1))


def glm_calls() -> Iterator[Call]:
    """Rows that stay in registers and that do not, of the widest models too."""
    families = {"gaussian": glm.GAUSSIAN, "bernoulli": glm.BERNOULLI, "poisson": glm.POISSON}
    for dtype in FLOATS:
        for rows, features in ((50, 32), (256 if dtype == torch.float32 else 64, 32), (5000, 128), (1, 1)):
            for name, family in families.items():
                yield linear_call(f"{name}, {dtype}", family, rows, features, dtype)
    for features, batched in ((64, True), (17, False), (1, True)):
        yield linear_call("categorical", glm.CATEGORICAL, 5000, features, torch.float32, batched, classes=16)


def linear_call(
    name: str, family: Any, rows: int, features: int, dtype: torch.dtype, batched: bool = False, classes: int = 0
) -> Call:
    clients = 1 if rows == 1 else 10_000
    x, y = (turned(absent(clients, rows, *one, dtype=dtype)) for one in ((features,), ()))
    start = absent(clients, features, *[classes] * bool(classes), dtype=dtype)
    pull = {} if family is glm.POISSON else {"precision": absent(clients), "shift": start}
    batches = {"batches": whole(clients, 20, 32)} if batched or family is glm.POISSON else {}
    run = partial(glm.glm_steps, family, x, y, whole(clients), start, steps=20, lr=0.1, **pull, **batches)
    kernel = "glm_steps.categorical" if classes else "glm_steps.linear"
    return Call(kernel, f"{name}, {clients} clients of {rows} x {features}", run)


def gibbs_calls() -> Iterator[Call]:
    for clients, chains, size in ((1000, 4, 2), (1000, 4, 16), (1, 1, 1)):
        rows = Rows(absent(clients, size, size), absent(clients, size), absent(clients), absent(clients))
        each, one = absent(clients, chains, size), absent(clients, chains)
        state = Chains(each, each, each, one)
        run = partial(gibbs_sweeps, rows, SweepPrior(turned(each), each, one), state, whole(clients, chains), 50)
        yield Call("gibbs_sweeps.horseshoe", f"{clients} clients, {chains} chains, {size} coefficients", run)


def calls() -> Iterator[Call]:
    yield from philox_calls()
    yield from step_calls()
    yield from glm_calls()
    yield from gibbs_calls()


class Started(NamedTuple):
    """What a call has started."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Architecture:
    """What Triton asks its driver of a device that is not there; every device is one architecture."""

    def __init__(self, number: int) -> None:
        self.number = number

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.number, 32)


def started(call: Call) -> Started:
    """The one program that a call starts."""
    seen: list[Started] = []
    launch._start = lambda *given: seen.append(Started(*given))
    call.operation()
    ((kernel, _, _, _),) = seen
    module, name = kernel.__module__.rpartition(".")[2], kernel.__name__
    assert f"{module}.{name}" == call.kernel, f"Expected {call.name} to start {call.kernel}, but got {module}.{name}"
    return seen[0]


def compiled(call: Call, architecture: int) -> dict[str, Any]:
    """What a call needs of a device."""
    kernel, programs, arguments, options = started(call)
    triton.runtime.driver.set_active(Architecture(architecture))
    kernel.device_caches.clear()  # what is the same for two calls is assembled for each
    told = io.StringIO()
    with redirect_stdout(told):
        made = kernel.warmup(*arguments, grid=(programs,), **options)
    assert len(made.asm["cubin"]) > 0
    assert made.metadata.target.arch == architecture
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", told.getvalue())))
    ((registers, stack),) = zip(
        re.findall(r"Used (\d+) registers", told.getvalue()), re.findall(r"(\d+) bytes stack", told.getvalue())
    )
    strided = [n for n, a in zip(kernel.arg_names, arguments) if isinstance(a, Tensor) and not a.is_contiguous()]
    where = {"kernel": call.kernel, "case": call.name, "architecture": architecture}
    grid = {"programs": programs, "threads": 32 * made.metadata.num_warps, "strided": strided}
    needed = {"registers": int(registers), "spilled": spilled, "stack": int(stack), "shared": made.metadata.shared}
    return {**where, **grid, **needed}


def main() -> None:
    """Print a line for every call and architecture; names of kernels choose some.

    With `--few` it is the first call of every program, for the last architecture.
    """
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    choice.is_cuda = lambda device: device.type == "meta"
    names, few, done = [name for name in sys.argv[1:] if name != "--few"], "--few" in sys.argv, set()
    for call in calls():
        if call.kernel.startswith(tuple(names) or "") and not (few and call.kernel in done):
            for architecture in ARCHITECTURES[-1:] if few else ARCHITECTURES:
                print(json.dumps(compiled(call, architecture)), flush=True)
            done.add(call.kernel)


if __name__ == "__main__":
    main()
