r"""Generalised linear models of many clients, each with its own normal penalty: mode and curvature, stacked.

Client k's coefficients minimise
:math:`-\sum_i \log p(y_{ki} \mid x_{ki}'\theta) + \tfrac{\lambda_k}{2} \|\theta\|^2 - \langle h_k, \theta\rangle`.
Steps of Newton's method are those of iteratively reweighted least squares, links being canonical; a step that increases
the objective is halved. Without a penalty, separable responses have no finite mode: steps end where they gain nothing
more.

>>> import torch, fedtorch as ft
>>> data = ft.data.from_tensors([(torch.ones(4, 1), torch.tensor([2.0, 4.0, 3.0, 3.0]))])
>>> rows = observed("poisson", data.stack([0]), 1)
>>> mode = penalised_mode("poisson", rows, torch.zeros(1, 1).double(), torch.zeros(1), torch.zeros(1, 1).double())
>>> mode.exp().round(decimals=6)  # the mean
tensor([[3.]], dtype=torch.float64)
>>> score_and_information("poisson", rows, mode)[1].round(decimals=6)  # Σ of the rate
tensor([[[12.]]], dtype=torch.float64)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch.models.hierarchical.families import GAUSSIAN, Family
from fedtorch.models.hierarchical.integrals.exponential import BINARY, COUNTS, Rows, log_likelihood, prepared

FAMILIES = {"logistic": BINARY, "poisson": COUNTS}

_STEPS, _HALVES = 100, 40
_STILL = 1e-13  # twice the gain of a last step, relative to the objective and 0.1; further steps are rounding


def check_family(family: str) -> None:
    """Raise ValueError for an unknown family other than the normal one."""
    if family not in FAMILIES:
        raise ValueError(f"Expected the family {' or '.join(map(repr, ('gaussian', *FAMILIES)))}, but got {family!r}")


def outcome(family: str) -> Family:
    """Return the distribution of one response.

    >>> outcome("logistic").mean(torch.zeros(1))
    tensor([0.5000])
    """
    return GAUSSIAN if family == "gaussian" else FAMILIES[family].outcome or GAUSSIAN


def observed(family: str, data: Any, features: int) -> Rows:
    """Return the rows of a block, x already being its design; raise where responses do not fit the family."""
    return prepared(FAMILIES[family], data, features, torch.arange(features))


def score_and_information(family: str, rows: Rows, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradient `(K, d)` and minus the second derivatives `(K, d, d)` of the log-likelihood at θ `(K, d)`."""
    return _expanded(family, rows.trimmed(), theta)


def _expanded(family: str, rows: Rows, theta: Tensor) -> tuple[Tensor, Tensor]:
    # Products of columns, with which `Problem` sums rows at many nodes, do not pay at one.
    first, second = (part[:, 0] for part in FAMILIES[family].slopes(rows.predictors(theta[:, None])))
    if rows.times is not None:
        first, second = first * rows.times, second * rows.times
    return rows.statistic - (first[:, None] @ rows.x)[:, 0], (second[..., None] * rows.x).mT @ rows.x


def negative_log_likelihood(family: str, rows: Rows, theta: Tensor) -> Tensor:
    """Return −Σ log p(y | x'θ), `(K,)`, with its constant."""
    return -(log_likelihood(FAMILIES[family], rows, theta[:, None])[:, 0] + rows.constant)


def null_information(family: str, rows: Rows, y: Tensor) -> Tensor:
    """Return the weight of a row if all have one mean, `(K,)`, with half a response more so that it is positive."""
    count = rows.count.to(torch.float64)
    mean = ((y * rows.mask).sum(1) + 0.5) / (count + 1)
    return mean * (1 - mean).clamp(min=1 / (4 * (count + 1))) if family == "logistic" else mean


def penalised_mode(
    family: str, rows: Rows, start: Tensor, precision: Tensor, shift: Tensor, steps: int | None = None
) -> Tensor:
    """Return the minimiser of the penalised negative log-likelihood `(K, d)`, or where `steps` lead to.

    Directions without information in rows and penalty stay at the start.

    Args:
        family: a name of `FAMILIES`.
        rows: from `observed`.
        start: `(K, d)`.
        precision: λ `(K,)`, not negative.
        shift: h `(K, d)`.
        steps: most steps; default: until steps are rounding.
    """
    precision, rows = precision.to(start), rows.trimmed()

    def value(theta: Tensor) -> Tensor:
        penalty = precision / 2 * theta.square().sum(1) - (shift * theta).sum(1)
        return negative_log_likelihood(family, rows, theta) + penalty

    theta, now = start, value(start)
    done = torch.zeros_like(now, dtype=torch.bool)
    for _ in range(_STEPS if steps is None else steps):
        score, information = _expanded(family, rows, theta)
        slope = score - precision[:, None] * theta + shift
        information.diagonal(dim1=1, dim2=2).add_(precision[:, None])
        step = (linalg.pseudo_inverse(information) @ slope[..., None])[..., 0]
        share = torch.ones_like(now)
        for _ in range(_HALVES):
            trial = theta + share[:, None] * step
            reached = value(trial)
            worse = ~(reached <= now + 1e-14 * now.abs())
            if not bool((worse & ~done).any()):
                break
            share = torch.where(worse, share / 2, share)
        moved = ~worse & ~done
        theta, now = torch.where(moved[:, None], trial, theta), torch.where(moved, reached, now)
        done = done | worse | ((step * slope).sum(1) <= _STILL * (now.abs() + 0.1))
        if bool(done.all()):
            break
    return theta
