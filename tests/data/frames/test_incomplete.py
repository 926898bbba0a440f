"""The share of missing cells, by client and column."""

from __future__ import annotations

import warnings

import pandas
import pytest
import torch

import fedtorch as ft
from fedtorch.data.frames.incomplete import incomplete_cells
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


def test_what_was_left_out_or_completed_is_remembered() -> None:
    frame = pandas.DataFrame(
        {"site": ["n", "n", "s", "v", "n"], "age": [1.0, None, 3.0, None, 2.0], "y": [1.0, 2.0, 3.0, 4.0, 5.0]}
    )
    wanted = [5, 0.4, 0.0, 0.4]
    settings = {"client": "site", "formula": "y ~ age"}
    dropped = ft.data.from_frame(frame, **settings, missing="drop")
    assert dropped.names == ("n", "s")
    columns = ft.data.from_frame(frame, client="site", features=["age"], target="y", missing="drop")
    for data, order in ((dropped, ["y", "age"]), (columns, ["age", "y"])):
        assert list(data.missing().index) == ["n", "s", "v", "all"]
        assert list(data.missing().columns) == ["rows", *order, "any"]
        assert data.missing().loc["all", ["rows", "age", "y", "any"]].tolist() == pytest.approx(wanted)
        assert data.missing().loc["v", "any"] == 1.0
        assert data.split(0.5, seed=0)[0].missing().equals(data.missing())
    gaps = ft.data.from_frame(frame, **settings, missing="impute")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        (completed,) = ft.inference.imputed(gaps, 1, rounds=2, between=False)
    assert completed.missing().loc["all"].tolist() == pytest.approx(wanted[:2] + wanted[2:])
    assert completed.counts.tolist() == [3, 1, 1]
