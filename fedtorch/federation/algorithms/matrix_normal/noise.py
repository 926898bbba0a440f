"""What devices of HM1 tell of their noise and the spread of their estimates, and what is made of it."""

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

_POOLING = 4.0  # degrees of freedom that the noise of all devices counts for in that of each


class Summary(NamedTuple):
    """Hold what a device knows of its noise; leaves `(K,)`, zeros for devices that have not been heard."""

    residual: Tensor  # ‖y − Xθ̂‖² of its least squares fit
    freedom: Tensor  # rows beyond the rank
    spread: Tensor  # tr((X'X)⁺) / rank: times σ², the sampling variance of a coefficient


class PreparedRows(NamedTuple):
    """Hold a block's data as the local solver wants it, and what the devices tell of it."""

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
    """Return number / n: the mean squared error is ½‖y − Xθ‖² times 2 / n, a mean negative log-likelihood 1 / n."""
    return number / count.clamp(min=1).to(torch.float64)


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


def priors(
    summary: Summary, heard: Tensor | None, noise: float | Tensor | None, prior: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what devices are sent: noise variances, precisions `(K,)` and shifts `(K, p)`, 1 and zeros where unknown.

    Args:
        summary: what is known of the devices' noise.
        heard: `(K,)` bool, which have been heard; None where those that have not been have a prior, too.
        noise: σ² where it is given.
        prior: precisions and shifts of those of which all is known.
    """
    if noise is None and _program.usable((*summary[:2], *prior)):
        return _program.priors(summary[:2], heard, _POOLING, prior)
    variance = noise_variance(summary, noise)
    finite = variance.isfinite()  # of devices that lie about their degrees of freedom it may be −∞
    unknown = ~(finite if heard is None else heard & finite)
    precision, shift = prior[0].masked_fill(unknown, 0.0), prior[1].masked_fill(unknown[:, None], 0.0)
    return variance.masked_fill(unknown, 1.0), precision, shift


class Renewed(NamedTuple):
    """Hold what the server makes of the devices that answered, before it renews their covariance."""

    parameters: Tensor  # (K, p) Θ
    summary: Summary  # (K,)
    heard: Tensor  # (K,) bool
    known: Tensor  # (K, p) Θ of those heard, zeros of others
    finite: bool  # whether the noise variance of every device is known
    reach: float  # Σθ² of those heard
    units: int  # how many they are
    typical: Tensor  # () median sampling variance of a coefficient, 0 where nobody has been seen


def renewed(
    theta: Tensor,
    summary: Summary,
    heard: Tensor,
    ids: Tensor,
    change: Tensor,
    fresh: Summary,
    noise: float | Tensor | None,
) -> Renewed:
    """Add what devices `ids` `(M,)` tell, their change of Θ `(M, p)` and `fresh` summaries, to what is known of all."""
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
