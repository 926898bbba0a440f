r"""Predictions of responses from mixtures of linear predictors: means and intervals, and intervals of new responses.

The mean response is a monotone function g of the predictor η, so that its quantiles are g at the quantiles of η.
E g(η) and E g(η)² are sums over the components by Gauss–Hermite rules. A new normal response has a mixture of normal
densities. Other responses are drawn by quasi-random numbers (component, η, y), the same for every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from fedtorch import linalg
from fedtorch.federation.posterior import Coefficients
from fedtorch.inference._table_rows import Rows
from fedtorch.models.device_posterior import DevicePosterior, interval
from fedtorch.models.estimates import weighted_quantile
from fedtorch.models.hierarchical.families import Ordered
from fedtorch.models.quadrature import gauss_hermite

_RULE = 21  # points of E g(η)
_DRAWS = 2048  # of new responses for each row
_NUMBERS = 2**22  # the most elements of one array


class LevelsPredicted(NamedTuple):
    """Predicted probabilities of levels, `(N, C)` each."""

    estimate: Tensor
    sd: Tensor
    low: Tensor
    high: Tensor


class Predicted(NamedTuple):
    """Predictions of rows, `(N,)` each: the mean response, and the interval of a new response."""

    estimate: Tensor
    sd: Tensor
    low: Tensor
    high: Tensor
    new_low: Tensor
    new_high: Tensor


def predicted(sites: Coefficients, place: int, rows: Rows, level: float) -> Predicted:
    """Return predictions for the rows of the site at `place`."""
    one = DevicePosterior(*(part[place : place + 1] for part in sites.posterior))
    x = rows.x.to(one.means)
    if sites.features is not None:
        x = sites.features(x)
    if sites.intercept:
        x = torch.cat([torch.ones_like(x[:, :1]), x], 1)
    if sites.family is None:
        raise TypeError(
            "Expected a model with a distribution of responses given x'θ, but got one without; pass family= to a "
            "likelihood of your own, or, for a sampler that integrates intercepts out, give x a column of ones"
        )
    rows = rows._replace(x=x)
    every = [_of_some(sites, one, rows.take(part), level) for part in _parts(one, len(x))]
    return Predicted(*map(torch.cat, zip(*every)))


def level_probabilities(sites: Coefficients, place: int, rows: Rows, level: float) -> LevelsPredicted:
    """Return the probability of each level of an ordered response, for the rows of the site at `place`.

    Draws are quasi-random and the same for every row; probabilities of a row sum to one.
    """
    theta = _even_draws(DevicePosterior(*(part[place] for part in sites.posterior)))
    x = rows.x.to(theta)
    offset = torch.zeros_like(x[:, 0]) if rows.offset is None else rows.offset.to(x)
    possible = Ordered.ascend(theta[:, x.shape[1] :])
    if not bool(possible.any()):
        raise ValueError(
            "Expected ascending thresholds, but got a posterior without draws of them, as levels without rows between "
            "others give; leave such levels out of levels=, or merge them with a neighbour"
        )
    theta = theta[possible]
    cuts, tail, parts = theta[:, x.shape[1] :], (1 - level) / 2, []
    for part in torch.arange(len(x)).split(max(1, _NUMBERS // theta.numel())):
        eta = x[part] @ theta[:, : x.shape[1]].mT + offset[part, None]
        above = torch.stack([eta, *(eta - cut for cut in cuts.unbind(1))], -1).sigmoid()  # (n, S, C - 1)
        ends = torch.nn.functional.pad(torch.nn.functional.pad(above, (1, 0), value=1.0), (0, 1))
        p = (ends[..., :-1] - ends[..., 1:]).transpose(0, 1)
        edges = (weighted_quantile(p, tail), weighted_quantile(p, 1 - tail))
        parts.append(LevelsPredicted(p.mean(0), p.std(0), *edges))
    return LevelsPredicted(*map(torch.cat, zip(*parts)))


def _even_draws(one: DevicePosterior) -> Tensor:
    """Return quasi-random draws of the coefficients of one site, `(S, d)`."""
    size = one.means.shape[-1]
    uniform = torch.quasirandom.SobolEngine(1 + size).draw(_DRAWS + 1, dtype=torch.float64)[1:].to(one.means)
    below = one.weights.cumsum(0)
    component = torch.searchsorted(below / below[-1], uniform[:, 0].contiguous()).clamp(max=len(below) - 1)
    white = torch.special.ndtri(uniform[:, 1:])[..., None]
    return one.means[component] + (linalg.square_root(one.covariances)[component] @ white)[..., 0]


def _parts(one: DevicePosterior, rows: int) -> Iterator[slice]:
    """Yield slices of the rows, at least one."""
    size = max(1, _NUMBERS // max(_DRAWS, _RULE * one.weights.shape[1]))
    yield from (slice(i, i + size) for i in range(0, max(rows, 1), size))


def _of_some(sites: Coefficients, one: DevicePosterior, rows: Rows, level: float) -> Predicted:
    assert sites.family is not None
    family, distribution = sites.family, one.predictive(rows.x[None], noise=0.0)
    offset = torch.zeros_like(rows.x[:, 0]) if rows.offset is None else rows.offset.to(rows.x)
    parts = distribution.component_distribution
    mean, sd = parts.mean[0] + offset[:, None], parts.stddev[0]  # (N, R)
    low, high = (edge[0] + offset for edge in interval(distribution, level))
    estimate, spread = _moments(family.mean, one.weights[0], mean, sd)
    if family.precise:
        variance = sd.square() + one.log_noise[0].exp()
        new = _normal_edges(one.weights[0], mean, variance.sqrt(), level)
    elif bool((one.log_noise.nan_to_num(0.0) != 0).any()):  # overdispersed: mean and variance, but no distribution
        new = (torch.full_like(estimate, torch.nan),) * 2
    else:
        new = _drawn_edges(sites, one.weights[0], mean, sd, rows.trials, level)
    return Predicted(estimate, spread, family.mean(low), family.mean(high), *new)


def _moments(g: Callable[[Tensor], Tensor], weights: Tensor, mean: Tensor, sd: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and sd of g(η), for mixtures of normal η `(N, R)`."""
    rule = gauss_hermite(1, _RULE)
    values = g(mean[..., None] + sd[..., None] * rule.nodes[:, 0].to(mean))
    first = (values @ rule.weights.to(mean)) @ weights
    second = ((values - first[:, None, None]).square() @ rule.weights.to(mean)) @ weights
    return first, second.sqrt()


def _normal_edges(weights: Tensor, mean: Tensor, sd: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return the interval of mixtures of normal responses; NaN where the noise is not known."""
    if bool(sd.isnan().any()):
        return torch.full_like(mean[:, 0], torch.nan), torch.full_like(mean[:, 0], torch.nan)
    parts = Normal(mean, sd, validate_args=False)
    return interval(MixtureSameFamily(Categorical(weights.expand_as(mean)), parts, validate_args=False), level)


def _drawn_edges(
    sites: Coefficients, weights: Tensor, mean: Tensor, sd: Tensor, trials: Tensor | None, level: float
) -> tuple[Tensor, Tensor]:
    """Return the interval of new responses, with its ends included."""
    assert sites.family is not None
    uniform = torch.quasirandom.SobolEngine(3).draw(_DRAWS + 1, dtype=torch.float64)[1:].to(mean)
    below = weights.cumsum(0)
    component = torch.searchsorted(below / below[-1], uniform[:, 0].contiguous()).clamp(max=len(weights) - 1)
    eta = mean[:, component] + sd[:, component] * torch.special.ndtri(uniform[:, 1])
    scale = torch.ones_like(eta) if trials is None else trials.to(eta)[:, None].expand_as(eta)
    y = sites.family.draw(uniform[:, 2].expand_as(eta), eta, scale).mT
    tail = (1 - level) / 2
    return weighted_quantile(y, tail).round(), weighted_quantile(y, 1 - tail).round()
