"""Geweke's joint-distribution test ("Getting it right", JASA 99, 2004) of Gibbs kernels, many replicates at once.

A replicate starts at a draw from the joint distribution of variables and data; then kernels and the simulation of the
data alternate. If the kernels are right, every replicate stays a draw from the joint distribution, and the average of a
statistic over time and replicates agrees with direct draws. Replicates are independent, so their means over time are
the batches whose standard error is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor

from fedtorch import exact, random
from fedtorch.models.gibbs import _interweaving as interweaving, sparse
from fedtorch.models.gibbs._gaussian_conditional import Design
from fedtorch.models.gibbs.kernels import GlobalKernel, LocalKernel
from fedtorch.models.linear import SufficientStatistics

LEVEL = 1e-3  # the probability that a right sampler fails one of its statistics


class Joint(NamedTuple):
    """Variables of all replicates: R replicates of M sites."""

    shared: sparse.Global  # (R, ...)
    sites: sparse.RegressionSite  # (R · M, 1, ...)


def keys(purpose: int, count: int, step: int = 0) -> Tensor:
    root = random.fold_in(random.fold_in(random.key(20), purpose), step)
    return random.fold_in(root, torch.arange(count))


def z_scores(direct: Mapping[str, Tensor], chains: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """The z-score of each component of each statistic: direct draws `(S, ...)` against those over time, `(R, ...)`."""
    scores = {}
    for name, draws in chains.items():
        means = torch.stack(draws).mean(0).flatten(1)
        prior = direct[name].flatten(1)
        error = (means.var(0) / len(means) + prior.var(0) / len(prior)).sqrt()
        for i, z in enumerate(((means.mean(0) - prior.mean(0)) / error).tolist()):
            scores[f"{name}[{i}]"] = z
    return scores


def worst(scores: Mapping[str, float]) -> tuple[str, float, float]:
    """(name and z-score of the worst statistic, the bound for so many of them)."""
    name = max(scores, key=lambda name: abs(scores[name]))
    return name, scores[name], float(stats.norm.ppf(1 - LEVEL / (2 * len(scores))))


def cauchy(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Half-Cauchy numbers."""
    return (math.pi / 2 * random.uniform(key, shape, torch.float64)).tan()


def horseshoe_scales(key: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(1/λ², 1/ν) with λ half-Cauchy: ν ~ IG(½, 1), λ² ~ IG(½, 1/ν)."""
    auxiliary = random.gamma(random.fold_in(key, 0), 0.5, shape, torch.float64)
    return random.gamma(random.fold_in(key, 1), 0.5, shape, torch.float64) / auxiliary, auxiliary


def laplace_scales(key: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(1/λ², 1) with λ² exponential of mean 2."""
    precision = 1 / (2 * random.exponential(key, shape, torch.float64))
    return precision, torch.ones_like(precision)


def fixed_scales(key: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    ones = torch.ones((*key.shape, *shape), dtype=torch.float64)
    return ones, ones


Scales = Callable[[Tensor, tuple[int, ...]], tuple[Tensor, Tensor]]


class Setting(NamedTuple):
    """A model for the test."""

    x: Tensor  # (n, p) every site's covariates
    sites: int  # M
    shape: float  # a_σ
    scales: Scales  # direct draws of (1/λ², auxiliary)
    prior: Callable[[Tensor, int], tuple[Tensor, Any]]  # (keys (R,), p) -> direct draws of (θ, its prior's variables)
    noise: Callable[[Tensor], Tensor]  # keys (R,) -> direct draws of b_σ
    scale: float | None = None  # τ where known


def draw_joint(setting: Setting, count: int, purpose: int) -> Joint:
    """Direct draws of all variables, without data."""
    p, sites = setting.x.shape[1], setting.sites
    own = keys(purpose, count)
    theta, prior = setting.prior(random.fold_in(own, 0), p)
    precision, _ = horseshoe_scales(random.fold_in(own, 1), (p,))
    if setting.scale is not None:
        precision = torch.full_like(precision, setting.scale**-2)
    rate = setting.noise(random.fold_in(own, 2))
    factors = torch.ones(count, 2, p, dtype=torch.float64)
    shared = sparse.Global(theta, theta, precision, rate, prior, factors)
    each = random.fold_in(random.fold_in(own, 3)[:, None], torch.arange(sites)).flatten()
    repeat = lambda leaf: leaf.repeat_interleave(sites, 0)
    w, u = setting.scales(random.fold_in(each, 0), (p,))
    z = random.normal(random.fold_in(each, 1), (p,), torch.float64)
    noise = random.gamma(random.fold_in(each, 2), setting.shape, (), torch.float64) / repeat(rate)
    local = repeat(theta) + z / (w * repeat(precision)).sqrt()
    place, *rest = (leaf[:, None] for leaf in (local, w, u, noise))
    return Joint(shared, sparse.RegressionSite(place, place, *rest, interweaving.nothing(local)))


def draw_responses(setting: Setting, sites: sparse.RegressionSite, key: Tensor) -> Tensor:
    """y `(R · M, n)` given the sites' variables."""
    mean = (setting.x * sites.theta).sum(-1)
    return mean + random.normal(key, (len(setting.x),), torch.float64) / sites.noise.sqrt()


def regression_data(setting: Setting, sites: sparse.RegressionSite, key: Tensor) -> Design:
    """Simulated data of all sites; computed from the residuals, so that huge coefficients cost no digits."""
    x, count = setting.x, len(sites.theta)
    n, p = x.shape
    error = random.normal(key, (n,), torch.float64) / sites.noise.sqrt()
    inverse = torch.linalg.pinv(x)
    estimate = sites.theta[:, 0] + error @ inverse.mT
    if n < p:  # the component that the data do not see is not part of the estimate
        estimate = estimate @ (inverse @ x).mT
    rss = (error - error @ inverse.mT @ x.mT).square().sum(-1)
    rows = (x.expand(count, n, p), draw_responses(setting, sites, key)) if p > 32 or n < p else (None, None)
    gram = (x.mT @ x).expand(count, p, p)
    cross, full = (gram @ estimate[..., None])[..., 0], torch.full((count,), float(n), dtype=torch.float64)
    statistics = SufficientStatistics(gram, cross, rss + (estimate * cross).sum(-1), full)
    return Design(statistics, estimate, rss, full, *rows)


def step(
    local: LocalKernel, shared: GlobalKernel, setting: Setting, joint: Joint, data: Any, t: int, sweeps: int
) -> Joint:
    """A round of the federation on all replicates: sweeps at the sites, sums, the server's step."""
    count, sites = len(joint.shared.theta), setting.sites
    repeat = lambda leaf: leaf.repeat_interleave(sites, 0)[:, None]
    heard = sparse.GlobalVariables(*(repeat(leaf) for leaf in shared.send(joint.shared)))
    after = local.sweep(heard, joint.sites, data, keys(101, count * sites, t)[:, None], sweeps)
    sums = {}
    for name, terms in local.report(after).items():
        limbs = sum(exact.limbs(term) for term in terms)
        sums[name] = limbs.reshape(count, sites, *limbs.shape[2:]).sum(1)
    now = shared.update(joint.shared, sums, keys(102, count, t))
    if "score" in sums:  # the sites moved with θ
        after = after._replace(theta=repeat(now.theta - now.centre) + after.place)
    return Joint(now, after)


def statistics(joint: Joint, sites: int, prior: Callable[[Any], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Statistics that have moments, `(R, ...)`."""
    shared, count = joint.shared, len(joint.shared.theta)
    each = lambda leaf: leaf.reshape(count, -1)
    of_precision, of_auxiliary = shared.factors.log().unbind(1)
    found = {
        "tanh theta": shared.theta.tanh(),
        "tanh theta_k": each(joint.sites.theta.tanh()),
        "log tau": -shared.precision.log(),
        "log lambda": each(-joint.sites.precision.log()) - of_precision.repeat(1, sites),
        "log nu": each(-joint.sites.auxiliary.log()) - of_auxiliary.repeat(1, sites),
        "log sigma2": each(-joint.sites.noise.log()),
        "log b_sigma": shared.noise.log()[:, None],
        "tanh intercept": each(getattr(joint.sites, "intercept", torch.zeros(count, sites)).tanh()),
        "tanh product": (shared.theta[:, None] * joint.sites.theta.reshape(count, sites, -1)).tanh().flatten(1),
        **prior(shared.prior),
    }
    return {name: value for name, value in found.items() if float(value.var()) > 0}


def run(
    local: LocalKernel,
    shared: GlobalKernel,
    setting: Setting,
    prior: Callable[[Any], dict[str, Tensor]],
    replicates: int,
    rounds: int,
    sweeps: int = 1,
    simulate: Callable[[Setting, Any, Tensor], Any] = regression_data,
    start: Callable[[Joint], Joint] = lambda joint: joint,
) -> dict[str, float]:
    """The z-scores of a sampler."""
    direct = statistics(start(draw_joint(setting, 100 * replicates, 1)), setting.sites, prior)
    joint = start(draw_joint(setting, replicates, 2))
    chains: dict[str, list[Tensor]] = {name: [] for name in direct}
    for t in range(rounds):
        data = simulate(setting, joint.sites, keys(3, replicates * setting.sites, t))
        joint = step(local, shared, setting, joint, data, t, sweeps)
        now = statistics(joint, setting.sites, prior)
        for name in chains:
            chains[name].append(now[name])
    return z_scores(direct, chains)
