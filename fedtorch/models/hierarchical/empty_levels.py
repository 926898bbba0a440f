r"""Detection of levels of an ordered response without rows, which sites do not report.

Rows of a middle level have log (1 − e^−η) of the distance of its thresholds, whose second derivative is
:math:`r (1 + r)`, :math:`r = 1 / (e^\eta - 1)`. As all other terms of the log likelihood are concave, n of them leave η
a variance of :math:`1 / (n\, r (1 + r))` at the most. At a maximum of the likelihood the expected number of rows of the
first or the last level equals the observed one, and if it is small the information on the level's threshold is about
that number.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch.models.hierarchical.families import Ordered

_NONE = 0.1  # estimated number of rows below which there is none: with one the numbers above are one or more
_APART = 1.0  # sds between thresholds
_END, _FAR = 0.7, 3.0  # sd and mean of the distance of two thresholds beyond which there is at most one row
_DEPENDENT = 1e-6  # relative information on a combination of slopes below which columns are dependent
_HELPS = "leave such levels out of levels=, or merge them with a neighbour"


def refuse_crossed(ordered: Ordered, mean: Tensor, covariance: Tensor) -> None:
    """Raise for middle levels whose thresholds are out of order in a posterior, because only rows keep them in order.

    Args:
        ordered: of the response, with three levels at least.
        mean, covariance: of the coefficients, `(d,)` and `(d, d)`.

    Raises:
        ValueError: thresholds that are out of order, or that rows leave unknown on both sides of a level.
    """
    apart, unsure = _differences(ordered, mean, covariance)
    crossed = (_near(apart, unsure) & ~(unsure <= _END)) | ~(apart > 0)
    if bool(crossed.any()):
        raise ValueError(_refusal(_named(ordered.levels[1:], crossed), "thresholds are not in order"))


def warn_of_few(ordered: Ordered, mean: Tensor, covariance: Tensor, *, helps: str = "", stacklevel: int = 3) -> bool:
    """Warn about levels whose thresholds the rows do not determine; return whether it has warned.

    Args:
        ordered, mean, covariance: as for `refuse_crossed`.
        helps: further remedies for the message.
        stacklevel: as for `warnings.warn`.
    """
    apart, unsure = _differences(ordered, mean, covariance)
    # the threshold of the first or the last level has reached its limit
    ends = ((unsure > _END) & (apart > _FAR))[[0, -1]]
    missing = torch.cat([ends[:1], _near(apart, unsure), ends[1:]])
    if bool(missing.any()):
        warnings.warn(
            f"Expected rows of every level, but got few or none of {_named(ordered.levels, missing)}, whose thresholds "
            f"the rows do not inform; {helps}{_HELPS}",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
    return bool(missing.any())


def refuse_without_maximum(ordered: Ordered, mean: Tensor, information: Tensor) -> None:
    """Raise for levels without rows if the likelihood has no maximum: their thresholds meet, or diverge.

    Args:
        ordered: of the response, with three levels at least.
        mean, information: of the coefficients, `(d,)` and `(d, d)`, at the largest likelihood.

    Raises:
        ValueError: levels with an estimated number of rows below one.
    """
    thresholds = ordered.shown[: len(ordered.levels) - 1].to(mean)
    moved = torch.linalg.pinv(thresholds).mT[[0, -1]]  # coefficients that move one threshold by one
    ends = (moved @ information * moved).sum(1) < _NONE
    known = information + thresholds[[0, -1]].mT @ (ends[:, None] * thresholds[[0, -1]])
    known = known + _of_slopes(thresholds, information)
    apart, unsure = _differences(ordered, mean, torch.linalg.inv_ex(known).inverse)
    ratio = 1 / apart.expm1()
    between = ~(_NONE * unsure.square() * ratio * (1 + ratio) < 1) | ~(apart > 0)
    empty = torch.cat([ends[:1], between, ends[1:]])
    if bool(empty.any()):
        raise ValueError(_refusal(_named(ordered.levels, empty), "the likelihood has no maximum"))


def _of_slopes(thresholds: Tensor, information: Tensor) -> Tensor:
    """Return information `(d, d)` with a unit on combinations of slopes that have none, which do not concern
    thresholds.
    """
    slopes = (thresholds == 0).all(0).to(information)
    inner = information * torch.outer(slopes, slopes)
    root = torch.where(slopes > 0, inner.diagonal(), 1.0).clamp(min=0).sqrt()
    unit = torch.where(root > 0, 1 / root, 1.0)
    values, vectors = torch.linalg.eigh(inner * torch.outer(unit, unit) + torch.diag(1 - slopes))
    null = torch.where(root > 0, root, 1.0)[:, None] * vectors * (values < _DEPENDENT)
    return null @ null.mT


def _differences(ordered: Ordered, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the differences of neighbouring thresholds, and their sds, `(C - 2,)`."""
    apart = ordered.shown[: len(ordered.levels) - 1].to(mean).diff(dim=0)
    return apart @ mean, (apart @ covariance @ apart.mT).diagonal().sqrt()


def _near(apart: Tensor, unsure: Tensor) -> Tensor:
    return ~(apart > _APART * unsure)


def _named(levels: Sequence[str], which: Tensor) -> str:
    return ", ".join(repr(level) for level, each in zip(levels, which.tolist()) if each)


def _refusal(levels: str, why: str) -> str:
    return f"Expected rows of every level, but got none of {levels}, so that {why}; {_HELPS}"
