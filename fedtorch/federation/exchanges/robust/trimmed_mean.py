"""The mean of every coordinate without its lowest and highest values.

Source: Yin, Chen, Ramchandran and Bartlett (2018), "Byzantine-robust distributed learning: towards optimal statistical
rates", Definition 2.

>>> import torch
>>> from fedtorch.federation.exchanges.robust.trimmed_mean import trimmed_mean
>>> messages = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]], dtype=torch.float64)
>>> weights = torch.full((5,), 0.2, dtype=torch.float64)
>>> trimmed_mean(0.2).average(messages, weights).round(decimals=6)
tensor([3.], dtype=torch.float64)
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedtorch.federation.exchanges.robust import order_statistics
from fedtorch.federation.exchanges.robust._order import by_order
from fedtorch.federation.exchanges.robust.rules import Rule


def trimmed_mean(fraction: float) -> Rule:
    """Return the mean of every coordinate without the lowest and the highest `fraction` of the weight.

    A value on the border counts with the part of its weight that is inside.

    Args:
        fraction: share cut on each side, at least 0 and below one half; 0 is the weighted mean.

    Raises:
        ValueError: a fraction out of range.
    """
    if not 0 <= fraction < 0.5:
        raise ValueError(f"Expected a fraction of at least 0 and below 0.5, but got {fraction}; use median() for more")
    weighted = partial(order_statistics.trimmed_mean, fraction=fraction)
    return Rule("trimmed_mean", by_order(partial(_trimmed, fraction), weighted), convex=fraction == 0)


def _trimmed(fraction: float, ordered: Tensor) -> Tensor:
    count = ordered.shape[-1]
    above = torch.arange(count + 1, dtype=torch.float64, device=ordered.device) / count
    inside = (above[1:].clamp(max=1 - fraction) - above[:-1].clamp(min=fraction)).clamp(min=0)
    positions = inside.nonzero()[:, 0]
    first, last = int(positions[0]), int(positions[-1]) + 1
    return ordered[..., first:last].double() @ inside[first:last] / (1 - 2 * fraction)
