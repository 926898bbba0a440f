r"""What a hierarchy of sites is compared with: every site for itself, all rows in one place, and joining afterwards.

.. math:: y \sim N(X\theta, \sigma^2),\quad \theta_j \mid \gamma_j \sim N(0, c_0^{1-\gamma_j} \eta_j)

with the priors of `global_priors.spike_and_slab`, for each site alone, or for `data.pool()` as one:
models (b) and (a) of the source's Figure 1. Separate results are joined by averages and majority votes (the source's
section 2.1), or draw by draw by `consensus`. Nothing is sent while sampling.

Source: Kidd, Wang, Xu and Ni (2023), "Federated learning for sparse Bayesian models", sections 1 and 2.1; Scott et al.
(2016), "Bayes and big data: the consensus Monte Carlo algorithm", IJMSEM 11.

>>> import torch
>>> from fedtorch.models.gibbs.baselines import majority_vote
>>> majority_vote(torch.tensor([[0.9, 0.2], [0.8, 0.7], [0.1, 0.4]]))
tensor([ True, False])
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.models.gibbs import sparse
from fedtorch.models.gibbs._gaussian_conditional import Design, columns, from_columns, gaussian_conditional
from fedtorch.models.gibbs.global_priors import flip, slab_evidence
from fedtorch.models.gibbs.kernels import GlobalKernel, LocalKernel


class LoneSite(NamedTuple):
    """A site's variables; `(K, C, ...)`.

    >>> import torch, fedtorch as ft
    >>> x = ft.random.normal(ft.random.key(0), (2, 50, 3))
    >>> data = ft.data.from_tensors([(x[0], x[0, :, 0]), (x[1], x[1, :, 2])])  # each site has an effect of its own
    >>> algorithm = ft.gibbs(lone_regression(), nothing_shared(), sweeps=9, chains=2)
    >>> run = ft.run(algorithm, ft.InProcess(data), torch.zeros(3), rounds=1)
    >>> run.tensors().theta.mean(1).round().int().tolist(), run.bytes_up  # of (2, 2, 3) the mean of the chains
    ([[1, 0, 0], [0, 0, 1]], 0)
    """

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

    def sweep(heard: dict[str, Tensor], site: LoneSite, data: Design, keys: Tensor, sweeps: int) -> LoneSite:
        clients, chains, p = site.theta.shape
        for_theta, for_flips, for_variance, for_noise, for_draw = random.split(keys, 5)
        normals = columns(random.normal(for_theta, (sweeps, p), torch.float64))
        coins = columns(random.uniform(for_flips, (sweeps, p), torch.float64))
        etas = columns(random.gamma(for_variance, variance[0] + 0.5 / sites, (sweeps, p), torch.float64))
        degrees = noise[0] + data.degrees[:, None, None] / 2
        precisions = columns(random.gamma(for_noise, degrees, (sweeps,), torch.float64))
        draw = gaussian_conditional(data, torch.zeros_like(site.theta), for_draw)
        theta, included, eta = (columns(leaf) for leaf in site[:3])
        precision = site.noise.reshape(-1)
        for s in range(sweeps):
            factor = included + spike * (1 - included)
            theta, rss = draw(precision, 1 / (sites * factor * eta), normals[s])
            precision = precisions[s] / (noise[1] + rss / 2)
            energy = theta.square() / (2 * sites)
            evidence = slab_evidence(energy, spike, *variance, 1 / sites)
            included = flip(included.mT, evidence.mT, coins[s].mT, *inclusion).mT
            eta = (variance[1] + energy / (included + spike * (1 - included))) / etas[s]
        return LoneSite(*(from_columns(leaf, clients, chains) for leaf in (theta, included, eta, precision)))

    return LocalKernel(init, sparse.design, sweep, lambda site: {})


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
    r"""Joins the sites' draws one by one: :math:`(\sum_k W_k)^{-1} \sum_k W_k \theta_k`, W_k the inverse covariance.

    Exact for normal posteriors (Scott et al. 2016, section 3.2).

    Args:
        draws: `(K, T, p)`, T more than p.

    Returns:
        `(T, p)`.

    Raises:
        ValueError: too few draws for a covariance.

    >>> import torch
    >>> sites = torch.tensor([[[-1.0], [0.0], [1.0]], [[8.0], [10.0], [12.0]]])  # variances 1 and 4
    >>> consensus(sites)  # (4 θ_1 + θ_2) / 5
    tensor([[0.8000],
            [2.0000],
            [3.2000]])
    """
    if draws.ndim != 3 or draws.shape[1] <= draws.shape[2]:
        raise ValueError(
            f"Expected draws (K, T, p) with more draws T than coefficients p, but got {tuple(draws.shape)}"
        )
    centred = draws - draws.mean(1, keepdim=True)
    factor = torch.linalg.cholesky(centred.mT @ centred / (draws.shape[1] - 1))
    weights = torch.cholesky_inverse(factor)
    return torch.linalg.solve(weights.sum(0), (draws @ weights).sum(0).mT).mT
