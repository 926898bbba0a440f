"""Max pooling of many clients on the CPU: one pass over their planes, in the order in which a convolution leaves them.

`torch.vmap` brings the clients to the front, which copies what a convolution of all clients hands out, and torch's loop
over windows takes a value at a time, fifteen times as long as one over several windows at once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import VmapInfo

from fedtorch.dispatch import compiled
from fedtorch.stacked_layers._rules import in_front, register

aten = torch.ops.aten
_SOURCE = Path(__file__).with_name("_max_pool.c")
_TYPES = {torch.float32: {"REAL": "float", "WHOLE": "int32_t"}, torch.float64: {"REAL": "double", "WHOLE": "int64_t"}}
_PAIR = ctypes.c_int64 * 2


class _Shape(ctypes.Structure):
    """`Shape` of the C file."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("height", "width", "out_height", "out_width")),
        *((name, _PAIR) for name in ("window", "stride", "padding")),
    )


def _rule(info: VmapInfo, dims: Any, arguments: tuple[Any, ...]) -> Any:
    """Return `torch.max_pool2d` of clients."""
    x, dilation, ceil = in_front(info, arguments[0], dims[0]), arguments[4], arguments[5]
    plain = x.device.type == "cpu" and x.ndim in (4, 5) and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    if not plain or any(step != 1 for step in dilation):
        return NotImplemented
    window, stride, padding = (list(each) * (2 // max(1, len(each))) for each in arguments[1:4])
    return (_max_pool(x, window, stride or window, padding, ceil)[0],)


@torch.library.custom_op("fedtorch::max_pool", mutates_args=())
def _max_pool(x: Tensor, window: list[int], stride: list[int], padding: list[int], ceil: bool) -> tuple[Tensor, Tensor]:
    """Return (the largest values of windows `(..., h, w)`, their places in the planes) of `(..., H, W)`."""
    order = _order(x)
    planes = x.permute(order).contiguous()
    size = _size(*planes.shape[-2:], *map(tuple, (window, stride, padding)), ceil)
    library = _library(planes)
    if library is None:
        results = aten.max_pool2d_with_indices(_batch(planes), window, stride, padding, 1, ceil)
        values, places = (result.view(*planes.shape[:-2], *size) for result in results)
    else:
        values = planes.new_empty(*planes.shape[:-2], *size)
        places = torch.empty_like(values, dtype=torch.int32)
        shape = _Shape(*planes.shape[-2:], *size, _PAIR(*window), _PAIR(*stride), _PAIR(*padding))
        _over_planes(library.max_pool, shape, planes, values, places)
    return values.permute(_inverse(order)), places.permute(_inverse(order))


@torch.library.custom_op("fedtorch::max_pool_backward", mutates_args=())
def _max_pool_backward(
    gradient: Tensor,
    places: Tensor,
    size: list[int],
    window: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
) -> Tensor:
    """Return the gradient of what `_max_pool` takes, planes of `size` (H, W)."""
    order = _order(places)
    places, gradient = places.permute(order), gradient.permute(order).contiguous()
    planes = gradient.new_empty(*gradient.shape[:-2], *size)
    library = _library(planes) if places.dtype == torch.int32 else None
    if library is None:
        several = map(_batch, (gradient, planes))
        settings = (window, stride, padding, [1, 1], ceil, _batch(places.long()))
        planes = aten.max_pool2d_with_indices_backward(*several, *settings).view(planes.shape)
    else:
        shape = _Shape(*size, *gradient.shape[-2:], _PAIR(*window), _PAIR(*stride), _PAIR(*padding))
        _over_planes(library.max_pool_backward, shape, gradient, places, planes)
    return planes.permute(_inverse(order))


def _over_planes(program: Any, shape: _Shape, *tensors: Tensor) -> None:
    """Call a program on planes of contiguous tensors, in as many threads as torch has."""
    sizes = [tensor.shape[-2] * tensor.shape[-1] * tensor.element_size() for tensor in tensors]

    def call(begin: int, end: int) -> None:
        at = (ctypes.c_void_p(tensor.data_ptr() + begin * size) for tensor, size in zip(tensors, sizes))
        program(ctypes.byref(shape), ctypes.c_int64(end - begin), *at)

    compiled.in_threads(call, tensors[0].shape[:-2].numel(), max(sizes))


def _library(planes: Tensor) -> ctypes.CDLL | None:
    """Return the program for such planes, None where there is none."""
    known = planes.device.type == "cpu" and planes.dtype in _TYPES and planes[..., 0, 0].numel() > 0
    if not known or planes.shape[-2] * planes.shape[-1] >= 2**31:
        return None
    return compiled.library(_SOURCE, **_TYPES[planes.dtype])


@functools.lru_cache
def _size(
    height: int, width: int, window: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> Sequence[int]:
    """Return height and width of the results, or raise torch's error."""
    plane = torch.empty(1, height, width, device="meta")
    return aten.max_pool2d_with_indices(plane, window, stride, padding, 1, ceil)[0].shape[1:]


def _batch(planes: Tensor) -> Tensor:
    """Return planes as a batch of one channel, which may be empty."""
    return planes.flatten(0, -3).unsqueeze(1)


def _order(x: Tensor) -> list[int]:
    """Return the dimensions in the order in which planes lie in memory, those of the planes last."""
    return [*sorted(range(x.ndim - 2), key=x.stride, reverse=True), x.ndim - 2, x.ndim - 1]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.settings = list(inputs[0].shape[-2:]), *inputs[1:]


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return _max_pool_backward(gradient, *ctx.saved_tensors, *ctx.settings), None, None, None, None


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _second_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of the first one: what stands at the places."""
    (places,) = ctx.saved_tensors
    values = gradient.flatten(-2).gather(-1, places.long().flatten(-2)).view(places.shape)
    return values, None, None, None, None, None, None


_max_pool.register_autograd(_gradients, setup_context=_keep)
_max_pool_backward.register_autograd(_second_gradients, setup_context=_keep_places)
register(aten.max_pool2d.default, _rule, composite=True)
