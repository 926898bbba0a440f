r"""Hierarchical logistic and Poisson regression: θ_k is integrated around its mode.

Given its normal prior N(a, P), P = LL', a device's coefficients θ = a + L u have the mode û of
:math:`\sum_i \log p(y_i \mid x_i'\theta) - \frac12 \|u\|^2`, found by Newton's method, and the curvature H there. The
nodes of a rule, moved to N(û, H⁻¹), then weigh what the normal approximation gets wrong, so that evidence, mean and
covariance are not those of Laplace's method but corrected ones; `inner=None` leaves it at Laplace's.

All coefficients at which a device's rows are evaluated are columns of one product with X, and second derivatives are
another with the products of its columns, so that no array has rows × coefficients × nodes.

Source: Yue, Kontar, Estrada Gómez (2022), section 7, names these as the next models; Rue, Martino, Chopin (2009),
"Approximate Bayesian inference for latent Gaussian models by using integrated nested Laplace approximations".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.models import gaussian
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical.factor import Conditional, DeviceLikelihood, Model, derivatives, of
from fedtorch.models.hierarchical.families import LOGISTIC, POISSON, Family
from fedtorch.models.hierarchical.hierarchy import Hierarchy
from fedtorch.models.quadrature import QuadratureRule, gauss_hermite, two_shells
from fedtorch.models.rows import EXTRAS, Observations, observations, refuse

__all__ = ["logistic", "poisson"]

_NEWTON_STEPS = 30
_HALVINGS = 8
_PRODUCT = 2  # dimensions of θ up to which the default inner rule is a product
_FURTHEST = 30.0  # of a linear predictor, before its exponential
_CACHED = 2**16  # linear predictors at a time
_TOGETHER = 512  # rows of whose probabilities the product is taken


class _Rows(NamedTuple):
    """The rows of `K` clients, in float64."""

    x: Tensor  # (K, N, d), zero beyond a client's count
    columns: Tensor  # (K, d, N) the same in another order, which products with many coefficients take four times faster
    statistic: Tensor  # (K, d) Σ w t x
    mask: Tensor  # (K, N)
    offset: Tensor | None  # (K, N) of the linear predictors
    times: Tensor | None  # (K, N) how often a row counts, weight × trials, zero beyond a client's count; None for once
    constant: Tensor  # (K,) the part of the log-likelihood that has no θ
    count: Tensor  # type: ignore[assignment]  # (K,)


class ExponentialFamily(NamedTuple):
    """A log-concave family: log p(y | η) = t η − n b(η), up to a constant, for η = x'θ + offset and n trials."""

    extras: tuple[str, ...]  # what it knows beside x and y
    response: Callable[
        [Observations, Tensor], Tensor
    ]  # rows, mask -> t; raises `BadClients` for responses that don't fit
    constant: Callable[[Observations], Tensor]  # -> the rest of log p
    cumulant: Callable[[Tensor, _Rows], Tensor]  # η (K, R, N), which it may overwrite, of rows -> Σ times b (K, R)
    slopes: Callable[[Tensor], tuple[Tensor, Tensor]]  # η, which it may overwrite -> b', b''
    outcome: Family | None = None  # of one response


def logistic(
    hierarchy: Hierarchy, *, rule: QuadratureRule | None = None, inner: QuadratureRule | str | None = "default"
) -> Model:
    """Return the model of y ∈ {0, 1}, or of y successes of a row's trials, with log-odds x'θ_k.

    Rows may have an offset of the log-odds, weights (powers of the likelihood) and trials, (x, y, {"trials": n}). See
    `generalised` for the arguments.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.models import hierarchical
    >>> model = logistic(hierarchical.normal(1, names=["slope"]))
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1))])
    >>> phi = torch.tensor([[[1.0, -30.0]]]).double()  # mean, log variance
    >>> model.log_factor(phi, model.prepare(data.stack([0]))).exp().round(decimals=3)  # 1 / (1 + e⁻¹)
    tensor([[0.7310]], dtype=torch.float64)
    """

    return generalised(hierarchy, _BINARY, rule=rule, inner=inner)


def poisson(
    hierarchy: Hierarchy, *, rule: QuadratureRule | None = None, inner: QuadratureRule | str | None = "default"
) -> Model:
    """Count y with log mean x'θ_k; rows may have an offset of it, such as a log exposure, and weights.

    See `generalised` for the arguments.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.models import hierarchical
    >>> model = poisson(hierarchical.normal(1))
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.tensor([2.0]))])
    >>> phi = torch.tensor([[[0.0, -30.0]]]).double()  # mean, log variance
    >>> model.log_factor(phi, model.prepare(data.stack([0]))).exp().round(decimals=3)  # e⁻¹ / 2!
    tensor([[0.1840]], dtype=torch.float64)
    """

    return generalised(hierarchy, _COUNTS, rule=rule, inner=inner)


def generalised(
    hierarchy: Hierarchy,
    family: ExponentialFamily,
    *,
    rule: QuadratureRule | None = None,
    inner: QuadratureRule | str | None = "default",
) -> Model:
    """Return a generalised linear model with log-concave likelihood.

    Args:
        hierarchy: of the coefficients, such as `hierarchical.normal(d)`.
        family: of the responses given the linear predictor.
        rule: nodes over the shared scales ζ.
        inner: nodes over θ_k, to correct its normal approximation; None for Laplace's method. Default: seven points a
            coordinate for up to two, designs on two spheres beyond.
    """
    features = hierarchy.mean.shape[0]
    if isinstance(inner, str):
        inner = gauss_hermite(features, 7) if features <= _PRODUCT else two_shells(features)

    def prepare(data: Any) -> _Rows:
        rows, mask = observations(data, features, family.extras), data.mask
        response, constant = family.response(rows, mask) * mask, family.constant(rows) * mask
        if rows.weight is not None:
            response, constant = response * rows.weight, constant * rows.weight
        if rows.offset is not None:
            constant = constant + response * rows.offset
        known = [part for part in (rows.weight, rows.trials) if part is not None]
        return _Rows(
            x=rows.x,
            columns=rows.x.mT.contiguous(),
            statistic=(response[:, None] @ rows.x)[:, 0],
            mask=mask,
            offset=rows.offset,
            times=math.prod(known[1:], start=known[0]) if known else None,
            constant=constant.sum(1),
            count=data.count,
        )

    def local(data: _Rows, mean: Tensor, covariance: Tensor, zeta: Tensor, log_noise: Tensor | None) -> Conditional:
        prior = _White(mean, torch.linalg.cholesky_ex(covariance).L)
        u, best, curvature = _mode(family, data, prior)
        factor = torch.linalg.cholesky_ex(curvature).L
        eye = torch.eye(features, dtype=mean.dtype, device=mean.device)
        half = torch.linalg.solve_triangular(factor.mT, eye.expand_as(factor), upper=True)
        log_evidence = best - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + data.constant[:, None]
        centre, whole = prior.at(u), prior.root @ half
        moments = Moments(centre, whole @ whole.mT)
        if inner is not None:
            ratios = _log_likelihood(family, data, _placed(centre, whole, inner)) - best[..., None]
            shift, spread, correction = _seen(ratios, _placed(u, half, inner), inner)
            log_evidence = log_evidence + correction
            moments = Moments(centre + (whole @ shift[..., None])[..., 0], whole @ spread @ whole.mT)
        return Conditional(
            log_evidence, lambda weights: derivatives(mean, covariance, moments, weights), lambda: moments
        )

    def size(data: _Rows) -> int:
        return max(data.x.shape[1], features * (1 if inner is None else len(inner.weights)))

    likelihood = DeviceLikelihood(prepare, local, None, lambda data: data.count, size, family.outcome)
    return of(hierarchy, likelihood, rule=rule)


class _White(NamedTuple):
    """The normal prior of θ, a + L u with standard normal u."""

    mean: Tensor  # (K, R, d) a
    root: Tensor  # (K, R, d, d) L

    def at(self, u: Tensor) -> Tensor:
        """Return θ."""
        return self.mean + (self.root @ u[..., None])[..., 0]


def _log_likelihood(family: ExponentialFamily, data: _Rows, theta: Tensor) -> Tensor:
    """Return Σ log p(y | x'θ), up to its constant, `(K, ...)`, for θ `(K, ..., d)`."""
    points = theta.flatten(1, -2)
    (total,) = _in_blocks(lambda eta: (family.cumulant(eta, data),), data, points)
    return ((points @ data.statistic[..., None])[..., 0] - total).reshape(theta.shape[:-1])


def _in_blocks(sums: Callable[[Tensor], tuple[Tensor, ...]], data: _Rows, theta: Tensor) -> list[Tensor]:
    """Call sums over rows, functions of η, for some θ of `(K, P, d)` at a time, so that η stays in a cache."""
    size = max(1, _CACHED // max(1, data.mask.numel()))
    every = [sums(_predictors(data, part)) for part in torch.split(theta, size, 1)]
    return [torch.cat(parts, 1) for parts in zip(*every)]


def _predictors(data: _Rows, theta: Tensor) -> Tensor:
    """Return η `(K, P, N)` at θ `(K, P, d)`."""
    eta = theta @ data.columns
    return eta if data.offset is None else eta.add_(data.offset[:, None])


def _mode(family: ExponentialFamily, data: _Rows, prior: _White) -> tuple[Tensor, Tensor, Tensor]:
    """Find the mode û `(K, R, d)` by Newton's method with halved steps; its log density, and minus its curvature."""
    u = torch.zeros_like(prior.mean)
    products = gaussian.pack(data.x[..., :, None] * data.x[..., None, :])

    def objective(u: Tensor) -> Tensor:
        return _log_likelihood(family, data, prior.at(u)) - 0.5 * u.square().sum(-1)

    def slopes(eta: Tensor) -> tuple[Tensor, Tensor]:
        first, second = family.slopes(eta)
        if data.times is not None:
            first, second = first * data.times[:, None], second * data.times[:, None]
        return first @ data.x, second @ products

    def expanded(u: Tensor) -> tuple[Tensor, Tensor]:
        first, second = _in_blocks(slopes, data, prior.at(u))
        gradient = (prior.root.mT @ (data.statistic[:, None] - first)[..., None])[..., 0] - u
        information = prior.root.mT @ gaussian.unpack(second) @ prior.root
        information.diagonal(dim1=-2, dim2=-1).add_(1)
        return gradient, information

    value = objective(u)
    for _ in range(_NEWTON_STEPS):
        gradient, curvature = expanded(u)
        step = torch.linalg.solve_ex(curvature, gradient[..., None]).result[..., 0]
        length = torch.ones_like(value)
        for _ in range(_HALVINGS):
            reached = objective(u + length[..., None] * step)
            worse = ~(reached >= value - 1e-12 * value.abs())
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        else:
            reached = objective(u + length[..., None] * step)
        u, value = u + length[..., None] * step, reached
        if bool((step.abs().amax(-1) < 1e-8).all()):
            break
    return u, value, expanded(u)[1]


def _placed(centre: Tensor, root: Tensor, rule: QuadratureRule) -> Tensor:
    """Return the rule's nodes moved to N(centre, root root'), `(K, R, J, d)`."""
    moved = root.flatten(0, -2) @ rule.nodes.to(centre).mT  # one product for all roots
    return centre[..., None, :] + moved.unflatten(0, root.shape[:-1]).mT


def _seen(ratios: Tensor, at: Tensor, rule: QuadratureRule) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and covariance in units of the normal approximation, and the logarithm of what its evidence lacks.

    Args:
        ratios: log likelihoods at the nodes, less the log density at the mode, `(K, R, J)`.
        at: u there, `(K, R, J, d)`.
        rule: the J nodes.
    """
    nodes, weights = rule.nodes.to(at), rule.weights.to(at)
    log = ratios - 0.5 * at.square().sum(-1) + (weights.log() + 0.5 * nodes.square().sum(-1))
    responsibility = torch.softmax(log, -1)
    shift = responsibility @ nodes
    second = gaussian.unpack(responsibility @ gaussian.pack(nodes[:, :, None] * nodes[:, None, :]))
    return shift, second - shift[..., :, None] * shift[..., None, :], log.logsumexp(-1)


def _sum_log_cosh(eta: Tensor, rows: _Rows) -> Tensor:
    """Return Σ log (2 cosh η/2) = Σ |η|/2 − Σ log σ(|η|), of whose logarithms one is taken for many rows.

    Rows that are none have η = 0 and count log 2 each; products of 512 numbers of at least ½ do not underflow.
    """
    if rows.times is not None:
        size = eta.abs_()
        return ((size / 2 + size.neg().exp_().log1p_()) @ rows.times[..., None])[..., 0]
    none = (eta.shape[-1] - rows.count).to(eta.dtype)[:, None]
    total = eta.abs_().sum(-1).div_(2).sub_(none, alpha=math.log(2))
    for part in torch.split(eta.sigmoid_(), _TOGETHER, -1):
        total.sub_(part.prod(-1).log_())
    return total


def _logistic_slopes(eta: Tensor) -> tuple[Tensor, Tensor]:
    p = eta.sigmoid_()
    second = torch.addcmul(p, p, p, value=-1)
    return p.sub_(0.5), second


def _sum_exp(eta: Tensor, rows: _Rows) -> Tensor:
    return (
        eta.clamp_(max=_FURTHEST).exp_() @ (rows.mask.to(eta.dtype) if rows.times is None else rows.times)[..., None]
    )[..., 0]


def _poisson_slopes(eta: Tensor) -> tuple[Tensor, Tensor]:
    rate = eta.clamp_(max=_FURTHEST).exp_()
    return rate, rate


def _successes(rows: Observations, mask: Tensor) -> Tensor:
    y, trials = rows.y, rows.trials
    most = torch.ones_like(y) if trials is None else trials
    bad = ~((y >= 0) & (y <= most) & (y == y.round())) & mask
    expected = "responses 0 or 1" if trials is None else "successes, whole numbers from 0 to the row's trials"
    refuse(bad.any(1), f"Expected {expected}, but got {_shown(y, trials, mask, bad)}; use another model")
    return y - most / 2


def _log_choices(rows: Observations) -> Tensor:
    """Return the logarithm of n over y."""
    if rows.trials is None:
        return torch.zeros_like(rows.y)
    n, y = rows.trials, rows.y
    return torch.lgamma(n + 1) - torch.lgamma(y + 1) - torch.lgamma(n - y + 1)


def _counts(rows: Observations, mask: Tensor) -> Tensor:
    bad = ~((rows.y >= 0) & (rows.y == rows.y.round())) & mask
    refuse(bad.any(1), f"Expected counts, but got {_shown(rows.y, None, mask, bad)}; use a linear model")
    return rows.y


def _shown(y: Tensor, trials: Tensor | None, mask: Tensor, bad: Tensor) -> str:
    """Return the range of y of the clients who have a bad one, or, with trials, the first bad one and its trials."""
    if not bool(bad.any()):
        return ""
    if trials is not None:
        return f"{float(y[bad][0]):g} of {float(trials[bad][0]):g} in y"
    which = bad.any(1)
    values = y[which][mask[which]]
    return f"{float(values.min())} to {float(values.max())} in y"


_BINARY = ExponentialFamily(EXTRAS, _successes, _log_choices, _sum_log_cosh, _logistic_slopes, LOGISTIC)
_COUNTS = ExponentialFamily(
    ("offset", "weight"), _counts, lambda rows: -torch.lgamma(rows.y + 1), _sum_exp, _poisson_slopes, POISSON
)
