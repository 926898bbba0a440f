"""Embeddings whose padding has no gradient at any client, and bags of embeddings by basic operations.

`torch.vmap`'s rule for the derivative of an embedding respects `padding_idx` for the first client only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SUM, _MEAN, _MAX = range(3)  # the modes of torch's bags


def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Compute `torch.embedding`."""
    rows = torch.embedding(weight, indices, -1, scale_grad_by_freq, sparse)
    if padding_idx == -1 or not torch.is_grad_enabled():
        return rows
    return torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)


def _bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, None, None, None]:
    """Return the bags `(B, D)` of `torch.embedding_bag`, with empty tensors in place of its derivative's inputs."""
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    if include_last_offset:
        offsets = offsets[:-1]
    rows = torch.embedding(weight, indices, -1, scale_grad_by_freq, sparse)
    count, places = len(offsets), torch.arange(len(indices), device=indices.device)
    bag = torch.searchsorted(offsets, places, right=True) - 1
    there = torch.ones_like(indices, dtype=torch.bool) if padding_idx is None else indices != padding_idx
    if mode == _MAX:
        member = (bag == torch.arange(count, device=bag.device).unsqueeze(1)) & there
        if not len(indices):
            return rows.new_zeros(count, rows.shape[1]), None, None, None
        largest = torch.where(member.unsqueeze(-1), rows, -torch.inf).max(1).values
        return torch.where(member.any(1, keepdim=True), largest, 0.0), None, None, None
    weighted = torch.where(there.unsqueeze(-1), rows, 0.0)
    if per_sample_weights is not None:
        weighted = weighted * per_sample_weights.unsqueeze(-1)
    sums = torch.zeros(count, rows.shape[1], dtype=weighted.dtype, device=weighted.device).index_add(0, bag, weighted)
    if mode == _MEAN:
        sizes = torch.zeros(count, dtype=torch.int64, device=weighted.device).index_add(0, bag, there.long())
        sums = sums / sizes.clamp(min=1).unsqueeze(-1)
    return sums, None, None, None


REPLACED: dict[Any, Callable[..., Any]] = {torch.embedding: _embedding, torch.embedding_bag: _bag}
