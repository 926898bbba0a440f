"""Vector instructions on groups of lanes, for loops in which LLVM cannot prove that groups do not overlap.

An array of groups is a flat one of float64, and `LANES` consecutive numbers of it are a group; positions count groups.
A group is the operand of one or a few processor instructions: independent problems side by side, each rounded as alone.
Positions are not checked. A call may not read a group that it has written, except at its own position.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtorch.programs.engine import Program

LANES = 16


class _Instructions(Program):
    """A part of programs that is written in LLVM's instructions instead of Python."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, (), inline=False)  # type: ignore[arg-type]

    @functools.cached_property
    def _compiled(self) -> Any:
        return _of_groups(self.name, self._function)

    def text(self) -> str:
        """Return the text that determines the compiled code: this file."""
        return f"{self.name} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"


@_Instructions
def multiply(llvm: Any, total: Any, factor: Any, row: Any) -> Any:
    """Write `out[at + k] = factors[i] * rows[j + k]` for k below `count`: (out, at, factors, i, rows, j, count)."""
    return llvm.fmul(factor, row)


@_Instructions
def subtract_multiples(llvm: Any, total: Any, factor: Any, row: Any) -> Any:
    """Write `out[at + k] -= factors[i] * rows[j + k]` for k below `count`; arguments as of `multiply`."""
    return llvm.fsub(total, llvm.fmul(factor, row))


@_Instructions
def subtract_products(llvm: Any, total: Any, factor: Any, row: Any) -> Any:
    """Write `out[at] -= factors[i + k] * rows[j + k]` for k below `count`, in this order; arguments as above."""
    return llvm.fsub(total, llvm.fmul(factor, row))


def _of_groups(name: str, step: Callable[..., Any]) -> Any:
    """Return numba's function of (out, at, factors, i, rows, j, count) for one step's expression."""
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    group = ir.VectorType(ir.DoubleType(), LANES)

    def code(context: Any, llvm: Any, signature: Any, arguments: Any) -> Any:
        def pointer(array: int, index: Any) -> Any:
            data = context.make_array(signature.args[array])(context, llvm, arguments[array]).data
            return llvm.gep(llvm.bitcast(data, group.as_pointer()), [index])

        read = lambda array, index: llvm.load(pointer(array, index), align=8)
        _, at, _, i, _, j, count = arguments
        if name == "subtract_products":
            total = cgutils.alloca_once_value(llvm, read(0, at))
            with cgutils.for_range(llvm, count) as loop:
                factor, row = read(2, llvm.add(i, loop.index)), read(4, llvm.add(j, loop.index))
                llvm.store(step(llvm, llvm.load(total), factor, row), total)
            llvm.store(llvm.load(total), pointer(0, at), align=8)
            return context.get_dummy_value()
        factor = read(2, i)
        with cgutils.for_range(llvm, count) as loop:
            out = pointer(0, llvm.add(at, loop.index))
            row = read(4, llvm.add(j, loop.index))
            llvm.store(step(llvm, llvm.load(out, align=8), factor, row), out, align=8)
        return context.get_dummy_value()

    def typed(context: Any, out: Any, at: Any, factors: Any, i: Any, rows: Any, j: Any, count: Any) -> Any:
        whole = types.intp
        return types.void(out, whole, factors, whole, rows, whole, whole), code

    return intrinsic(typed)
