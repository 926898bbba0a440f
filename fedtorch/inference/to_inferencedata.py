"""A run's posterior for ArviZ, with coefficients and sites by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.algorithms.ep.estimates import quantities, shown_coefficients
from fedtorch.federation.populations.population import feature_names
from fedtorch.federation.runs.drawn import SHARED, sampler_of
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import SITES, arviz_of
from fedtorch.inference._rows import site_draws, source
from fedtorch.models.hierarchical import Model

_SEED = 0


def to_inferencedata(
    run: Run, *, draws: int = 500, chains: int = 4, given: Corrected | None = None, tolerance: float = 0.01
) -> Any:
    """Return the posterior as ArviZ's `InferenceData`, whose coordinates are names of coefficients and sites.

    Of `ft.ep` it has independent draws of the posterior that was found: `beta` of the coefficients, `sd` and `cor` of
    those that differ between sites, `sigma` of the noise, and where rows are at hand `theta`, the coefficients of each
    site. Chains are alike then, and R-hat says nothing. Of `ft.gibbs` they are the draws of its sampler.

    Args:
        run: of `ft.ep` with a hierarchical model, or of `ft.gibbs` with a sampler that keeps its draws.
        draws: of each chain, of `ft.ep`.
        chains: how many, of `ft.ep`.
        given, tolerance: as those of `ranef`.

    Raises:
        TypeError: a run of something else.

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
    if run.algorithm.settings.get("algorithm") == "gibbs":
        return _of_sampler(run)
    model = run.algorithm.settings.get("model")
    if not isinstance(model, Model) or not model.hierarchy.coefficients:
        raise TypeError(
            "Expected a run of ft.ep with a hierarchical model or of ft.gibbs, but got "
            f"{run.algorithm.settings.get('algorithm', 'another')}, which has no draws"
        )
    return _of_propagation(run, model, draws, chains, given, tolerance)


def _of_propagation(run: Run, model: Model, draws: int, chains: int, given: Corrected | None, tolerance: float) -> Any:
    at_hand, count = not hasattr(run.population, "counts"), draws * chains
    drawn = site_draws(run, count, given, tolerance) if at_hand else None
    phi = source(run, count, given, tolerance, _SEED).phi if drawn is None or drawn.phi is None else drawn.phi
    shown, size, random = quantities(run, phi), len(shown_coefficients(run)[0]), model.hierarchy.random
    names, values = shown.names, torch.stack(shown.values, 1).unflatten(0, (chains, draws))
    coords: dict[str, Sequence[str]] = {"coefficient": names[:size]}
    dims, made = {"beta": ["coefficient"]}, {"beta": values[..., :size]}
    last = len(names) - (len(model.names) > len(model.hierarchy.names))
    for name, axis, start, stop in (
        ("sd", "random", size, size + len(random)),
        ("cor", "pair", size + len(random), last),
    ):
        if stop > start:
            coords[axis] = [each.removeprefix(f"{name}(").removesuffix(")") for each in names[start:stop]]
            dims[name], made[name] = [axis], values[..., start:stop]
    if last < len(names):
        made["sigma"] = values[..., -1]
    if drawn is not None:
        theta = (drawn.theta @ shown_coefficients(run)[1].mT).transpose(0, 1)
        coords["site"], dims["theta"] = run.population.names, ["site", "coefficient"]
        made["theta"] = theta.unflatten(0, (chains, draws))
    return arviz_of(made, coords, dims)


def _of_sampler(run: Run) -> Any:
    draws: dict[str, Tensor] = sampler_of(run).draws()
    columns = feature_names(run.population) or tuple(map(str, range(draws[SHARED].shape[-1] if SHARED in draws else 0)))
    coords: dict[str, Sequence[str]] = {"coefficient": columns, "site": run.population.names}
    dims: dict[str, list[str]] = {}
    for name, leaf in draws.items():
        site = ["site"] if name.startswith(SITES) else []
        if leaf.ndim > 2 + len(site) and leaf.shape[-1] == len(columns) and leaf.ndim == 3 + len(site):
            dims[name] = [*site, "coefficient"]
        elif site:
            dims[name] = site
    used = {axis for axes in dims.values() for axis in axes}
    return arviz_of(draws, {axis: names for axis, names in coords.items() if axis in used}, dims)
