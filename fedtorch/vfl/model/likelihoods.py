"""Likelihoods of a response given a linear predictor, whichever party holds the data.

Rows come last and outputs before them: a predictor is `(..., C, n)` with `C = 1` but for the categorical, a response
`(..., n)`, and parameters that rows share (a noise, a dispersion) are `(..., S)` on the log scale. All broadcast, so
that one call evaluates folds × models × seeds and all Monte Carlo draws. A likelihood of your own takes a few lines:

>>> import dataclasses, torch
>>> from fedtorch.vfl.model import likelihoods
>>> student = dataclasses.replace(
...     likelihoods.gaussian(),
...     log_prob=lambda y, s, shared: torch.distributions.StudentT(4.0, s[..., 0, :], shared.exp()).log_prob(y),
... )
>>> student.log_prob(torch.zeros(3), torch.zeros(1, 3), torch.zeros(1)).shape
torch.Size([3])
>>> likelihoods.poisson().check(torch.tensor([2.0, -1.0]))
Traceback (most recent call last):
ValueError: Expected counts (whole numbers from 0 on) for a Poisson response, but got -1.0 in row 1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch._lazy import only
from fedtorch.models import counts

__all__ = ["bernoulli", "categorical", "gaussian", "negative_binomial", "poisson"]
__dir__ = only(__all__)

_LEAST = 1e-15  # probabilities are clipped here before their logits are taken
_CHECKED = 2**16  # rows checked at a time, so that the memory of a check does not grow with the rows


@dataclass(frozen=True)
class ResponseLikelihood:
    """A response given a predictor, as functions; vary one with `dataclasses.replace`.

    Attributes:
        log_prob: (response `(..., n)`, predictor `(..., C, n)`, shared `(..., S)`) -> `(..., n)`.
        mean: (predictor, shared) -> the response's mean `(..., n)`; of the categorical, probabilities `(..., C, n)`.
        check: raises `ValueError` when a response does not fit, naming the first row that does not.
        features: (response `(..., n)`, predictor `(..., C, n)`) -> the encoder's inputs from the response, besides the
            predictor, `(..., F, n)`; where there is a natural scale, its distance from the predictor.
        outputs: `C`, numbers of the predictor for a row.
        shared: names of the parameters that all rows share, on the log scale.
        normal: (response `(..., n)`, shared `(..., S)`) -> mode and curvature there of −log p as a function of the
            predictor, `(..., n)` each, curvature 0 where there is no mode; None if no response has one, as of labels.
        logits: of a likelihood of classes, from the mean in float64 to logits for metrics, `(..., n)` of two classes
            and `(..., n, C)` of more; None for other responses.
    """

    log_prob: Callable[[Tensor, Tensor, Tensor], Tensor]
    mean: Callable[[Tensor, Tensor], Tensor]
    check: Callable[[Tensor], None]
    features: Callable[[Tensor, Tensor], Tensor]
    outputs: int = 1
    shared: tuple[str, ...] = ()
    normal: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    logits: Callable[[Tensor], Tensor] | None = None


def gaussian(sd: float | None = None) -> ResponseLikelihood:
    r"""Make a normal likelihood, :math:`y \sim N(s, \sigma^2)`.

    Args:
        sd: σ if it is known; otherwise `log_sd` is a shared parameter.

    Raises:
        ValueError: `sd` is not positive.
    """
    fixed = _fixed(sd, "sd")

    def log_prob(y: Tensor, s: Tensor, shared: Tensor) -> Tensor:
        log_sd = shared[..., :1] if fixed is None else fixed
        scale = torch.exp(-log_sd) if isinstance(log_sd, Tensor) else math.exp(-log_sd)
        return -0.5 * ((y - s[..., 0, :]) * scale).square() - log_sd - 0.5 * math.log(2 * math.pi)

    return ResponseLikelihood(
        log_prob,
        mean=lambda s, shared: s[..., 0, :],
        check=partial(_check, expected="finite numbers for a Gaussian response", fits=torch.isfinite),
        features=lambda y, s: y.unsqueeze(-2) - s,
        shared=("log_sd",) if fixed is None else (),
        normal=lambda y, shared: (y, torch.exp(-2 * (shared[..., :1] if fixed is None else y.new_tensor([fixed])))),
    )


def bernoulli() -> ResponseLikelihood:
    r"""Make a likelihood of two classes, :math:`P(y = 1) = 1/(1 + e^{-s})`; the response is 0 or 1."""
    return ResponseLikelihood(
        log_prob=lambda y, s, shared: F.logsigmoid((2 * y - 1) * s[..., 0, :]),
        mean=lambda s, shared: s[..., 0, :].sigmoid(),
        check=partial(_check, expected="labels 0 and 1 for a Bernoulli response", fits=lambda y: (y == 0) | (y == 1)),
        features=lambda y, s: (2 * y - 1).unsqueeze(-2),
        logits=partial(torch.logit, eps=_LEAST),
    )


def poisson() -> ResponseLikelihood:
    r"""Make a likelihood of counts, :math:`y \sim \mathrm{Poisson}(e^s)`."""
    return ResponseLikelihood(
        log_prob=lambda y, s, shared: counts.poisson(y, s[..., 0, :]),
        mean=lambda s, shared: s[..., 0, :].exp(),
        check=partial(_check, expected="counts (whole numbers from 0 on) for a Poisson response", fits=_is_count),
        features=lambda y, s: y.log1p().unsqueeze(-2) - s,
        normal=lambda y, shared: (y.clamp(min=1).log(), y),
    )


def negative_binomial(dispersion: float | None = None) -> ResponseLikelihood:
    r"""Make a likelihood of overdispersed counts of mean :math:`e^s` and variance :math:`e^s + e^{2s}/r`.

    Args:
        dispersion: r if it is known; otherwise `log_dispersion` is a shared parameter.

    Raises:
        ValueError: `dispersion` is not positive.

    >>> likelihood = negative_binomial(dispersion=1.0)  # with r = 1 and mean 1: halves
    >>> likelihood.log_prob(torch.arange(3.0), torch.zeros(1, 3), torch.zeros(0)).exp()
    tensor([0.5000, 0.2500, 0.1250])
    """
    fixed = _fixed(dispersion, "dispersion")

    def log_prob(y: Tensor, s: Tensor, shared: Tensor) -> Tensor:
        log_r = shared[..., :1] if fixed is None else torch.as_tensor(fixed, dtype=s.dtype, device=s.device)
        return counts.negative_binomial(y, s[..., 0, :], log_r)

    def normal(y: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        r = (shared[..., :1] if fixed is None else y.new_tensor([fixed])).exp()
        return y.clamp(min=1).log(), y * r / (y + r)

    return ResponseLikelihood(
        log_prob,
        mean=lambda s, shared: s[..., 0, :].exp(),
        check=partial(_check, expected="counts (whole numbers from 0 on) for a negative binomial one", fits=_is_count),
        features=lambda y, s: y.log1p().unsqueeze(-2) - s,
        shared=("log_dispersion",) if fixed is None else (),
        normal=normal,
    )


def categorical(classes: int) -> ResponseLikelihood:
    r"""Make a likelihood of `classes` labels from 0 on, :math:`P(y = c) \propto e^{s_c}`.

    Raises:
        ValueError: fewer than two classes.

    >>> s = torch.tensor([1.0, 1.0, 2.0]).log().unsqueeze(-1)  # three numbers for one row
    >>> categorical(3).log_prob(torch.tensor([2.0]), s, torch.zeros(0)).exp()
    tensor([0.5000])
    """
    if classes < 2:
        raise ValueError(f"Expected at least 2 classes, but got {classes}")

    def log_prob(y: Tensor, s: Tensor, shared: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(y.shape, (*s.shape[:-2], s.shape[-1]))
        chosen = s.expand(*shape[:-1], *s.shape[-2:]).gather(-2, y.long().expand(shape).unsqueeze(-2)).squeeze(-2)
        return chosen - s.logsumexp(-2)

    return ResponseLikelihood(
        log_prob,
        mean=lambda s, shared: s.softmax(-2),
        check=partial(
            _check,
            expected=f"labels from 0 to {classes - 1} for a categorical response",
            fits=lambda y: _is_count(y) & (y < classes),
        ),
        features=lambda y, s: (y.unsqueeze(-2) == torch.arange(classes, device=y.device)[:, None]).to(y.dtype),
        outputs=classes,
        logits=lambda mean: mean.clamp(min=_LEAST).log().mT,
    )


def _fixed(value: float | None, name: str) -> float | None:
    """Return the logarithm of a known parameter."""
    if value is None:
        return None
    if not 0 < value < math.inf:
        raise ValueError(f"Expected a positive {name}, or None to learn it, but got {value}")
    return math.log(value)


def _is_count(y: Tensor) -> Tensor:
    return (y >= 0) & (y == y.floor()) & y.isfinite()


def _check(y: Tensor, *, expected: str, fits: Callable[[Tensor], Tensor]) -> None:
    for start, part in enumerate(y.split(_CHECKED, -1)):
        wrong = ~fits(part)
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            row = start * _CHECKED + place[-1]
            raise ValueError(f"Expected {expected}, but got {float(part[tuple(place)])} in row {row}")
