"""Normal distributions in natural parameters, which add where densities multiply.

N(m, Q⁻¹) is stored as the shift r = Q m and the lower triangle of the precision Q, packed row by row, so that sums of
thousands stay symmetric. Products and quotients of normal densities are sums and differences of these trees; the result
need not be a density: Q may be indefinite, which `is_proper` tests.

>>> import torch
>>> from fedtorch import tree
>>> from fedtorch.models import gaussian
>>> one = gaussian.natural(gaussian.Moments(torch.tensor([1.0, 0.0]), torch.eye(2)))
>>> gaussian.moments(tree.add(one, one)).mean.round(decimals=3)
tensor([1., 0.])
>>> gaussian.distribution(tree.add(one, one)).variance  # half of each one's
tensor([0.5000, 0.5000])
>>> gaussian.is_proper(tree.subtract(one, one))  # a quotient of precision zero
tensor(False)

Source: Yue, Kontar, Estrada Gómez (2022), "Federated data analytics: a study on linear models", Lemma 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch import linalg


class Natural(NamedTuple):
    """Natural parameters of normal densities, or of quotients of them."""

    shift: Tensor  # (..., p) r = Q m
    precision: Tensor  # (..., p (p + 1) / 2) the lower triangle of Q


class Moments(NamedTuple):
    """Means and covariances of distributions."""

    mean: Tensor  # (..., p)
    covariance: Tensor  # (..., p, p)


def pack(matrix: Tensor) -> Tensor:
    """Return the lower triangle of symmetric matrices `(..., p, p)` as `(..., p (p + 1) / 2)`, row by row."""
    row, column = _triangle(matrix.shape[-1], matrix.device)
    return matrix[..., row, column]


def unpack(packed: Tensor) -> Tensor:
    """Return the inverse of `pack`: symmetric matrices `(..., p, p)`, exactly."""
    size = int((8 * packed.shape[-1] + 1) ** 0.5 / 2)
    row, column = _triangle(size, packed.device)
    matrix = packed.new_zeros((*packed.shape[:-1], size, size))
    matrix[..., row, column] = packed
    matrix[..., column, row] = packed
    return matrix


def solved(matrix: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return (A⁻¹ v `(..., p)`, A⁻¹ `(..., p, p)`); NaN where A is not positive definite.

    Args:
        matrix: A, symmetric, `(..., p, p)`.
        vector: v, `(..., p)`.
    """
    inverse = _inverse(matrix)
    return (inverse @ vector[..., None])[..., 0], inverse


def _inverse(matrix: Tensor) -> Tensor:
    """Return inverses of symmetric positive definite matrices; NaN for others."""
    if matrix.shape[-1] == 0:
        return matrix
    factor, info = torch.linalg.cholesky_ex(matrix)
    good = (info == 0)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    half = linalg.inverse_factor(torch.where(good, factor, eye))
    return torch.where(good, half.mT @ half, torch.nan)


def natural(moments: Moments) -> Natural:
    """Return natural parameters of normal densities with these moments; NaN where one is not positive definite."""
    shift, precision = solved(moments.covariance, moments.mean)
    return Natural(shift, pack(precision))


def moments(natural: Natural) -> Moments:
    """Return moments of normal densities; NaN where a precision is not positive definite."""
    return Moments(*solved(unpack(natural.precision), natural.shift))


def is_proper(natural: Natural) -> Tensor:
    """Return which natural parameters belong to densities: finite, with a positive definite precision, `(...)`."""
    finite = natural.shift.isfinite().all(-1) & natural.precision.isfinite().all(-1)
    if natural.shift.shape[-1] == 0:
        return finite
    safe = torch.where(finite[..., None], natural.precision, torch.zeros_like(natural.precision))
    return finite & (torch.linalg.cholesky_ex(unpack(safe)).info == 0)


def distribution(natural: Natural) -> MultivariateNormal:
    """Return the `torch.distributions` object, with the leading dimensions as batch shape.

    Raises:
        ValueError: not a density; see `is_proper`.
    """
    if not bool(is_proper(natural).all()):
        raise ValueError("Expected a positive definite precision, but got an indefinite one; this is no density")
    return MultivariateNormal(*moments(natural))


def _triangle(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column = torch.tril_indices(size, size, device=device)
    return row, column
