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

from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.ep.estimates import coefficient_names, units
from fedtorch.federation.runs.run import Run
from fedtorch.inference._rows import source
from fedtorch.inference._sites import COEFFICIENTS
from fedtorch.inference.holders import ask
from fedtorch.models.device_posterior import DevicePosterior, credible_interval
from fedtorch.models.hierarchical import Model

_WIDE = 25.0  # sds of the sites' coefficients, of a prior that says nothing
_SCALES = {"gaussian": "effect on the response", "logistic": "log-odds", "poisson": "log rate"}
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
        run: of `ft.ep` with a hierarchical model of a known family, on rows at hand.
        level: probability of the intervals.
        tolerance: see `ep.posterior`, which warns and raises alike.

    Raises:
        TypeError: a run of something else.
        ValueError: rows that are at sites, or a model whose coefficients are the same for all sites.
    """
    model = source(run, 1, None, tolerance, 0).model
    names, place = _names(run, model), list(model.hierarchy.random)
    back = units(run)
    q = ep.posterior(run, tolerance=tolerance)
    pooled = _original(ask(run, COEFFICIENTS), back)
    low, high = (edge[:, place] for edge in credible_interval(pooled.marginals(), level))
    own = _original(_alone(run, model, q.mean), back)
    mean, variance = own.means[:, 0], own.covariances[:, 0].diagonal(dim1=-2, dim2=-1)
    size = len(back)
    centre = back @ q.mean[:size]
    sd = (back @ q.covariance_matrix[:size, :size] @ back.mT).diagonal().sqrt()
    factor = torch.special.ndtri(torch.tensor((1 + level) / 2)).to(sd)
    spread = (back @ _covariance(model, q.mean) @ back.mT).diagonal().sqrt()
    says = variance.sqrt() < _SAYS * _WIDE * spread
    return SiteEstimates(
        sites=tuple(run.population.names),
        coefficients=tuple(names[j] for j in place),
        mean=pooled.distribution().mean[:, place],
        low=low,
        high=high,
        own=mean.where(says, torch.nan)[:, place],
        own_sd=variance.sqrt().where(says, torch.nan)[:, place],
        centre=centre[place],
        centre_low=(centre - factor * sd)[place],
        centre_high=(centre + factor * sd)[place],
        spread=spread[place],
        scale=_SCALES.get(model.family.name if model.family else "", "effect"),
    )


def _names(run: Run, model: Model) -> tuple[str, ...]:
    """Return the names of a site's coefficients, of which some must differ by site."""
    if not model.hierarchy.random or len(model.hierarchy.coefficients) != len(model.hierarchy.mean):
        raise ValueError(
            f"Expected a model with coefficients that differ by site, but got {list(model.names)}; name them by "
            "hierarchical.normal(..., random=)"
        )
    return coefficient_names(run)


def _covariance(model: Model, mean: Tensor) -> Tensor:
    """Return the covariance of sites' coefficients at the posterior mean of its logarithms, `(d, d)`."""
    m, scales = model.hierarchy.mean.shape[1], len(model.hierarchy.names)
    return model.hierarchy.covariance(mean[m:scales])


def _alone(run: Run, model: Model, mean: Tensor) -> DevicePosterior:
    """Return each site's coefficients from its own rows, under a wide prior around the sites' mean."""
    m, scales = model.hierarchy.mean.shape[1], len(model.hierarchy.names)
    variance = _covariance(model, mean).diagonal()
    phi = mean.clone()
    phi[m:scales] = model.hierarchy.scales(torch.diag(_WIDE**2 * variance), mean.new_zeros(()))

    alone = {"phi": phi[None], "weights": torch.ones_like(phi[:1])}
    return ask(run, COEFFICIENTS, alone)


def _original(posterior: DevicePosterior, back: Tensor) -> DevicePosterior:
    return posterior._replace(means=posterior.means @ back.mT, covariances=back @ posterior.covariances @ back.mT)
