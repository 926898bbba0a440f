r"""The posterior of Θ under the matrix-normal prior, and the contribution of Ω's uncertainty.

Ω = aI + FF', F = V diag(s)^½ with rows f_k `(r,)`, means that θ_k = Z'f_k + √a e_k with factors Z `(r, d)` that all
units share and e_k of its own, all standard normal. Unit k's rows enter as G_k = X_k'X_k/σ_k² and b_k = X_k'y_k/σ_k².
With

.. math:: B_k = (G_k + I/a)^{-1}, \quad A_k = B_k/a, \quad M_k = G_k A_k, \quad
    C = \Bigl(I + \sum_k f_k f_k' \otimes M_k\Bigr)^{-1}, \quad
    \operatorname{vec} \hat Z = C \sum_k f_k \otimes A_k b_k,

the posterior given Ω is exact (Woodbury in r·d dimensions; over units it needs sums only),

.. math:: \hat\theta_k = B_k b_k + A_k \hat Z' f_k, \qquad
    \operatorname{cov}(\theta_k \mid \Omega) = B_k + A_k (f_k \otimes I)' C (f_k \otimes I) A_k .

**Ω is not known.** Given the others, unit k's row of Ω is f_k, whose r numbers are estimated from the d coefficients of
one unit: along the factors this uncertainty stays for any number of units, while that of Z vanishes with K. Intervals
given Ω̂ are therefore too short. With rows as draws of N(0, diag(s)/K), which is the covariance of the rows of F, a
Laplace step for f_k has the precision H_k = Ẑ M_k Ẑ' + K diag(s)⁻¹, and

.. math::
    \operatorname{cov}(\theta_k) = \operatorname{cov}(\theta_k \mid \hat\Omega) + A_k \hat Z' H_k^{-1} \hat Z A_k .

A step for the spectrum (a, s) alone does not suffice: directions V fitted to Θ̂ contain its errors, and the marginal
likelihood given these takes a to zero, and intervals with it (a slow test shows it). Nor can Ω be integrated out under
HM1's own prior, which is proper only for ν ≥ K.

Source: Kass and Steffey (1989), "Approximate Bayesian inference in conditionally independent hierarchical models", JASA
84, for the second term; its necessity is our own result.

>>> import torch
>>> from fedtorch.models import low_rank
>>> from fedtorch.models.linear import sufficient_statistics
>>> x = torch.eye(2).double().expand(3, 2, 2)
>>> statistics = sufficient_statistics(x, torch.tensor([[4.0, 0.0], [2.0, 2.0], [0.0, 0.0]]).double())
>>> known = low_rank.identity(3, rank=2)  # no factors: every coefficient ~ N(0, 1), seen once with noise 1
>>> found = posterior(statistics, torch.ones(3).double(), known)
>>> found.means[:, 0].round(decimals=6).tolist(), found.covariances[0, 0].round(decimals=6).tolist()
([[2.0, 0.0], [1.0, 1.0], [0.0, 0.0]], [[0.5, 0.0], [0.0, 0.5]])
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Moments
from fedtorch.models.linear import SufficientStatistics
from fedtorch.models.low_rank import LowRank


class Units(NamedTuple):
    """Statistics of some units and their own part of Ω, in the notation above."""

    statistics: SufficientStatistics
    noise: Tensor  # (K,) σ²
    factor: Tensor  # (K, r) f
    multiple: Tensor  # (1,) a


class Factors(NamedTuple):
    """The posterior of the factors that all units share."""

    inner: Tensor  # (r d, r d) Cholesky factor of C⁻¹
    shared: Tensor  # (r, d) Ẑ
    precision: Tensor  # (r,) K / s


class Sums(NamedTuple):
    """Sums over units that determine the factors."""

    informed: Tensor  # (r d, r d) Σ f f' ⊗ M
    right: Tensor  # (r d,) Σ f ⊗ A b


class Averaged(NamedTuple):
    """Sums over units that determine the mean of their coefficients."""

    means: Tensor  # (d,)
    unshared: Tensor  # (d, d) covariances without the shared part
    loadings: Tensor  # (d, r d) Σ A (f ⊗ I)'


class _Parts(NamedTuple):
    """Terms of each unit given the factors."""

    alone: Tensor  # (K, d, d) B
    reach: Tensor  # (K, d, d) A
    informed: Tensor  # (K, d, d) M
    cross: Tensor  # (K, d) b


def _parts(units: Units) -> _Parts:
    noise, a = units.noise, units.multiple
    gram, cross = units.statistics.gram / noise[:, None, None], units.statistics.cross / noise[:, None]
    alone = _inverse(gram + torch.eye(cross.shape[1], dtype=gram.dtype, device=gram.device) / a)
    reach = alone / a
    informed = gram @ reach
    return _Parts(alone, reach, (informed + informed.mT) / 2, cross)


def sums(units: Units) -> Sums:
    """Return the sums that determine the factors; those of several holders of units add up."""
    parts, factor = _parts(units), units.factor
    (_, d), r = parts.cross.shape, factor.shape[1]
    pairs = (factor[:, :, None] * factor[:, None]).flatten(1)
    blocks = (pairs.mT @ parts.informed.flatten(1)).reshape(r, r, d, d).permute(0, 2, 1, 3).reshape(r * d, r * d)
    return Sums(blocks, (factor.mT @ (parts.reach @ parts.cross[..., None])[..., 0]).flatten())


def factors(total: Sums, covariance: LowRank) -> Factors:
    """Return the posterior of the factors of Ω, from the sums over all units."""
    _, vectors, values = covariance.trimmed()
    eye = torch.eye(len(total.right), dtype=total.right.dtype, device=total.right.device)
    inner = torch.linalg.cholesky(total.informed + eye)
    size = len(total.right) // max(1, len(values))
    shared = torch.cholesky_solve(total.right[:, None], inner).reshape(len(values), size)
    return Factors(inner, shared, len(vectors) / values)


def units_of(statistics: SufficientStatistics, noise: Tensor, covariance: LowRank) -> Units:
    """Return all units with their parts of Ω."""
    a, vectors, values = covariance.trimmed()
    return Units(statistics, noise, vectors * values.sqrt(), a.reshape(1))


def _means(units: Units, parts: _Parts, known: Factors) -> Tensor:
    """Return the posterior means `(K, d)`."""
    shared = units.factor @ known.shared.reshape(units.factor.shape[1], parts.cross.shape[1])
    return (parts.alone @ parts.cross[..., None])[..., 0] + (parts.reach @ shared[..., None])[..., 0]


def _row(parts: _Parts, known: Factors) -> Tensor:
    """Return the covariance of Z'f from the uncertainty of a row of Ω, Ẑ'H⁻¹Ẑ `(K, d, d)`."""
    z = known.shared.reshape(len(known.precision), parts.cross.shape[1])
    return z.mT @ _inverse(z @ parts.informed @ z.mT + torch.diag(known.precision)) @ z


def posterior_of(units: Units, given: Factors, *, known: bool) -> DevicePosterior:
    """Return the posterior of some units' coefficients; see `posterior`."""
    parts, factor = _parts(units), units.factor
    means = _means(units, parts, given)
    (count, r), d = factor.shape, means.shape[1]
    pairs = (factor[:, :, None] * factor[:, None]).flatten(1)
    uncertain = torch.cholesky_inverse(given.inner).reshape(r, d, r, d).permute(0, 2, 1, 3).reshape(r * r, d * d)
    spread = (pairs @ uncertain).reshape(count, d, d) + (0 if known else _row(parts, given))
    covariances = (parts.alone + parts.reach @ spread @ parts.reach.mT)[:, None]
    return DevicePosterior(means.new_ones(count, 1), means[:, None], covariances, units.noise[:, None].log().to(means))


def averaged(units: Units, given: Factors, *, known: bool) -> Averaged:
    """Return some units' part of the mean of all; sums of several holders of units are added up."""
    parts = _parts(units)
    unshared = parts.alone if known else parts.alone + parts.reach @ _row(parts, given) @ parts.reach.mT
    loadings = torch.einsum("kab,kr->arb", parts.reach, units.factor).reshape(parts.cross.shape[1], -1)
    return Averaged(_means(units, parts, given).sum(0), unshared.sum(0), loadings)


def mean_of(total: Averaged, given: Factors, units: int) -> Moments:
    """Return the posterior of the mean of the coefficients over this many units, `(d,)`, from sums over all of them."""
    root = torch.linalg.solve_triangular(given.inner, total.loadings.mT, upper=False)
    return Moments(total.means / units, (total.unshared + root.mT @ root) / units**2)


def posterior(
    statistics: SufficientStatistics, noise: Tensor, covariance: LowRank, *, known: bool = False
) -> DevicePosterior:
    """Return the posterior of every unit's coefficients, a normal density each; memory is O(K d² + r² d²).

    Args:
        statistics: of K units.
        noise: σ_k², `(K,)`, positive.
        covariance: Ω, of a finite multiple of the identity.
        known: whether Ω is treated as known; else with the uncertainty of each unit's row of it, to first order.
    """
    units = units_of(statistics, noise, covariance)
    return posterior_of(units, factors(sums(units), covariance), known=known)


def average(statistics: SufficientStatistics, noise: Tensor, covariance: LowRank, *, known: bool = False) -> Moments:
    """Return the posterior of the mean of the units' coefficients, `(d,)`; arguments as of `posterior`.

    Rows of Ω are treated as independent between units.
    """
    units = units_of(statistics, noise, covariance)
    given = factors(sums(units), covariance)
    return mean_of(averaged(units, given, known=known), given, len(noise))


def _inverse(matrix: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
