"""Linear layers of many clients on the CPU: a product for all, with gradients that lie in memory as the weights do.

By its parts `torch.vmap` differentiates transposed weights, and who takes the gradients has to turn them, which takes
longer than the products where layers are wide.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from fedtorch.stacked_layers._rules import in_front, register

_WIDE = 2**13  # weights of a client, from which on to turn them takes longer than Python
_OPERATIONS = torch.library.Library("fedtorch", "FRAGMENT")
_OPERATIONS.define("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")  # torch's has parts before any rule


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `torch.nn.functional.linear` does, of weights `(O, I)` and biases `(O,)`."""
    if torch._C._functorch.is_batchedtensor(weight) and weight.numel() >= _WIDE:
        return torch.ops.fedtorch.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class StackedLinear(nn.Linear):
    """A linear layer whose product is one of all clients."""

    def forward(self, input: Tensor) -> Tensor:
        """Return what `torch.nn.Linear` does."""
        return linear(input, self.weight, self.bias)


class _Products(_SingleLevelFunction):
    """x W' + b of clients: inputs `(K, B, I)`, weights `(K, O, I)`, biases `(K, O)` or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _products(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        asked = ctx.needs_input_grad
        d_x = torch.bmm(gradient, weight) if asked[0] else None
        d_weight = torch.bmm(gradient.mT, x) if asked[1] else None
        return d_x, d_weight, gradient.sum(1) if asked[2] else None


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _rule(info: VmapInfo, dims: Any, arguments: tuple[Any, ...]) -> tuple[Tensor]:
    """Return `torch.nn.functional.linear` of clients."""
    x, weight = (in_front(info, arguments[i], dims[i]) for i in range(2))
    if dims[1] is None and dims[2] is None:
        return (F.linear(x, *arguments[1:]),)
    rows = x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])
    bias = None if arguments[2] is None else in_front(info, arguments[2], dims[2]).expand(-1, weight.shape[1])
    given = [tensor for tensor in (rows, weight, bias) if tensor is not None]
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    transformed = any(map(torch._C._functorch.is_functorch_wrapped_tensor, given))
    products: Any = _products if transformed or not differentiated or x.device.type != "cpu" else _apply
    return (products(rows, weight, bias).view(*x.shape[:-1], weight.shape[1]),)


def _apply(*arguments: Tensor | None) -> Tensor:
    with enable_single_level_autograd_function():  # outside of this vmap, of which `Function` would ask for a rule
        return _Products.apply(*arguments)  # type: ignore[attr-defined]


_OPERATIONS.impl("linear", F.linear, "CompositeImplicitAutograd")
register(torch.ops.fedtorch.linear.default, _rule, composite=True)
