"""Effects of sites: coefficients of each site, their deviations from the shared ones, and estimates without pooling."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.posterior import WIDE, Coefficients, posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import diagnostics
from fedtorch.inference.pooling import refuse_pooled
from fedtorch.models.device_posterior import interval
from fedtorch.models.estimates import Diagnostics, Estimates
from fedtorch.tables.result_frame import ResultFrame

_INFORMED = 0.25  # share of the wide prior's sd from which a site's rows count as uninformative


def ranef(
    run: Run | Coefficients,
    level: float = 0.95,
    *,
    total: bool = False,
    given: Corrected | None = None,
    tolerance: float = 0.01,
) -> ResultFrame:
    """Return the coefficients of each site: `estimate`, `sd`, interval (`low`, `high`), by site and coefficient.

    For runs with draws the table has `r_hat` and `ess`, too. The `ft.Sampler` of a run of `ft.gibbs` has to record
    sites.

    Args:
        run: of `ft.ep` with a hierarchical model or of `ft.maximum_likelihood`, with its rows at hand or on sites whose
            policies have `after_fit=("effects",)`; of `ft.gibbs` with its rows at hand; of `ft.matrix_normal` with its
            rows at hand and `total=True`; or sites, as `adapted` returns them. For a linear model fitted by maximum
            likelihood, estimates are best linear unbiased predictions, and sds are prediction errors given the
            estimated variances.
        level: of the intervals.
        total: whether to return the coefficients themselves, also those that all sites share; default: of the
            coefficients that differ, the deviations from their shared mean.
        given: the corrected posterior of the shared parameters, see `fedtorch.federation.algorithms.ep.correction`.
        tolerance: as in `ep.posterior`, with its warnings and errors.

    Raises:
        TypeError: an algorithm that has no such posterior, or a sampler without sites.
        RuntimeError: sites whose policies do not allow effects; the message names the setting that would.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models import hierarchical
        >>> x = torch.ones(20, 1, dtype=torch.float64)
        >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0)], names=list("ABCD"))
        >>> model = hierarchical.linear(hierarchical.normal(1, names=["level"]), noise=0.1)
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=30)
        >>> print(ft.inference.ranef(run, total=True).loc["A":"C"].to_markdown())
        | site | coefficient | estimate | sd | 95 % interval |
        | :-- | :-- | --: | --: | --: |
        | A | level | 1.004 | 0.071 | 0.866 to 1.143 |
        | B | level | 1.998 | 0.071 | 1.860 to 2.136 |
        | C | level | 2.992 | 0.071 | 2.853 to 3.130 |
    """
    refuse_pooled(run, "ranef")
    if isinstance(run, Coefficients):
        if not total:
            raise ValueError("Expected a run, but got other sites, of which only totals are known; pass total=True")
        sites = run
    else:
        posterior = posterior_of(run.algorithm)
        sites = (posterior.coefficients if total else posterior.deviations)(run, given, tolerance)
    return _of_mixture(sites, level) if sites.draws is None else _of_draws(sites, sites.draws, level)


def _of_mixture(sites: Coefficients, level: float) -> ResultFrame:
    marginals = sites.totals().marginals()
    low, high = interval(marginals, level)
    parts = {"estimate": marginals.mean, "sd": marginals.variance.clamp(min=0).sqrt(), "low": low, "high": high}
    columns = {name: part.flatten().tolist() for name, part in parts.items()}
    return ResultFrame.of(columns, _index(sites), level=level)


def _of_draws(sites: Coefficients, draws: Tensor, level: float) -> ResultFrame:
    stack = draws.flatten(2)
    made = Diagnostics(*(torch.tensor(each, dtype=torch.float64) for each in diagnostics(stack.numpy())))
    flat = stack.flatten(0, 1)
    table = Estimates(tuple(map(str, range(flat.shape[1]))), flat, diagnostics=made).table(level)
    table.index = _index(sites)
    return table


def _index(sites: Coefficients) -> pd.MultiIndex:
    return pd.MultiIndex.from_product([sites.sites, sites.names], names=["site", "coefficient"])


class SiteEstimates(NamedTuple):
    """Estimates of the `r` coefficients that differ by site, for `K` sites."""

    sites: tuple[str, ...]
    coefficients: tuple[str, ...]
    mean: Tensor  # (K, r) of each site's posterior
    low: Tensor  # (K, r) of its interval
    high: Tensor
    unpooled: Tensor  # (K, r) from the site's rows alone, NaN where they are uninformative
    unpooled_sd: Tensor
    centre: Tensor  # (r,) shared mean of the sites' coefficients
    centre_low: Tensor
    centre_high: Tensor
    spread: Tensor  # (r,) sd of the sites' coefficients
    scale: str  # name of the scale of the effects, such as log-odds


def site_estimates(run: Run, level: float, tolerance: float = 0.01) -> SiteEstimates:
    """Return unpooled and pooled estimates of each site's coefficients, in the data's units if the design is known.

    A site's unpooled estimate is that under a very wide prior, with the noise and the fixed effects as estimated from
    all sites. It is NaN where the site's rows are uninformative, as for the slope of a constant variable or log-odds of
    responses that are all 0. Partial pooling is the site's posterior.

    Args:
        run: of `ft.ep` with a hierarchical model of a known family, or of `ft.gibbs` with a regression and a sampler
            that recorded sites.
        level: probability of the intervals.
        tolerance: as in `ep.posterior`, with its warnings and errors.

    Raises:
        TypeError: a run of another algorithm or model.
        ValueError: a model whose coefficients are the same for all sites.
        RuntimeError: sites whose policies do not allow effects.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.ep import settled
        >>> from fedtorch.models import hierarchical
        >>> x, z = torch.ones(8, 1).double(), ft.random.normal(ft.random.key(0), (5, 8), torch.float64)
        >>> data = ft.data.from_tensors([(x, k + z[k]) for k in range(5)])
        >>> model = hierarchical.linear(hierarchical.normal(1, sd=5.0, names=["level"]), noise=1.0)
        >>> sites = site_estimates(ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled()), level=0.9)
        >>> bool((sites.unpooled[:, 0] - torch.stack([y.mean() for _, y in data])).abs().max() < 0.01)
        True
        >>> bool(((sites.mean - sites.centre).abs() < (sites.unpooled - sites.centre).abs()).all())  # shrunk
        True
    """
    pooling = posterior_of(run.algorithm).pooling(run, level, tolerance)
    low, high = interval(pooling.pooled.marginals(), level)
    mean, variance = pooling.own.means[:, 0], pooling.own.covariances[:, 0].diagonal(dim1=-2, dim2=-1)
    informed = variance.sqrt() < _INFORMED * WIDE * pooling.spread
    at = lambda part: part[..., pooling.place]
    return SiteEstimates(
        sites=tuple(run.population.names),
        coefficients=tuple(pooling.names[j] for j in pooling.place),
        mean=at(pooling.pooled.marginals().mean),
        low=at(low),
        high=at(high),
        unpooled=at(mean.where(informed, torch.nan)),
        unpooled_sd=at(variance.sqrt().where(informed, torch.nan)),
        centre=at(pooling.centre),
        centre_low=at(pooling.centre_low),
        centre_high=at(pooling.centre_high),
        spread=at(pooling.spread),
        scale=pooling.family.effects if pooling.family else "effect",
    )
