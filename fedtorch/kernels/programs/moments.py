"""Programs of `fedtorch.kernels.moments`, and the inverse of small matrices in registers for other programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse(matrix, size, SIZE: tl.constexpr):
    """Invert symmetric `(B, SIZE, SIZE)` by sweeping the first `size` columns; also whether all pivots are positive.

    Each sweep is a step of Gauss–Jordan elimination that keeps the matrix symmetric; a matrix is positive definite
    where every pivot is positive, as in a Cholesky factor. Rows and columns scale without rounding.
    """
    index = tl.arange(0, SIZE)
    positive = tl.sum(tl.sum(matrix * 0, 2), 1) == 0  # NaN and Inf are not
    for j in range(size):
        at = index == j
        row = tl.sum(tl.where(at[None, :, None], matrix, 0.0), 1)
        pivot = tl.sum(tl.where(at[None, :], row, 0.0), 1)
        positive = positive & (pivot > 0)
        share, half = row / pivot[:, None], row / tl.sqrt(pivot)[:, None]
        edge = tl.where(at[None, :, None], share[:, None, :], share[:, :, None])
        corner = at[:, None] & at[None, :]
        rest = matrix - half[:, :, None] * half[:, None, :]
        outside = at[:, None] | at[None, :]
        matrix = tl.where(corner[None, :, :], (-1.0 / pivot)[:, None, None], tl.where(outside[None, :, :], edge, rest))
    return -matrix, positive


@triton.jit
def place_of(row, column, size, SIZE: tl.constexpr):
    """Return (places of vectors, of matrices, their masks) of problems."""
    problem = row.to(tl.int64)
    index = tl.arange(0, SIZE)
    real = index < size
    vector = problem[:, None] * size + index[None, :]
    matrix = vector[:, :, None] * size + index[None, None, :]
    return (
        vector,
        matrix,
        column[:, None] & real[None, :],
        column[:, None, None] & (real[:, None] & real[None, :])[None],
    )


@triton.jit
def solve(solution, out, matrix, vector, problems, size, BATCH: tl.constexpr, SIZE: tl.constexpr):
    """Return A⁻¹ v and A⁻¹, NaN where A is not positive definite."""
    problem = tl.program_id(0) * BATCH + tl.arange(0, BATCH)
    at, whole, there, inside = place_of(problem, problem < problems, size, SIZE)
    index = tl.arange(0, SIZE)
    unit = (index[:, None] == index[None, :]).to(tl.float64)[None, :, :]
    own = tl.where(inside, tl.load(matrix + whole, mask=inside, other=0.0), unit)
    right = tl.load(vector + at, mask=there, other=0.0)
    found, positive = inverse(own, size, SIZE)
    found = tl.where(positive[:, None, None], found, float("nan"))
    product = tl.sum(tl.where(inside, found * right[:, None, :], 0.0), 2)
    tl.store(out + whole, found, mask=inside)
    tl.store(solution + at, product, mask=there)
