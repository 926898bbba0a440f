"""Rows are refused by their shapes and for what is not finite; a client's numbers are those of its own rows."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import same_bits
from torch import Tensor

import fedtorch as ft
from fedtorch.models import rows
from fedtorch.models.gibbs import imputation
from fedtorch.models.linear import SufficientStatistics, block_statistics, sufficient_statistics

COUNT = torch.tensor([4, 0, 2])
X = ft.random.normal(ft.random.key(0), (3, 4, 2), torch.float64)


def block(*leaves: Tensor) -> ft.data.ClientData:
    return ft.data.ClientData(leaves, COUNT)


def test_padding_is_zero_and_a_column_of_responses_is_a_vector() -> None:
    x, y = rows.regression_rows(block(X.float(), torch.ones(3, 4, 1, dtype=torch.int64)), 2)
    assert x.dtype == y.dtype == torch.float64
    assert y.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert torch.equal(x[2, 2:], torch.zeros(2, 2))
    assert torch.equal(rows.variable_rows(block(X))[0], X[0])


def test_other_shapes_are_refused() -> None:
    message = r"Expected rows \(x, y\) of shapes \(3,\) and \(\), but got \[\(2,\), \(\)\]"
    with pytest.raises(ValueError, match=message):
        rows.regression_rows(block(X, X[..., 0]), 3)
    for leaves in ((X,), (X, X), (X[..., 0], X[..., 0]), (X, X[..., 0], X)):
        with pytest.raises(ValueError, match=r"Expected rows \(x, y\) of shapes \(d,\) and \(\)"):
            rows.regression_rows(block(*leaves))
    with pytest.raises(ValueError, match=r"Expected rows y of shape \(p,\) and nothing else"):
        rows.variable_rows(block(X[..., 0]))


def test_clients_with_gaps_are_named() -> None:
    x = X.clone()
    x[2, 1, 0] = torch.nan
    with pytest.raises(ft.BadClients, match="Expected finite x, but got NaN or Inf") as caught:
        rows.regression_rows(block(x, X[..., 0]))
    assert caught.value.rows == [2]
    with pytest.raises(ft.BadClients, match="Expected finite y, but got NaN or Inf"):
        rows.regression_rows(block(X, x[..., 0]))


def test_client_by_client() -> None:
    sums = rows.client_by_client(lambda own: (own.sum(0), own.new_tensor(len(own))), COUNT, X)
    assert sums[1].tolist() == [4, 0, 2]
    assert torch.equal(sums[0][2], X[2, :2].sum(0))
    nobody = rows.client_by_client(lambda own: own.sum(0), COUNT[:0], X[:0])
    assert nobody.shape == (0, 2)


def test_statistics_of_all_clients_are_those_of_their_block() -> None:
    sizes = [3, 40, 1, 7]
    x = [ft.random.normal(ft.random.key(k), (n, 2), torch.float64) for k, n in enumerate(sizes)]
    data = ft.data.from_tensors([(one, one @ torch.tensor([1.0, -1.0]).double()) for one in x])
    found, whole = SufficientStatistics.of(data), block_statistics(data.stack(range(4)))
    for one, other in zip(found, whole):
        assert torch.allclose(one, other, rtol=1e-13)
    assert torch.allclose(found.per_row().gram[1], x[1].mT @ x[1] / 40, rtol=1e-13)
    several = sufficient_statistics(x[1], torch.stack([x[1][:, 0], x[1][:, 1]], 1))
    assert several.cross.shape == (2, 2)
    assert torch.allclose(several.power, x[1].square().sum(), rtol=1e-13)
    empty = ft.data.FederatedData(data.rows, torch.tensor([0, 43, 1, 7]), allow_empty=True)
    assert same_bits(SufficientStatistics.of(empty).per_row().power[0], torch.zeros((), dtype=torch.float64))


def test_missing_cells_name_the_remedy() -> None:
    data = imputation.incomplete([(torch.tensor([[1.0], [torch.nan]]), torch.ones(2))])
    with pytest.raises(
        ValueError, match=r"complete rows \(x, y\), but got rows with missing cells; fit what ft\.inference"
    ):
        rows.regression_rows(data.stack([0]))
