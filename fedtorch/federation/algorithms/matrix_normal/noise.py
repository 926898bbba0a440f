"""Noise variances of HM1's devices, and the spread of their estimates, from their summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch.federation.algorithm import LocalSolver
from fedtorch.models.hierarchical.penalised import null_information
from fedtorch.models.linear import Spectral, spectral_rows
from fedtorch.programs import matrix_normal as _program
from fedtorch.tree import Tree

_POOLING = 4.0  # weight of the pooled noise in each device's, in degrees of freedom


class Summary(NamedTuple):
    """Summary of a device's noise; leaves `(K,)`, zeros for devices that have not answered."""

    residual: Tensor  # ‖y − Xθ̂‖² of its least squares fit
    freedom: Tensor  # rows beyond the rank
    spread: Tensor  # tr((X'X)⁺) / rank: times σ², the sampling variance of a coefficient


class PreparedRows(NamedTuple):
    """A block's data prepared for the local solver, and the devices' summaries."""

    local: Tree
    summary: Summary  # (K,)
    unit: Tensor  # (K,) times σ²: the loss in units of the objective


def prepare(data: Any, *, local: LocalSolver) -> PreparedRows:
    """Compute the statistics of a block's rows, once."""
    prepared = local.prepare(data)
    if local.family != "gaussian":
        return PreparedRows(prepared, _of_the_null(prepared, data.batch[1], local.family), _unit(1.0, prepared.count))
    if isinstance(prepared, Spectral):
        rows = prepared
    else:
        x, y = data.batch
        with torch.no_grad():
            design = local.module.block_design(x)
        rows = spectral_rows(design, y, data.mask)
    count = rows.count.to(torch.float64)
    freedom = count - rows.fit.rank
    spread = rows.fit.spread / count.clamp(min=1)
    summary = Summary(torch.where(freedom > 0, count * rows.rest, 0.0), freedom, spread)
    return PreparedRows(prepared, summary, _unit(2.0, count))


def _unit(number: float, count: Tensor) -> Tensor:
    """Return number / n, the unit of the loss: number 2 for half the squared error, 1 for a log-likelihood."""
    return number / count.clamp(min=1).to(torch.float64)


def _of_the_null(rows: Any, y: Tensor, family: str) -> Summary:
    """Return summaries of generalised linear models: variances of coefficients if all rows have one mean."""
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
    """Return σ_k² of every device, `(K,)`: given, or estimated and shrunk to the common one; infinite while unknown."""
    if isinstance(noise, Tensor):
        return noise.to(summary.residual)
    if noise is not None:
        return torch.full_like(summary.residual, noise)
    freedom = summary.freedom.sum()
    pooled = torch.where(freedom > 0, summary.residual.sum() / freedom.clamp(min=1), torch.inf)
    return (summary.residual + _POOLING * pooled) / (summary.freedom + _POOLING)


def priors(
    summary: Summary, heard: Tensor | None, noise: float | Tensor | None, prior: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return noise variances, precisions `(K,)` and shifts `(K, p)` for the devices, 1 and zeros where unknown.

    Args:
        summary: the devices' noise summaries.
        heard: `(K,)` bool, devices that have answered; None if the others have a prior, too.
        noise: a given σ².
        prior: precisions and shifts for devices with known noise.
    """
    if noise is None and _program.usable((*summary[:2], *prior)):
        return _program.priors(summary[:2], heard, _POOLING, prior)
    variance = noise_variance(summary, noise)
    finite = variance.isfinite()  # false degrees of freedom can make it −∞
    unknown = ~(finite if heard is None else heard & finite)
    precision, shift = prior[0].masked_fill(unknown, 0.0), prior[1].masked_fill(unknown[:, None], 0.0)
    return variance.masked_fill(unknown, 1.0), precision, shift


class Renewed(NamedTuple):
    """Result of the server's update from the answers, before the covariance is updated."""

    parameters: Tensor  # (K, p) Θ
    summary: Summary  # (K,)
    heard: Tensor  # (K,) bool
    known: Tensor  # (K, p) Θ of the devices that have answered, zeros for others
    finite: bool  # whether the noise variance of every device is known
    reach: float  # Σθ² of the devices that have answered
    units: int  # number of these devices
    typical: Tensor  # () median sampling variance of a coefficient, 0 without answers


def renewed(
    theta: Tensor,
    summary: Summary,
    heard: Tensor,
    ids: Tensor,
    change: Tensor,
    fresh: Summary,
    noise: float | Tensor | None,
) -> Renewed:
    """Add the answers of devices `ids` `(M,)`, their change of Θ `(M, p)` and `fresh` summaries, to the server's."""
    if _program.usable((theta, *summary, change, *fresh)):
        given = noise if noise is None else noise_variance(summary, noise)
        server_and_fresh = (theta, *summary), heard, ids, (change, *fresh)
        theta, three, heard, known, numbers = _program.renewed(*server_and_fresh, given, _POOLING)
        finite, reach, units, _ = numbers.tolist()
        return Renewed(theta, Summary(*three), heard, known, bool(finite), reach, int(units), numbers[3])
    theta = theta.index_add(0, ids, change)
    summary = Summary(*(old.index_copy(0, ids, new) for old, new in zip(summary, fresh)))
    heard = heard.index_fill(0, ids, True)
    variance = noise_variance(summary, noise)
    known = torch.where(heard[:, None], theta, 0.0)
    finite, reach, units = torch.stack([variance.isfinite().all(), known.square().sum(), heard.sum()]).tolist()
    typical = (variance * summary.spread).masked_fill(summary.spread <= 0, torch.nan).nanmedian()
    scale = typical.nan_to_num(0.0, posinf=torch.inf)
    return Renewed(theta, summary, heard, known, bool(finite), reach, int(units), scale)
