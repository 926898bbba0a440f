"""Rows in which some cells are missing, and how many are, by client and column.

A missing cell is a zero in `values` and False in `observed`, so that all rows contain finite numbers.

>>> import torch
>>> from fedtorch.data import FederatedData
>>> x = torch.tensor([[60.0, torch.nan], [70.0, 120.0], [50.0, 130.0]])
>>> data = FederatedData(incomplete_cells(x), torch.tensor([1, 2]), ("north", "south"), features=("age", "sbp"))
>>> data.rows.values[0], data.rows.observed[0]
(tensor([60.,  0.], dtype=torch.float64), tensor([ True, False]))
>>> missing_shares(data)
       rows  age       sbp       any
north     1  0.0  1.000000  1.000000
south     2  0.0  0.000000  0.000000
all       3  0.0  0.333333  0.333333
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree

if TYPE_CHECKING:
    import pandas


class Incomplete(NamedTuple):
    """Rows with missing cells.

    >>> incomplete_cells(torch.tensor([[1.0, 5.0], [torch.nan, 6.0]])).observed
    tensor([[ True,  True],
            [False,  True]])
    """

    values: Tensor  # (..., p) float64, zero where missing
    observed: Tensor  # (..., p) bool


def incomplete_cells(cells: Tensor) -> Incomplete:
    """Return cells `(n, p)` with NaN for missing ones as rows of finite numbers and a mask."""
    cells = cells.to(torch.float64)
    observed = ~cells.isnan()
    return Incomplete(torch.where(observed, cells, 0.0), observed)


class Absent(NamedTuple):
    """Numbers of missing cells of clients' rows, before rows were completed or left out."""

    columns: tuple[str, ...]
    names: tuple[str, ...]  # of the clients
    rows: Tensor  # (K,) numbers of rows
    cells: Tensor  # (K, p + 1) missing cells of each column, and rows that lack any


def absent(data: Any) -> Absent:
    """Count the missing cells in the rows of federated data."""
    lacking = _lacking(data.rows)
    columns = data.features if len(data.features) == lacking.shape[1] else tuple(map(str, range(lacking.shape[1])))
    counted = torch.cat([lacking, lacking.any(1, keepdim=True)], 1).cpu().to(torch.float64)
    client = torch.arange(len(data)).repeat_interleave(data.counts)
    cells = counted.new_zeros(len(data), counted.shape[1]).index_add_(0, client, counted)
    return Absent(tuple(columns), data.names, data.counts, cells)


def missing_shares(data: Any) -> pandas.DataFrame:
    """Return the share of missing cells of each client by column, and of rows with any: see the module.

    For completed rows, and if rows were left out, it is the share before, in that case of all clients together.
    """
    import pandas  # slow to import

    known = data.absent or absent(data)
    total = torch.cat([known.rows, known.rows.sum()[None]])
    shares = torch.cat([known.cells, known.cells.sum(0, keepdim=True)]) / total.clamp(min=1)[:, None]
    frame = pandas.DataFrame(shares.numpy(), index=[*known.names, "all"], columns=[*known.columns, "any"])
    frame.insert(0, "rows", total.numpy())
    return frame


def _lacking(rows: Any) -> Tensor:
    """Return which cells are missing, `(n, p)`; none where rows are complete."""
    if isinstance(rows, Incomplete):
        return ~rows.observed
    first = tree.leaves(rows)[0]
    return torch.zeros(len(first), math.prod(first.shape[1:]), dtype=torch.bool)
