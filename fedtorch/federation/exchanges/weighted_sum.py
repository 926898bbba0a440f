"""Sums of weighted rows that no size of the weights makes Inf or zero."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 2.0**1023  # power of two in float64


def weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    """Return Σ_k w_k v_k of weights `(K,)` and values `(K, ...)`, float64.

    The product is one in the dtype of the values, if it is float32, with weights divided by the power of two above
    their sum. So it is at most the largest value, and no bit changes where it would have been finite anyway.

    >>> weighted_sum(torch.tensor([2e38, 3e38]), torch.tensor([[1.0], [2.0]])) / 1e38
    tensor([8.0000], dtype=torch.float64)
    """
    dtype = value.dtype if value.dtype in (torch.float32, torch.float64) else torch.float64
    wide = weight.to(value.device, torch.float64)
    size = wide.sum()
    power = (size / torch.frexp(size).mantissa).clamp(max=_LARGEST)
    power = torch.where(power > 0, power, 1.0)  # not of NaN, Inf or nothing
    rows = value.flatten(1) if value.ndim > 1 else value[:, None]
    total = (wide / power).to(dtype) @ rows.to(dtype)
    return (total.to(torch.float64) * power).reshape(value.shape[1:])
