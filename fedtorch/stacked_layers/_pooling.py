"""Max pooling of many clients on the CPU, with channels last in memory.

Torch's loop over windows processes several channels at a time if they are last in memory, and otherwise one number at a
time, which is four times slower. `torch.vmap` supports only the usual memory order. The derivative scatters numbers,
which is faster in the usual order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch.stacked_layers._transforms import belongs_to_clients, outside, over_clients

aten = torch.ops.aten


def _max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Compute `torch.nn.functional.max_pool2d`."""
    settings: Any = (kernel_size, stride, padding, dilation, ceil_mode)
    pool: Any = F.max_pool2d
    whole = input.dim() == 4 and 0 not in input.shape and input.is_floating_point() and not return_indices
    if not whole or input.device.type != "cpu" or not belongs_to_clients(input) or not over_clients():
        return pool(input, *settings, return_indices=return_indices)
    window = _pair(kernel_size)
    return outside(
        partial(_of_clients, [window, _pair(stride) or window, _pair(padding), _pair(dilation), ceil_mode]), input
    )


def _pair(sizes: int | Sequence[int] | None) -> list[int]:
    """Return height and width; an empty list for None."""
    each = [sizes] if isinstance(sizes, int) else list(sizes or [])
    return each * 2 if len(each) == 1 else each


def _of_clients(settings: Sequence[Any], x: Tensor) -> Tensor:
    """Return the largest values of windows of planes `(K, N, C, H, W)`."""
    if x.stride(0) > x.stride(1):
        return _Pooling.apply(x.flatten(0, 1), settings).unflatten(0, x.shape[:2])
    # A convolution of all clients leaves their channels next to each other.
    planes: Tensor = _Pooling.apply(x.movedim(0, 1).flatten(1, 2), settings)
    return planes.unflatten(1, (x.shape[0], x.shape[2])).movedim(1, 0)


class _Pooling(torch.autograd.Function):
    """Max pooling of planes `(N, C, H, W)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: Sequence[Any]) -> Tensor:
        planes = x.contiguous(memory_format=torch.channels_last)
        values, places = aten.max_pool2d_with_indices(planes, *settings)
        ctx.settings, ctx.shape = settings, x.shape
        ctx.save_for_backward(places.contiguous())
        return values.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (places,) = gradients, ctx.saved_tensors
        planes = gradient.new_empty(ctx.shape)  # only its shape is read
        back = aten.max_pool2d_with_indices_backward
        return back(gradient.contiguous(), planes, *ctx.settings, places), None


REPLACED: dict[Any, Callable[..., Any]] = {F.max_pool2d: _max_pool2d}
