"""The weighted median and the weighted trimmed mean of M messages, coordinate by coordinate.

Source: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates",
ICML 2018, Definitions 1 and 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SLACK = 1e-12  # rounding of the summed weights must not decide which value is in the middle, or is cut


def median(value: Tensor, share: Tensor) -> Tensor:
    """Return the weighted median of every coordinate, the middle between two values that halve the weight.

    Args:
        value: `(M, ...)`, M > 0.
        share: the messages' weights `(M,)` in float64, of sum 1.

    Returns:
        `(...)` in float64.
    """
    ordered, _, above = _ordered(value, share)
    low = (above < 0.5 - _SLACK).sum(0).clamp(max=len(value) - 1)
    high = (above < 0.5 + _SLACK).sum(0).clamp(max=len(value) - 1)
    return 0.5 * (ordered.gather(0, low[None]) + ordered.gather(0, high[None]))[0]


def trimmed_mean(value: Tensor, share: Tensor, fraction: float) -> Tensor:
    """Return the mean of every coordinate without the lowest and the highest `fraction` of the weight.

    Args:
        value: `(M, ...)`, M > 0.
        share: the messages' weights `(M,)` in float64, of sum 1.
        fraction: share cut on each side, at least 0 and below one half.

    Returns:
        `(...)` in float64.
    """
    ordered, weights, above = _ordered(value, share)
    weight_inside = (above.clamp(max=1 - fraction) - (above - weights).clamp(min=fraction)).clamp(min=0)
    return torch.where(weight_inside > _SLACK, weight_inside * ordered, 0.0).sum(0) / (1 - 2 * fraction)


def _ordered(value: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values in ascending order, their weights, the weights summed up to each), `(M, ...)`."""
    ordered, order = value.to(torch.float64).sort(0)
    weights = share[order]
    return ordered, weights, weights.cumsum(0)
