"""Integers modulo 2^(64·width) in words of 64 bits, the lowest first; words of one number carry.

Tensors may have many millions of words, so both operations work in place.

>>> import torch
>>> from fedtorch.sites.secure import ring
>>> ring.add(torch.tensor([-1, 0]), torch.tensor([1, 0]), width=2)  # 2⁶⁴ − 1 and 1
tensor([0, 1])
>>> ring.negate(torch.tensor([1, 0]), width=2)
tensor([-1, -1])
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN = -(2**63)


def add(total: Tensor, other: Tensor, width: int) -> Tensor:
    """Add numbers `(D · width,)` int64, a number's words side by side, to `total` in place, and return it."""
    if width == 1:
        return total.add_(other)
    sums, before = total.unflatten(0, (-1, width)), total.unflatten(0, (-1, width)) ^ _SIGN
    total.add_(other)
    wrapped = (sums ^ _SIGN) < before  # compared as unsigned numbers
    for place in range(1, width):
        raised = sums[:, place] + wrapped[:, place - 1]
        wrapped[:, place] |= (raised == 0) & wrapped[:, place - 1]
        sums[:, place] = raised
    return total


def negate(value: Tensor, width: int) -> Tensor:
    """Negate numbers `(D · width,)` in place, and return them."""
    if width == 1:
        return value.neg_()
    one = torch.zeros_like(value).unflatten(0, (-1, width))
    one[:, 0] = 1
    return add(value.bitwise_not_(), one.flatten(), width)
