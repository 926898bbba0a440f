"""What devices of HM1 tell of their noise and the spread of their estimates, and what is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch.federation.algorithm import LocalSolver
from fedtorch.models.hierarchical.penalised import null_information
from fedtorch.models.linear import SufficientStatistics, least_norm, residual_sum, sufficient_statistics
from fedtorch.tree import Tree

_POOLING = 4.0  # degrees of freedom that the noise of all devices counts for in that of each
_EXACT = 1e-14  # residuals below, relative to y'y, are rounding


class Summary(NamedTuple):
    """Hold what a device knows of its noise; leaves `(K,)`, zeros for devices that have not been heard."""

    residual: Tensor  # ‖y − Xθ̂‖² of its least squares fit
    freedom: Tensor  # rows beyond the rank
    spread: Tensor  # tr((X'X)⁺) / rank: times σ², the sampling variance of a coefficient


class PreparedRows(NamedTuple):
    """Hold a block's data as the local solver wants it, and what the devices tell of it."""

    local: Tree
    summary: Summary  # (K,)
    rows: Tensor  # (K,)


def prepare(data: Any, *, local: LocalSolver) -> PreparedRows:
    """Compute the statistics of a block's rows, once."""
    prepared = local.prepare(data)
    if local.family != "gaussian":
        return PreparedRows(prepared, _of_the_null(prepared, data.batch[1], local.family), prepared.count)
    if local.statistics is None:
        x, y = data.batch
        with torch.no_grad():
            statistics = sufficient_statistics(local.module.block_design(x), y, data.mask)
    else:
        statistics = _of_one_response(local.statistics(prepared))
    fit = least_norm(statistics)
    residual = residual_sum(statistics, fit.solution).maximum(_EXACT * statistics.power)
    freedom = statistics.count - fit.rank
    summary = Summary(torch.where(freedom > 0, residual, 0.0), freedom, fit.spread)
    return PreparedRows(prepared, summary, statistics.count)


def _of_one_response(statistics: SufficientStatistics) -> SufficientStatistics:
    return statistics._replace(cross=statistics.cross[..., 0])


def _of_the_null(rows: Any, y: Tensor, family: str) -> Summary:
    """Return what generalised linear models tell: variances of coefficients where all rows have one mean."""
    y = y.reshape(rows.mask.shape).to(torch.float64)
    parts = linalg.equilibrated(rows.x.mT @ rows.x)
    root = parts.inverse_root(parts.null())
    spread = root.square().sum((-2, -1)) / parts.rank.clamp(min=1) / null_information(family, rows, y)
    return Summary(torch.zeros_like(spread), torch.zeros_like(spread), spread)


def of_each(noise: Tensor | Sequence[float]) -> Tensor:
    """Return the devices' noise variances as float64 `(K,)`, or raise ValueError."""
    known = torch.as_tensor(noise, dtype=torch.float64)
    if known.ndim != 1 or not bool(((known > 0) & known.isfinite()).all()):
        raise ValueError(f"Expected positive noise variances (K,), but got {known.tolist()}; bound them from below")
    return known


def noise_variance(summary: Summary, noise: float | Tensor | None = None) -> Tensor:
    """Return σ_k² of every device, `(K,)`: as given, or estimated and drawn to that of all; infinite while unknown."""
    if isinstance(noise, Tensor):
        return noise.to(summary.residual)
    if noise is not None:
        return torch.full_like(summary.residual, noise)
    freedom = summary.freedom.sum()
    pooled = torch.where(freedom > 0, summary.residual.sum() / freedom.clamp(min=1), torch.inf)
    return (summary.residual + _POOLING * pooled) / (summary.freedom + _POOLING)
