"""Linear layers of many clients: one product, bias included, and gradients that lie in memory as the weights do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer that is one operation where clients have weights of their own."""

    def forward(self, input: Tensor) -> Tensor:
        """Return what `torch.nn.Linear` does."""
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear` of inputs that have more than one dimension.

    `torch.vmap` makes a copy of the bias, a product and a sum of it. Of fewer rows than features, weights come first in
    the product: then the gradient of the weights needs no transposed copy, which takes longer than that of few outputs.
    """
    maps = torch._C._functorch
    level = maps.maybe_current_level()
    if level is None:
        return F.linear(input, weight, bias)
    rows, at = maps._unwrap_batched(input, level)
    weights, first = maps._unwrap_batched(weight, level)
    added, of_each = (None, 0) if bias is None else maps._unwrap_batched(bias, level)
    alone = (first, of_each) != (0, 0) or maps.is_batchedtensor(weights)
    if at is None or alone or rows.dim() < 3 or rows.dtype != weights.dtype or input.shape[-1] != weight.shape[-1]:
        return F.linear(input, weight, bias)
    rows = rows.movedim(at, 0)
    flat = rows if rows.dim() == 3 else rows.flatten(1, -2)
    if flat.shape[1] < flat.shape[2]:
        turned = flat.transpose(1, 2)
        product = weights.bmm(turned) if added is None else torch.baddbmm(added.unsqueeze(2), weights, turned)
        product = product.transpose(1, 2)
    else:
        turned = weights.transpose(1, 2)
        product = flat.bmm(turned) if added is None else torch.baddbmm(added.unsqueeze(1), flat, turned)
    return maps._add_batch_dim(product if rows.dim() == 3 else product.unflatten(1, rows.shape[1:-1]), 0, level)


def is_linear(part: nn.Module) -> bool:
    """Return whether a module is a linear layer of torch's, and no class of somebody's made of it.

    Example:
        >>> is_linear(nn.Linear(2, 1)), is_linear(nn.LazyLinear(1))
        (True, False)
    """
    return type(part) in (nn.Linear, Linear)
