r"""Log-concave families of responses, and the rows of devices for generalised linear models.

All coefficients at which a device's rows are evaluated are columns of one product with X, and second derivatives are
another with the products of its columns, so that no array has rows × coefficients × nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.models import counts
from fedtorch.models.hierarchical.families import LOGISTIC, POISSON, Family
from fedtorch.models.rows import EXTRAS, Observations, observations, refuse

CACHED = 2**16  # linear predictors at a time
_MOST_SPREAD = 2.0  # largest variance of a linear predictor for a second-order expansion
_TOGETHER = 512  # rows whose probabilities are multiplied before the logarithm


class Likely(NamedTuple):
    """Responses, and predictors with high likelihood."""

    response: Tensor  # (K, N) y times the row's count, 0 on padding
    rest: Tensor  # (K, N) further data of the family: e^base of counts, failures of trials, times the count
    base: Tensor  # (K, N) η₀


class Rows(NamedTuple):
    """The rows of `K` clients, in float64, zero on padding."""

    x: Tensor  # (K, N, d)
    columns: Tensor  # (K, d, N) the same in another order, which products with many coefficients take four times faster
    statistic: Tensor  # (K, d) Σ w t x
    mask: Tensor  # (K, N) bool
    offset: Tensor | None  # (K, N) of the linear predictors
    times: Tensor | None  # (K, N) how often a row counts, weight × trials; None for once
    likely: Likely | None  # responses, if log-likelihoods are taken relative to their maximum; None otherwise
    constant: Tensor  # (K,) the part of the log-likelihood that has no θ
    count: Tensor  # type: ignore[assignment]  # (K,)

    def trimmed(self) -> Rows:
        """Return the rows without padding beyond all clients' counts."""
        most = int(self.count.amax()) if len(self.count) else 0
        if most >= self.x.shape[1]:
            return self
        return self._replace(
            x=self.x[:, :most],
            columns=self.columns[..., :most].contiguous(),
            mask=self.mask[:, :most],
            offset=None if self.offset is None else self.offset[:, :most],
            times=None if self.times is None else self.times[:, :most],
            likely=None if self.likely is None else Likely(*(part[:, :most] for part in self.likely)),
        )

    def predictors(self, theta: Tensor) -> Tensor:
        """Return η `(K, P, N)` at θ `(K, P, d)`."""
        eta = theta @ self.columns
        return eta if self.offset is None else eta.add_(self.offset[:, None])

    def counted(self, values: Tensor) -> Tensor:
        """Multiply values of rows `(K, P, N)` by the rows' counts; may overwrite them."""
        return values if self.times is None else values.mul_(self.times[:, None])

    def at_once(self) -> int:
        """Return at how many coefficients rows are evaluated together, so that η fits the cache."""
        return max(1, CACHED // max(1, self.mask.numel()))


class ExponentialFamily(NamedTuple):
    """A log-concave family: log p(y | η) = t η − n b(η), up to a constant, for η = x'θ + offset and n trials.

    If t η and n b(η) may be large compared to their difference, rows have their largest likelihood, and `ratio` returns
    the difference to it.
    """

    extras: tuple[str, ...]  # fields besides x and y
    response: Callable[[Observations, Tensor], Tensor]  # rows, mask -> t; raises `BadClients` where they do not fit
    likely: Callable[[Observations], tuple[Likely, Tensor] | None]  # -> that of single rows, and log p there
    # η (K, P, N), which it may overwrite, of rows -> Σ log p relative to the maximum, or without it −Σ times b, (K, P)
    ratio: Callable[[Tensor, Rows], Tensor]
    slopes: Callable[[Tensor], tuple[Tensor, Tensor]]  # η, which it may overwrite -> b', b''
    bends: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # η, which it may overwrite -> b'', b''', b''''
    spread: Callable[[Tensor], Tensor]  # v -> w, so that E b''(η + v^½ z) is about b'' + ½ w b''''
    outcome: Family | None = None  # distribution of one response


def prepared(family: ExponentialFamily, data: Any, features: int, order: Tensor) -> Rows:
    """Return a block's rows with their columns in this order; raise as `rows.observations` and the family."""
    rows, mask = observations(data, features, family.extras), data.mask
    x = rows.x if bool((order == torch.arange(features)).all()) else rows.x[..., order.to(rows.x.device)]
    response, peak = family.response(rows, mask) * mask, family.likely(rows)
    likely, constant = (None, torch.zeros_like(response)) if peak is None else peak
    times = mask if rows.weight is None else rows.weight * mask
    response = response * times
    if likely is not None:
        likely = Likely(likely.response * times, likely.rest * times, likely.base)
    elif rows.offset is not None:
        constant = constant + response * rows.offset
    known = [part for part in (rows.weight, rows.trials) if part is not None]
    return Rows(
        x=x,
        columns=x.mT.contiguous(),
        statistic=(response[:, None] @ x)[:, 0],
        mask=mask,
        offset=rows.offset,
        times=math.prod(known[1:], start=known[0]) if known else None,
        likely=likely,
        constant=(constant * times).sum(1),
        count=data.count,
    )


def log_likelihood(family: ExponentialFamily, data: Rows, theta: Tensor) -> Tensor:
    """Return Σ log p(y | x'θ), up to its constant, `(K, ...)`, for θ `(K, ..., d)`."""
    points = theta.flatten(1, -2)
    total = torch.cat([family.ratio(data.predictors(part), data) for part in torch.split(points, data.at_once(), 1)], 1)
    if data.likely is None:
        total = total + (points @ data.statistic[..., None])[..., 0]
    return total.reshape(theta.shape[:-1])


def _binary_ratio(eta: Tensor, rows: Rows) -> Tensor:
    """Return −Σ log (2 cosh η/2) = −Σ |η|/2 + Σ log σ(|η|), with one logarithm for many rows; for trials the ratio.

    Padded rows have η = 0 and contribute log 2 each; products of 512 numbers of at least ½ do not underflow.
    """
    if rows.likely is not None:
        successes, failures, start = (part[:, None] for part in rows.likely)
        return counts.binomial_ratio(successes, eta, successes + failures, start).sum(-1)
    if rows.times is not None:
        size = eta.abs_()
        return -((size / 2 + size.neg().exp_().log1p_()) @ rows.times[..., None])[..., 0]
    none = (eta.shape[-1] - rows.count).to(eta.dtype)[:, None]
    total = eta.abs_().sum(-1).div_(-2).add_(none, alpha=math.log(2))
    for part in torch.split(eta.sigmoid_(), _TOGETHER, -1):
        total.add_(part.prod(-1).log_())
    return total


def _logistic_slopes(eta: Tensor) -> tuple[Tensor, Tensor]:
    p = eta.sigmoid_()
    second = torch.addcmul(p, p, p, value=-1)
    return p.sub_(0.5), second


def _logistic_bends(eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second = _logistic_slopes(eta)
    third = first.mul_(second).mul_(-2)
    return second, third, second - 6 * second.square()


def _counts_ratio(eta: Tensor, rows: Rows) -> Tensor:
    """Return Σ y d − e^η₀ (e^d − 1), d = η − η₀."""
    assert rows.likely is not None
    response, rate, start = rows.likely
    away = eta.clamp_(max=counts.FURTHEST).sub_(start[:, None])
    linear = away @ response[..., None]
    return (linear - away.expm1_() @ rate[..., None])[..., 0]


def _poisson_slopes(eta: Tensor) -> tuple[Tensor, Tensor]:
    rate = eta.clamp_(max=counts.FURTHEST).exp_()
    return rate, rate


def _poisson_bends(eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rate = eta.clamp_(max=counts.FURTHEST).exp_()
    return rate, rate, rate


def _successes(rows: Observations, mask: Tensor) -> Tensor:
    y, trials = rows.y, rows.trials
    most = torch.ones_like(y) if trials is None else trials
    bad = ~((y >= 0) & (y <= most) & (y == y.round())) & mask
    expected = "responses 0 or 1" if trials is None else "successes, whole numbers from 0 to the row's trials"
    message = f"Expected {expected}, but got {_shown(y, trials, bad)}; correct them, or take another family"
    refuse(bad.any(1), message, f"others than {expected}; correct them, or take another family")
    return y - most / 2


def _likely_successes(rows: Observations) -> tuple[Likely, Tensor] | None:
    """Return the likeliest responses if there are trials; log-likelihoods of single responses are small."""
    if rows.trials is None:
        return None
    start, largest = counts.binomial_base(rows.y, rows.trials)
    return Likely(rows.y, rows.trials - rows.y, start), largest


def _likely_counts(rows: Observations) -> tuple[Likely, Tensor]:
    start, mean, largest = counts.base(rows.y)
    return Likely(rows.y, mean, start), largest


def _counts(rows: Observations, mask: Tensor) -> Tensor:
    bad = ~((rows.y >= 0) & (rows.y == rows.y.round())) & mask
    message = f"Expected counts, but got {_shown(rows.y, None, bad)}; correct them, or take another family"
    refuse(bad.any(1), message, "others than counts; correct them, or take another family")
    return rows.y


def _shown(y: Tensor, trials: Tensor | None, bad: Tensor) -> str:
    """Return the first bad y, with its trials if there are some, and the number of bad ones."""
    if not bool(bad.any()):
        return ""
    of = "" if trials is None else f" of {float(trials[bad][0]):g}"
    return f"{float(y[bad][0]):g}{of} in y ({int(bad.sum())} such rows)"


def _bounded(variance: Tensor) -> Tensor:
    return variance / (1 + (variance / _MOST_SPREAD).square()).sqrt()


BINARY = ExponentialFamily(
    extras=EXTRAS,
    response=_successes,
    likely=_likely_successes,
    ratio=_binary_ratio,
    slopes=_logistic_slopes,
    bends=_logistic_bends,
    spread=_bounded,
    outcome=LOGISTIC,
)
COUNTS = ExponentialFamily(
    extras=("offset", "weight"),
    response=_counts,
    likely=_likely_counts,
    ratio=_counts_ratio,
    slopes=_poisson_slopes,
    bends=_poisson_bends,
    spread=_bounded,
    outcome=POISSON,
)
