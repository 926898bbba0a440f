"""Covariances of low rank against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from torch import Tensor

from fedtorch.models import low_rank
from fedtorch.models.low_rank import LowRank

SHAPES = [(7, 3, 5), (7, 9, 7), (30, 8, 8), (1, 4, 1), (5, 8, 5), (40, 6, 64)]  # units, columns, rank


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(units: int, columns: int, rank: int, multiple: float = 0.3) -> tuple[LowRank, Tensor]:
    factor = draw(units, columns) * torch.logspace(0, -2, columns, dtype=torch.float64)
    made = low_rank.LowRank.from_factor(torch.tensor(multiple, dtype=torch.float64), factor, rank)
    return made, multiple * torch.eye(units, dtype=torch.float64) + factor @ factor.T


def close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=10 * ROUNDING, atol=10 * ROUNDING)


@pytest.mark.parametrize("shape", SHAPES)
def test_woodbury_is_dense_algebra(shape: tuple[int, int, int]) -> None:
    made, dense = covariance(*shape)
    inverse, right = torch.linalg.inv(dense), draw(shape[0], 3, seed=1)
    assert close(made.dense(), dense)
    assert close(made.diagonal(), dense.diagonal())
    assert close(low_rank.solve(made, right), inverse @ right)
    assert close(made.quadratic_form(right), (right * (inverse @ right)).sum())
    assert close(made.inverse_diagonal(), inverse.diagonal())
    assert close(made.inverse_trace(), inverse.trace())
    assert close(made.log_determinant(), dense.logdet())
    rows = torch.arange(0, shape[0], 2)
    diagonal = 0.1 + draw(len(rows), seed=2).square()
    block = inverse[rows][:, rows] + diagonal.diag()
    assert close(low_rank.solve_rows(made, rows, diagonal, right[rows]), torch.linalg.solve(block, right[rows]))
    sd = dense.diagonal().sqrt()
    assert close(made.correlation(rows), (dense / sd[:, None] / sd)[rows][:, rows])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("multiple", [1e-3, 1.0])
def test_the_eigenvalue_bound_holds_and_is_tight(shape: tuple[int, int, int], multiple: float) -> None:
    made, dense = covariance(*shape, multiple)
    inverse = torch.linalg.inv(dense)
    sd = inverse.diagonal().sqrt()
    largest = float(torch.linalg.eigvalsh(inverse / sd[:, None] / sd)[-1])
    for accuracy in (0.1, 0.001):
        bound = float(low_rank.eigenvalue_bound(made, accuracy))
        assert largest * (1 - ROUNDING / multiple) <= bound <= largest * (1 + accuracy) * (1 + ROUNDING / multiple)


def test_a_cut_keeps_the_trace_and_is_the_likeliest_of_its_rank() -> None:
    factor = draw(9, 6)
    whole = low_rank.LowRank.from_factor(torch.tensor(0.2, dtype=torch.float64), factor, 9)
    cut = low_rank.LowRank.from_factor(torch.tensor(0.2, dtype=torch.float64), factor, 3)
    target = whole.dense()
    assert close(cut.dense().trace(), target.trace())

    def deviance(multiple: Tensor, factor: Tensor) -> Tensor:
        dense = multiple.exp() * torch.eye(9, dtype=torch.float64) + factor @ factor.T
        return dense.logdet() + torch.linalg.solve(dense, target).trace()

    parts = (cut.multiple.log().requires_grad_(), (cut.vectors * cut.values.sqrt()).requires_grad_())
    slopes = torch.autograd.grad(deviance(*parts), parts)
    assert all(float(slope.abs().max()) < 100 * ROUNDING for slope in slopes)  # stationary in its class


def test_nothing_known() -> None:
    unknown = low_rank.identity(4, 3, float("inf"))
    assert not low_rank.solve(unknown, draw(4, 2)).any()
    assert not unknown.inverse_diagonal().any()
    assert float(low_rank.eigenvalue_bound(unknown)) == 1


def test_a_multiple_of_the_identity_has_no_directions() -> None:
    plain, right = low_rank.identity(4, 9, 2.0), draw(4, 2)
    assert plain.vectors.shape == (4, 4)
    for made in (plain, plain.trimmed()):
        assert close(made.dense(), 2 * torch.eye(4, dtype=torch.float64))
        assert close(low_rank.solve(made, right), right / 2)
        assert close(low_rank.solve_rows(made, torch.tensor([2]), torch.ones(1), right[2:3]), right[2:3] / 1.5)
        assert float(low_rank.eigenvalue_bound(made)) == 1


def test_trimming_takes_away_zeros_only() -> None:
    made, whole = covariance(9, 3, 7)
    assert made.vectors.shape == (9, 7)
    assert made.trimmed().vectors.shape == (9, 3)
    assert close(made.trimmed().dense(), whole)
