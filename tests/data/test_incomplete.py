"""The share of missing cells, by client and column."""

from __future__ import annotations

import pytest
import torch

import fedtorch as ft
from fedtorch.data.incomplete import incomplete_cells
from fedtorch.models.gibbs import imputation

CELLS = torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, torch.nan, 1.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]])


def test_shares_by_client_and_column() -> None:
    data = ft.data.FederatedData(
        incomplete_cells(CELLS), torch.tensor([2, 2]), ("north", "south"), features=("a", "b", "y")
    )
    shares = data.missing()
    assert shares.loc["north"].tolist() == [2, 0.5, 1.0, 0.0, 1.0]
    assert shares.loc["south"].tolist() == [2, 0.0, 0.0, 0.0, 0.0]
    assert shares.loc["all"].tolist() == [4, 0.25, 0.5, 0.0, 0.5]
    assert list(shares.columns) == ["rows", "a", "b", "y", "any"]


def test_complete_rows_lack_nothing() -> None:
    data = ft.data.from_tensors([(torch.ones(3, 2), torch.ones(3))])
    assert data.missing().loc["all"].tolist() == [3, 0.0, 0.0, 0.0]


def test_shares_add_up_to_those_of_the_pool() -> None:
    data = imputation.incomplete([(CELLS[:1, :2], CELLS[:1, 2]), (CELLS[2:, :2], CELLS[2:, 2])])
    assert data.missing().loc["all"].tolist() == pytest.approx(data.pool().missing().loc["pool"].tolist())
