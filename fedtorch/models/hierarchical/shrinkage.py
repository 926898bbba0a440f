r"""Penalised regression with shared penalties: lasso, ridge, elastic net, fused lasso and horseshoe priors of θ_k.

.. math::
    y_k \sim N(X_k \theta_k, \sigma^2 I), \qquad
    p(\theta_k \mid \varphi) \propto N(\theta_k; 0, b^{-1} I) \prod_i t((A\theta_k)_i),

with φ the logarithms of the penalties and of σ², and factors t of contrasts A as in `penalties`.

Given φ, θ_k is integrated by expectation propagation over its own factors t: each is approximated by a normal site of
its contrast, by exact one-dimensional moments. Nodes of φ adapt to a device's tilted distribution, so that a device's
posterior is a mixture over them. The ridge needs no site and is exact.

Source: Yue, Kontar, Estrada Gómez (2022), section 4.3; Van Erp, Oberski, Mulder (2019), "Shrinkage priors for Bayesian
penalized regression"; Seeger (2008), "Bayesian inference and optimal design for the sparse linear model".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch._lazy import only
from fedtorch.models._reduced import Reduced, reduced
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import hyperpriors
from fedtorch.models.hierarchical._sites import LOG_SCALES
from fedtorch.models.hierarchical.factor import Conditional, DeviceLikelihood, Model, of
from fedtorch.models.hierarchical.hierarchy import Hierarchy
from fedtorch.models.hierarchical.hyperpriors import Hyperprior
from fedtorch.models.hierarchical.linear_devices import expected_residual
from fedtorch.models.hierarchical.penalties import (
    ShrinkagePrior as ShrinkagePrior,
    elastic_net as elastic_net,
    fused_lasso as fused_lasso,
    horseshoe as horseshoe,
    lasso as lasso,
    ridge as ridge,
)
from fedtorch.models.linear import LINEAR_EXTRAS, sufficient_statistics
from fedtorch.models.quadrature import QuadratureRule
from fedtorch.models.rows import observations

__all__ = ["elastic_net", "fused_lasso", "horseshoe", "lasso", "penalised", "ridge"]
__dir__ = only(__all__)

_SWEEPS = 60
_STILL = 1e-7  # relative change of a contrast's sd, and of its mean in sd
_DAMPING = 0.8
_LEAST_PRECISION = 1e-10  # of a horseshoe's site, relative to its cavity


def penalised(
    penalty: ShrinkagePrior,
    *,
    penalties: Hyperprior | None = None,
    noise: Hyperprior | None = None,
    rule: QuadratureRule | None = None,
) -> Model:
    """Return linear regression with a penalty that all devices share.

    Args:
        penalty: such as `lasso(d)`.
        penalties: hyperprior of the logarithm of each penalty; default: log-normal(0, 5). For a half-Cauchy prior of
            λ itself, `half_cauchy(scale, power=1)`.
        noise: hyperprior of log σ²; default: log-normal(0, 5).
        rule: nodes over φ.

    >>> import torch, fedtorch as ft
    >>> model = penalised(ridge(features=1))
    >>> model.names
    ('log l2', 'log noise')
    >>> data = ft.data.from_tensors([(torch.ones(3, 1), torch.full((3,), 4.0))])
    >>> phi = torch.zeros(1, 1, 2).double()  # λ = 1, σ = 1
    >>> found = model.given(phi, torch.ones(1, 1).double(), model.prepare(data.stack([0])))
    >>> found.means.round(decimals=6)  # 3 · 4 / (3 + λ)
    tensor([[[3.]]], dtype=torch.float64)
    """
    hyperprior = hyperpriors.log_normal(0.0, 5.0) if penalties is None else penalties
    features = penalty.contrasts.shape[1]
    count = len(penalty.names)
    prior = hyperpriors.prior(torch.zeros(0), torch.zeros(0, 0), [hyperprior] * count)
    hierarchy = Hierarchy(
        penalty.names,
        torch.zeros(features, 0, dtype=torch.float64),
        lambda zeta: zeta.new_zeros((*zeta.shape[:-1], features, features)),
        lambda spread, log_noise: penalty.scales(spread.diagonal().mean(), log_noise),
        prior,
    )

    def local(data: Reduced, mean: Tensor, covariance: Tensor, zeta: Tensor, log_noise: Tensor | None) -> Conditional:
        assert log_noise is not None
        return _sparse(penalty, data, zeta, log_noise)

    def prepare(data: Any) -> Reduced:
        rows = observations(data, features, LINEAR_EXTRAS).whitened()
        return reduced(sufficient_statistics(*rows)._replace(count=data.count.to(torch.float64)), rows)

    likelihood = DeviceLikelihood(
        prepare,
        local,
        expected_residual,
        lambda data: data.count,
        lambda data: len(penalty.contrasts) * len(LOG_SCALES),
    )
    last = hyperpriors.log_normal(0.0, 5.0) if noise is None else noise
    return of(hierarchy, likelihood, noise=last, rule=rule)


def _sparse(penalty: ShrinkagePrior, data: Reduced, zeta: Tensor, log_noise: Tensor) -> Conditional:
    """Run expectation propagation over the factors of θ, at each node of φ."""
    contrasts = penalty.contrasts.to(log_noise)
    features = contrasts.shape[1]
    precision = (-log_noise).exp()
    eye = torch.eye(features, dtype=log_noise.dtype, device=log_noise.device)
    b = penalty.ridge(zeta, log_noise).expand_as(log_noise)
    gram = (data.root @ data.root.mT)[:, None] * precision[..., None, None]
    base = gram + b[..., None, None] * eye
    pull = (data.root @ data.misfit(torch.zeros_like(data.fit)[:, None]).mT).mT * precision[..., None]
    rates = penalty.rates(zeta, log_noise)
    shift, weight = torch.zeros_like(rates), _first_precision(rates, gram, contrasts)
    mean, covariance, factor = _posterior(base, pull, contrasts, shift, weight)
    for _ in range(_SWEEPS if len(contrasts) else 0):
        at, spread = _contrasts(contrasts, mean, covariance)
        left = (1 / spread - weight).clamp(min=torch.finfo(at.dtype).tiny)
        m, v = (at / spread - shift) / left, 1 / left
        tilted = penalty.site(m, v, rates)
        target = torch.maximum(1 / tilted.variance - left, _LEAST_PRECISION * left)
        moved = target * tilted.mean + left * (tilted.mean - m)
        shift = shift + _DAMPING * (moved - shift)
        weight = weight + _DAMPING * (target - weight)
        mean, covariance, factor = _posterior(base, pull, contrasts, shift, weight)
        new, wide = _contrasts(contrasts, mean, covariance)
        if bool((((new - at).abs() / wide.sqrt()).amax() < _STILL) & (((wide - spread).abs() / wide).amax() < _STILL)):
            break
    misfit, at = data.misfit(mean), mean @ contrasts.mT
    deviance = (data.rest[:, None] + misfit.square().sum(-1)) * precision + b * mean.square().sum(-1)
    log_evidence = (
        -0.5 * data.count[:, None] * (math.log(2 * math.pi) + log_noise)
        - 0.5 * (deviance + (at * (weight * at - 2 * shift)).sum(-1))
        - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        + features / 2 * math.log(2 * math.pi)
        - penalty.log_normaliser(zeta, log_noise)
    )
    if len(contrasts):
        at, spread = _contrasts(contrasts, mean, covariance)
        left = (1 / spread - weight).clamp(min=torch.finfo(at.dtype).tiny)
        m, v = (at / spread - shift) / left, 1 / left
        both = 0.5 * ((m * left + shift).square() / (left + weight) - m.square() * left) - 0.5 * (weight * v).log1p()
        log_evidence = log_evidence + (penalty.site(m, v, rates).log_normaliser - both).sum(-1)
    none = torch.zeros_like(mean), covariance.new_zeros(covariance[:, 0].shape)  # no mean is shared
    return Conditional(log_evidence, lambda weights: none, lambda: Moments(mean, covariance))


def _first_precision(rates: Tensor, gram: Tensor, contrasts: Tensor) -> Tensor:
    """Return initial sites of the order of the factors' own widths, and not below the rows' information."""
    return rates.square() / 2 + 1e-6 * gram.diagonal(dim1=-2, dim2=-1) @ contrasts.square().mT


def _posterior(
    base: Tensor, pull: Tensor, contrasts: Tensor, shift: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    precision = base + (contrasts.mT * weight[..., None, :]) @ contrasts
    factor = torch.linalg.cholesky_ex(precision).L
    half = linalg.inverse_factor(factor)
    covariance = half.mT @ half
    return (covariance @ (pull + shift @ contrasts)[..., None])[..., 0], covariance, factor


def _contrasts(contrasts: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances of Aθ."""
    return mean @ contrasts.mT, ((contrasts @ covariance) * contrasts).sum(-1)
