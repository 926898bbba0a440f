"""Load and launch Triton programs, and choose the sizes of their tiles."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch


@functools.cache
def loaded(operation: str, *, interpreted: bool) -> ModuleType:
    """Import the module of programs of an operation, by its dotted name.

    Raises:
        RuntimeError: interpreted programs are requested, but Triton has been imported to compile them.
    """
    if interpreted:
        if "triton" not in sys.modules:
            os.environ.setdefault("TRITON_INTERPRET", "1")
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "Expected TRITON_INTERPRET=1 before Triton's first import for FEDTORCH_PROGRAMS=interpret; set both "
                "when you start Python"
            )
    return importlib.import_module(operation)


def launch(kernel: Any, programs: int, *arguments: Any, warps: int = 4, **constants: Any) -> None:
    """Run `programs` instances of a Triton kernel on the device of the first argument; rounding is never fused away.

    Args:
        kernel: a `triton.jit` function.
        programs: their number; zero launches nothing.
        arguments: tensors and numbers, the first one a tensor.
        warps: of 32 threads, per program.
        constants: its compile-time constants, by name.
    """
    if programs:
        _start(kernel, programs, arguments, {**constants, "num_warps": warps, "enable_fp_fusion": False})


def _start(kernel: Any, programs: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Start the programs: the one call of a kernel."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **options)


def tile(columns: int, size: int) -> tuple[int, int]:
    """Return (rows, columns), powers of two, of a tile of `size` elements that covers few columns by many rows."""
    across = min(power_of_two(columns), size)
    return size // across, across


def power_of_two(count: int) -> int:
    """Return the smallest power of two of at least `count`, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()
