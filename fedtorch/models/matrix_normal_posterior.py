r"""The posterior of Θ under the matrix-normal prior, and what not knowing Ω adds to it.

Ω = aI + FF', F = V diag(s)^½ with rows f_k `(r,)`, says that θ_k = Z'f_k + √a e_k with factors Z `(r, d)` that all
units share and e_k of its own, all standard normal. Unit k's rows enter as G_k = X_k'X_k/σ_k² and b_k = X_k'y_k/σ_k².
With

.. math:: B_k = (G_k + I/a)^{-1}, \quad A_k = B_k/a, \quad M_k = G_k A_k, \quad
    C = \Bigl(I + \sum_k f_k f_k' \otimes M_k\Bigr)^{-1}, \quad
    \operatorname{vec} \hat Z = C \sum_k f_k \otimes A_k b_k,

the posterior given Ω is exact (Woodbury in r·d dimensions; over units it needs sums only),

.. math:: \hat\theta_k = B_k b_k + A_k \hat Z' f_k, \qquad
    \operatorname{cov}(\theta_k \mid \Omega) = B_k + A_k (f_k \otimes I)' C (f_k \otimes I) A_k .

**Ω is not known.** Given the others, unit k's row of Ω is f_k, of which r numbers are estimated from the d coefficients
of one unit: along the factors the unit is on its own, however many units there are, while what others leave unsaid of Z
goes away with K. Intervals given Ω̂ therefore are too short. Rows being draws of N(0, diag(s)/K), which is the
covariance that the rows of F have, a Laplace step for f_k has the precision H_k = Ẑ M_k Ẑ' + K diag(s)⁻¹, and

.. math::
    \operatorname{cov}(\theta_k) = \operatorname{cov}(\theta_k \mid \hat\Omega) + A_k \hat Z' H_k^{-1} \hat Z A_k .

A step for the spectrum (a, s) alone does not do: directions V that were fitted to Θ̂ have its errors in them, and the
marginal likelihood given these takes a to zero, and intervals with it (a slow test shows it). Nor can Ω be integrated
out under HM1's own prior, which is proper only for ν ≥ K.

Source: Kass and Steffey (1989), "Approximate Bayesian inference in conditionally independent hierarchical models",
JASA 84, for the second term; that it is needed is our own finding.

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


class _Parts(NamedTuple):
    """Hold what the posterior is made of, in the letters of the text above."""

    factor: Tensor  # (K, r) f
    alone: Tensor  # (K, d, d) B
    reach: Tensor  # (K, d, d) A
    inner: Tensor  # (r d, r d) Cholesky factor of C⁻¹
    means: Tensor  # (K, d)
    row: Tensor  # (K, d, d) Ẑ' H⁻¹ Ẑ


def _parts(statistics: SufficientStatistics, noise: Tensor, covariance: LowRank) -> _Parts:
    a, vectors, values = covariance.trimmed()
    factor = vectors * values.sqrt()
    gram, cross = statistics.gram / noise[:, None, None], statistics.cross / noise[:, None]
    units, d = cross.shape
    r = factor.shape[1]
    alone = _inverse(gram + torch.eye(d, dtype=gram.dtype, device=gram.device) / a)
    reach = alone / a
    informed = gram @ reach
    informed = (informed + informed.mT) / 2  # M
    pairs = (factor[:, :, None] * factor[:, None]).flatten(1)
    blocks = (pairs.mT @ informed.flatten(1)).reshape(r, r, d, d).permute(0, 2, 1, 3).reshape(r * d, r * d)
    inner = torch.linalg.cholesky(blocks + torch.eye(r * d, dtype=gram.dtype, device=gram.device))
    right = (factor.mT @ (reach @ cross[..., None])[..., 0]).reshape(-1, 1)
    shared = torch.cholesky_solve(right, inner).reshape(r, d)  # Ẑ
    means = (alone @ cross[..., None])[..., 0] + (reach @ (factor @ shared)[..., None])[..., 0]
    row = shared.mT @ _inverse(shared @ informed @ shared.mT + torch.diag(units / values)) @ shared
    return _Parts(factor, alone, reach, inner, means, row)


def posterior(
    statistics: SufficientStatistics, noise: Tensor, covariance: LowRank, *, known: bool = False
) -> DevicePosterior:
    """Return the posterior of every unit's coefficients, a normal density each; memory is O(K d² + r² d²).

    Args:
        statistics: of K units.
        noise: σ_k², `(K,)`, positive.
        covariance: Ω, of a finite multiple of the identity.
        known: whether Ω is taken as known; else with the uncertainty of each unit's row of it, to first order.
    """
    factor, alone, reach, inner, means, row = _parts(statistics, noise, covariance)
    (units, r), d = factor.shape, means.shape[1]
    pairs = (factor[:, :, None] * factor[:, None]).flatten(1)
    uncertain = torch.cholesky_inverse(inner).reshape(r, d, r, d).permute(0, 2, 1, 3).reshape(r * r, d * d)
    spread = (pairs @ uncertain).reshape(units, d, d) + (0 if known else row)
    one = means.new_ones(units, 1)
    return DevicePosterior(
        one, means[:, None], (alone + reach @ spread @ reach.mT)[:, None], noise[:, None].log().to(means)
    )


def average(statistics: SufficientStatistics, noise: Tensor, covariance: LowRank, *, known: bool = False) -> Moments:
    """Return the posterior of the mean of the units' coefficients, `(d,)`; arguments as of `posterior`.

    Rows of Ω are taken as independent between units.
    """
    factor, alone, reach, inner, means, row = _parts(statistics, noise, covariance)
    units, d = means.shape
    loadings = torch.einsum("kab,kr->arb", reach, factor).reshape(d, -1)  # Σ A_k (f_k ⊗ I)', (d, r d)
    root = torch.linalg.solve_triangular(inner, loadings.mT, upper=False)
    own = (alone if known else alone + reach @ row @ reach.mT).sum(0)
    return Moments(means.mean(0), (own + root.mT @ root) / units**2)


def _inverse(matrix: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
