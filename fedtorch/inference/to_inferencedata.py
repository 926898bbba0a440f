"""A run's posterior for ArviZ, with coefficients and sites by name."""

from __future__ import annotations

from typing import Any

from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.run import Run


def to_inferencedata(
    run: Run, *, draws: int = 500, chains: int = 4, given: Corrected | None = None, tolerance: float = 0.01
) -> Any:
    """Return the posterior as ArviZ's `InferenceData`, whose coordinates are names of coefficients and sites.

    For `ft.ep` it has independent draws from the estimated posterior: `beta` of the coefficients, `sd` and `cor` of
    those that differ between sites, `sigma` of the noise and, where rows are at hand, `theta`, the coefficients of each
    site. Its chains do not differ, so R-hat is not informative. For `ft.gibbs` it has the draws of the sampler.

    Args:
        run: of `ft.ep` with a hierarchical model, or of `ft.gibbs` with a sampler that stores its draws.
        draws: of each chain, for `ft.ep`.
        chains: number of chains, for `ft.ep`.
        given, tolerance: as in `ranef`.

    Raises:
        TypeError: a run of another algorithm or model.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models import hierarchical
        >>> x = torch.ones(20, 1, dtype=torch.float64)
        >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0)], names=list("ABCD"))
        >>> model = hierarchical.linear(hierarchical.normal(1, names=["level"]), noise=0.1)
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=30)
        >>> posterior = ft.inference.to_inferencedata(run).posterior
        >>> float(posterior.theta.sel(site="C", coefficient="level").mean().round(1))
        3.0
    """
    known = posterior_of(run.algorithm)
    return known.inferencedata(run, draws=draws, chains=chains, given=given, tolerance=tolerance)
