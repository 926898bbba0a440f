"""Simulation-based calibration: where truths lie in the posteriors of data that were simulated from them.

Truths are drawn from the prior and data given them. If posteriors are right, the place of a truth in its posterior, by
the distribution function or among draws, is uniform over data sets. Three statistics of the places look for what is
wrong: the sum of their normal scores (a shift), the sum of their squares (posteriors that are too narrow or too wide),
and Kolmogorov's distance (any other shape). The distributions of all three are known, so that a test of right
posteriors fails with probability `ALARM` at the most.

Source: Talts, Betancourt, Simpson, Vehtari, Gelman (2018), "Validating Bayesian inference algorithms with
simulation-based calibration"; Cook, Gelman, Rubin (2006), "Validation of software for Bayesian models using posterior
quantiles".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor

from fedtorch import random, tree
from fedtorch.models.gibbs.kernels import GlobalKernel, LocalKernel
from support.oracles import geweke

ALARM = 1e-6  # the probability that right posteriors fail a test
_INSIDE = 1e-12  # of places, whose normal scores are finite


class Worst(NamedTuple):
    """The least probable statistic of a test, in words, and the bound for so many of them."""

    what: str
    probability: float
    bound: float


def among(truth: Tensor, draws: Tensor) -> Tensor:
    """The places of truths `(R, ...)` among independent draws `(T, R, ...)`, at random among equal ones."""
    keys = geweke.keys(200, len(truth))
    share = random.uniform(keys, truth.shape[1:], torch.float64)
    below, equal = (draws < truth).sum(0), (draws == truth).sum(0)
    return (below + share * (equal + 1)) / (len(draws) + 1)


def worst(places: Mapping[str, Tensor]) -> Worst:
    """The least probable statistic of places in (0, 1), `(R, ...)` by name, of R independent replicates."""
    found = {}
    for name, values in places.items():
        for i, each in enumerate(values.flatten(1).unbind(1) if values.ndim > 1 else [values]):
            count = len(each)
            scores = torch.special.ndtri(each.clamp(_INSIDE, 1 - _INSIDE))
            mean, square = float(scores.mean()), float(scores.square().sum())
            found[f"{name}[{i}]: mean score {mean:.3f}"] = 2 * stats.norm.sf(abs(mean) * count**0.5)
            tail = min(stats.chi2.cdf(square, count), stats.chi2.sf(square, count))
            found[f"{name}[{i}]: mean squared score {square / count:.3f}"] = 2 * tail
            distance, probability = stats.kstest(each.numpy(), "uniform")
            found[f"{name}[{i}]: distance {distance:.3f}"] = probability
    what = min(found, key=lambda name: found[name])
    return Worst(what, float(found[what]), ALARM / len(found))


def check(places: Mapping[str, Tensor]) -> None:
    """Fail where places are not uniform."""
    found = worst(places)
    assert found.probability > found.bound, found


class Length(NamedTuple):
    """How much a test of a sampler does."""

    replicates: int
    draws: int
    burn_in: int  # rounds
    thin: int  # rounds between draws


def of_gibbs(
    local: LocalKernel,
    shared: GlobalKernel,
    setting: geweke.Setting,
    truth: geweke.Joint,
    data: Any,
    statistics: Callable[[geweke.Joint], Mapping[str, Tensor]],
    length: Length,
    *,
    start: Tensor,
    sweeps: int = 1,
) -> dict[str, Tensor]:
    """The places of truths among the draws of a sampler that starts as a run does, by statistic.

    Args:
        truth, data: of R replicates of M sites.
        statistics: of the variables, `(R, ...)`.
        start: of the global parameter, `(p,)`.
    """
    count = length.replicates
    every = start.to(torch.float64).expand(count, -1).contiguous()
    sites = tree.map(lambda leaf: leaf.repeat_interleave(setting.sites, 0)[:, None], local.init(every))
    joint, draws = geweke.Joint(shared.init(every), sites), []
    for t in range(length.burn_in + length.draws * length.thin):
        joint = geweke.step(local, shared, setting, joint, data, t, sweeps)
        if t >= length.burn_in and (t - length.burn_in) % length.thin == length.thin - 1:
            draws.append(statistics(joint))
    return {
        name: among(value, torch.stack([each[name] for each in draws])) for name, value in statistics(truth).items()
    }
