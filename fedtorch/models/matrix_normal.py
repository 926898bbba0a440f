r"""The matrix-normal prior over units: Θ = (θ_1 … θ_K) ~ MN(0, I, Ω), and estimates of Ω.

With Y_k ~ N(X_k θ_k, σ_k² I) the objective, with Θ stored as rows `(K, d)`, is

.. math:: L(\Theta, \Omega) = \sum_k \frac{\|y_k - X_k\theta_k\|^2}{\sigma_k^2}
    + \operatorname{tr}(\Theta'\Omega^{-1}\Theta) + m \log|\Omega| + \psi \operatorname{tr} \Omega^{-1}.

m = d and ψ = 0 is the paper's, which is unbounded below (Θ → 0); an inverse-Wishart prior on Ω with ν degrees of
freedom and scale ψI has m = d + ν + K + 1 and is well posed. The minimiser over Ω is Ω̂ = (ψI + ΘΘ')/m. Moving from any
Ω towards it, (1 − α)Ω + αΩ̂, never increases L, for every α in (0, 1]: with w the eigenvalues of Ω relative to Ω̂, L is
m Σ (log w + 1/w) there, and every w moves straight to 1.

Source: Yue, Al Kontar, Estrada Gómez, "Federated data analytics: a study on linear models", section 3 (equation (2), L
and the update of Ω); Zhang and Yeung (2012), "A convex formulation for learning task relationships in multi-task
learning".

>>> import torch
>>> from fedtorch.models import low_rank
>>> from fedtorch.models.linear import sufficient_statistics
>>> x = torch.eye(2).double().expand(3, 2, 2)  # three units with two rows each
>>> statistics = sufficient_statistics(x, torch.tensor([[4.0, 0.0], [2.0, 2.0], [0.0, 0.0]]).double())
>>> noise = torch.ones(3).double()
>>> mode = posterior_mode(statistics, noise, low_rank.identity(3, rank=2))  # Θ ~ MN(0, I, I): shrunk by half
>>> mode.coefficients.round(decimals=6)
tensor([[2., 0.],
        [1., 1.],
        [0., 0.]], dtype=torch.float64)
>>> round(float(data_misfit(statistics, noise, mode.coefficients)), 6)  # Σ ‖y − θ‖²
6.0
>>> learnt = inverse_wishart().update(low_rank.identity(3, rank=2), mode.coefficients, torch.tensor(1.0).double(), 3)
>>> round(float(learnt.correlation(torch.tensor([0, 1]))[0, 1]), 3)  # 2 / √(10 · 8)
0.224
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, tree
from fedtorch._lazy import only
from fedtorch.models import low_rank
from fedtorch.models.linear import SufficientStatistics, residual_sum
from fedtorch.models.low_rank import LowRank

__all__ = ["exponential_average", "inverse_wishart", "posterior_mode", "zhang_yeung"]
__dir__ = only(__all__)

_LEAST_VARIANCE = 1e-100  # of coefficients that are all zero


class CovarianceUpdate(NamedTuple):
    """A way to learn Ω from Θ.

    Both functions take (Ω, Θ `(K, d)`, variance (), units): `variance` is the typical sampling variance of a
    coefficient, which sets the scale, and `units` how many of the K rows are known, the others being zero.

    >>> keep = CovarianceUpdate(
    ...     update=lambda covariance, theta, variance, units: covariance,  # Ω stays as it is
    ...     penalty=lambda covariance, theta, variance, units: covariance.quadratic_form(theta))
    >>> keep.penalty(low_rank.identity(3, rank=2), torch.ones(3, 2).double(), torch.tensor(1.0).double(), 3)
    tensor(6., dtype=torch.float64)
    """

    update: Callable[[LowRank, Tensor, Tensor, int], LowRank]  # -> the new Ω, of at most the same rank
    penalty: Callable[[LowRank, Tensor, Tensor, int], Tensor]  # -> term of L besides the data's misfit


def inverse_wishart(*, alpha: float = 1.0, freedom: float = 0.0, scale: float = 1.0) -> CovarianceUpdate:
    """Return Ω ← (1 − α)Ω + αΩ̂, where Ω̂ = (ψI + ΘΘ')/m is the mode under an inverse-Wishart prior.

    m = d + ν + K + 1 and ψ = m · scale · variance: a unit that shares nothing with others has the prior variance
    `scale` times the sampling variance of its own estimate, and its coefficients are shrunk by about half.

    Args:
        alpha: step length, in (0, 1].
        freedom: ν, at least 0.
        scale: of the variance that is not shared, positive.
    """
    _check_alpha(alpha)
    if not (freedom >= 0 and scale > 0):
        raise ValueError(f"Expected freedom of at least 0 and a positive scale, but got {freedom} and {scale}")

    def terms(theta: Tensor, variance: Tensor, units: int) -> tuple[float, Tensor]:
        m = freedom + units + 1 + theta.shape[1]
        return m, m * scale * variance.clamp(min=_LEAST_VARIANCE)

    return _towards_the_mode(alpha, terms)


def exponential_average(alpha: float = 0.1, *, floor: float = 1e-6) -> CovarianceUpdate:
    """Return the paper's Ω ← (1 − α)Ω + (α/d) ΘΘ', with ψ = d · floor · variance so that Ω can be factorised.

    As printed the multiple of the identity in Ω decays as (1 − α)^c over the rounds c, and α = 1 is singular.

    Args:
        alpha: step length, in (0, 1].
        floor: the least eigenvalue of Ω in units of the sampling variance, positive.

    >>> theta = torch.tensor([[2.0, 0.0], [2.0, 0.0]]).double()
    >>> start = low_rank.identity(2, rank=2)
    >>> learnt = exponential_average(0.1).update(start, theta, torch.tensor(1.0).double(), 2)
    >>> learnt.dense().round(decimals=3)  # 0.9 I + 0.05 ΘΘ'
    tensor([[1.1000, 0.2000],
            [0.2000, 1.1000]], dtype=torch.float64)
    """
    _check_alpha(alpha)
    _check_floor(floor)

    def terms(theta: Tensor, variance: Tensor, units: int) -> tuple[float, Tensor]:
        d = theta.shape[1]
        return d, d * floor * variance.clamp(min=_LEAST_VARIANCE)

    return _towards_the_mode(alpha, terms)


def zhang_yeung(*, trace: float = 1.0, floor: float = 1e-6) -> CovarianceUpdate:
    """Return Ω = t (ΘΘ')^½ / tr (ΘΘ')^½: the minimiser of tr(Θ'Ω⁻¹Θ) among the covariances of trace t.

    ΘΘ' is replaced by ΘΘ' + floor · variance · I so that Ω can be factorised. A trace is in units of the coefficients:
    rescaled data need another one. After truncation to the rank, the update is kept only if it improves the objective.

    Args:
        trace: t, positive; Zhang and Yeung's is 1.
        floor: in units of the sampling variance, positive.

    >>> theta = torch.tensor([[3.0, 0.0], [0.0, 1.0]]).double()
    >>> learnt = zhang_yeung().update(low_rank.identity(2, rank=2), theta, torch.tensor(1.0).double(), 2)
    >>> learnt.diagonal().round(decimals=3)  # in proportion to the lengths 3 and 1
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    if not trace > 0:
        raise ValueError(f"Expected a positive trace, but got {trace}")
    _check_floor(floor)

    def update(covariance: LowRank, theta: Tensor, variance: Tensor, units: int) -> LowRank:
        least = (floor * variance.clamp(min=_LEAST_VARIANCE)).sqrt()
        left, singular, _ = torch.linalg.svd(theta, full_matrices=False)
        roots = (least.square() + singular.square()).sqrt()
        share = trace / (roots.sum() + (len(theta) - len(roots)) * least)
        factor = left * ((roots - least) * share).sqrt()
        new = low_rank.LowRank.from_factor(least * share, factor, len(covariance.values))
        worse = penalty(new, theta, variance, units) > penalty(covariance, theta, variance, units)
        had = len(theta) * covariance.multiple + covariance.values.sum()  # with another trace it is not a candidate
        return tree.where(worse & torch.isclose(had / trace, torch.ones_like(had)), covariance, new)

    def penalty(covariance: LowRank, theta: Tensor, variance: Tensor, units: int) -> Tensor:
        psi = floor * variance.clamp(min=_LEAST_VARIANCE)
        return covariance.quadratic_form(theta) + psi * covariance.inverse_trace()

    return CovarianceUpdate(update, penalty)


def _towards_the_mode(alpha: float, terms: Callable[[Tensor, Tensor, int], tuple[float, Tensor]]) -> CovarianceUpdate:
    """Return (1 − α)Ω + αΩ̂ for m and ψ from `terms`.

    Truncation of the average to its rank may lose the descent; then Ω̂, the minimiser of this rank, replaces it.
    """

    def update(covariance: LowRank, theta: Tensor, variance: Tensor, units: int) -> LowRank:
        m, psi = terms(theta, variance, units)
        rank = len(covariance.values)
        mode = low_rank.LowRank.from_factor(psi / m, theta / m**0.5, rank)
        if alpha == 1:
            return mode
        parts = [covariance.vectors * ((1 - alpha) * covariance.values).sqrt(), theta * (alpha / m) ** 0.5]
        multiple = (1 - alpha) * covariance.multiple + alpha * psi / m
        average = low_rank.LowRank.from_factor(multiple, torch.cat(parts, 1), rank)
        change = penalty(average, theta, variance, units) - penalty(covariance, theta, variance, units)
        return tree.where(change <= 0, average, mode)  # the mode if nothing was known, since the change is ∞ − ∞

    def penalty(covariance: LowRank, theta: Tensor, variance: Tensor, units: int) -> Tensor:
        m, psi = terms(theta, variance, units)
        fit = covariance.quadratic_form(theta)
        return fit + m * covariance.log_determinant() + psi * covariance.inverse_trace()

    return CovarianceUpdate(update, penalty)


def data_misfit(statistics: SufficientStatistics, noise: Tensor, theta: Tensor) -> Tensor:
    """Return Σ_k ‖y_k − X_k θ_k‖² / σ_k², ().

    Args:
        statistics: of K units.
        noise: σ_k², `(K,)`.
        theta: `(K, d)`.
    """
    return (residual_sum(statistics, theta) / noise).sum()


class Mode(NamedTuple):
    """The most probable coefficients, and the solver's report.

    >>> from fedtorch.models.linear import sufficient_statistics
    >>> statistics = sufficient_statistics(torch.ones(2, 4, 1), torch.tensor([[5.0] * 4, [0.0] * 4]))  # two units
    >>> mode = posterior_mode(statistics, torch.ones(2), low_rank.identity(2, rank=1))
    >>> mode.coefficients.round(decimals=6).tolist(), mode.residual < 1e-10  # Σ y / (4 + 1)
    ([[4.0], [0.0]], True)
    """

    coefficients: Tensor  # (K, d)
    iterations: int
    residual: float  # of the equations, relative to their right side, with coefficients scaled to one size


def posterior_mode(
    statistics: SufficientStatistics,
    noise: Tensor,
    covariance: LowRank,
    *,
    tolerance: float = 1e-10,
    iterations: int = 1000,
) -> Mode:
    """Return the exact mode of Θ given Ω, by conjugate gradients on (bdiag(X_k'X_k/σ_k²) + Ω⁻¹ ⊗ I) Θ = X_k'y_k/σ_k².

    The preconditioner is bdiag(X_k'X_k/σ_k² + (Ω⁻¹)_kk I), factorised once. An iteration costs O(K d (d + r)).

    Args:
        statistics: of K units.
        noise: σ_k², `(K,)`, positive.
        covariance: Ω.
        tolerance: of the residual relative to the right side, with coefficients scaled to one size.
        iterations: most iterations; the residual shows the accuracy reached.

    Raises:
        ValueError: a noise variance is not positive, or the numbers of units differ.
    """
    noise = noise.to(torch.float64)
    if noise.shape != statistics.count.shape or len(covariance.vectors) != len(noise):
        raise ValueError(
            f"Expected a noise variance and a row of the covariance for each of {len(statistics.count)} units, but got "
            f"{tuple(noise.shape)} and {len(covariance.vectors)}"
        )
    if not bool((noise > 0).all()):
        raise ValueError(f"Expected positive noise variances, but got {float(noise.min())}")
    gram = statistics.gram / noise[:, None, None]
    right = statistics.cross / noise[:, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    blocks = gram + covariance.inverse_diagonal()[:, None, None] * eye
    factor, unit = torch.linalg.cholesky(blocks), linalg.unit_scale(blocks.diagonal(dim1=1, dim2=2))

    def apply(theta: Tensor) -> Tensor:
        return (gram @ theta[..., None])[..., 0] + low_rank.solve(covariance, theta)

    def precondition(residual: Tensor) -> Tensor:
        return torch.cholesky_solve(residual[..., None], factor)[..., 0]

    theta = precondition(right)
    residual = right - apply(theta)
    size = float((unit * right).norm())
    direction = scaled = precondition(residual)
    inner = (residual * scaled).sum()
    done = 0
    while done < iterations and float((unit * residual).norm()) > tolerance * size and bool(inner > 0):
        image = apply(direction)
        step = inner / (direction * image).sum()
        theta, residual = theta + step * direction, residual - step * image
        scaled = precondition(residual)
        before, inner = inner, (residual * scaled).sum()
        direction = scaled + (inner / before) * direction
        done += 1
    return Mode(theta, done, float((unit * (right - apply(theta))).norm()) / size if size else 0.0)


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise ValueError(f"Expected alpha in (0, 1], but got {alpha}")


def _check_floor(floor: float) -> None:
    if not floor > 0:
        raise ValueError(f"Expected a positive floor, but got {floor}; without one the covariance becomes singular")
