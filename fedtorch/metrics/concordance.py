"""The concordance index of survival models: how often the one with the greater risk has the event first."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtorch.metrics.stacked import StackedMetric
from fedtorch.tree import Tree

_PAIRS = 2**22  # pairs of rows that are compared at a time


def concordance_index() -> StackedMetric:
    """Return Harrell's C-index of risks `(K, N)` or `(K, N, 1)` for targets (event, time) `(K, N, 2)`.

    Of two rows the one with the earlier event should have the greater risk; equal risks count half. A pair counts if
    the earlier time is an event's, or, for two equal times, if one is. Pairs are rows of one client: rows of different
    clients are never compared, so the overall index is that of all clients' own pairs.

    Source: Harrell et al. (1982), "Evaluating the yield of medical tests"; ties as in the package lifelines.

    Raises:
        ValueError: targets of another shape, or an event that is neither 0 nor 1.

    Example:
        >>> import torch, fedtorch as ft
        >>> index = ft.metrics.concordance_index()
        >>> target = torch.tensor([[[1.0, 2.0], [1.0, 5.0], [0.0, 9.0]]])  # (event, time)
        >>> risk = torch.tensor([[3.0, 1.0, 2.0]])
        >>> index.compute(index.update(risk, target, torch.ones(1, 3).bool()))  # 2 of 3 pairs
        tensor([0.6667], dtype=torch.float64)
    """

    def update(prediction: Tensor, target: Tensor, mask: Tensor) -> Tree:
        if target.ndim != 3 or target.shape[2] != 2:
            raise ValueError(f"Expected targets (event, time) of shape (K, N, 2), but got {tuple(target.shape)}")
        risk = prediction.reshape(mask.shape)
        event, time = target[..., 0], target[..., 1]
        if bool(((event != 0) & (event != 1) & mask).any()):
            raise ValueError("Expected events 0 or 1 in the first column of the target, but got other numbers")
        happened = (event == 1) & mask
        right, pairs = [], []
        for part in torch.arange(mask.shape[1]).split(max(1, _PAIRS // max(1, mask.numel()))):
            first = lambda leaf, part=part: leaf[:, part, None]
            later = (first(time) < time[:, None]) | ((first(time) == time[:, None]) & ~happened[:, None])
            counts = first(happened) & mask[:, None] & later
            above = first(risk) - risk[:, None]
            right.append((counts * ((above > 0) + 0.5 * (above == 0))).sum((1, 2), dtype=torch.float64))
            pairs.append(counts.sum((1, 2), dtype=torch.float64))
        rows = mask.sum(1, dtype=torch.float64)
        return {"right": torch.stack(right).sum(0), "pairs": torch.stack(pairs).sum(0), "rows": rows}

    return StackedMetric(update, lambda sums: sums["right"] / sums["pairs"], True)
