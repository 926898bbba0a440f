"""The mean of every coordinate without its lowest and highest values.

Source: Yin, Chen, Ramchandran and Bartlett (2018), "Byzantine-robust distributed learning: towards optimal statistical
rates", Definition 2.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedtorch.trust.robust.order import ascending, equal, ordered
from fedtorch.trust.robust.rule import Rule, by_columns


def trimmed_mean(fraction: float) -> Rule:
    """The mean of every coordinate without the lowest and the highest `fraction` of the weight.

    A value on the border counts with the part of its weight that is inside.

    Args:
        fraction: on each side, at least 0 and below one half; 0 is the weighted mean.

    Raises:
        ValueError: a fraction out of range.
    """
    if not 0 <= fraction < 0.5:
        raise ValueError(f"Expected a fraction of at least 0 and below 0.5, but got {fraction}; use median() for more")
    return Rule("trimmed_mean", by_columns(partial(_trimmed, fraction)), convex=fraction == 0)


def _trimmed(fraction: float, values: Tensor, weights: Tensor) -> Tensor:
    if equal(weights):
        found = ascending(values)
        share = torch.full(found.shape[-1:], 1 / found.shape[-1], dtype=torch.float64, device=found.device)
        above = torch.arange(1, len(share) + 1, device=found.device) * share
        inside = _inside(fraction, share, above)
        kept = inside.nonzero()[:, 0]
        first, last = int(kept[0]), int(kept[-1]) + 1
        return found[..., first:last].double() @ inside[first:last] / (1 - 2 * fraction)
    found, share, above = ordered(values, weights)
    inside = _inside(fraction, share, above)
    return torch.where(inside > 0, inside * found, 0.0).sum(-1) / (1 - 2 * fraction)


def _inside(fraction: float, share: Tensor, above: Tensor) -> Tensor:
    """The part of every value's weight that is neither among the lowest nor among the highest."""
    return (above.clamp(max=1 - fraction) - (above - share).clamp(min=fraction)).clamp(min=0)
