"""Rows with missing cells completed by draws that are the same wherever they are made.

A client's draws follow from a key and from the client's own rows, not from its number or block: in one process, over
ranks and at a site of its own a row is completed alike, and a second time too. Rows without a response say nothing of it
once their cells are drawn from the same model; they help to complete the others, and are left out of what is returned
(von Hippel 2007, "Regression with missing Ys", Sociological Methodology 37).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import ClientData
from fedtorch.data.incomplete import Incomplete
from fedtorch.models.incomplete_normal import SiteNormal, drawn, gaps

_MIX = -7046029254386353131  # 2⁶⁴ / golden ratio as an int64, odd


def completed(data: ClientData, normal: SiteNormal, key: Tensor) -> ClientData:
    """Return a block of rows (x, y) with cells drawn, the response last of the columns, without rows that lack one.

    Args:
        data: rows with missing cells.
        normal: of all columns, one for all clients.
        key: of the completed data set.

    Raises:
        ValueError: rows of another form, or a normal distribution of another number of columns.

    >>> import torch
    >>> from fedtorch.data import FederatedData
    >>> from fedtorch.data.incomplete import incomplete_cells
    >>> cells = torch.tensor([[1.0, 5.0], [torch.nan, 6.0], [2.0, torch.nan]])
    >>> data = FederatedData(incomplete_cells(cells), torch.tensor([3]))
    >>> normal = SiteNormal(torch.zeros(2).double(), torch.eye(2).double(), torch.zeros(2).double())
    >>> (x, y), count = completed(data.stack([0]), normal, random.key(0))
    >>> x.shape, y, count
    (torch.Size([1, 2, 1]), tensor([[5., 6.]], dtype=torch.float64), tensor([2]))
    """
    block = gaps(data)
    filled, _ = drawn(block, tree.expand(tree.to(normal, block.values.device), len(block.count)), _keys(block, key))
    kept = data.batch.observed[..., -1] & data.mask
    count = kept.sum(1)
    order = (~kept).long().argsort(dim=1, stable=True)[:, : int(count.max()) if len(count) else 1]
    rows = filled.gather(1, order[..., None].expand(-1, -1, filled.shape[-1]))
    rows = torch.where(torch.arange(rows.shape[1], device=rows.device)[:, None] < count[:, None, None], rows, 0.0)
    return ClientData((rows[..., :-1], rows[..., -1]), count)


def _keys(rows: Any, key: Tensor) -> Tensor:
    """Return a key for each client `(K,)`, of the bits of its rows; padding is zeros and adds nothing."""
    cells = torch.cat([rows.values.view(torch.int64), (rows.observed & _inside(rows)).long()], -1)
    weight = (torch.arange(cells[0].numel() if len(cells) else 0, device=cells.device) * 2 + 1) * _MIX
    mixed = cells.flatten(1) ^ (cells.flatten(1) >> 29)
    return random.fold_in(key, (mixed * weight).sum(1))


def _inside(rows: Any) -> Tensor:
    return (torch.arange(rows.values.shape[1], device=rows.count.device) < rows.count[:, None])[..., None]


def is_incomplete(data: Any) -> bool:
    """Return whether rows have a mask of missing cells."""
    return isinstance(data, Incomplete)
