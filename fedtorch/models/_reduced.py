"""As few rows as there are columns, which stand for all rows of a linear model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch.models.linear import SufficientStatistics


class Reduced(NamedTuple):
    """d rows that stand for all rows of a linear model: ‖y − Xθ‖² = rest + ‖response − root'θ‖²."""

    root: Tensor  # (..., d, d) B with BB' = X'X
    response: Tensor  # (..., d) z with B z = X'y
    rest: Tensor  # (...) ‖y‖² − ‖z‖²
    count: Tensor  # type: ignore[assignment]  # (...) n


def reduced(statistics: SufficientStatistics) -> Reduced:
    """Return a triangular B, columns in the order of their size; directions that the rows leave open are zero.

    Its columns then differ in size as those of X do, which a symmetric root would mix up.
    """
    gram, cross, power, rows = statistics
    scale, values, vectors = linalg.equilibrated(gram)
    known = values > 0
    response = (vectors.mT @ (scale * cross)[..., None])[..., 0]
    response = torch.where(known, response / torch.where(known, values, 1.0).sqrt(), 0.0)
    order = scale.argsort(dim=-1, stable=True)
    half = (vectors * values.sqrt()[..., None, :]).take_along_dim(order[..., None], -2)
    turn, upper = torch.linalg.qr(half.mT)
    root = upper.mT.take_along_dim(order.argsort(-1)[..., None], -2) / scale[..., None]
    rest = (power - response.square().sum(-1)).clamp(min=0)
    return Reduced(root, (turn.mT @ response[..., None])[..., 0], rest, rows)
