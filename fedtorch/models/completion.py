"""Rows with missing cells completed by draws that are the same wherever they are made.

A client's draws follow from a key and the client's own rows, not from its number or block: in one process, over ranks
and at a site a row is completed alike, and every time. Rows without a response have no information about it once their
cells are drawn from the same model; they help to complete the others, and are left out of the result (von Hippel 2007,
"Regression with missing Ys", Sociological Methodology 37).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import ClientData, Design
from fedtorch.data.frames.raw_columns import RawColumns
from fedtorch.models.incomplete_normal import SiteNormal, drawn, gaps
from fedtorch.tree import Tree

_MIX = -7046029254386353131  # 2⁶⁴ / golden ratio as an int64, odd


def completed(data: ClientData, normal: SiteNormal, key: Tensor, design: Design | None = None) -> ClientData:
    """Return a block with cells drawn and without rows that lack a response, the last column.

    Args:
        data: rows with missing cells.
        normal: of all columns, one for all clients.
        key: random key of the completed data set.
        design: the formula whose columns these are, which makes the rows; default: rows (x, y) of the columns.

    Raises:
        ValueError: rows of another form, or a normal distribution of another number of columns.

    >>> import torch
    >>> from fedtorch.data import FederatedData
    >>> from fedtorch.data.frames.incomplete import incomplete_cells
    >>> cells = torch.tensor([[1.0, 5.0], [torch.nan, 6.0], [2.0, torch.nan]])
    >>> data = FederatedData(incomplete_cells(cells), torch.tensor([3]))
    >>> normal = SiteNormal(torch.zeros(2).double(), torch.eye(2).double(), torch.zeros(2).double())
    >>> (x, y), count = completed(data.stack([0]), normal, random.key(0))
    >>> x.shape, y, count
    (torch.Size([1, 2, 1]), tensor([[5., 6.]], dtype=torch.float64), tensor([2]))
    """
    block = gaps(data)
    filled, _ = drawn(block, tree.expand(tree.to(normal, block.values.device), len(block.count)), _keys(block, key))
    complete = data.batch.observed[..., -1] & data.mask
    rows = [_rows(client[which], design) for client, which in zip(filled, complete)] or [
        _rows(filled.flatten(0, 1), design)
    ]
    count = complete.sum(1)
    size = max(count.tolist(), default=1)
    padded = [tree.map(lambda leaf: _padded(leaf, size), client) for client in rows]
    return ClientData(tree.to(tree.take(tree.stack(padded), slice(len(count))), filled.device), count)


def _rows(values: Tensor, design: Design | None) -> Tree:
    """Return completed columns `(n, q)` as rows."""
    if design is None:
        return values[:, :-1], values[:, -1]
    return design.rows_of(RawColumns(design).cells(values))


def _padded(leaf: Tensor, size: int) -> Tensor:
    return torch.cat([leaf, leaf.new_zeros(size - len(leaf), *leaf.shape[1:])])


def _keys(rows: Any, key: Tensor) -> Tensor:
    """Return a key for each client `(K,)`, from the bits of its rows; padding is zeros and adds nothing."""
    cells = torch.cat([rows.values.view(torch.int64), (rows.observed & _inside(rows)).long()], -1)
    weight = (torch.arange(cells.shape[1] * cells.shape[2], device=cells.device) * 2 + 1) * _MIX
    mixed = cells.flatten(1) ^ (cells.flatten(1) >> 29)
    return random.fold_in(key, (mixed * weight).sum(1))


def _inside(rows: Any) -> Tensor:
    return (torch.arange(rows.values.shape[1], device=rows.count.device) < rows.count[:, None])[..., None]
