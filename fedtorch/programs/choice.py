"""Choice of an operation's implementation: its Triton program on a CUDA device, its torch reference elsewhere.

The environment variable `FEDTORCH_PROGRAMS` is read at every call:

- `on`, the default: programs run on CUDA tensors of the dtypes and sizes that they know, where Triton is installed, and
  those that numba compiles on the CPU (`fedtorch.programs`);
- `off`: references run always;
- `interpret`: programs run on CPU tensors too, in Triton's interpreter, which shows that they are right and is slow.

A tensor that is differentiated, mapped over or traced is passed to the reference, unless the operation has its own
derivative.

An operation asks for its program, and falls back to its reference:

>>> import torch
>>> from fedtorch.programs import choice
>>> def doubled(x):
...     module = choice.triton_programs("my_programs.doubled", (x,), fits=x.numel() < 2**20)  # or None
...     return 2 * x if module is None else module.doubled(x)
>>> x = torch.tensor([1.0, 2.0])  # on the CPU
>>> doubled(x), choice.possible(x.device) and choice.installed()
(tensor([2., 4.]), False)
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch._devices import is_cuda
from fedtorch.programs import launch as _launch

VARIABLE = "FEDTORCH_PROGRAMS"
MODES = ("on", "off", "interpret")
FLOATS = (torch.float32, torch.float64)


def _mode() -> str:
    """Return the value of `FEDTORCH_PROGRAMS`.

    Raises:
        ValueError: not one of `MODES`.
    """
    mode = os.environ.get(VARIABLE, "on")
    if mode not in MODES:
        raise ValueError(f"Expected {VARIABLE} to be one of {', '.join(MODES)}, but got {mode!r}")
    return mode


def enabled() -> bool:
    """Return whether `FEDTORCH_PROGRAMS` allows compiled programs; the interpreter's mode is Triton's alone."""
    return _mode() == "on"


def possible(device: torch.device) -> bool:
    """Return whether programs may run on a device at all; if not, nothing else need be checked.

    >>> import torch
    >>> possible(torch.device("cuda")), possible(torch.device("cpu"))
    (True, False)
    """
    chosen = _mode()
    return chosen == "interpret" if device.type == "cpu" else chosen != "off" and is_cuda(device)


def triton_programs(
    operation: str,
    tensors: Sequence[Tensor],
    dtypes: Container[torch.dtype] = FLOATS,
    *,
    fits: bool = True,
    differentiable: bool = False,
) -> Any:
    """Return the module of programs of an operation if they are to run on these tensors, None for the reference.

    Args:
        operation: name of the module of programs.
        tensors: inputs of the operation, the first with the relevant dtype.
        dtypes: those supported by the program.
        fits: whether the sizes are within its limits.
        differentiable: whether the operation has its own derivative.

    Raises:
        ValueError: the tensors are on different devices.
    """
    first = tensors[0]
    if not possible(first.device) or not fits or first.dtype not in dtypes:
        return None
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"Expected tensors on one device for {operation.rpartition('.')[2]}, but got {sorted(map(str, devices))}"
        )
    if not differentiable and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if traced(tensors):
        return None
    if not installed():
        return None
    return _launch.loaded(operation, interpreted=not is_cuda(first.device))


def traced(tensors: Sequence[Tensor]) -> bool:
    """Return whether operations on tensors are intercepted, or mapped over.

    >>> traced([torch.ones(2)]), torch.vmap(lambda x: x * traced([x]))(torch.ones(2))
    (False, tensor([1., 1.]))
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return torch._C._len_torch_dispatch_stack() > 0 or any(map(wrapped, tensors))


def plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether all are plain CPU tensors, without gradients, function transforms or modes.

    >>> plain([torch.ones(2)]), plain([torch.ones(2, requires_grad=True)]), plain([torch.nn.Parameter(torch.ones(2))])
    (True, False, False)
    """
    differentiated = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor or not tensor.is_cpu or (differentiated and tensor.requires_grad):
            return False
    return not traced(tensors)


@functools.cache
def installed() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
