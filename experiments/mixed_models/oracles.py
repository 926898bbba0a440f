"""Parts that the examples need and users seldom: nodes along one coefficient, and other priors and hierarchies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.algorithms.ep import corrected, settled
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import hyperpriors
from fedtorch.models.hierarchical.hyperpriors import Hyperprior
from fedtorch.models.quadrature import QuadratureRule, gauss_hermite


def along(features: int, random: Sequence[int], points: int) -> QuadratureRule:
    """Gauss-Hermite nodes along the only random coefficient."""
    return gauss_hermite(len(random), points)


def half_student(scale: float, freedom: float = 3.0) -> Hyperprior:
    """The prior of x = log τ by which the sd exp(x / 2) is half Student's t."""

    def log_density(x: Tensor) -> Tensor:
        return x / 2 - 0.5 * (freedom + 1) * ((x.exp() / scale**2) / freedom).log1p()

    return Hyperprior(0.0, 0.0, log_density)


def with_nodes(family: Callable[..., Any], hierarchy: hierarchical.Hierarchy, random: Sequence[int]) -> Any:
    """A model of the default nodes in `ft.ep`, and of fifteen for the one random coefficient in `corrected`."""
    model = family(hierarchy)
    return model._replace(log_factor=family(hierarchy, inner=along(len(model.hierarchy.mean), random, 15)).log_factor)


def posterior(data: ft.data.FederatedData, model: Any, points: int) -> tuple[Tensor, Tensor]:
    """Nodes of the posterior of what patients share, `(R, p)`, and their weights."""
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=60, until=settled(), progress=False)
    found = corrected(run, points=points)
    return found.nodes, found.weights


def nested(fixed: int, inner: int) -> hierarchical.Hierarchy:
    """Fixed effects, the first of which differs by group, and deviations of a group's inner units, of one variance."""

    def covariance(zeta: Tensor) -> Tensor:
        group, unit = zeta.exp().unbind(-1)
        nothing = torch.zeros_like(group)
        return torch.diag_embed(torch.stack([group, *[nothing] * (fixed - 1), *[unit] * inner], -1))

    def scales(spread: Tensor, log_noise: Tensor) -> Tensor:
        return torch.stack([spread[0, 0], spread.diagonal()[fixed:].mean()]).log()

    mean = torch.cat([torch.eye(fixed), torch.zeros(inner, fixed)]).double()
    prior = hyperpriors.prior(torch.zeros(fixed), 100 * torch.eye(fixed), [hyperpriors.log_normal()] * 2)
    names = (*(f"mean {i}" for i in range(fixed)), "log variance group", "log variance unit")
    return hierarchical.Hierarchy(names, mean, covariance, scales, prior)
