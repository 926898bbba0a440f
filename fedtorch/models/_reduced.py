"""Reduction of a linear model's rows to as many rows as there are columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch.models.linear import SufficientStatistics


class Reduced(NamedTuple):
    """d rows equivalent to all rows of a linear model: ‖y − Xθ‖² = rest + ‖response − root'(θ − fit)‖²."""

    root: Tensor  # (..., d, d) B with BB' = X'X
    fit: Tensor  # (..., d) θ̂, zero if the sums are not centred
    response: Tensor  # (..., d) z with B z = X'(y − Xθ̂)
    rest: Tensor  # (...) ‖y − Xθ̂‖² − ‖z‖²
    count: Tensor  # type: ignore[assignment]  # (...) n

    def misfit(self, theta: Tensor) -> Tensor:
        """Return response − root'(θ − fit) `(..., R, d)` at θ `(..., R, d)`."""
        return self.response[..., None, :] - (theta - self.fit[..., None, :]) @ self.root


def reduced(statistics: SufficientStatistics, rows: tuple[Tensor, Tensor] | None = None) -> Reduced:
    """Return a triangular B with columns in the order of their size; directions without information are zero.

    Its columns differ in size as those of X do; a symmetric root would mix them.

    Args:
        statistics: sufficient statistics of the rows.
        rows: x `(..., N, d)` and y `(..., N)` themselves, zero on padding. Sums of y are then taken about their least
            squares fit, because for responses far from zero y'y loses all digits of the residual sum of squares.
    """
    gram, cross, power, count = statistics
    scale, values, vectors = linalg.equilibrated(gram)
    known = values > 0
    root_values = torch.where(known, values, 1.0).sqrt()

    def turned(cross: Tensor) -> Tensor:
        return torch.where(known, (vectors.mT @ (scale * cross)[..., None])[..., 0] / root_values, 0.0)

    response, fit = turned(cross), torch.zeros_like(cross)
    if rows is not None:
        x, y = rows
        fit = scale * (vectors @ (response / root_values)[..., None])[..., 0]
        away = y - (x @ fit[..., None])[..., 0]
        response, power = turned((x.mT @ away[..., None])[..., 0]), away.square().sum(-1)
    order = scale.argsort(dim=-1, stable=True)
    half = (vectors * values.sqrt()[..., None, :]).take_along_dim(order[..., None], -2)
    turn, upper = torch.linalg.qr(half.mT)
    root = upper.mT.take_along_dim(order.argsort(-1)[..., None], -2) / scale[..., None]
    rest = (power - response.square().sum(-1)).clamp(min=0)
    return Reduced(root, fit, (turn.mT @ response[..., None])[..., 0], rest, count)
