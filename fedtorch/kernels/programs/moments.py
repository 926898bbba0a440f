"""Programs of `fedtorch.kernels.moments`, and the inverse of small matrices in registers for other programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse(matrix, size, SIZE: tl.constexpr):
    """(inverses, whether all pivots are positive) of symmetric `(B, SIZE, SIZE)`, by sweeping the first `size` columns.

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
    """(places of vectors, of matrices, their masks) of problems."""
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
    """A⁻¹ v and A⁻¹, NaN where A is not positive definite."""
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


@triton.jit
def tilt(shift, precision, nodes, weights, size, many, NODES: tl.constexpr, SIZE: tl.constexpr):
    """Natural parameters of the normal density with the moments of a client's weighted nodes."""
    client = tl.program_id(0) + tl.arange(0, 1)
    at, whole, there, inside = place_of(client, client >= 0, size, SIZE)
    index = tl.arange(0, SIZE)
    first = client.to(tl.int64)[:, None] * many
    mean = tl.zeros((SIZE,), tl.float64)
    for start in range(0, many, NODES):
        node = start + tl.arange(0, NODES)
        inner = first + node[None, :]
        place = tl.trans(inner) * size + index[None, :]
        value = tl.load(nodes + place, mask=(node < many)[:, None] & (index < size)[None, :], other=0.0)
        weight = tl.load(weights + tl.trans(inner), mask=(node < many)[:, None], other=0.0)
        mean += tl.sum(weight * value, 0)
    total = tl.zeros((SIZE, SIZE), tl.float64)
    for start in range(0, many, NODES):
        node = start + tl.arange(0, NODES)
        inner = first + node[None, :]
        place = tl.trans(inner) * size + index[None, :]
        value = tl.load(nodes + place, mask=(node < many)[:, None] & (index < size)[None, :], other=0.0)
        weight = tl.load(weights + tl.trans(inner), mask=(node < many)[:, None], other=0.0)
        gap = tl.where((node < many)[:, None] & (index < size)[None, :], value - mean[None, :], 0.0)
        total += tl.sum((weight * gap)[:, :, None] * gap[:, None, :], 0)
    covariance = tl.where(inside, total[None, :, :], 0.0)
    found, positive = inverse(covariance, size, SIZE)
    found = tl.where(positive[:, None, None], found, float("nan"))
    product = tl.sum(tl.where(inside, found * mean[None, None, :], 0.0), 2)
    tl.store(precision + whole, found, mask=inside)
    tl.store(shift + at, product, mask=there)
