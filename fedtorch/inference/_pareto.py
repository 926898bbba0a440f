"""Pareto-smoothed importance sampling of many rows at once, and leave-one-out predictive densities of rows.

The largest weights of a row are replaced by quantiles of a generalised Pareto distribution fitted to them. Its shape k
shows how far the weights can be trusted: above 0.7 their mean has no useful finite-sample error.

Source: Vehtari, Simpson, Gelman, Yao and Gabry (2024), "Pareto smoothed importance sampling", JMLR 25; Zhang and
Stephens (2009), "A new and efficient estimation method for the generalized Pareto distribution"; Vehtari, Gelman and
Gabry (2017), "Practical Bayesian model evaluation using leave-one-out cross-validation and WAIC".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_FEWEST = 5  # of the largest weights, for a fit
_PRIOR_SCALE, _PRIOR_SHAPE = 3.0, 10.0
_TOGETHER = 2**21  # numbers of one array of the fit


class Smoothed(NamedTuple):
    """Smoothed weights of draws, for each row."""

    log_weights: Tensor  # (..., S); the weights sum to 1
    shape: Tensor  # (...) Pareto's k; infinite where too few weights are large


def smoothed(log_ratios: Tensor, efficiency: float = 1.0) -> Smoothed:
    """Return smoothed weights of the draws of each row.

    Args:
        log_ratios: `(..., S)`, up to a constant for each row.
        efficiency: effective sample size of a draw, 1 for independent draws.

    >>> ratios = torch.distributions.Pareto(1.0, 2.0).icdf((torch.arange(2000.0).double() + 0.5) / 2000).log()
    >>> round(float(smoothed(ratios).shape), 1)  # 1 / 2
    0.5
    """
    draws = log_ratios.shape[-1]
    if draws < _FEWEST:
        raise ValueError(f"Expected at least {_FEWEST} draws, but got {draws}; ask for more draws=")
    tail = math.ceil(min(draws / 5, 3 * (draws / efficiency) ** 0.5))
    flat = log_ratios.reshape(-1, draws)
    ordered, order = (flat - flat.amax(-1, keepdim=True)).sort(-1)
    cutoff = ordered[:, -tail - 1].clamp(min=math.log(torch.finfo(flat.dtype).tiny))
    sizes = (ordered > cutoff[:, None]).sum(-1)
    shape = torch.full_like(cutoff, torch.inf)
    for size in sizes.unique().tolist():
        if size >= _FEWEST:
            for rows in (sizes == size).nonzero()[:, 0].split(max(1, _TOGETHER // (size * _points(size)))):
                shape[rows], ordered[rows, -size:] = _replaced(ordered[rows, -size:], cutoff[rows])
    weights = torch.empty_like(flat).scatter_(1, order, ordered.clamp_(max=0))
    weights = weights - weights.logsumexp(-1, keepdim=True)
    return Smoothed(weights.reshape_as(log_ratios), shape.reshape(log_ratios.shape[:-1]))


def _replaced(tail: Tensor, cutoff: Tensor) -> tuple[Tensor, Tensor]:
    """Return (shape, smoothed logarithms) of the largest weights `(R, M)`, ascending; unchanged if the fit fails."""
    least = cutoff.exp()[:, None]
    shape, scale = _fitted(tail.exp() - least)
    middle = (torch.arange(tail.shape[1]).to(tail) + 0.5) / tail.shape[1]
    raised = -torch.log1p(-middle)
    flat = shape.abs()[:, None] < torch.finfo(tail.dtype).eps
    excess = torch.where(flat, raised, torch.expm1(shape[:, None] * raised) / shape[:, None].where(~flat, 1.0))
    fits = (shape.isfinite() & (scale > 0))[:, None]
    return shape.where(scale > 0, torch.inf), torch.where(fits, (scale[:, None] * excess + least).log(), tail)


def _points(size: int) -> int:
    return 30 + int(size**0.5)


def _fitted(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Fit shape and scale `(R,)` to ascending positive numbers `(R, M)`, by an approximate posterior mean."""
    size = excess.shape[1]
    points = _points(size)
    grid = 1 - (points / (torch.arange(points).to(excess) + 0.5)).sqrt()
    quartile = excess[:, int(size / 4 + 0.5) - 1, None]
    rate = grid / (_PRIOR_SCALE * quartile) + 1 / excess[:, -1:]
    mean = torch.log1p(-rate[:, :, None] * excess[:, None]).mean(-1)
    weights = torch.softmax(size * ((-rate / mean).log() - mean - 1), -1)
    weights = weights.where(weights >= 10 * torch.finfo(excess.dtype).eps, 0.0)
    best = (rate * weights).sum(-1) / weights.sum(-1)
    shape = torch.log1p(-best[:, None] * excess).mean(-1)
    return (size * shape + _PRIOR_SHAPE * 0.5) / (size + _PRIOR_SHAPE), -shape / best


class LeftOut(NamedTuple):
    """Predictive densities of rows `(...)` left out, estimated from the draws."""

    elpd: Tensor  # log predictive density
    lppd: Tensor  # log predictive density of a row that was not left out
    doubt: Tensor  # Pareto's k, or the variance of the log density


def left_out(log_density: Tensor, efficiency: float = 1.0) -> LeftOut:
    """Return leave-one-out densities by smoothed importance sampling, from log densities `(..., S)` at the draws."""
    weights = smoothed(-log_density, efficiency)
    elpd = (weights.log_weights + log_density).logsumexp(-1)
    return LeftOut(elpd, _log_mean(log_density), weights.shape)


def widely_applicable(log_density: Tensor, efficiency: float = 1.0) -> LeftOut:
    """Return leave-one-out densities by Watanabe's approximation: lppd minus the log density's variance over draws.

    >>> row = widely_applicable(torch.tensor([[0.2, 0.4]]).double().log())
    >>> row.lppd.exp(), (row.lppd - row.elpd - row.doubt).abs() < 1e-12
    (tensor([0.3000], dtype=torch.float64), tensor([True]))
    """
    variance, mean = log_density.var(-1, correction=0), _log_mean(log_density)
    return LeftOut(mean - variance, mean, variance)


def _log_mean(log_density: Tensor) -> Tensor:
    return log_density.logsumexp(-1) - math.log(log_density.shape[-1])
