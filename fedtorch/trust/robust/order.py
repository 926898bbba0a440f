"""Numbers in ascending order, with or without the weights that belong to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Ordered(NamedTuple):
    """A coordinate's numbers in ascending order."""

    values: Tensor  # (..., D, M)
    share: Tensor  # (..., D, M) float64 their weights, which sum to one
    above: Tensor  # (..., D, M) float64 the weights summed up to each


def ascending(values: Tensor) -> Tensor:
    """Values `(..., M)` in ascending order; on a CPU by NumPy, whose sort of numbers alone is vectorised."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.sort(values.numpy(), -1))
    return values.sort(-1).values


def ordered(values: Tensor, weights: Tensor) -> Ordered:
    """Values `(..., D, M)` and weights `(..., M)` in the order of the values."""
    found, order = values.sort(-1)
    share = weights[..., None, :].expand(values.shape).gather(-1, order)
    return Ordered(found, share, share.cumsum(-1))


def equal(weights: Tensor) -> bool:
    """Whether all weights `(..., M)` are the same."""
    return bool((weights == weights[..., :1]).all())
