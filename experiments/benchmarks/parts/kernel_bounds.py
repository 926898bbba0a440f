"""What a program of `fedtorch.programs` can save: bounds of its torch reference and of itself on a device.

A reference reads and writes the arrays of every operation; a program reads its arguments and writes its result, in one
call. Bytes and calls of a reference are counted on this processor as it runs; both do the operations that the result
asks for. What stays in a cache between two operations is counted as moved, so that a processor's references may be
faster than their bound says; one program stands for a Triton program on a GPU and for a loop in C++ here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._inductor.config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.benchmarks.parts.cost_formulas import H100, Device
from experiments.benchmarks.parts.gpu_kernels import CASES, Kind
from experiments.benchmarks.parts.gpu_timing import kernels


class Spent(NamedTuple):
    """What the operations of a function did."""

    calls: int
    moved: float  # bytes


class _Counting(TorchDispatchMode):
    """Count operations that compute, and the bytes of their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.moved = 0, 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function is not torch.ops.aten._local_scalar_dense.default:
            self.calls += 1
            self.moved += sum(map(_bytes, [*tensors(args), *tensors(result)]))
        return result


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors among arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for each in value for leaf in tensors(each)] if isinstance(value, (tuple, list)) else []


def _bytes(tensor: Tensor) -> float:
    """Bytes of the numbers that a tensor shows, of repeated ones once."""
    if tensor.layout != torch.strided:
        return float(tensor._nnz() * (tensor.element_size() + 8))
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        numbers *= size if stride else 1
    return float(numbers * tensor.element_size())


def spent(work: Callable[[], object]) -> Spent:
    """What the torch operations of a call do."""
    with _Counting() as counting:
        work()
    return Spent(counting.calls, counting.moved)


def processor(small: bool) -> Device:
    """This one, on one thread: copying, products of matrices, and a call on one number."""
    numbers, side = (2**20, 128) if small else (2**24, 768)
    source, target = torch.ones(numbers), torch.empty(numbers)
    single, double = (torch.ones(side, side, dtype=dtype) for dtype in (torch.float32, torch.float64))
    one, flops = torch.ones(1), 2 * side**3
    return Device(
        "this processor",
        memory=8 * numbers / _least(lambda: target.copy_(source)),
        single=flops / _least(lambda: single @ single),
        double=flops / _least(lambda: double @ double),
        call=_least(one.neg),
    )


def _least(work: Callable[[], object], times: int = 20) -> float:
    """The least seconds of a call."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


COLUMNS = ["program", "sizes", "reference moves, GB", "in calls", "program moves, GB"]
COLUMNS += [f"{device}: {what}" for device in ("H100", "here") for what in ("reference, ms", "program, ms", "ratio")]


class Bounds(NamedTuple):
    """An operation at its full size."""

    reference: Spent
    program: Spent
    seconds: dict[str, tuple[float, float]]  # device -> the bounds of reference and program


def bounds(kind: Kind, devices: tuple[Device, ...]) -> Bounds:
    """Count at a size that fits here, scaled to the full one."""
    case, scale = kind.case(kind.counted, "cpu"), math.prod(kind.full) / math.prod(kind.counted)
    counted = spent(case.ours)
    reference, program = Spent(counted.calls, counted.moved * scale), Spent(1, case.moved * scale)
    work = case.operations * scale
    seconds = {d.name: (d.bound(*reference, work, case.double), d.bound(*program, work, case.double)) for d in devices}
    return Bounds(reference, program, seconds)


def lines(small: bool) -> list[list[str]]:
    """Lines of `COLUMNS`."""
    found, devices = [], (H100, processor(small))
    for name, kind in CASES.items():
        each = bounds(kind._replace(counted=kind.small) if small else kind, devices)
        sizes = " × ".join(f"{size:,}" for size in kind.full)
        line = [name, sizes, f"{each.reference.moved / 1e9:.3g}", str(each.reference.calls)]
        line.append(f"{each.program.moved / 1e9:.3g}")
        for reference, program in each.seconds.values():
            line += [f"{1e3 * reference:.3g}", f"{1e3 * program:.3g}", f"{reference / program:.1f}"]
        found.append(line)
    return found


COMPILED = ["program", "sizes", "reference, ms", "library, ms", "C++, ms", "reference / C++", "best other / C++"]
COMPILED += ["s to compile", "calls until it has paid"]
ABOUT_COMPILED = """
References here, what a library has for the same result (for steps `torch.optim.Adam(fused=True)`, which descent takes;
for rows on a graph the sparse product that is the reference), and the references as C++ by `torch.compile`: processor
time, medians of seven calls in turns. "Best other" is the quicker of the first two. Compiling is timed by the first
call, without a cache.
"""


def compiled(name: str, small: bool, compile: Callable[..., Any] = torch.compile) -> list[str]:
    """Return the line of `COMPILED` of an operation at its counted size."""
    kind = CASES[name]
    sizes = kind.small if small else kind.counted
    case = kind.case(sizes, "cpu")
    program = compile(case.ours, dynamic=False)
    with kernels("off"), torch._inductor.config.patch(force_disable_caches=True):
        library = min(case.vendor.values(), key=_processor_seconds)
        ways = {"reference": case.ours, "library": library}
        began = time.perf_counter()
        try:
            program()
            ways["C++"] = program
        except Exception as error:  # whatever the compiler refuses
            reason = type(error).__name__
        starting = time.perf_counter() - began
        each = [{way: _processor_seconds(work) for way, work in ways.items()} for _ in range(7)]
    spent = {way: statistics.median(times[way] for times in each) for way in ways}
    line = [name, " × ".join(f"{size:,}" for size in sizes)]
    line += [f"{1e3 * spent[way]:.3g}" for way in ("reference", "library")]
    if "C++" not in spent:
        return [*line, f"refused ({reason})", "", "", f"{starting:.3g}", "never"]
    gained = min(spent["reference"], spent["library"]) - spent["C++"]
    ratios = (spent["reference"] / spent["C++"], 1 + gained / spent["C++"])
    paid = f"{starting / gained:,.0f}" if gained > 0 else "never"
    return [*line, f"{1e3 * spent['C++']:.3g}", *(f"{ratio:.2f}" for ratio in ratios), f"{starting:.3g}", paid]


def _processor_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
