"""Rows that are independent given f: their expected log-likelihoods and natural-gradient sites, for any likelihood."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch, linear_operator

MultivariateNormal = gpytorch.distributions.MultivariateNormal
DiagLinearOperator = linear_operator.operators.DiagLinearOperator
GaussianLikelihood = gpytorch.likelihoods.GaussianLikelihood
LaplaceLikelihood = gpytorch.likelihoods.LaplaceLikelihood


def row_fit(likelihood: Any, y: Tensor, mean: Tensor, variance: Tensor, mask: Tensor, extra: tuple[Any, ...]) -> Tensor:
    """Return E[log p(y_n | f_n)] for f_n ~ N(mean, variance), `(*b, N)`, 0 where masked out.

    In closed form for Gaussian and Laplace likelihoods, of which quadrature would miss the latter's kink; otherwise by
    the likelihood's own `expected_log_prob`.

    Args:
        likelihood: any GPyTorch likelihood of one-dimensional outputs.
        y: outputs `(*b, N)`.
        mean: of f `(*b, N)`.
        variance: of f `(*b, N)`, positive except on padding.
        mask: `(*b, N)`, 1 for rows that are there.
        extra: further fields of the likelihood, `(*b, N)` each.
    """
    if isinstance(likelihood, GaussianLikelihood):
        gap = (y - mean).square() + variance
        return -0.5 * mask * (math.log(2 * math.pi) + likelihood.noise.log() + gap / likelihood.noise)
    there = mask > 0
    variance = torch.where(there, variance, torch.ones_like(variance))
    if isinstance(likelihood, LaplaceLikelihood):
        scale = likelihood.noise.sqrt()
        value = -(2 * scale).log() - _absolute(y - mean, variance.sqrt()) / scale
        return torch.where(there, value, torch.zeros_like(value))
    function = MultivariateNormal(mean, DiagLinearOperator(variance), validate_args=False)
    value = likelihood.expected_log_prob(y, function, *extra)
    return torch.where(there, value, torch.zeros_like(value))


def row_sites(
    likelihood: Any,
    y: Tensor,
    level: Tensor,
    linear: Tensor,
    variance: Tensor,
    mask: Tensor,
    extra: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (precision, shift, expected log-likelihood) of every row about f − level, `(*b, N)` each.

    With m, v the moments of f − level, precision β = −2 ∂/∂v, at least 0, and shift ∂/∂m + β m. Arguments as those of
    `row_fit`, with the mean in two parts, the unit's level `(*b, 1)` and the rest `(*b, N)`.
    """
    with torch.enable_grad():
        mean = linear.detach().clone().requires_grad_()
        spread = variance.detach().clone().requires_grad_()
        value = row_fit(likelihood, y, mean + level.detach(), spread, mask, extra)
        slope, curve = torch.autograd.grad(value.sum(), [mean, spread])
    precision = (-2 * curve).clamp(min=0)
    return precision, slope + precision * linear, value.detach()


def _absolute(mean: Tensor, sd: Tensor) -> Tensor:
    """Return E|z| for z ~ N(mean, sd²)."""
    far = mean / sd
    density = (-0.5 * far.square()).exp() * math.sqrt(2 / math.pi)
    return sd * density + mean * torch.erf(far / math.sqrt(2))
