r"""Small linear algebra on stacked matrices `(..., p, p)`, for columns with very different units.

A Gram matrix of a Unix time beside an indicator has eigenvalues that differ by twenty orders of magnitude, and their
size does not show which are rounding. `equilibrated` scales every column to one size first: A = S⁻¹ Ã S⁻¹ with S
diagonal and Ã of unit diagonal, up to powers of two. Only eigenvalues of Ã are ever truncated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def symmetric(matrix: Tensor) -> Tensor:
    """Return the symmetric part, which rounding leaves."""
    return (matrix + matrix.mT) / 2


def inverse_factor(factor: Tensor) -> Tensor:
    """Return L⁻¹ of lower triangular L, so that the inverse of LL' is its transpose times itself."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)


def normal_draw(factor: Tensor, shift: Tensor, z: Tensor) -> Tensor:
    """Return N(A⁻¹ b, A⁻¹) from standard normal z, with A = LL': L'⁻¹ (L⁻¹ b + z).

    Args:
        factor: L, lower triangular, `(..., p, p)`.
        shift: b, `(..., p)`.
        z: `(..., p)`.
    """
    half = torch.linalg.solve_triangular(factor, shift[..., None], upper=False)
    return torch.linalg.solve_triangular(factor.mT, half + z[..., None], upper=True)[..., 0]


class Equilibrated(NamedTuple):
    """A positive semi-definite A = S⁻¹ V diag(m) V' S⁻¹, for any units of its rows and columns."""

    scale: Tensor  # (..., p) the diagonal of S, see `unit_scale`
    values: Tensor  # (..., p) m, ascending, zero at rounding level
    vectors: Tensor  # (..., p, p) V

    @property
    def rank(self) -> Tensor:
        """Return the rank of A, `(...)`."""
        return (self.values > 0).sum(-1)

    def null(self) -> Tensor:
        """Return orthonormal columns that span A's null space in its own units; `(..., p, p)`, zeros beside them."""
        solution = torch.zeros_like(self.vectors)
        open_ = self.values.shape[-1] - self.rank
        for count in filter(None, open_.unique().tolist()):
            which = open_ == count
            scale, vectors = self.scale[which][..., None], self.vectors[which][..., :count]
            # Elimination with pivots separates nearly parallel scaled directions; its remainder of other columns is
            # rounding, which in their units could be large.
            order, lower, _ = torch.linalg.lu(scale * vectors)
            top = lower[..., :count, :]
            basis = torch.linalg.solve_triangular(top, order @ lower, upper=False, left=False, unitriangular=True)
            size = (basis / scale).abs()
            basis = torch.where(size > 64 * _noise(vectors) * size.amax(-2, keepdim=True), basis, 0.0)
            upper = torch.linalg.qr(basis, mode="r").R
            whole = torch.linalg.solve_triangular(upper, basis, upper=True, left=False)
            solution[which] = torch.nn.functional.pad(whole, (0, solution.shape[-1] - count))
        return solution

    def inverse_root(self, null: Tensor) -> Tensor:
        """Return X `(..., p, p)` with XX' = A⁺, the pseudo-inverse in the units of A, from the result of `null()`."""
        known = self.values > 0
        root = torch.where(known, self.values, 1.0).rsqrt() * known
        root_columns = self.vectors * root[..., None, :] * self.scale[..., None]
        if bool(known.all()):
            return root_columns
        # A column of zeros has zeros here: its coefficient is zero, not rounding.
        return torch.where(root_columns.any(-1, keepdim=True), root_columns - null @ (null.mT @ root_columns), 0.0)


def equilibrated(matrix: Tensor) -> Equilibrated:
    """Decompose a positive semi-definite matrix between diagonal matrices that give it a diagonal of ones.

    Eigenvalues below 64 p ε of the largest count as rounding of sums over rows.

    Args:
        matrix: A, `(..., p, p)`.
    """
    scale = unit_scale(matrix.diagonal(dim1=-2, dim2=-1))
    values, vectors = torch.linalg.eigh(scale[..., :, None] * matrix * scale[..., None, :])
    known = values > _noise(matrix) * values[..., -1:].clamp(min=0)
    empty = matrix.diagonal(dim1=-2, dim2=-1) == 0
    vectors = torch.where(empty[..., :, None] & known[..., None, :], 0.0, vectors)
    return Equilibrated(scale, torch.where(known, values, 0.0), vectors)


def _noise(matrix: Tensor) -> float:
    """Return the size of rounding errors, relative to the largest eigenvalue of a matrix that is a sum over rows."""
    return 64 * matrix.shape[-2] * torch.finfo(matrix.dtype).eps


def unit_scale(diagonal: Tensor) -> Tensor:
    """Return powers of two s, which scale without rounding, with s² times `diagonal` in [0.5, 2); 1 for zeros."""
    exponent = torch.frexp(diagonal).exponent
    return torch.ldexp(torch.ones_like(diagonal), -exponent.div(2, rounding_mode="floor"))


def square_root(covariance: Tensor) -> Tensor:
    """Return C `(..., p, p)` with CC' = A of positive semi-definite A, also where rounding leaves A no Cholesky factor.

    If A has a row of zeros, C has one too, so known coordinates stay exact for any units of the rest.

    >>> square_root(torch.tensor([[0.0, 0.0], [0.0, 4.0]]))
    tensor([[0., 0.],
            [0., 2.]])
    """
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    known = diagonal <= 0
    scale = unit_scale(torch.where(known, 1.0, diagonal))
    scaled = scale[..., :, None] * covariance * scale[..., None, :] + torch.diag_embed(known.to(covariance))
    factor, failed = torch.linalg.cholesky_ex(scaled)
    bad = failed > 0
    if bool(bad.any()):
        values, vectors = torch.linalg.eigh(scaled[bad])
        factor[bad] = vectors * values.clamp(min=0).sqrt()[..., None, :]
    return (factor / scale[..., None]).masked_fill(known[..., None], 0.0)


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """Return A⁺ of a positive semi-definite A, `(..., p, p)`: A⁺b is the solution of least norm, in the units of A."""
    parts = equilibrated(matrix)
    root = parts.inverse_root(parts.null())
    return root @ root.mT
