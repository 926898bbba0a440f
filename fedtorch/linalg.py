"""Small linear algebra on stacked matrices `(..., p, p)`."""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part, which rounding leaves."""
    return (matrix + matrix.mT) / 2


def inverse_factor(factor: Tensor) -> Tensor:
    """L⁻¹ of lower triangular L, so that the inverse of LL' is its transpose times itself."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)


def normal_draw(factor: Tensor, shift: Tensor, z: Tensor) -> Tensor:
    """N(A⁻¹ b, A⁻¹) from standard normal z, with A = LL': L'⁻¹ (L⁻¹ b + z).

    Args:
        factor: L, lower triangular, `(..., p, p)`.
        shift: b, `(..., p)`.
        z: `(..., p)`.
    """
    half = torch.linalg.solve_triangular(factor, shift[..., None], upper=False)
    return torch.linalg.solve_triangular(factor.mT, half + z[..., None], upper=True)[..., 0]
