"""Coordinatewise averages by order: side by side and sorted where weights are equal, else by `order_statistics`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedtorch.federation.exchanges.robust.rules import Average, by_columns


def by_order(equally: Callable[[Tensor], Tensor], weighted: Callable[[Tensor, Tensor], Tensor]) -> Average:
    """Average coordinate by coordinate.

    Args:
        equally: numbers in ascending order `(..., D, M)` of equal weights -> `(..., D)`; on a CPU.
        weighted: (values `(M, D)`, weights `(M,)`) -> `(D,)`; for other weights and devices, batch by batch.
    """
    sorted_first = by_columns(lambda values, weights: equally(ascending(values)))

    def average(values: Tensor, weights: Tensor) -> Tensor:
        if values.device.type == "cpu" and bool((weights == weights[..., :1]).all()):
            return sorted_first(values, weights)
        if values.ndim > 2:
            return torch.stack([average(*each) for each in zip(values, weights)])
        return weighted(values, weights)

    return average


def middle(ordered: Tensor) -> Tensor:
    """Return the median of numbers in ascending order `(..., M)`, float64; of two in the middle the mean."""
    count = ordered.shape[-1]
    return 0.5 * (ordered[..., (count - 1) // 2].double() + ordered[..., count // 2].double())


def ascending(values: Tensor) -> Tensor:
    """Sort values `(..., M)` in ascending order; on a CPU by NumPy, whose sort of numbers alone is vectorised."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.sort(values.numpy(), -1))
    return values.sort(-1).values
