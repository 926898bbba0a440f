"""Inverses in registers are those of Cholesky factors."""

from __future__ import annotations

import pytest
import torch
from support.programs import launches, reference
from torch import Tensor

from fedtorch import random
from fedtorch.kernels.moments import solved
from fedtorch.models import gaussian

# Of matrices that are not positive definite the interpreter, which is NumPy, tells.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning")


def problem(batch: tuple[int, ...], size: int) -> tuple[Tensor, Tensor]:
    """Well-conditioned matrices in units that differ by twelve orders of magnitude, and vectors."""
    root = random.normal(random.key(size), (*batch, size, size + 3), torch.float64)
    unit = torch.logspace(-6, 6, size, dtype=torch.float64) if size > 1 else torch.ones(1, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(size, dtype=torch.float64)
    return unit[:, None] * matrix * unit, random.normal(random.key(99), (*batch, size), torch.float64)


@pytest.mark.parametrize("batch", [(1,), (5,), (2, 3), (0,), ()])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_inverses(batch, size, device, monkeypatch) -> None:
    matrix, vector = problem(batch, size)
    with reference():
        wanted = solved(matrix, vector)
    with launches(monkeypatch):
        found = solved(matrix.to(device), vector.to(device))
    root = matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    scales = root[..., :, None] * root[..., None, :]
    # Of columns in their own units: condition numbers are below 100, rounding of 16 steps.
    torch.testing.assert_close(found[1].cpu() * scales, wanted[1] * scales, rtol=0, atol=1600 * 2.0**-52)
    assert torch.equal(found[1], found[1].mT)
    size_of = (wanted[1].abs() @ vector.abs()[..., None])[..., 0]
    assert bool(((found[0].cpu() - wanted[0]).abs() <= 1600 * 2.0**-52 * size_of).all())


def test_matrices_that_are_not_positive_definite(device) -> None:
    matrix, vector = (part.to(device) for part in problem((5,), 3))
    matrix[0, 2, 2] = -1.0
    matrix[1] = 0.0
    matrix[2, 0, 1] = matrix[2, 1, 0] = torch.nan
    matrix[3, 1, 1] = torch.inf
    solution, inverse = solved(matrix, vector)
    assert inverse.isnan().all((1, 2)).tolist() == [True, True, True, True, False]
    assert solution.isnan().all(1).tolist() == [True, True, True, True, False]
    assert bool(inverse[4].isfinite().all())


def test_gaussian_densities_use_it(device, monkeypatch) -> None:
    matrix, mean = problem((4,), 3)
    with reference():
        wanted = gaussian.natural(gaussian.Moments(mean, matrix))
    with launches(monkeypatch, at_least=2):
        found = gaussian.natural(gaussian.Moments(mean.to(device), matrix.to(device)))
        back = gaussian.moments(found)
    torch.testing.assert_close(found.precision.cpu(), wanted.precision, rtol=1e-9, atol=0)
    torch.testing.assert_close(back.covariance.cpu(), matrix, rtol=1e-9, atol=0)


def test_what_goes_to_the_reference(device, monkeypatch) -> None:
    with launches(monkeypatch, at_least=0) as seen:
        for size in (0, 17):
            matrix, vector = torch.eye(size, device=device).double(), torch.ones(size, device=device).double()
            assert torch.equal(solved(matrix, vector)[0], vector)
        matrix, vector = torch.eye(2, device=device), torch.ones(2, device=device)
        assert torch.equal(solved(matrix, vector)[0], vector)
        matrix = matrix.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda m: solved(m @ m.mT + torch.eye(2).to(m), vector.double()), matrix)
    assert seen == []
