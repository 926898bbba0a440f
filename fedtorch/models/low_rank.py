r"""Covariances between many units as a multiple of the identity plus low rank, Ω = aI + V diag(s) V'.

V `(K, r)` has orthonormal columns, so that

.. math:: Ω^{-1} = \frac1a (I - VV') + V \operatorname{diag}\frac{1}{a + s} V'

(Woodbury), and everything costs O(K r) or O(K r²): never K². A column of zeros with s = 0 is unused; such columns come
last, so that a covariance whose rank grows keeps its shape.

>>> import torch
>>> from fedtorch.models import low_rank
>>> covariance = low_rank.LowRank.from_factor(torch.tensor(1.0), torch.tensor([[1.0], [1.0]]), rank=1)
>>> low_rank.solve(covariance, torch.tensor([[3.0], [3.0]])).flatten().round(decimals=4)
tensor([1., 1.])
>>> low_rank.eigenvalue_bound(covariance).round(decimals=4)  # Ω⁻¹ = (2 −1; −1 2) / 3 ≼ 1.5 diag Ω⁻¹
tensor(1.5000)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch._lazy import only
from fedtorch.programs import matrix_normal as _program

__all__ = ["LowRank"]
__dir__ = only(__all__)


class LowRank(NamedTuple):
    """Ω = aI + V diag(s) V'. An infinite multiple a means no information: Ω⁻¹ = 0.

    >>> covariance = LowRank(torch.tensor(1.0), torch.tensor([[0.6], [0.8]]), torch.tensor([25.0]))
    >>> covariance.dense().round(decimals=3)
    tensor([[10., 12.],
            [12., 17.]])
    """

    multiple: Tensor  # () a > 0
    vectors: Tensor  # (K, r) V
    values: Tensor  # (r,) s ≥ 0, descending

    @classmethod
    def from_factor(cls, multiple: Tensor, factor: Tensor, rank: int) -> LowRank:
        """Return aI + FF' for F `(K, c)` with the largest `rank` of the eigenvalues of FF'.

        The mean of the remaining eigenvalues goes into the multiple, which preserves the trace and is the nearest
        covariance of this rank in the sense of maximum likelihood (probabilistic principal components).
        """
        units = len(factor)
        rank = min(units, rank)
        if max(factor.shape[1], 1) * units <= _program.FEW and _program.usable((multiple, factor)):
            parts = _program.factored(multiple, factor, rank)
            if parts is not None:
                return cls(*parts)
        left, singular, _ = torch.linalg.svd(factor, full_matrices=False)
        values = singular.square()
        left, values = _canonical(left, values)
        if len(values) <= rank:
            pad = torch.nn.functional.pad
            return cls(multiple, pad(left, (0, rank - len(values))), pad(values, (0, rank - len(values))))
        beyond = values[rank:].sum() / max(units - rank, 1)
        return cls(multiple + beyond, left[:, :rank].clone(), (values[:rank] - beyond).clamp(min=0))

    def dense(self) -> Tensor:
        """Return Ω itself, `(K, K)`; for few units."""
        eye = torch.eye(len(self.vectors), dtype=self.vectors.dtype, device=self.vectors.device)
        return self.multiple * eye + (self.vectors * self.values) @ self.vectors.mT

    def trimmed(self) -> LowRank:
        """Return the same covariance without unused columns, as views."""
        rank = int((self.values > 0).sum())
        return LowRank(self.multiple, self.vectors[:, :rank], self.values[:rank])

    def diagonal(self) -> Tensor:
        """Return the variances, `(K,)`."""
        return self.multiple + self.vectors.square() @ self.values

    def log_determinant(self) -> Tensor:
        """Return log |Ω|."""
        rest = len(self.vectors) - len(self.values)
        return rest * self.multiple.log() + (self.multiple + self.values).log().sum()

    def inverse_trace(self) -> Tensor:
        """Return tr Ω⁻¹."""
        rest = len(self.vectors) - len(self.values)
        return rest / self.multiple + (1 / (self.multiple + self.values)).sum()

    def inverse_diagonal(self) -> Tensor:
        """Return the conditional precisions (Ω⁻¹)_kk, `(K,)`."""
        squares, beyond = self.vectors.square(), self.multiple + self.values
        return torch.addmv((1 - squares.sum(1)).clamp(min=0) / self.multiple, squares, beyond.reciprocal())

    def quadratic_form(self, right: Tensor) -> Tensor:
        """Return tr(right' Ω⁻¹ right), right `(K, d)`, as a sum of squares: exact also where Ω is nearly singular."""
        inside = self.vectors.mT @ right
        outside = right - self.vectors @ inside
        return outside.square().sum() / self.multiple + (inside.square().sum(1) / (self.multiple + self.values)).sum()

    def correlation(self, units: Tensor) -> Tensor:
        """Return the correlations between some units `(M,)`, `(M, M)`."""
        rows = self.vectors[units]
        sd = self.diagonal()[units].sqrt()
        covariance = (rows * self.values) @ rows.mT
        covariance.diagonal().add_(self.multiple)
        return covariance / sd[:, None] / sd


def identity(units: int, rank: int, multiple: float | Tensor = 1.0) -> LowRank:
    """Return a multiple of the identity for `units` units, with room for `rank` directions."""
    multiple = torch.as_tensor(multiple, dtype=torch.float64)
    rank = min(units, rank)
    return LowRank(multiple, multiple.new_zeros(units, rank), multiple.new_zeros(rank))


def _canonical(vectors: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Fix the sign of each direction, and zero those at rounding level, so that equal covariances have equal parts."""
    known = values > torch.finfo(values.dtype).eps * values.amax(0, keepdim=True) if len(values) else values > 0
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) if len(vectors) else vectors[:1]
    return vectors * torch.where(known, largest.sign(), 0.0), torch.where(known, values, 0.0)


def solve(covariance: LowRank, right: Tensor) -> Tensor:
    """Return Ω⁻¹ right, for right `(K, d)`."""
    inside = covariance.vectors.mT @ right
    outside = torch.addmm(right, covariance.vectors, inside, alpha=-1) / covariance.multiple
    return torch.addmm(outside, covariance.vectors, inside / (covariance.multiple + covariance.values)[:, None])


def solve_rows(covariance: LowRank, rows: Tensor, diagonal: Tensor, right: Tensor) -> Tensor:
    """Return ((Ω⁻¹)_SS + diag)⁻¹ right for some units S, by Woodbury in r dimensions.

    Args:
        covariance: of all units.
        rows: S, `(M,)`.
        diagonal: `(M,)`, positive.
        right: `(M, d)`.
    """
    base = (1 / covariance.multiple + diagonal)[:, None]
    shrunk = covariance.values / (covariance.multiple + covariance.values) / covariance.multiple
    factor = covariance.vectors[rows] * shrunk.sqrt()
    scaled = factor / base
    eye = torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
    inner = torch.linalg.cholesky(eye - factor.mT @ scaled)
    return right / base + scaled @ torch.cholesky_solve(scaled.mT @ right, inner)


def majorised(covariance: LowRank, theta: Tensor, accuracy: float = 0.1) -> tuple[Tensor, Tensor]:
    r"""Return λ `(K,)` and h `(K, d)` with which Σ_k λ_k/2 ‖θ_k‖² − ⟨h_k, θ_k⟩ majorises the prior at Θ.

    λ_k = c (Ω⁻¹)_kk with c of `eigenvalue_bound`, and h = diag(λ)Θ − Ω⁻¹Θ.

    Args:
        covariance: Ω.
        theta: Θ, `(K, d)`.
        accuracy: of c.

    Example:
        >>> import torch
        >>> majorised(identity(2, rank=1, multiple=0.5), torch.ones(2, 1).double())  # nothing is shared
        (tensor([2., 2.], dtype=torch.float64), tensor([[0.],
                [0.]], dtype=torch.float64))
    """
    if len(covariance.values) <= _program.MOST and _program.usable((*covariance, theta)):
        return _program.majorised(*covariance, theta, accuracy)
    covariance = covariance.trimmed()
    alone = covariance.inverse_diagonal()
    precision = eigenvalue_bound(covariance, accuracy, alone) * alone
    return precision, precision[:, None] * theta - solve(covariance, theta)


def eigenvalue_bound(covariance: LowRank, accuracy: float = 0.1, precision: Tensor | None = None) -> Tensor:
    r"""Return a bound c with Ω⁻¹ ≼ c · diag(Ω⁻¹), at most `accuracy` above the smallest.

    c is the largest eigenvalue of the partial correlation matrix E − ZZ', E = diag(1 / (a (Ω⁻¹)_kk)), Z `(K, r)`: 1
    when the units are independent, K at most. E − ZZ' − c is negative definite just when its number of positive
    eigenvalues, by Sylvester's law of inertia the number of E_k > c plus that of I − Z'(E − c)⁻¹Z minus r, is zero; so
    c is found by bisection, at O(K r²) a step: r is better `trimmed`.

    Args:
        covariance: Ω.
        accuracy: as for `majorised`.
        precision: diag(Ω⁻¹), if it is known.
    """
    precision = covariance.inverse_diagonal() if precision is None else precision
    weights = 1 / (covariance.multiple * precision)
    shrunk = covariance.values / (covariance.multiple + covariance.values)
    z = covariance.vectors * (shrunk * weights[:, None]).sqrt()
    eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)

    def positive(c: Tensor) -> Tensor:
        gap = weights - c
        gap.masked_fill_(gap.abs() < 1e-14 * c, -1e-14 * c)
        inner = torch.addmm(eye, z.mT, z / gap[:, None], alpha=-1)
        return (gap > 0).sum() + (torch.linalg.eigvalsh(inner) > 0).sum() > len(inner)

    low, high = torch.ones_like(covariance.multiple), weights.max().clamp(max=len(weights))
    ratio = float(high)
    if math.isnan(ratio):  # for an infinite multiple
        return low
    while ratio > 1 + accuracy:
        middle, ratio = (low * high).sqrt(), ratio**0.5
        above = positive(middle)
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return high.clamp(min=1)
