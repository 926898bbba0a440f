r"""Moments of many small normal densities from natural parameters and back.

N(m, C) has the natural parameters :math:`Q = C^{-1}` and :math:`r = Q m`; either way it is one inverse of a symmetric
positive definite matrix and one product with it. A program keeps whole matrices in registers and inverts them by the
symmetric sweeps of Gauss–Jordan elimination, whose pivots are those of a Cholesky factor, so that only the result is
written; the reference is a batched Cholesky factor, a triangular solve and two products.

Source: Vehtari et al., "Expectation propagation as a way of life", JMLR 21, 2020, section 3, for the moments;
Goodnight, "A tutorial on the SWEEP operator", The American Statistician 33, 1979. Bound: arithmetic, about d³
operations a matrix, and for up to four dimensions bandwidth. Not measured yet.

Differentiable by its reference only, which runs where a gradient is asked for. Programs know float64 and up to 16
dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch.dispatch.choice import program
from fedtorch.dispatch.launch import launch, power_of_two

MOST = 16  # dimensions
_SIZE = 512  # numbers of a program's matrices


def solved(matrix: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return (A⁻¹ v `(..., p)`, A⁻¹ `(..., p, p)`), exactly symmetric; NaN where A is not positive definite.

    Args:
        matrix: A, symmetric, `(..., p, p)`.
        vector: v, `(..., p)`.
    """
    size = vector.shape[-1]
    same = matrix.shape[:-1] == vector.shape and vector.dtype == matrix.dtype
    programs = program(
        "fedtorch.kernels.programs.moments", (matrix, vector), (torch.float64,), fits=0 < size <= MOST and same
    )
    if not programs:
        inverse = _inverse(matrix)
        return (inverse @ vector[..., None])[..., 0], inverse
    solution, inverse = vector.new_empty(vector.shape), matrix.new_empty(matrix.shape)
    side = power_of_two(size)
    batch, problems = max(_SIZE // side**2, 1), vector.numel() // size
    tensors = (solution, inverse, matrix.contiguous(), vector.contiguous())
    launch(programs.solve, -(-problems // batch), *tensors, problems, size, BATCH=batch, SIZE=side)
    return solution, inverse


def _inverse(matrix: Tensor) -> Tensor:
    """Return inverses of symmetric positive definite matrices, exactly symmetric; NaN for others."""
    if matrix.shape[-1] == 0:
        return matrix
    factor, info = torch.linalg.cholesky_ex(matrix)
    good = (info == 0)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    half = linalg.inverse_factor(torch.where(good, factor, eye))
    return torch.where(good, half.mT @ half, torch.nan)
