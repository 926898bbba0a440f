"""Aligned rows in the shapes that split networks take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch.vfl.model import Batch, VerticalData, check_known

__all__ = ["batch_of", "check_rows", "minibatch", "of_party", "present", "rows_of", "shaped"]


def batch_of(data: VerticalData, dtype: torch.dtype) -> Batch:
    """Response, offset and weights in shapes that broadcast; features stay with the parties."""
    weight = None if data.weight is None else shaped(data.weight, 1, dtype)
    offset = None if data.offset is None else shaped(data.offset, 2, dtype)
    return Batch((), shaped(data.response, 1, dtype), offset, weight, None)


def rows_of(data: VerticalData) -> Tensor:
    """The rows that a loss is the mean of, those of which a minibatch is drawn: their weights' sum, `()` or `(B,)`."""
    if data.weight_total is not None:
        return data.weight_total
    if data.weight is None:
        return torch.tensor(data.response.shape[-1], device=data.response.device)
    return data.weight.sum(-1)


def of_party(batch: Batch, data: VerticalData, j: int) -> Batch:
    """The batch with weight zero on rows that party j lacks."""
    if data.present is None:
        return batch
    here = data.present[:, j].to(batch.y.dtype).reshape(1, 1, -1)
    return batch._replace(weight=here if batch.weight is None else batch.weight * here)


def present(value: Tensor, data: VerticalData, j: int) -> Tensor:
    """z_j `(..., n)` with zeros on rows that party j lacks."""
    return value if data.present is None else value * data.present[:, j].to(value.dtype)


def check_rows(data: VerticalData, row_dims: Sequence[int], names: Sequence[str]) -> None:
    """Raises `ValueError` unless all have as many rows as the response, and every party finite ones."""
    if len(data.features) != len(names):
        raise ValueError(f"Expected features of {len(names)} parties, but got {len(data.features)}")
    rows = data.response.shape[-1]
    check_known(data)
    if not bool((rows_of(data) > 0).all()):
        raise ValueError("Expected a row with a positive weight for each element, but got weights that are all 0")
    if data.present is not None and (data.present.ndim != 2 or len(data.present) != rows):
        raise ValueError(f"Expected present of ({rows}, parties), but got shape {tuple(data.present.shape)}")
    for x, dims, name in zip(data.features, row_dims, names):
        if x.ndim not in (dims + 1, dims + 2) or x.shape[-1 - dims] != rows:
            raise ValueError(
                f"Expected {rows} rows of {dims} dimensions of {name!r}, but got shape {tuple(x.shape)}; align the rows"
            )
        if not bool(x.isfinite().all()):
            raise ValueError(f"Expected finite features of {name!r}, but got NaN or Inf; impute them first")


def shaped(value: Tensor, ones: int, dtype: torch.dtype) -> Tensor:
    """`(n,)` or `(B, n)` as `(1 or B, 1, ..., 1, n)`."""
    return value.to(dtype).reshape(-1, *(1,) * ones, value.shape[-1])


def minibatch(data: VerticalData, rows: Tensor, row_dims: Sequence[int] | None = None) -> VerticalData:
    """These rows of everything, in this order, weighted by rows per row of the minibatch: its loss is unbiased.

    Args:
        data: aligned rows.
        rows: `(m,)` indices.
        row_dims: dimensions of one party's row; 1 each by default.
    """
    last = lambda value: None if value is None else value.index_select(-1, rows)
    dims = [1] * len(data.features) if row_dims is None else row_dims
    features = tuple(x.index_select(x.ndim - 1 - d, rows) for x, d in zip(data.features, dims))
    present = None if data.present is None else data.present[rows]
    scale = torch.full((len(rows),), data.response.shape[-1] / len(rows), dtype=torch.float64, device=rows.device)
    weight = scale if data.weight is None else data.weight.index_select(-1, rows) * scale
    response = data.response.index_select(-1, rows)
    return VerticalData(features, response, last(data.offset), weight, present, rows_of(data))
