"""What a sampling run has found, from the draws of the sampler that has recorded it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch.federation.populations.population import feature_names, row_counts
from fedtorch.federation.runs.sampler import SITES, Sampler, diagnostics
from fedtorch.models.estimates import Diagnostics, Estimates

SHARED = "theta"  # the global parameter of the package's models


def sampler_of(run: Any) -> Sampler:
    """Return the sampler that has recorded a run and keeps its draws.

    Raises:
        TypeError: there is none.
    """
    samplers = [each for each in run.recorders if isinstance(each, Sampler)]
    if not samplers:
        raise TypeError(
            f"Expected a run of {run.algorithm.settings.get('algorithm')} with draws, but got one without a sampler; "
            "pass record=ft.Sampler(burn_in=100) to ft.run"
        )
    return samplers[0]


def estimates(run: Any) -> Estimates:
    """Return the posterior of the global parameter by its draws; of a model without one, that of all that was watched.

    Coefficients have the names of the rows' columns, where there are as many.
    """
    draws = {name: leaf for name, leaf in sampler_of(run).draws().items() if not name.startswith(SITES)}
    draws = {SHARED: draws[SHARED]} if SHARED in draws else draws
    columns, rows = feature_names(run.population), int(row_counts(run.population).sum())
    names, parts = [], []
    for name, leaf in draws.items():
        flat = leaf.flatten(2)
        names += component_names(name, leaf, columns)
        parts.append(flat if leaf.ndim > 2 else leaf[..., None])
    stack = torch.cat(parts, 2)  # (C, T, q)
    r_hat, ess = (torch.tensor(each, dtype=torch.float64) for each in diagnostics(stack.numpy()))
    return Estimates(
        names=tuple(names),
        nodes=stack.flatten(0, 1),
        coefficients=len(names),
        n=(rows,) * len(names),
        diagnostics=Diagnostics(r_hat, ess),
        chains=len(stack),
        about=f"{stack.shape[1]:,} draws of each of {len(stack)} chains",
    )


def component_names(name: str, leaf: Tensor, columns: tuple[str, ...]) -> list[str]:
    """Return names of the components of draws `(C, T, ...)`: of the global parameter those of its columns.

    >>> component_names("theta", torch.zeros(2, 5, 2), ("age", "sex")), component_names("tau", torch.zeros(2, 5, 1), ())
    (['age', 'sex'], ['tau[0]'])
    """
    shape = leaf.shape[2:]
    if not len(shape):
        return [name]
    known = columns if len(columns) == shape[-1] else tuple(map(str, range(shape[-1])))
    places = torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist()
    if name == SHARED and known == columns and len(shape) == 1:
        return list(columns)
    return [f"{name}[{', '.join([*map(str, place[:-1]), known[place[-1]]])}]" for place in places]
