"""Effects of sites: by how much each one's coefficients deviate, what they are, and what its rows say of them alone."""

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

_SAYS = 0.25  # of that prior's sd, above which rows say nothing


def ranef(
    run: Run | Coefficients,
    level: float = 0.95,
    *,
    total: bool = False,
    given: Corrected | None = None,
    tolerance: float = 0.01,
) -> ResultFrame:
    """Return the coefficients of each site: `estimate`, `sd`, interval (`low`, `high`), by site and coefficient.

    Of draws there are `r_hat` and `ess` too; of `ft.gibbs`, the run's `ft.Sampler` has to record sites.

    Args:
        run: of `ft.ep` with a hierarchical model or of `ft.maximum_likelihood`, with its rows at hand or on sites whose
            policies have `after_fit=("effects",)`; of `ft.gibbs` with its rows at hand; of `ft.matrix_normal` with
            `total=True`, likewise; or sites, as by `adapted`. Of maximum likelihood they are best linear unbiased
            predictions where the model is linear, their sds prediction errors given the estimated variances.
        level: of the intervals.
        total: whether coefficients themselves are shown, those that all sites share among them; default: the deviations
            from what is shared, of the coefficients that differ.
        given: the corrected posterior of what is shared, see `fedtorch.federation.algorithms.ep.correction`.
        tolerance: as that of `ep.posterior`, which warns and raises alike.

    Raises:
        TypeError: an algorithm that has no such posterior, or a sampler without sites.
        RuntimeError: sites that do not tell effects; the message says which line of their policy would.

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
            raise ValueError("Expected a run, but got other sites, whose totals alone are known; pass total=True")
        sites = run
    else:
        known = posterior_of(run.algorithm)
        sites = (known.coefficients if total else known.deviations)(run, given, tolerance)
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

    A site's own estimate is that under a prior so wide that it says nothing, with the noise and the fixed effects as
    all sites have found them; where the rows say nothing either, as of a slope without variation or of a log-odds whose
    responses are all 0, there is none. Partial pooling is the site's posterior.

    Args:
        run: of `ft.ep` with a hierarchical model of a known family, or of `ft.gibbs` with a regression and a sampler
            that recorded sites.
        level: probability of the intervals.
        tolerance: see `ep.posterior`, which warns and raises alike.

    Raises:
        TypeError: a run of something else.
        ValueError: a model whose coefficients are the same for all sites.
        RuntimeError: sites whose policy does not tell effects.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.ep import settled
        >>> from fedtorch.models import hierarchical
        >>> x, z = torch.ones(8, 1).double(), ft.random.normal(ft.random.key(0), (5, 8), torch.float64)
        >>> data = ft.data.from_tensors([(x, k + z[k]) for k in range(5)])
        >>> model = hierarchical.linear(hierarchical.normal(1, sd=5.0, names=["level"]), noise=1.0)
        >>> found = site_estimates(ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled()), level=0.9)
        >>> bool((found.own[:, 0] - torch.stack([y.mean() for _, y in data])).abs().max() < 0.01)
        True
        >>> bool(((found.mean - found.centre).abs() < (found.own - found.centre).abs()).all())  # drawn to the mean
        True
    """
    found = posterior_of(run.algorithm).pooling(run, level, tolerance)
    low, high = interval(found.pooled.marginals(), level)
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
        scale=found.family.effects if found.family else "effect",
    )
