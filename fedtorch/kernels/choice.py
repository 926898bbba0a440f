"""Which form of an operation runs: its Triton program on a CUDA device, its torch reference everywhere else.

The environment variable `FEDTORCH_KERNELS` is read at every call:

- `on`, the default: programs run on CUDA tensors of the dtypes and sizes that they know, where Triton is installed;
- `off`: references run always;
- `interpret`: programs run on CPU tensors too, in Triton's interpreter, which shows that they are right and is slow.

A tensor that is being differentiated, mapped over or traced goes to the reference, unless the operation has its own
derivative.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Container, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VARIABLE = "FEDTORCH_KERNELS"
MODES = ("on", "off", "interpret")
FLOATS = (torch.float32, torch.float64)


def mode() -> str:
    """What `FEDTORCH_KERNELS` says.

    Raises:
        ValueError: something else than `MODES`.
    """
    found = os.environ.get(VARIABLE, "on")
    if found not in MODES:
        raise ValueError(f"Expected {VARIABLE} to be one of {', '.join(MODES)}, but got {found!r}")
    return found


def program(
    operation: str,
    tensors: Sequence[Tensor],
    dtypes: Container[torch.dtype] = FLOATS,
    *,
    fits: bool = True,
    differentiable: bool = False,
) -> Any:
    """The module of programs of an operation if they are to run on these tensors, None for the reference.

    Args:
        operation: name of the module in `fedtorch.kernels.programs`.
        tensors: that the operation reads, of which the first has the dtype that matters.
        dtypes: that the program knows.
        fits: whether the sizes are within its limits.
        differentiable: whether the operation has a derivative of its own.

    Raises:
        ValueError: the tensors are on different devices.
    """
    first = tensors[0]
    if first.device.type not in ("cuda", "cpu") or (first.device.type == "cpu" and mode() != "interpret"):
        return None
    if mode() == "off" or not fits or first.dtype not in dtypes:
        return None
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"Expected tensors on one device for {operation}, but got {sorted(map(str, devices))}")
    if not differentiable and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if torch._C._len_torch_dispatch_stack() or any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return None
    if not installed():
        return None
    return loaded(operation, interpreted=first.device.type == "cpu")


@functools.cache
def installed() -> bool:
    """Whether Triton is."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def loaded(operation: str, *, interpreted: bool) -> ModuleType:
    """The module of programs of an operation.

    Raises:
        RuntimeError: interpreted programs are asked for, but Triton has been imported to compile them.
    """
    if interpreted:
        if "triton" not in sys.modules:
            os.environ.setdefault("TRITON_INTERPRET", "1")
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                f"Expected TRITON_INTERPRET=1 before Triton's first import for {VARIABLE}=interpret; set both when you "
                "start Python"
            )
    return importlib.import_module(f"fedtorch.kernels.programs.{operation}")


def launch(kernel: Any, programs: int, *arguments: Any, warps: int = 4, **constants: Any) -> None:
    """Runs `programs` instances of a Triton kernel on the device of the first argument; rounding is never fused away.

    Args:
        kernel: a `triton.jit` function.
        programs: how many; none is none.
        arguments: tensors and numbers, the first one a tensor.
        warps: of 32 threads, per program.
        constants: its compile-time constants, by name.
    """
    if programs:
        with torch.cuda.device_of(arguments[0]):
            kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


def tile(columns: int, size: int) -> tuple[int, int]:
    """(rows, columns), powers of two, of a tile of `size` elements that covers few columns by many rows."""
    across = min(power_of_two(columns), size)
    return size // across, across


def power_of_two(count: int) -> int:
    """The smallest power of two of at least `count`, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()
