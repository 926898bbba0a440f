"""Linear layers of many clients: one product for all, with gradients in the memory order of the weights.

With `torch.vmap`'s decomposition, gradients are those of transposed weights, and an optimiser has to transpose them,
which takes as long as the products for wide layers. It also copies a client's weights for every index of further
dimensions of the rows, if these are not contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch.stacked_layers._transforms import belongs_to_clients, outside, over_clients


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`."""
    matrices = input.dim() > 0 and weight.dim() == 2 and not torch.is_autocast_enabled(weight.device.type)
    if matrices and belongs_to_clients(weight) and over_clients():
        return outside(_of_clients, input, weight, bias)
    return F.linear(input, weight, bias)


def _of_clients(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W' + b of inputs `(K, ..., I)`, weights `(K, O, I)` and biases `(K, O)`."""
    rows = x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])
    outputs: Tensor = _Products.apply(rows, weight, bias)
    return outputs.view(*x.shape[:-1], weight.shape[1])


class _Products(torch.autograd.Function):
    """x W' + b of inputs `(K, B, I)`, weights `(K, O, I)` and biases `(K, O)` or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        asked = ctx.needs_input_grad
        d_x = torch.bmm(gradient, weight.conj()) if asked[0] else None
        d_weight = torch.bmm(gradient.mT, x.conj()) if asked[1] else None
        return d_x, d_weight, gradient.sum(1) if asked[2] else None


REPLACED: dict[Any, Callable[..., Any]] = {F.linear: linear}
