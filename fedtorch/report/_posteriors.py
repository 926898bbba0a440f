"""Posteriors of a run with their diagnostics, from samplers' draws or from the approximation q.

Diagnostics are ArviZ's: rank-normalised split-R-hat and bulk effective sizes (Vehtari et al. 2021, "Rank-normalization,
folding, and localization").
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtorch.data.formulas.grammar import INTERCEPT
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import Sampler, diagnostics
from fedtorch.inference.ranef import site_estimates
from fedtorch.vfl.fit.run import VerticalRun
from fedtorch.vfl.fit.sfvi import VariationalFit

_MOST = 200  # the most components of one posterior
_CLIENTS = 500  # the most clients whose posteriors are shown
_ELEMENTS = 5  # the most elements of a batch of fits that are shown
_TRACES, _POINTS = 4, 200  # components whose traces are drawn, and the most draws of each chain


def described(run: Run | VerticalRun) -> list[dict[str, Any]]:
    """Return the posteriors of a run, each as plain data with `rows` of mean, sd and 95 % interval by component."""
    if not isinstance(run, Run):
        return _of_variational(run) if run.number and isinstance(run, VariationalFit) else []
    sources = [_of_draws(one) for one in run.recorders if isinstance(one, Sampler) and one.moments]
    if run.number and posterior_of(run.algorithm).title:
        sources.append(_of_shared(run))
    return sources


def _of_draws(sampler: Sampler) -> dict[str, Any]:
    """Return the posterior of a sampler, from its draws if it stores them, otherwise from their moments."""
    count = int(next(iter(sampler.moments.values())).count)
    chains = len(next(iter(sampler.moments.values())).mean)
    about_draws = {
        "title": f"{count:,} draws of each of {chains} chain{'s' * (chains > 1)}",
        "components": sum(moments.mean[0].numel() for moments in sampler.moments.values()),
        "warnings": [],
        "traces": [],
    }
    try:
        draws = sampler.draws()
    except ValueError:  # the sampler does not store its draws
        means, sds = _components(sampler.mean(), 0), _components(sampler.sd(), 0)
        rows = [_normal(name, float(mean), float(sds[name])) for name, mean in means.items()]
        return {**about_draws, "rows": rows}
    flat = _components(draws, 2)
    names, stack = list(flat), torch.stack(list(flat.values()), -1).numpy()  # (C, T, components)
    edges = np.quantile(stack.reshape(-1, len(names)), (0.025, 0.975), axis=0)
    rhat, ess = diagnostics(stack)
    rows = [
        {
            "name": name,
            "mean": float(stack[..., i].mean()),
            "sd": float(stack[..., i].std(ddof=1)),
            "low": float(edges[0, i]),
            "high": float(edges[1, i]),
            "rhat": rhat[i],
            "ess": ess[i],
        }
        for i, name in enumerate(names)
    ]
    worst = np.argsort([-value if math.isfinite(value) else 0.0 for value in rhat], kind="stable")[:_TRACES]
    places = np.unique(np.linspace(0, stack.shape[1] - 1, min(_POINTS, stack.shape[1])).round().astype(int))
    traces = [{"name": names[i], "draw": places.tolist(), "chains": stack[:, places, i].tolist()} for i in worst]
    return {**about_draws, "rows": rows, "traces": traces}


def _of_shared(run: Run) -> dict[str, Any]:
    """Return the posterior of the parameters that all clients share, with its warnings."""
    posterior = posterior_of(run.algorithm)
    shown: dict[str, Any] = {"title": posterior.title, "rows": [], "components": 0, "traces": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            estimates = posterior.estimates(run)
        except RuntimeError as error:
            return {**shown, "warnings": [str(error)]}
    table = estimates.table(0.95)
    count = estimates.coefficients
    alone = count > 1 and INTERCEPT in table.index[:count]  # an intercept is often far from the effects
    kinds = ["Coefficients but for the intercept" if alone else "Coefficients"] * count
    kinds += ["Spread between clients, and noise"] * (len(table) - count)
    rows = [
        {"name": str(name), "mean": row.estimate, "sd": row.sd, "low": row.low, "high": row.high, "panel": kind}
        for (name, row), kind in zip(table[:_MOST].iterrows(), kinds)
    ]
    for row in rows[:count] if alone else ():
        row["drawn"] = row["name"] != INTERCEPT
    messages = [str(warning.message) for warning in caught]
    return {**shown, "rows": rows, "components": len(table), "warnings": messages}


def by_client(run: Run | VerticalRun) -> list[dict[str, Any]]:
    """Return each client's posterior if rows are at hand; over ranks all take part, and all return the same."""
    if not isinstance(run, Run) or not run.number or not posterior_of(run.algorithm).title:
        return []
    try:
        if len(run.population.data) > _CLIENTS:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the posterior of the shared parameters has the same warnings
            estimates = site_estimates(run, 0.95, tolerance=math.inf)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # rows at sites, no density, no coefficient that differs
        return []
    sd = (estimates.high - estimates.low) / (2 * 1.96)
    rows = []
    for j, panel in enumerate(estimates.coefficients):
        for k in estimates.mean[:, j].argsort(stable=True).tolist():
            numbers = {
                "mean": estimates.mean[k, j],
                "sd": sd[k, j],
                "low": estimates.low[k, j],
                "high": estimates.high[k, j],
            }
            row = {name: float(value) for name, value in numbers.items()}
            rows.append({"name": estimates.sites[k], "panel": panel, "other": float(estimates.unpooled[k, j]), **row})
        ends = {"mean": estimates.centre, "low": estimates.centre_low, "high": estimates.centre_high}
        row = {name: float(value[j]) for name, value in ends.items()}
        rows.append(
            {"name": "all clients", "panel": panel, "all": True, "sd": (row["high"] - row["low"]) / 3.92, **row}
        )
    title = f"Each client's coefficients, {estimates.scale}"
    return [{"title": title, "rows": rows, "components": len(rows), "traces": [], "warnings": [], "clients": True}]


def _of_variational(fit: VariationalFit) -> list[dict[str, Any]]:
    """Return q(γ, θ_1, …, θ_J) of the first elements of the batch."""
    means, covariances = fit.moments()
    names = [f"γ[{i}]" for i in range(fit.model.sizes[0])]
    names += [f"θ_{j}[{i}]" for j, size in enumerate(fit.model.sizes[1:], start=1) for i in range(size)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        doubts = ["" if ok else str(caught[0].message) for ok in fit.converged().tolist()]
    posteriors = []
    for b, (mean, covariance, doubt) in enumerate(zip(means[:_ELEMENTS], covariances, doubts)):
        rows = [_normal(*each) for each in zip(names[:_MOST], mean.tolist(), covariance.diagonal().sqrt().tolist())]
        title = "q(γ, θ) of variational inference" + (f", element {b}" if len(means) > 1 else "")
        shown = {"title": title, "rows": rows, "components": len(names), "traces": []}
        posteriors.append({**shown, "warnings": [doubt] if doubt else []})
    return posteriors


def _normal(name: str, mean: float, sd: float) -> dict[str, Any]:
    return {"name": name, "mean": mean, "sd": sd, "low": mean - 1.96 * sd, "high": mean + 1.96 * sd}


def _components(values: dict[str, Tensor], before: int) -> dict[str, Tensor]:
    """Return the first numbers of named tensors by name and index, where the first `before` dimensions stay."""
    flat: dict[str, Tensor] = {}
    for name, leaf in values.items():
        shape = tuple(leaf.shape[before:])
        columns = leaf.reshape(*leaf.shape[:before], -1)
        for i in range(min(columns.shape[-1], _MOST - len(flat))):
            place = ",".join(map(str, np.unravel_index(i, shape))) if shape else ""
            flat[f"{name}[{place}]" if place else name] = columns[..., i]
    return flat
