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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.data import ClientData
from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.ep.estimates import coefficient_names, units
from fedtorch.federation.runs.run import Run
from fedtorch.inference._rows import by_client, source
from fedtorch.inference._sites import COEFFICIENTS, drawn_coefficients, site_coefficients
from fedtorch.inference.holders import ask, local_holder, rows_at_hand
from fedtorch.models import hierarchical
from fedtorch.models.device_posterior import DevicePosterior, credible_interval
from fedtorch.models.hierarchical import Model
from fedtorch.models.hierarchical.families import Family

_WIDE = 25.0  # sds of the sites' coefficients, of a prior that says nothing
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
    found = (
        _of_draws(run, level) if run.algorithm.settings.get("algorithm") == "gibbs" else _of_ep(run, level, tolerance)
    )
    low, high = credible_interval(found.pooled.marginals(), level)
    mean, variance = found.own.means[:, 0], found.own.covariances[:, 0].diagonal(dim1=-2, dim2=-1)
    says = variance.sqrt() < _SAYS * _WIDE * found.spread
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


class _Found(NamedTuple):
    """Hold what is known of all `d` coefficients, in the units of the data."""

    names: tuple[str, ...]
    place: list[int]  # of those that differ by site
    pooled: DevicePosterior
    own: DevicePosterior
    centre: Tensor  # (d,)
    centre_low: Tensor
    centre_high: Tensor
    spread: Tensor
    family: Family | None


def _of_ep(run: Run, level: float, tolerance: float) -> _Found:
    model = source(run, 1, None, tolerance, 0).model
    names, back = _names(run, model), units(run)
    q = ep.posterior(run, tolerance=tolerance)
    size = len(back)
    centre = back @ q.mean[:size]
    sd = (back @ q.covariance_matrix[:size, :size] @ back.mT).diagonal().sqrt()
    half = torch.special.ndtri(torch.tensor((1 + level) / 2)).to(sd) * sd
    covariance = _covariance(model, q.mean)
    alone = _wide(model, q.mean, covariance.diagonal().sqrt())
    return _Found(
        names,
        list(model.hierarchy.random),
        _original(ask(run, COEFFICIENTS), back),
        _original(ask(run, COEFFICIENTS, {"phi": alone[None], "weights": torch.ones_like(alone[:1])}), back),
        centre,
        centre - half,
        centre + half,
        (back @ covariance @ back.mT).diagonal().sqrt(),
        model.family,
    )


def _of_draws(run: Run, level: float) -> _Found:
    """Return what draws of all sites say; a site's own estimate has the noise that it was found to have."""
    sites, (total, shared) = site_coefficients(run), drawn_coefficients(run)
    if sites.family is None:
        raise TypeError(
            "Expected a sampler of regressions with all their coefficients, such as sparse.regression() or "
            "logistic_regression(), but got another; add a column of ones to x in place of intercept=True"
        )
    total, shared = total.flatten(0, 1), shared[..., 0, :].flatten(0, 1)  # (S, K, d), (S, d)
    known = ~shared.isnan() & bool((shared != 0).any())
    known[:, : int(sites.intercept)] = False  # nothing is shared of intercepts but their mean
    middle = shared.where(known, total.mean(1))
    spread = (total - middle[:, None]).square().mean(1).sqrt().log().mean(0).exp()
    low, high = (middle.quantile((1 + sign * level) / 2, 0) for sign in (-1, 1))
    size, centre = len(spread), middle.mean(0)
    hierarchy, gaussian = hierarchical.normal(size), sites.family.precise
    model = (hierarchical.linear if gaussian else hierarchical.generalised.logistic)(hierarchy)
    phi = _wide(model, torch.cat([centre, torch.zeros(len(model.names) - size).to(centre)]), spread)
    every = phi.expand(len(sites.sites), -1).clone()
    if gaussian:
        every[:, -1] = sites.posterior.log_noise.mean(1)
    alone = by_client(
        local_holder(run), [rows_at_hand(run)], [_Alone(model, every, sites.intercept)], lambda drawn: drawn[0]
    )
    place = list(range(size))
    return _Found(sites.names, place, sites.totals(), alone, centre, low, high, spread, sites.family)


class _Alone(NamedTuple):
    """Hold a prior of each client under which its rows alone are taken."""

    model: Model
    phi: Tensor  # (clients, p)
    intercept: bool

    @property
    def family(self) -> Any:
        """Return the distribution of one response."""
        return self.model.family

    def drawn(self, block: ClientData, clients: Tensor) -> Any:
        """Return the posterior of the coefficients of a block's clients."""
        x, y = (part.to(torch.float64) for part in block.batch)
        x = torch.cat([torch.ones_like(x[..., :1]), x], -1) if self.intercept else x
        phi = self.phi[clients][:, None].to(x)
        return self.model.given(phi, torch.ones_like(phi[..., 0]), self.model.prepare(ClientData((x, y), block.count)))


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


def _wide(model: Model, mean: Tensor, sd: Tensor) -> Tensor:
    """Return φ of a prior around the sites' mean that is so wide that it says nothing."""
    m, scales = model.hierarchy.mean.shape[1], len(model.hierarchy.names)
    phi = mean.clone()
    phi[m:scales] = model.hierarchy.scales(torch.diag((_WIDE * sd) ** 2), mean.new_zeros(()))
    return phi


def _original(posterior: DevicePosterior, back: Tensor) -> DevicePosterior:
    return posterior._replace(means=posterior.means @ back.mT, covariances=back @ posterior.covariances @ back.mT)
