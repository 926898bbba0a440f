"""Whole numbers modulo 2^(64·width), each in words of 64 bits, the lowest first: one word wraps by itself, more carry.

>>> import torch
>>> from fedtorch.trust.secure import ring
>>> ring.add(torch.tensor([-1, 0]), torch.tensor([1, 0]), width=2)  # 2⁶⁴ − 1 and 1
tensor([0, 1])
>>> ring.negate(torch.tensor([1, 0]), width=2)
tensor([-1, -1])
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN = -(2**63)


def add(one: Tensor, other: Tensor, width: int) -> Tensor:
    """The sum of numbers `(D · width,)` int64, a number's words side by side."""
    if width == 1:
        return one + other
    total = (one + other).unflatten(0, (-1, width))
    wrapped = (total ^ _SIGN) < (one.unflatten(0, (-1, width)) ^ _SIGN)  # as if without sign
    for place in range(1, width):
        word = total[:, place]
        raised = word + wrapped[:, place - 1]
        wrapped[:, place] |= (raised == 0) & (word != 0)
        total[:, place] = raised
    return total.flatten()


def negate(value: Tensor, width: int) -> Tensor:
    """Minus numbers `(D · width,)`."""
    if width == 1:
        return -value
    one = torch.zeros_like(value).unflatten(0, (-1, width))
    one[:, 0] = 1
    return add(~value, one.flatten(), width)
