r"""Posteriors of the sparse models without Markov chains: indicators enumerated, coefficients integrated out.

Given the scales, a site's least squares estimate b_k is normal about θ with covariance V_k = σ_k² G_k⁻¹ + D_k, and θ is
normal given γ: their part of the posterior is in closed form. ρ is integrated out too. What is left, (λ, τ, η, σ²), is
drawn independently from a proposal and weighted, so that errors are those of an average of independent draws.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from scipy import special, stats
from torch import Tensor

import fedtorch as ft
from fedtorch import random

SPIKE, VARIANCE = 0.01, (2.0, 0.5)  # the defaults of `global_priors.spike_and_slab`, with ρ uniform


class Posterior(NamedTuple):
    """Moments with their Monte Carlo standard errors."""

    theta: Tensor  # (p,) means
    sites: Tensor  # (M, p) means of θ_k
    inclusion: Tensor  # (p,)
    theta_sd: Tensor  # (p,) posterior standard deviations
    sites_sd: Tensor  # (M, p)
    error: Tensor  # (2p + M p,) standard errors: of θ and θ_k in units of their posterior sd, and of inclusion
    effective: float  # draws that the weights are worth


def half_cauchy(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    return (torch.pi / 2 * random.uniform(key, shape, torch.float64)).tan()


def regression(data: ft.data.FederatedData, draws: int = 200_000, seed: int = 0) -> Posterior:
    """`sparse.regression()` under `sparse.hierarchy()`; every site must have more rows than coefficients."""
    p, keys = data[0][0].shape[1], random.split(random.key(seed), 5)
    slab = VARIANCE[1] / random.gamma(keys[0], VARIANCE[0], (draws, p), torch.float64)
    tau = half_cauchy(keys[1], (draws, p))
    precision, shift, constant, sites = torch.zeros(draws, p, p).double(), torch.zeros(draws, p).double(), 0.0, []
    for k, (x, y) in enumerate(data):
        inverse = torch.linalg.inv(x.T @ x)
        estimate = inverse @ x.T @ y
        rate = 1 + (y - x @ estimate).square().sum() / 2
        sigma2 = rate / random.gamma(random.fold_in(keys[2], k), 1 + (len(x) - p) / 2, (draws,), torch.float64)
        spread = (half_cauchy(random.fold_in(keys[3], k), (draws, p)) * tau).square()
        own = sigma2[:, None, None] * inverse
        covariance = own + torch.diag_embed(spread)
        inner = torch.linalg.inv(covariance)
        precision, shift = precision + inner, shift + inner @ estimate
        constant = constant - covariance.logdet() / 2 - (inner @ estimate) @ estimate / 2
        gain = own @ inner  # θ_k given θ has mean b_k − gain (b_k − θ)
        sites.append((estimate, gain, own - gain @ own))
    weights, first, second, included = [], [], [], []
    for gamma in itertools.product((0.0, 1.0), repeat=p):
        indicator = torch.tensor(gamma, dtype=torch.float64)
        prior = slab * torch.where(indicator > 0, 1.0, SPIKE)
        posterior = precision + torch.diag_embed(1 / prior)
        covariance = torch.linalg.inv(posterior)
        mean = (covariance @ shift[..., None])[..., 0]
        fit = (mean * shift).sum(-1) / 2 - (posterior.logdet() + prior.log().sum(-1)) / 2
        weights.append(constant + fit + special.betaln(1 + sum(gamma), 1 + p - sum(gamma)))
        means, variances = [mean], [covariance.diagonal(0, 1, 2)]
        for estimate, gain, rest in sites:
            means.append(estimate - (gain @ (estimate - mean)[..., None])[..., 0])
            variances.append((rest + gain @ covariance @ gain.mT).diagonal(0, 1, 2))
        first.append(torch.cat(means, 1))
        second.append(first[-1].square() + torch.cat(variances, 1))
        included.append(indicator.expand(draws, p))
    return _summary(torch.stack(weights), torch.stack(first), torch.stack(second), torch.stack(included))


def logistic_regression(data: ft.data.FederatedData, draws: int = 20_000, seed: int = 0) -> Posterior:
    """`logistic.logistic_regression()` under `sparse.hierarchy()` for one coefficient; θ_k and β_k on a grid."""
    keys = random.split(random.key(seed), 5)
    gamma = (torch.arange(draws) % 2).double()
    slab = VARIANCE[1] / random.gamma(keys[0], VARIANCE[0], (draws,), torch.float64)
    theta = (slab * torch.where(gamma > 0, 1.0, SPIKE)).sqrt() * random.normal(keys[1], (draws,), torch.float64)
    tau = half_cauchy(keys[2], (draws,))
    grid = torch.linspace(-8.0, 8.0, 2001, dtype=torch.float64)
    step = float(grid[1] - grid[0])
    log_weight, first, second = torch.zeros(draws).double(), [theta], [theta.square()]
    for k, (x, y) in enumerate(data):
        likelihood = _integrated_likelihood(x[:, 0], y, grid)
        scale = half_cauchy(random.fold_in(keys[3], k), (draws,)) * tau
        scale = scale.clamp_min(2 * step)  # the likelihood does not change over two steps of the grid
        moments = torch.stack([likelihood * grid**power for power in range(3)], 1)
        parts = []
        for some in range(0, draws, 5000):
            centre, width = theta[some : some + 5000, None], scale[some : some + 5000, None]
            density = (-0.5 * ((grid - centre) / width).square()).exp() / width
            parts.append(density @ moments)
        total = torch.cat(parts)
        log_weight = log_weight + total[:, 0].log()
        first.append(total[:, 1] / total[:, 0])
        second.append(total[:, 2] / total[:, 0])
    return _summary(log_weight[None], torch.stack(first, 1)[None], torch.stack(second, 1)[None], gamma[None, :, None])


def _integrated_likelihood(x: Tensor, y: Tensor, grid: Tensor, scale: float = 10.0) -> Tensor:
    """The likelihood of a site's coefficient on a grid, its intercept β ~ N(0, scale²) integrated out."""
    intercepts = torch.linspace(-6.0, 6.0, 241, dtype=torch.float64)
    prior = (-0.5 * (intercepts / scale).square()).exp()
    logits = intercepts[:, None, None] + grid[:, None] * x
    log = (y * logits - torch.nn.functional.softplus(logits)).sum(-1)
    likelihood = ((log - log.max()).exp() * prior[:, None]).sum(0)
    return likelihood / likelihood.max()


def _summary(log_weight: Tensor, first: Tensor, second: Tensor, included: Tensor) -> Posterior:
    """Self-normalised averages over (γ, draws); errors by the delta method, draws being independent."""
    p = included.shape[-1]
    weight = (log_weight - log_weight.max()).exp()
    weight = weight / weight.sum()
    average = lambda value: torch.einsum("gn,gnq->q", weight, value)
    mean, inclusion = average(first), average(included)
    sd = (average(second) - mean.square()).sqrt()
    per_draw = lambda value, centre: torch.einsum("gn,gnq->nq", weight, value - centre)
    error = torch.cat([per_draw(first, mean) / sd, per_draw(included, inclusion)], 1).square().sum(0).sqrt()
    effective = float(1 / weight.sum(0).square().sum())
    sites, sites_sd = mean[p:].reshape(-1, p), sd[p:].reshape(-1, p)
    return Posterior(mean[:p], sites, inclusion, sd[:p], sites_sd, error, effective)


def bound(count: int, level: float = 1e-3) -> float:
    """The z-score that the worst of so many exceeds with probability `level`."""
    return float(stats.norm.ppf(1 - level / (2 * count)))
