r"""Hierarchical logistic and Poisson regression: θ_k is integrated around its mode.

Given its normal prior N(a, P), P = LL', a device's coefficients θ = a + L u have the mode û of
:math:`\sum_i \log p(y_i \mid x_i'\theta) - \frac12 \|u\|^2`, found by Newton's method, and the curvature H there. The
nodes of a rule, moved to N(û, H⁻¹), then weigh what the normal approximation gets wrong, so that evidence, mean and
covariance are not those of Laplace's method but corrected ones; `rule=None` leaves it at Laplace's.

Source: Yue, Kontar, Estrada Gómez (2022), section 7, names these as the next models; Rue, Martino, Chopin (2009),
"Approximate Bayesian inference for latent Gaussian models by using integrated nested Laplace approximations".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical.factor import Conditional, DeviceLikelihood, Model, derivatives, of
from fedtorch.models.hierarchical.hierarchy import Hierarchy
from fedtorch.models.quadrature import QuadratureRule, gauss_hermite, two_shells
from fedtorch.models.rows import regression_rows

__all__ = ["logistic", "poisson"]

_NEWTON_STEPS = 30
_HALVINGS = 8
_PRODUCT = 2  # dimensions of θ up to which the default inner rule is a product
_FURTHEST = 30.0  # of a linear predictor, before its exponential


class _Rows(NamedTuple):
    """The rows of `K` clients, in float64."""

    x: Tensor  # (K, N, d), zero beyond a client's count
    y: Tensor  # (K, N)
    mask: Tensor  # (K, N)
    constant: Tensor  # (K,) the part of the log-likelihood that has no θ
    count: Tensor  # type: ignore[assignment]  # (K,)


class RowTerms(NamedTuple):
    """log p(y | η) up to a constant, its first derivative in the linear predictor η, and minus its second."""

    log: Tensor
    score: Tensor
    information: Tensor


def logistic(
    hierarchy: Hierarchy, *, rule: QuadratureRule | None = None, inner: QuadratureRule | str | None = "default"
) -> Model:
    """Return the model of y ∈ {0, 1} with log-odds x'θ_k; see `generalised` for the arguments.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.models import hierarchical
    >>> model = logistic(hierarchical.normal(1, names=["slope"]))
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1))])
    >>> phi = torch.tensor([[[1.0, -30.0]]]).double()  # mean, log variance
    >>> model.log_factor(phi, model.prepare(data.stack([0]))).exp().round(decimals=3)  # 1 / (1 + e⁻¹)
    tensor([[0.7310]], dtype=torch.float64)
    """

    def terms(y: Tensor, eta: Tensor) -> RowTerms:
        p = torch.sigmoid(eta)
        return RowTerms(y * eta - softplus(eta), y - p, p * (1 - p))

    return generalised(hierarchy, terms, _binary, rule=rule, inner=inner)


def poisson(
    hierarchy: Hierarchy, *, rule: QuadratureRule | None = None, inner: QuadratureRule | str | None = "default"
) -> Model:
    """Count y with log mean x'θ_k; see `generalised` for the arguments.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.models import hierarchical
    >>> model = poisson(hierarchical.normal(1))
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.tensor([2.0]))])
    >>> phi = torch.tensor([[[0.0, -30.0]]]).double()  # mean, log variance
    >>> model.log_factor(phi, model.prepare(data.stack([0]))).exp().round(decimals=3)  # e⁻¹ / 2!
    tensor([[0.1840]], dtype=torch.float64)
    """

    def terms(y: Tensor, eta: Tensor) -> RowTerms:
        rate = eta.clamp(max=_FURTHEST).exp()
        return RowTerms(y * eta - rate, y - rate, rate)

    return generalised(hierarchy, terms, _counts, rule=rule, inner=inner)


def generalised(
    hierarchy: Hierarchy,
    terms: Callable[[Tensor, Tensor], RowTerms],
    constant: Callable[[Tensor], Tensor],
    *,
    rule: QuadratureRule | None = None,
    inner: QuadratureRule | str | None = "default",
) -> Model:
    """Return a generalised linear model with log-concave likelihood.

    Args:
        hierarchy: of the coefficients, such as `hierarchical.normal(d)`.
        terms: (y, linear predictor η) -> `RowTerms`.
        constant: y -> the rest of log p; raises ValueError for responses that do not fit.
        rule: nodes over the shared scales ζ.
        inner: nodes over θ_k, to correct its normal approximation; None for Laplace's method. Default: five points a
            coordinate for up to two, designs on two spheres beyond.

    Waiting times y > 0, exponential with log rate x'θ_k:
    """
    features = hierarchy.mean.shape[0]
    if isinstance(inner, str):
        inner = gauss_hermite(features, 7) if features <= _PRODUCT else two_shells(features)

    def prepare(data: Any) -> _Rows:
        x, y = regression_rows(data, features)
        return _Rows(x, y, data.mask, (constant(y) * data.mask).sum(1), data.count)

    def local(data: _Rows, mean: Tensor, covariance: Tensor, zeta: Tensor, log_noise: Tensor | None) -> Conditional:
        root = torch.linalg.cholesky_ex(covariance).L
        design, offset = data.x[:, None] @ root, mean @ data.x.mT
        y, mask = data.y[:, None], data.mask[:, None]

        def objective(u: Tensor) -> Tensor:
            return (terms(y, _predictor(design, offset, u)).log * mask).sum(-1) - 0.5 * u.square().sum(-1)

        u, curvature = _mode(objective, lambda u: terms(y, _predictor(design, offset, u)), design, mask, mean)
        factor = torch.linalg.cholesky_ex(curvature).L
        eye = torch.eye(features, dtype=mean.dtype, device=mean.device)
        half = torch.linalg.solve_triangular(factor.mT, eye.expand_as(factor), upper=True)
        log_evidence = objective(u) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + data.constant[:, None]
        shift, spread = torch.zeros_like(u), eye.expand_as(factor)
        if inner is not None:
            shift, spread, correction = _corrected(objective, u, half, inner)
            log_evidence = log_evidence + correction
        whole = root @ half
        centre = mean + (root @ u[..., None] + whole @ shift[..., None])[..., 0]
        found = Moments(centre, whole @ spread @ whole.mT)
        return Conditional(log_evidence, lambda weights: derivatives(mean, covariance, found, weights), lambda: found)

    def size(data: _Rows) -> int:
        return data.x.shape[1] * (features + (1 if inner is None else len(inner.weights)))

    return of(hierarchy, DeviceLikelihood(prepare, local, None, lambda data: data.count, size), rule=rule)


def _predictor(design: Tensor, offset: Tensor, u: Tensor) -> Tensor:
    """Return η = x'(a + L u), `(K, R, N)`."""
    return offset + (design @ u[..., None])[..., 0]


def _mode(
    objective: Callable[[Tensor], Tensor],
    terms: Callable[[Tensor], RowTerms],
    design: Tensor,
    mask: Tensor,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Find the mode û `(K, R, d)` by Newton's method with halved steps, and minus the second derivatives there."""
    u = torch.zeros_like(like)
    eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    value = objective(u)
    for _ in range(_NEWTON_STEPS):
        now = terms(u)
        gradient = ((now.score * mask)[..., None, :] @ design)[..., 0, :] - u
        curvature = eye + design.mT @ ((now.information * mask)[..., None] * design)
        step = torch.linalg.solve_ex(curvature, gradient[..., None]).result[..., 0]
        length = torch.ones_like(value)
        for _ in range(_HALVINGS):
            worse = ~(objective(u + length[..., None] * step) >= value - 1e-12 * value.abs())
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        u = u + length[..., None] * step
        value = objective(u)
        if bool((step.abs().amax(-1) < 1e-8).all()):
            break
    return u, eye + design.mT @ ((terms(u).information * mask)[..., None] * design)


def _corrected(
    objective: Callable[[Tensor], Tensor], mode: Tensor, half: Tensor, rule: QuadratureRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and covariance in units of the normal approximation, and the logarithm of what its evidence lacks."""
    nodes, weights = rule.nodes.to(mode), rule.weights.to(mode)
    best = objective(mode)
    log = torch.stack([objective(mode + (half @ z)) - best + 0.5 * z @ z for z in nodes], -1) + weights.log()
    own = torch.softmax(log, -1)
    shift = own @ nodes
    second = torch.einsum("krj,ja,jb->krab", own, nodes, nodes)
    return shift, second - shift[..., :, None] * shift[..., None, :], log.logsumexp(-1)


def _binary(y: Tensor) -> Tensor:
    if not bool(((y == 0) | (y == 1)).all()):
        raise ValueError(f"Expected responses 0 or 1, but got {float(y.min())} to {float(y.max())}; use another model")
    return torch.zeros_like(y)


def _counts(y: Tensor) -> Tensor:
    if not bool(((y >= 0) & (y == y.round())).all()):
        raise ValueError(f"Expected counts, but got {float(y.min())} to {float(y.max())}; use a linear model")
    return -torch.lgamma(y + 1)
