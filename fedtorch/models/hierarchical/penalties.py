r"""Priors of coefficients that shrink them: ridge, lasso, elastic net, fused lasso and horseshoe.

Lasso: a Laplace density of diversity σ/λ on each coefficient. Ridge: N(0, σ²/λ). Elastic net:
exp(−λ₁|θ|/σ − λ₂θ²/(2σ²)), normalised. Fused lasso: exp(−λ₁|θ_j|/σ − λ₂|θ_j − θ_{j−1}|/σ), normalised over θ.
Horseshoe: N(0, s²τ²σ²) with s half-Cauchy.

The paper prints N(0, σ/λ) for the ridge instead of σ²/λ (Van Erp et al., section 3.1).

Source: Yue, Kontar, Estrada Gómez (2022), section 4.3; Van Erp, Oberski, Mulder (2019), "Shrinkage priors for Bayesian
penalized regression".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from fedtorch.models.hierarchical import _sites as sites
from fedtorch.models.hierarchical._sites import Moments1

_FUSED_REACH, _FUSED_POINTS = 40.0, 16_001  # grid of the fused lasso's normaliser


class ShrinkagePrior(NamedTuple):
    """A prior of θ_k given the logarithms ζ of its penalties and log σ².

    >>> import torch
    >>> penalty, flat = lasso(features=1), torch.tensor([1e9]).double()
    >>> found = penalty.site(torch.zeros(1).double(), flat, torch.tensor([2.0]).double())  # N(u; 0, 10⁹) exp(−2|u|)
    >>> found.variance.round(decimals=3)  # of the Laplace density, 2 / 2²
    tensor([0.5000], dtype=torch.float64)
    """

    names: tuple[str, ...]  # of the penalties
    contrasts: Tensor  # (m, d) A
    ridge: Callable[[Tensor, Tensor], Tensor]  # (ζ (..., s), log σ² (...)) -> b (...)
    rates: Callable[[Tensor, Tensor], Tensor]  # -> (..., m), input of `site`
    log_normaliser: Callable[[Tensor, Tensor], Tensor]  # -> log ∫ exp(−b|θ|²/2) ∏ t(Aθ) dθ (...)
    scales: Callable[[Tensor, Tensor], Tensor]  # (mean square of the coefficients (), log σ² ()) -> ζ (s,) to start at
    site: Callable[[Tensor, Tensor, Tensor], Moments1]  # (m, v, rate) -> moments of N(u; m, v) t(u)


def ridge(features: int) -> ShrinkagePrior:
    """Return the ridge penalty, θ_kj ~ N(0, σ²/λ).

    >>> import torch
    >>> penalty = ridge(features=2)
    >>> precision = penalty.ridge(torch.tensor([0.0]), torch.tensor(2.0).log())
    >>> penalty.names, round(float(precision), 3)  # λ/σ² of λ = 1, σ² = 2
    (('log l2',), 0.5)
    """
    return elastic_net(features, l1=0.0)


def lasso(features: int) -> ShrinkagePrior:
    """Return the lasso penalty, θ_kj Laplace with diversity σ/λ.

    >>> import torch
    >>> penalty = lasso(features=2)
    >>> log_noise = torch.tensor(0.0).double()  # of σ = 1
    >>> penalty.names, penalty.rates(torch.tensor([2.0]).double().log(), log_noise).round(decimals=4)  # λ / σ
    (('log l1',), tensor([2., 2.], dtype=torch.float64))
    """
    return elastic_net(features, l2=0.0)


def elastic_net(features: int, *, l1: float | None = None, l2: float | None = None) -> ShrinkagePrior:
    """Return exp(−λ₁|θ_kj|/σ − λ₂θ_kj²/(2σ²)).

    Args:
        features: d.
        l1, l2: values of λ₁ and λ₂; None for learnt ones. With `l1=0` it is the ridge, with `l2=0` the lasso.

    >>> import torch
    >>> penalty, log_noise = elastic_net(features=2, l1=3.0), torch.tensor(0.0).double()  # σ = 1
    >>> zeta = torch.tensor([5.0]).double().log()  # λ₂ = 5 is learnt
    >>> penalty.names, penalty.rates(zeta, log_noise), float(penalty.ridge(zeta, log_noise).round(decimals=3))
    (('log l2',), tensor([3., 3.], dtype=torch.float64), 5.0)
    """
    if (l1 == 0 and l2 == 0) or min(l1 or 0.0, l2 or 0.0) < 0:
        raise ValueError(f"Expected penalties of at least 0, not both 0, but got l1={l1} and l2={l2}")
    names = tuple(name for name, value in (("log l1", l1), ("log l2", l2)) if value is None)
    zero = torch.zeros((), dtype=torch.float64)

    def parts(zeta: Tensor, log_noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return Laplace rate a and precision b."""
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
    return ShrinkagePrior(
        names,
        contrasts,
        lambda zeta, noise: parts(zeta, noise)[1],
        lambda zeta, noise: parts(zeta, noise)[0][..., None].expand(*noise.shape, len(contrasts)),
        log_normaliser,
        scales,
        sites.laplace,
    )


def fused_lasso(features: int) -> ShrinkagePrior:
    """Build the prior exp(−λ₁ Σ|θ_j|/σ − λ₂ Σ|θ_j − θ_{j−1}|/σ), for coefficients in a meaningful order.

    >>> fused_lasso(features=2).contrasts  # each coefficient, and their difference
    tensor([[ 1.,  0.], [ 0.,  1.], [-1.,  1.]], dtype=torch.float64)
    """
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

    return ShrinkagePrior(
        ("log l1", "log l2"), torch.cat([eye, eye[1:] - eye[:-1]]), lambda zeta, noise: torch.zeros_like(noise),
        rates, log_normaliser, scales, sites.laplace,
    )  # fmt: skip


def horseshoe(features: int) -> ShrinkagePrior:
    """Return the horseshoe penalty, θ_kj ~ N(0, s_kj² τ² σ²), s_kj half-Cauchy; τ is learnt.

    >>> import torch
    >>> penalty = horseshoe(features=2)
    >>> penalty.names, penalty.rates(torch.tensor([2.0]).log(), torch.tensor(9.0).log()).round(decimals=3)  # τ σ
    (('log tau',), tensor([6., 6.]))
    """
    return ShrinkagePrior(
        ("log tau",),
        torch.eye(features, dtype=torch.float64),
        lambda zeta, noise: torch.zeros_like(noise),
        lambda zeta, noise: (zeta + noise[..., None] / 2).exp().expand(*noise.shape, features),
        lambda zeta, noise: torch.zeros_like(noise),
        lambda variance, noise: ((variance.log() - noise) / 2)[None],
        sites.horseshoe,
    )


def _fused_normaliser(features: int, ratio: float) -> float:
    """Return log ∫ exp(−Σ|x_j| − ratio Σ|x_j − x_{j−1}|) dx: convolutions, each exact for piecewise linear functions.

    A convolution with exp(−ratio |x|) is a recursion from either side.
    """
    from scipy.signal import lfilter  # here, because few need it and it takes long to import

    x = numpy.linspace(-_FUSED_REACH, _FUSED_REACH, _FUSED_POINTS)
    h = x[1] - x[0]
    decay, lost = math.exp(-ratio * h), -math.expm1(-ratio * h)
    near = 1 / ratio - lost / (ratio * ratio * h)
    far = lost / (ratio * ratio * h) - decay / ratio
    density = numpy.exp(-numpy.abs(x))
    chain, log_scale = density, 0.0
    for _ in range(features - 1):
        forward = lfilter([near, far], [1.0, -decay], chain)
        backward = lfilter([near, far], [1.0, -decay], chain[::-1])[::-1]
        chain = density * (forward + backward)
        log_scale += math.log(chain.max())
        chain = chain / chain.max()
    return log_scale + math.log(numpy.trapezoid(chain, x))


def _interpolated(at: Tensor, nodes: Tensor, values: Tensor) -> Tensor:
    """Interpolate linearly, and extrapolate, on even nodes."""
    nodes, values = nodes.to(at), values.to(at)
    place = (at - nodes[0]) / (nodes[1] - nodes[0])
    left = place.floor().clamp(0, len(nodes) - 2)
    index = left.to(torch.int64)
    return values[index] + (place - left) * (values[index + 1] - values[index])
