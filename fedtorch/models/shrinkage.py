r"""Penalised regression with shared penalties: lasso, ridge, elastic net, fused lasso and horseshoe priors of θ_k.

.. math::
    y_k \sim N(X_k \theta_k, \sigma^2 I), \qquad
    p(\theta_k \mid \varphi) \propto N(\theta_k; 0, b^{-1} I) \prod_i t((A\theta_k)_i),

with φ the logarithms of the penalties and of σ².

Lasso: t is a Laplace density of diversity σ/λ on each coefficient. Ridge: N(0, σ²/λ). Elastic net:
exp(−λ₁|θ|/σ − λ₂θ²/(2σ²)), normalised. Fused lasso: exp(−λ₁|θ_j|/σ − λ₂|θ_j − θ_{j−1}|/σ), normalised over θ.
Horseshoe: N(0, s²τ²σ²) with s half-Cauchy.

Given φ, θ_k is integrated by expectation propagation over its own factors t: each is replaced by a normal site of its
contrast, by exact one-dimensional moments. For φ nodes go where a device's tilted distribution is, so that a device's
posterior is a mixture over them. The ridge needs no site and is exact.

The paper prints N(0, σ/λ) for the ridge, where σ²/λ is meant (Van Erp et al., section 3.1).

Source: Yue, Kontar, Estrada Gómez (2022), section 4.3; Van Erp, Oberski, Mulder (2019), "Shrinkage priors for Bayesian
penalized regression"; Seeger (2008), "Bayesian inference and optimal design for the sparse linear model".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy
import scipy.signal
import torch
from torch import Tensor

from fedtorch.models import hierarchical, hyperpriors
from fedtorch.models.hierarchical import Hierarchy, Likelihood, Local, Model, Statistics
from fedtorch.models.hyperpriors import Hyperprior
from fedtorch.models.quadrature import Rule

__all__ = ["Penalty", "elastic_net", "fused_lasso", "horseshoe", "lasso", "penalised", "ridge"]

_SWEEPS = 60
_STILL = 1e-7  # relative change of a contrast's sd, and of its mean in sd
_DAMPING = 0.8
_SCALES = torch.linspace(-14, 14, 71, dtype=torch.float64)  # log s of the horseshoe
_FUSED_REACH, _FUSED_POINTS = 40.0, 16_001  # of the grid of the fused lasso's normaliser
_DEEP = 50.0
_LEAST_PRECISION = 1e-10  # of a horseshoe's site, relative to its cavity


class Moments1(NamedTuple):
    """Of N(u; m, v) t(u): log normaliser, mean, variance."""

    log_normaliser: Tensor
    mean: Tensor
    variance: Tensor


class Penalty(NamedTuple):
    """A prior of θ_k given the logarithms ζ of its penalties and log σ²."""

    names: tuple[str, ...]  # of the penalties
    contrasts: Tensor  # (m, d) A
    ridge: Callable[[Tensor, Tensor], Tensor]  # (ζ (..., s), log σ² (...)) -> b (...)
    rates: Callable[[Tensor, Tensor], Tensor]  # -> (..., m), what `site` takes
    log_normaliser: Callable[[Tensor, Tensor], Tensor]  # -> log ∫ exp(−b|θ|²/2) ∏ t(Aθ) dθ (...)
    scales: Callable[[Tensor, Tensor], Tensor]  # (mean square of the coefficients (), log σ² ()) -> ζ (s,) to start at
    site: Callable[[Tensor, Tensor, Tensor], Moments1]  # (m, v, rate) -> moments of N(u; m, v) t(u)


def ridge(features: int) -> Penalty:
    """θ_kj ~ N(0, σ²/λ)."""
    return elastic_net(features, l1=0.0)


def lasso(features: int) -> Penalty:
    """θ_kj Laplace with diversity σ/λ."""
    return elastic_net(features, l2=0.0)


def elastic_net(features: int, *, l1: float | None = None, l2: float | None = None) -> Penalty:
    """exp(−λ₁|θ_kj|/σ − λ₂θ_kj²/(2σ²)).

    Args:
        features: d.
        l1, l2: values of λ₁ and λ₂; None for those that are learnt. With `l1=0` it is the ridge, with `l2=0` the lasso.
    """
    if (l1 == 0 and l2 == 0) or min(l1 or 0.0, l2 or 0.0) < 0:
        raise ValueError(f"Expected penalties of at least 0, not both 0, but got l1={l1} and l2={l2}")
    names = tuple(name for name, value in (("log l1", l1), ("log l2", l2)) if value is None)
    zero = torch.zeros((), dtype=torch.float64)

    def parts(zeta: Tensor, log_noise: Tensor) -> tuple[Tensor, Tensor]:
        """Laplace rate a and precision b."""
        first = zeta[..., 0].exp() if l1 is None else zero + l1
        second = zeta[..., -1].exp() if l2 is None else zero + l2
        return (first * (-log_noise / 2).exp()), second * (-log_noise).exp()

    def log_normaliser(zeta: Tensor, log_noise: Tensor) -> Tensor:
        a, b = parts(zeta, log_noise)
        if l2 == 0:
            return features * (math.log(2) - a.log())
        if l1 == 0:
            return features / 2 * (math.log(2 * math.pi) - b.log())
        return features * (0.5 * (2 * math.pi / b).log() + torch.special.erfcx(a / (2 * b).sqrt()).log())

    def scales(variance: Tensor, log_noise: Tensor) -> Tensor:
        first = (math.log(2) + log_noise - variance.log()) / 2
        second = log_noise - variance.log()
        return torch.stack([value for value, given in ((first, l1), (second, l2)) if given is None])

    contrasts = torch.eye(features, dtype=torch.float64)[: 0 if l1 == 0 else None]
    return Penalty(
        names,
        contrasts,
        lambda zeta, noise: parts(zeta, noise)[1],
        lambda zeta, noise: parts(zeta, noise)[0][..., None].expand(*noise.shape, len(contrasts)),
        log_normaliser,
        scales,
        _laplace_site,
    )


def fused_lasso(features: int) -> Penalty:
    """exp(−λ₁ Σ|θ_j|/σ − λ₂ Σ|θ_j − θ_{j−1}|/σ); coefficients in an order that means something."""
    if features < 2:
        raise ValueError(f"Expected at least 2 features to fuse, but got {features}; use lasso")
    eye = torch.eye(features, dtype=torch.float64)
    ratios = torch.linspace(-6, 8, 141, dtype=torch.float64)
    table = torch.tensor([_fused_normaliser(features, math.exp(r)) for r in ratios.tolist()], dtype=torch.float64)

    def scales(variance: Tensor, log_noise: Tensor) -> Tensor:
        return ((math.log(2) + log_noise - variance.log()) / 2).expand(2)

    def rates(zeta: Tensor, log_noise: Tensor) -> Tensor:
        each = (zeta - log_noise[..., None] / 2).exp()
        return torch.cat([each[..., :1].expand(*log_noise.shape, features),
                          each[..., 1:].expand(*log_noise.shape, features - 1)], -1)  # fmt: skip

    def log_normaliser(zeta: Tensor, log_noise: Tensor) -> Tensor:
        return _interpolated(zeta[..., 1] - zeta[..., 0], ratios, table) - features * (zeta[..., 0] - log_noise / 2)

    return Penalty(
        ("log l1", "log l2"), torch.cat([eye, eye[1:] - eye[:-1]]), lambda zeta, noise: torch.zeros_like(noise),
        rates, log_normaliser, scales, _laplace_site,
    )  # fmt: skip


def horseshoe(features: int) -> Penalty:
    """θ_kj ~ N(0, s_kj² τ² σ²), s_kj half-Cauchy; τ is learnt."""
    return Penalty(
        ("log tau",),
        torch.eye(features, dtype=torch.float64),
        lambda zeta, noise: torch.zeros_like(noise),
        lambda zeta, noise: (zeta + noise[..., None] / 2).exp().expand(*noise.shape, features),
        lambda zeta, noise: torch.zeros_like(noise),
        lambda variance, noise: ((variance.log() - noise) / 2)[None],
        _horseshoe_site,
    )


def penalised(
    penalty: Penalty,
    *,
    penalties: Hyperprior | None = None,
    noise: Hyperprior | None = None,
    rule: Rule | None = None,
) -> Model:
    """Linear regression with a penalty that all devices share.

    Args:
        penalty: such as `lasso(d)`.
        penalties: hyperprior of the logarithm of each penalty; default: log-normal(0, 5). For a half-Cauchy prior of
            λ itself, `half_cauchy(scale, power=1)`.
        noise: hyperprior of log σ²; default: log-normal(0, 5).
        rule: nodes over φ.
    """
    own = hyperpriors.log_normal(0.0, 5.0) if penalties is None else penalties
    features = penalty.contrasts.shape[1]
    count = len(penalty.names)
    prior = hyperpriors.prior(torch.zeros(0), torch.zeros(0, 0), [own] * count)
    hierarchy = Hierarchy(
        penalty.names,
        torch.zeros(features, 0, dtype=torch.float64),
        lambda zeta: zeta.new_zeros((*zeta.shape[:-1], features, features)),
        lambda spread, log_noise: penalty.scales(spread.diagonal().mean(), log_noise),
        prior,
    )

    def local(data: Statistics, mean: Tensor, covariance: Tensor, zeta: Tensor, log_noise: Tensor | None) -> Local:
        assert log_noise is not None
        return _sparse(penalty, data, zeta, log_noise)

    def prepare(data: object) -> Statistics:
        return hierarchical.statistics(data, features)

    likelihood = Likelihood(
        prepare, local, hierarchical.expected_residual, lambda data: len(penalty.contrasts) * len(_SCALES)
    )
    last = hyperpriors.log_normal(0.0, 5.0) if noise is None else noise
    return hierarchical.of(hierarchy, likelihood, noise=last, rule=rule)


def _sparse(penalty: Penalty, data: Statistics, zeta: Tensor, log_noise: Tensor) -> Local:
    """Expectation propagation over the factors of θ, at each node of φ."""
    contrasts = penalty.contrasts.to(log_noise)
    features = contrasts.shape[1]
    precision = (-log_noise).exp()
    eye = torch.eye(features, dtype=log_noise.dtype, device=log_noise.device)
    b = penalty.ridge(zeta, log_noise).expand_as(log_noise)
    base = data.gram[:, None] * precision[..., None, None] + b[..., None, None] * eye
    pull = data.cross[:, None] * precision[..., None]
    rates = penalty.rates(zeta, log_noise)
    shift, weight = torch.zeros_like(rates), _first_precision(rates, precision)
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
    total = pull + shift @ contrasts
    log_evidence = (
        -0.5 * data.count[:, None] * (math.log(2 * math.pi) + log_noise)
        - 0.5 * data.square[:, None] * precision
        + 0.5 * (total * mean).sum(-1)
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
    return Local(log_evidence, mean, covariance)


def _first_precision(rates: Tensor, precision: Tensor) -> Tensor:
    """Sites to start from, of the order of the factors' own widths."""
    return rates.square() / 2 + 1e-6 * precision[..., None]


def _posterior(
    base: Tensor, pull: Tensor, contrasts: Tensor, shift: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    precision = base + (contrasts.mT * weight[..., None, :]) @ contrasts
    factor = torch.linalg.cholesky_ex(precision).L
    eye = torch.eye(base.shape[-1], dtype=base.dtype, device=base.device)
    half = torch.linalg.solve_triangular(factor, eye.expand_as(base), upper=False)
    covariance = half.mT @ half
    return (covariance @ (pull + shift @ contrasts)[..., None])[..., 0], covariance, factor


def _contrasts(contrasts: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of Aθ."""
    return mean @ contrasts.mT, ((contrasts @ covariance) * contrasts).sum(-1)


def _laplace_site(mean: Tensor, variance: Tensor, rate: Tensor) -> Moments1:
    """Moments of N(u; m, v) exp(−a|u|): two normal densities, each cut off at 0."""
    sd = variance.sqrt()
    z = mean / sd
    right, left = _cut(z - rate * sd), _cut(-z - rate * sd)
    log_right, log_left = right[0] - rate * mean, left[0] + rate * mean
    log_total = torch.logaddexp(log_right, log_left)
    p = (log_right - log_total).exp()
    first = sd * (p * right[1] - (1 - p) * left[1])
    spread = p * right[2] + (1 - p) * left[2] + p * (1 - p) * (right[1] + left[1]).square()
    return Moments1(log_total + (rate * sd).square() / 2, first, variance * spread)


def _cut(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log Φ(z), and mean and variance of N(z, 1) above 0."""
    ratio = (-0.5 * z.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(z)).exp()
    mean = z + ratio
    variance = (1 - ratio * mean).clamp(min=0)
    deep = z < -_DEEP  # there both differences cancel: the density is exponential of rate |z|
    tail = -1 / torch.where(deep, z, -_DEEP)
    mean = torch.where(deep, tail - 2 * tail**3 + 10 * tail**5, mean)
    variance = torch.where(deep, tail.square() - 6 * tail**4, variance)
    return torch.special.log_ndtr(z), mean, variance


def _horseshoe_site(mean: Tensor, variance: Tensor, scale: Tensor) -> Moments1:
    """Moments of N(u; m, v) times the horseshoe density of this scale: a mixture over the local scale."""
    log_scales = _SCALES.to(mean)
    # log of the half-Cauchy density of e^x, its Jacobian and the width of a node
    log_weight = math.log(2 / math.pi) + log_scales - torch.nn.functional.softplus(2 * log_scales)
    log_weight = log_weight + (log_scales[1] - log_scales[0]).log()
    prior = (scale[..., None] * log_scales.exp()).square()
    total = prior + variance[..., None]
    log = log_weight - 0.5 * (2 * math.pi * total).log() - 0.5 * mean[..., None].square() / total
    own = torch.softmax(log, -1)
    gain = prior / total
    at = gain * mean[..., None]
    first = (own * at).sum(-1)
    spread = (own * (gain * variance[..., None] + (at - first[..., None]).square())).sum(-1)
    return Moments1(log.logsumexp(-1), first, spread)


def _fused_normaliser(features: int, ratio: float) -> float:
    """log ∫ exp(−Σ|x_j| − ratio Σ|x_j − x_{j−1}|) dx: convolutions, each exact for piecewise linear functions.

    A convolution with exp(−ratio |x|) is a recursion from either side.
    """
    x = numpy.linspace(-_FUSED_REACH, _FUSED_REACH, _FUSED_POINTS)
    h = x[1] - x[0]
    decay, lost = math.exp(-ratio * h), -math.expm1(-ratio * h)
    near = 1 / ratio - lost / (ratio * ratio * h)
    far = lost / (ratio * ratio * h) - decay / ratio
    own = numpy.exp(-numpy.abs(x))
    chain, log_scale = own, 0.0
    for _ in range(features - 1):
        forward = scipy.signal.lfilter([near, far], [1.0, -decay], chain)
        backward = scipy.signal.lfilter([near, far], [1.0, -decay], chain[::-1])[::-1]
        chain = own * (forward + backward)
        log_scale += math.log(chain.max())
        chain = chain / chain.max()
    return log_scale + math.log(numpy.trapezoid(chain, x))


def _interpolated(at: Tensor, nodes: Tensor, values: Tensor) -> Tensor:
    """Linear interpolation, and extrapolation, on even nodes."""
    nodes, values = nodes.to(at), values.to(at)
    place = (at - nodes[0]) / (nodes[1] - nodes[0])
    left = place.floor().clamp(0, len(nodes) - 2)
    index = left.to(torch.int64)
    return values[index] + (place - left) * (values[index + 1] - values[index])
