"""What each site's rows say of its coefficients alone, and what they say together with the other sites'.

A site's own estimate is that under a prior so wide that it says nothing, with the noise and the fixed effects as all
sites have found them; where the rows say nothing either, as of a slope without variation or of a log-odds whose
responses are all 0, there is none. Partial pooling is the site's posterior.

>>> import torch, fedtorch as ft
>>> from fedtorch.federation.algorithms.ep import settled
>>> from fedtorch.models import hierarchical
>>> x, z = torch.ones(8, 1).double(), ft.random.normal(ft.random.key(0), (5, 8), torch.float64)
>>> data = ft.data.from_tensors([(x, k + z[k]) for k in range(5)])
>>> model = hierarchical.linear(hierarchical.normal(1, sd=5.0, names=["level"]), noise=1.0)
>>> found = site_estimates(ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled()), level=0.9)
>>> bool((found.own[:, 0] - torch.stack([y.mean() for _, y in data])).abs().max() < 0.01)
True
>>> bool(((found.mean - found.centre).abs() < (found.own - found.centre).abs()).all())  # they are drawn to the mean
True
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch.federation.posterior import WIDE, posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.models.device_posterior import credible_interval

_SCALES = {
    "gaussian": "effect on the response",
    "logistic": "log-odds",
    "cumulative": "log-odds",
    "poisson": "log rate",
}
_SAYS = 0.25  # of that prior's sd, above which rows say nothing


class SiteEstimates(NamedTuple):
    """Hold the coefficients that differ by site, `r` of them, of `K` sites."""

    sites: tuple[str, ...]
    coefficients: tuple[str, ...]
    mean: Tensor  # (K, r) of each site's posterior
    low: Tensor  # (K, r) of its interval
    high: Tensor
    own: Tensor  # (K, r) of the site's rows alone, NaN where they say nothing
    own_sd: Tensor
    centre: Tensor  # (r,) what sites have in common
    centre_low: Tensor
    centre_high: Tensor
    spread: Tensor  # (r,) sd of the sites' coefficients
    scale: str  # what coefficients are effects on


def site_estimates(run: Run, level: float, tolerance: float = 0.01) -> SiteEstimates:
    """Return own and pooled estimates of each site's coefficients, in the units of the data where a design is known.

    Args:
        run: of `ft.ep` with a hierarchical model of a known family, or of `ft.gibbs` with a regression and a sampler
            that recorded sites.
        level: probability of the intervals.
        tolerance: see `ep.posterior`, which warns and raises alike.

    Raises:
        TypeError: a run of something else.
        ValueError: a model whose coefficients are the same for all sites.
        RuntimeError: sites whose policy does not tell effects.
    """
    found = posterior_of(run.algorithm).pooling(run, level, tolerance)
    low, high = credible_interval(found.pooled.marginals(), level)
    mean, variance = found.own.means[:, 0], found.own.covariances[:, 0].diagonal(dim1=-2, dim2=-1)
    says = variance.sqrt() < _SAYS * WIDE * found.spread
    at = lambda part: part[..., found.place]
    return SiteEstimates(
        sites=tuple(run.population.names),
        coefficients=tuple(found.names[j] for j in found.place),
        mean=at(found.pooled.marginals().mean),
        low=at(low),
        high=at(high),
        own=at(mean.where(says, torch.nan)),
        own_sd=at(variance.sqrt().where(says, torch.nan)),
        centre=at(found.centre),
        centre_low=at(found.centre_low),
        centre_high=at(found.centre_high),
        spread=at(found.spread),
        scale=_SCALES.get(found.family.name if found.family else "", "effect"),
    )
