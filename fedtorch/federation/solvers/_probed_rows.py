"""Choose a few rows of a block, to find out what a module can do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.tree import Tree

_LOOKED_AT = 16  # rows of a block


def spread_rows(data: Any) -> tuple[Tensor, Tensor]:
    """Return (client, row) of rows spread over a block, and of those with the smallest and largest whole numbers."""
    ends = data.count.cumsum(0)
    at = _evenly(int(ends[-1]), _LOOKED_AT).to(ends.device)
    client = torch.searchsorted(ends, at, right=True)
    choice, mask = [(client, at - ends[client] + data.count[client])], data.mask
    for leaf in tree.leaves(data.batch):
        if leaf.ndim in (2, 3) and not (leaf.is_floating_point() or leaf.is_complex()):
            low, high = leaf.flatten(2).long().aminmax(dim=2) if leaf.ndim == 3 else (leaf.long(), leaf.long())
            first = low[client[0], 0]
            extremes = torch.where(mask, low, first).argmin(), torch.where(mask, high, first).argmax()
            both = torch.stack(extremes)
            choice.append((both // mask.shape[1], both % mask.shape[1]))
    return torch.cat([k for k, _ in choice]), torch.cat([r for _, r in choice])


def first_rows(data: Any) -> Tree:
    """Return the first rows of the client that has most."""
    client = int(data.count.argmax())
    count = min(_LOOKED_AT, int(data.count[client]))
    return tree.map(lambda leaf: leaf[client, :count], data.batch)


def _evenly(count: int, most: int) -> Tensor:
    """Return at most so many of `count` places; single precision would miss those of very many."""
    return torch.linspace(0, count - 1, min(most, count), dtype=torch.float64).long()
