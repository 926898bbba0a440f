r"""What a hierarchy of sites is compared with: every site for itself, all rows in one place, and joining afterwards.

.. math:: y \sim N(X\theta, \sigma^2),\quad \theta_j \mid \gamma_j \sim N(0, c_0^{1-\gamma_j} \eta_j)

with the priors of `global_priors.spike_and_slab`, for each site alone, or for `data.pool()` as one:
models (b) and (a) of the source's Figure 1. Separate results are joined by averages and majority votes (the source's
section 2.1), or draw by draw by `consensus`. Nothing is sent while sampling.

Source: Kidd, Wang, Xu and Ni (2023), "Federated learning for sparse Bayesian models", sections 1 and 2.1; Scott et al.
(2016), "Bayes and big data: the consensus Monte Carlo algorithm", IJMSEM 11.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, random
from fedtorch.models.gibbs import LocalKernel, sparse
from fedtorch.models.gibbs.global_priors import flip, slab_evidence
from fedtorch.models.gibbs.kernels import GlobalKernel


class LoneSite(NamedTuple):
    """A site's variables; `(K, C, ...)`."""

    theta: Tensor  # (..., p)
    included: Tensor  # (..., p) γ, 0 or 1
    variance: Tensor  # (..., p) η
    noise: Tensor  # (...) 1/σ²


def lone_regression(
    *,
    spike: float = 0.01,
    variance: tuple[float, float] = (2.0, 0.5),
    inclusion: tuple[float, float] = (1.0, 1.0),
    noise: tuple[float, float] = (1.0, 1.0),
    sites: int = 1,
) -> LocalKernel:
    """Spike-and-slab regression of each site for itself.

    Args:
        spike: c₀.
        variance: (a_η, b_η).
        inclusion: (a_ρ, b_ρ); ρ is integrated out.
        noise: (a_σ, b_σ).
        sites: how many sites' draws `consensus` will join: the normal prior of θ is raised to the power of 1 over it,
            so that it counts once in the product.

    Raises:
        ValueError: a hyperparameter out of range.
    """
    if not (0 < spike < 1 and min(*variance, *inclusion, *noise) > 0 and sites >= 1):
        raise ValueError(
            "Expected a spike between 0 and 1, positive hyperparameters and at least one site, but got "
            f"spike={spike}, variance={variance}, inclusion={inclusion}, noise={noise}, sites={sites}"
        )

    def init(start: Tensor) -> LoneSite:
        ones = torch.ones_like(start)
        return LoneSite(start, ones, ones, ones[:, 0])

    def sweep(heard: dict[str, Tensor], site: LoneSite, data: sparse.Design, keys: Tensor, sweeps: int) -> LoneSite:
        p = site.theta.shape[-1]
        for_theta, for_flips, for_variance, for_noise, _ = random.split(keys, 5)
        normals = random.normal(for_theta, (sweeps, p), torch.float64)
        coins = random.uniform(for_flips, (sweeps, p), torch.float64)
        etas = random.gamma(for_variance, variance[0] + 0.5 / sites, (sweeps, p), torch.float64)
        degrees = noise[0] + data.degrees[:, None, None] / 2
        precisions = random.gamma(for_noise, degrees, (sweeps,), torch.float64)
        theta, included, eta, precision = site
        for s in range(sweeps):
            factor = included + spike * (1 - included)
            theta, rss = draw_coefficients(data, precision, 1 / (sites * factor * eta), normals[:, :, s])
            precision = precisions[:, :, s] / (noise[1] + rss / 2)
            energy = theta.square() / (2 * sites)
            evidence = slab_evidence(energy, spike, *variance, 1 / sites)
            included = flip(included.flatten(0, 1), evidence.flatten(0, 1), coins[:, :, s].flatten(0, 1), *inclusion)
            included = included.reshape(theta.shape)
            eta = (variance[1] + energy / (included + spike * (1 - included))) / etas[:, :, s]
        return LoneSite(theta, included, eta, precision)

    return LocalKernel(init, sparse.design, sweep, lambda site: {})


def draw_coefficients(data: sparse.Design, noise: Tensor, prior: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return θ ~ N(A⁻¹ s X'y, A⁻¹), A = s X'X + diag(d), and the residual sums of squares.

    Args:
        data: of the clients.
        noise: s, `(K, C)`.
        prior: d, `(K, C, p)`.
        z: standard normals, `(K, C, p)`.
    """
    gram, estimate = data.statistics.gram[:, None], data.estimate[:, None]
    right = noise[..., None] * (gram * estimate[..., None, :]).sum(-1)
    factor = torch.linalg.cholesky(noise[..., None, None] * gram + torch.diag_embed(prior))
    theta = linalg.normal_draw(factor, right, z)
    error = theta - estimate
    return theta, data.rss[:, None] + ((gram * error[..., None, :]).sum(-1) * error).sum(-1)


def nothing_shared() -> GlobalKernel:
    """The server's half when there is nothing to share."""
    return GlobalKernel(lambda start: {}, lambda state: state, lambda state, sums, keys: state)


def majority_vote(inclusion: Tensor) -> Tensor:
    """Which coefficients more than half of the sites include.

    Args:
        inclusion: the sites' inclusion probabilities, `(K, p)`.

    Returns:
        `(p,)` bool.
    """
    return (inclusion > 0.5).to(torch.float64).mean(0) > 0.5


def consensus(draws: Tensor) -> Tensor:
    r"""Join the sites' draws one by one: :math:`(\sum_k W_k)^{-1} \sum_k W_k \theta_k`, W_k the inverse covariance.

    Exact for normal posteriors (Scott et al. 2016, section 3.2).

    Args:
        draws: `(K, T, p)`, T more than p.

    Returns:
        `(T, p)`.

    Raises:
        ValueError: too few draws for a covariance.
    """
    if draws.ndim != 3 or draws.shape[1] <= draws.shape[2]:
        raise ValueError(
            f"Expected draws (K, T, p) with more draws T than coefficients p, but got {tuple(draws.shape)}"
        )
    centred = draws - draws.mean(1, keepdim=True)
    factor = torch.linalg.cholesky(centred.mT @ centred / (draws.shape[1] - 1))
    weights = torch.cholesky_inverse(factor)
    return torch.linalg.solve(weights.sum(0), (draws @ weights).sum(0).mT).mT
