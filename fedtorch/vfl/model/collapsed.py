r"""The likelihood with the auxiliary variables integrated out by Gauss–Hermite quadrature, for tests and scores.

In the augmented model only s = Σ_j z_j matters, :math:`s | \theta \sim N(h, J\rho^2)`. In the power model the arguments
of the J likelihoods, :math:`a_j = h + \sum_k e_k - e_j`, have covariance :math:`\rho^2(I + (J-2) 11^\top)`, so that for
J ≥ 2 :math:`a_j = h + \rho\sqrt{J-2}\,\zeta + \rho\,\xi_j` with independent standard normals: two nested quadratures.
The source has neither; both are exact up to the quadrature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedtorch.models.quadrature import gauss_hermite
from fedtorch.vfl.model.vertical import VerticalModel

_NEAR = 1e-6  # a step of so few sds ends the search for a mode


def collapsed_log_likelihood(
    model: VerticalModel,
    y: Tensor,
    centre: Tensor,
    shared: Tensor,
    points: int = 32,
    *,
    power: bool | None = None,
    variance: Tensor | None = None,
    adaptive: bool = False,
) -> Tensor:
    r"""Return the log-likelihood of every row given γ and θ alone.

    Args:
        model: with one output; weights are 1/J.
        y: `(n,)` or `(..., n)`.
        centre: intercept + offset + Σ_j η_j, `(B, M, 1, n)`.
        shared: the likelihood's own parameters, `(B, M, S)`.
        points: of each quadrature.
        power: whether to take the product of powers (not normalised over y) instead of the augmented likelihood; by
            default as the model does.
        variance: of the noise on the predictor instead of Jρ², `(1 or B,)`.
        adaptive: whether to place the nodes around the mode of p(y|s) N(s; h, Jρ²), as a likelihood much narrower than
            the noise (large counts) needs; for augmented likelihoods that are log-concave in s.

    Returns:
        `(B, M, n)`.

    Raises:
        ValueError: a likelihood of several outputs, for each of which the integral would have a dimension.
    """
    if model.likelihood.outputs > 1:
        raise ValueError(f"Expected a likelihood of one output, but got {model.likelihood.outputs}; sample s instead")
    parties = len(model.predictors)
    rule = gauss_hermite(1, points)
    nodes, weights = rule.nodes[:, 0].to(centre), rule.weights.log().to(centre)
    along = (-1, *(1,) * centre.ndim)
    if not (model.power if power is None else power):
        spread = model.noise_sd.to(centre).square() * parties if variance is None else variance.reshape(-1, 1, 1, 1)
        spread = spread.to(centre)
        if not adaptive:
            values = model.likelihood.log_prob(y, centre + spread.sqrt() * nodes.reshape(along), shared)
            return (values + weights.reshape(along[:-1])).logsumexp(0)
        mode, sd = _mode(model, y, centre, shared, spread)
        s = mode + sd * nodes.reshape(along)
        ratio = -0.5 * (s - centre).square() / spread + 0.5 * nodes.reshape(along).square() + (sd / spread.sqrt()).log()
        values = model.likelihood.log_prob(y, s, shared) + ratio[..., 0, :]
        return (values + weights.reshape(along[:-1])).logsumexp(0)
    if parties == 1:
        return model.likelihood.log_prob(y, centre, shared)
    rho = model.noise_sd.to(centre)

    def shares(at: Tensor) -> Tensor:
        """Return J log ∫ p(y | a + ρξ)^{1/J} dN(ξ)."""
        values = model.likelihood.log_prob(y, at + rho * nodes.reshape(-1, *(1,) * at.ndim), shared) / parties
        return parties * (values + weights.reshape(-1, *(1,) * (at.ndim - 1))).logsumexp(0)

    if parties == 2:
        return shares(centre)
    common = shares(centre + rho * math.sqrt(parties - 2) * nodes.reshape(along))
    return (common + weights.reshape(along[:-1])).logsumexp(0)


def noise_variance(model: VerticalModel) -> Tensor:
    """Return the variance of the model's noise on the sum of the predictors, `(1 or B,)`.

    >>> import fedtorch as ft
    >>> parts = ft.vfl.likelihoods.bernoulli(), [ft.vfl.linear(2), ft.vfl.linear(3)], 1.0
    >>> [float(noise_variance(make(*parts))) for make in (ft.vfl.augmented, ft.vfl.power)]
    [2.0, 0.5]
    """
    parties = len(model.predictors)
    factor = (parties - 1) / parties if model.power else 1.0
    return parties * (model.rho * factor).square()


def _mode(
    model: VerticalModel, y: Tensor, centre: Tensor, shared: Tensor, spread: Tensor, steps: int = 50
) -> tuple[Tensor, Tensor]:
    """Return the mode of p(y|s) N(s; centre, spread), by Newton's method with halved steps, and the sd there."""
    h, fixed = centre.detach(), shared.detach()

    def log_density(s: Tensor) -> Tensor:
        value: Tensor = model.likelihood.log_prob(y, s, fixed)
        return value - 0.5 * ((s - h).square() / spread)[..., 0, :]

    s, sd = h.clone(), h
    with torch.enable_grad():
        for _ in range(steps):
            s = s.detach().requires_grad_()
            value = log_density(s)
            (slope,) = torch.autograd.grad(value.sum(), s, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.sum(), s)
            sd = (-curvature).rsqrt()
            step, before = slope.detach() * sd.square(), value.detach()[..., None, :]
            if float((step / sd).abs().max()) < _NEAR:
                break
            with torch.no_grad():
                while bool(
                    (worse := ~(log_density(s + step)[..., None, :] >= before) & (step.abs() > _NEAR * sd)).any()
                ):
                    step = torch.where(worse, step / 2, step)
            s = s.detach() + step
    return s.detach(), sd
