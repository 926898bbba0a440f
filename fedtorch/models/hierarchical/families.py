r"""Distributions of one response given its linear predictor, for model criticism.

A likelihood itself only needs sums over a client's rows. Leaving out rows, calibration and replicated responses need
the density, the mean and draws of each one, which a `Family` has.

>>> import torch
>>> eta, one = torch.zeros(1).double(), torch.ones(1).double()
>>> LOGISTIC.log_density(one, eta, one).exp(), POISSON.mean(eta)  # of y = 1 at log-odds 0; a rate of e⁰
(tensor([0.5000], dtype=torch.float64), tensor([1.], dtype=torch.float64))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtorch.models import counts

_SMALL, _COUNTS = 30.0, 120  # small rates, whose counts are found one after the other, and the most of these counts


class Family(NamedTuple):
    """The distribution of y given η = x'θ, and given a scale: the noise variance, the number of trials, thresholds."""

    name: str
    mean: Callable[[Tensor], Tensor]  # η -> E y, of one trial
    log_density: Callable[[Tensor, Tensor, Tensor], Tensor]  # (y, η, scale) -> log p
    draw: Callable[[Tensor, Tensor, Tensor], Tensor]  # (uniform numbers, η, scale) -> y, by the inverse distribution
    scale: Callable[[Any], Tensor] | None = None  # a model's prepared rows -> the known scale, (K,)
    precise: bool = False  # whether a row's weight divides the scale, and is not a power of the density
    counts: bool = False  # whether responses are numbers of events, without an upper bound
    effects: str = "effect"  # what differences of η are called


class Ordered(NamedTuple):
    """Levels of an ordered response, with thresholds as functions of coefficients.

    >>> ordered = Ordered.of(["1", "2", "3"], ["Intercept", "age", "2|3 - 1|2"])
    >>> ordered.names
    ('1|2', '2|3', 'age')
    >>> ordered.shown
    tensor([[-1.,  0.,  0.],
            [-1.,  0.,  1.],
            [ 0.,  1.,  0.]], dtype=torch.float64)
    """

    levels: tuple[str, ...]
    names: tuple[str, ...]  # of thresholds, and of the coefficients of x except the intercept, as in tables
    shown: Tensor  # (q, d) these from the coefficients of the model

    @staticmethod
    def of(levels: Sequence[str], coefficients: Sequence[str]) -> Ordered:
        """Return the thresholds, from coefficients the last of which are differences to the first threshold."""
        if len(levels) < 2 or "Intercept" not in coefficients:
            raise ValueError(
                "Expected at least two levels, and a coefficient 'Intercept' from which thresholds are counted, but "
                f"got {list(levels)} and {list(coefficients)}"
            )
        eye, first = torch.eye(len(coefficients), dtype=torch.float64), list(coefficients).index("Intercept")
        last = len(coefficients) - (len(levels) - 2)
        others = [place for place in range(last) if place != first]
        thresholds = torch.cat([0 * eye[:1], eye[last:]]) - eye[first]
        if alike := [coefficients[place] for place in others if coefficients[place] in Ordered.thresholds(levels)]:
            raise ValueError(
                f"Expected coefficients of other names than the thresholds {Ordered.thresholds(levels)}, but got "
                f"{alike}; rename such columns in the frame"
            )
        names = (*Ordered.thresholds(levels), *(coefficients[place] for place in others))
        return Ordered(tuple(levels), names, torch.cat([thresholds, eye[others]]))

    @property
    def differences(self) -> int:
        """Return the number of coefficients that are differences of thresholds."""
        return len(self.levels) - 2

    @staticmethod
    def ascend(differences: Tensor) -> Tensor:
        """Return whether thresholds with these differences to the first ascend, `(..., C - 2)` -> `(...)`.

        >>> Ordered.ascend(torch.tensor([[1.0, 2.0], [2.0, 1.0], [-1.0, 1.0]]))
        tensor([ True, False, False])
        """
        return (torch.nn.functional.pad(differences, (1, 0)).diff(dim=-1) > 0).all(-1)

    @staticmethod
    def thresholds(levels: Sequence[str]) -> list[str]:
        """Return the names of thresholds, each by its two levels."""
        return [f"{below}|{above}" for below, above in itertools.pairwise(levels)]


def _gaussian_density(y: Tensor, eta: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((y - eta).square() / variance + variance.log() + math.log(2 * math.pi))


def _binomial_density(y: Tensor, eta: Tensor, trials: Tensor) -> Tensor:
    return counts.binomial(y, eta, trials)


def _poisson_density(y: Tensor, eta: Tensor, scale: Tensor) -> Tensor:
    return counts.poisson(y, eta)


def _binomial_draw(uniform: Tensor, eta: Tensor, trials: Tensor) -> Tensor:
    p = eta.sigmoid()
    if bool((trials == 1).all()):
        return (uniform > 1 - p).to(p.dtype)
    from scipy import stats

    return _by_quantiles(stats.binom.ppf, uniform, trials.expand_as(p), p)


def _poisson_draw(uniform: Tensor, eta: Tensor, scale: Tensor) -> Tensor:
    rate = counts.rate(eta)
    if rate.numel() and float(rate.max()) > _SMALL:
        from scipy import stats

        return _by_quantiles(stats.poisson.ppf, uniform, rate)
    y, mass = torch.zeros_like(rate), (-rate).exp()
    below = mass.clone()
    for count in range(1, _COUNTS):
        above = uniform > below
        if not bool(above.any()):
            break
        y += above
        mass *= rate / count
        below += mass
    return y


def _sides(eta: Tensor, scale: Tensor) -> list[Tensor]:
    """Return η minus each threshold, the first 0 and the others in `scale` `(..., thresholds - 1)`."""
    return [eta, *(eta - cut for cut in scale.unbind(-1))]


def _no_mean(eta: Tensor) -> Tensor:
    raise TypeError(
        "Expected a response that has a mean, but got one of ordered levels; ft.inference.predict(run, rows) has the "
        "probability of each"
    )


def _cumulative_density(y: Tensor, eta: Tensor, scale: Tensor) -> Tensor:
    """Return log (σ(a) − σ(b)) = log σ(a) + log σ(−b) + log (1 − exp(b − a)) for a above b."""
    sides = _sides(eta, scale)
    below = [torch.full_like(eta, torch.inf), *sides]  # -b, from the lower threshold
    above = [*(-side for side in sides), torch.full_like(eta, torch.inf)]  # a
    total = torch.full_like(eta, torch.nan)
    for level, (a, b) in enumerate(zip(above, below)):
        apart = (-(-(a + b)).expm1()).clamp(min=torch.finfo(eta.dtype).tiny).log()
        value = torch.nn.functional.logsigmoid(a) + torch.nn.functional.logsigmoid(b) + apart
        total = torch.where(y == level, value, total)
    return total


def _cumulative_draw(uniform: Tensor, eta: Tensor, scale: Tensor) -> Tensor:
    return sum((uniform > (-side).sigmoid() for side in _sides(eta, scale)), torch.zeros_like(eta))


def _by_quantiles(quantile: Callable[..., np.ndarray], uniform: Tensor, *parameters: Tensor) -> Tensor:
    return torch.from_numpy(quantile(uniform.cpu().numpy(), *(part.cpu().numpy() for part in parameters))).to(uniform)


GAUSSIAN = Family(
    "gaussian",
    lambda eta: eta,
    _gaussian_density,
    lambda uniform, eta, variance: eta + variance.sqrt() * torch.special.ndtri(uniform),
    lambda prepared: prepared.log_noise.exp(),
    precise=True,
    effects="effect on the response",
)
LOGISTIC = Family("logistic", torch.sigmoid, _binomial_density, _binomial_draw, effects="log-odds")
CUMULATIVE = Family(  # y: numbers of levels from 0
    "cumulative", _no_mean, _cumulative_density, _cumulative_draw, effects="log-odds"
)
POISSON = Family("poisson", counts.rate, _poisson_density, _poisson_draw, counts=True, effects="log rate")
