"""Natural parameters of normal densities and back, in any units."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedtorch import random
from fedtorch.models import gaussian
from fedtorch.models.gaussian import solved


def problem(batch: tuple[int, ...], size: int) -> tuple[Tensor, Tensor]:
    """Well-conditioned matrices in units that differ by twelve orders of magnitude, and vectors."""
    root = random.normal(random.key(size), (*batch, size, size + 3), torch.float64)
    unit = torch.logspace(-6, 6, size, dtype=torch.float64) if size > 1 else torch.ones(1, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(size, dtype=torch.float64)
    return unit[:, None] * matrix * unit, random.normal(random.key(99), (*batch, size), torch.float64)


@pytest.mark.parametrize("batch", [(1,), (5,), (2, 3), (0,), ()])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_inverses(batch: tuple[int, ...], size: int) -> None:
    matrix, vector = problem(batch, size)
    solution, inverse = solved(matrix, vector)
    root = matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    scales = root[..., :, None] * root[..., None, :]
    # Of columns in their own units: condition numbers are below 1000, rounding of 16 steps.
    eye = (inverse * scales) @ (matrix / scales)
    torch.testing.assert_close(eye, torch.eye(size).double().expand_as(eye), rtol=0, atol=16_000 * 2.0**-52)
    torch.testing.assert_close(inverse * scales, (inverse * scales).mT, rtol=0, atol=16_000 * 2.0**-52)
    assert torch.equal(solution, (inverse @ vector[..., None])[..., 0])


def test_matrices_that_are_not_positive_definite() -> None:
    matrix, vector = problem((5,), 3)
    matrix[0, 2, 2] = -1.0
    matrix[1] = 0.0
    matrix[2, 0, 1] = matrix[2, 1, 0] = torch.nan
    matrix[3, 1, 1] = torch.nan
    solution, inverse = solved(matrix, vector)
    assert inverse.isnan().all((1, 2)).tolist() == [True, True, True, True, False]
    assert solution.isnan().all(1).tolist() == [True, True, True, True, False]
    assert bool(inverse[4].isfinite().all())


def test_there_and_back() -> None:
    matrix, mean = problem((4,), 3)
    mean = mean * matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    natural = gaussian.natural(gaussian.Moments(mean, matrix))
    back = gaussian.moments(natural)
    torch.testing.assert_close(back.covariance, matrix, rtol=1e-9, atol=0)
    torch.testing.assert_close(back.mean, mean, rtol=1e-9, atol=0)


def test_gradients_and_no_dimension() -> None:
    matrix, vector = torch.eye(2, dtype=torch.float64, requires_grad=True), torch.ones(2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda m: solved(m @ m.mT + torch.eye(2).to(m), vector), matrix)
    assert solved(torch.eye(0).double(), torch.ones(0).double())[0].shape == (0,)
