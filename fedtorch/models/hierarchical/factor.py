r"""The factor f_k(φ) = ∫ p(y_k | θ_k) p(θ_k | φ) dθ_k of a device, for any hierarchy and likelihood.

θ_k | φ ~ N(A μ, S(ζ)), φ = (μ, ζ). Under a cavity, μ given ζ is normal, so that θ_k given ζ is N(m, Σ) with Σ = S(ζ) +
A V A'. A likelihood returns the evidence ℓ(m, Σ) of the rows and its derivatives in m, which suffice for the moments of
μ (Stein's identities), with C = V A' the covariance of μ and θ_k:

.. math:: E[\mu \mid \zeta, y] = E[\mu \mid \zeta] + C\, \ell'(m), \qquad
    \mathrm{Cov}[\mu \mid \zeta, y] = V + C\, \ell''(m)\, C' .

Nodes are needed over ζ only (`quadrature.tilt`).

A user-defined likelihood, of one row y ~ N(θ_k, 1) per device:

>>> import torch, fedtorch as ft
>>> from torch.distributions import MultivariateNormal
>>> from fedtorch.models import hierarchical
>>> from fedtorch.models.gaussian import Moments
>>> from fedtorch.models.hierarchical.factor import Conditional, DeviceLikelihood, derivatives
>>> def local(y, mean, covariance, zeta, log_noise):
...     gain = covariance / (covariance + 1)
...     found = Moments(mean + gain[..., 0] * (y[:, None] - mean), covariance - gain * covariance)
...     evidence = MultivariateNormal(mean, covariance + 1).log_prob(y[:, None])
...     return Conditional(evidence, lambda w: derivatives(mean, covariance, found, w), lambda: found)
>>> likelihood = DeviceLikelihood(lambda data: data.batch[0][:, 0], local, None, lambda y: y.new_ones(len(y)), len)
>>> model = hierarchical.of(hierarchical.normal(1), likelihood)
>>> data = ft.data.from_tensors([(torch.tensor([[level]]).double(),) for level in (1.0, 5.0)])
>>> prepared = model.prepare(data.stack([0, 1]))
>>> at = torch.zeros(2, 1, 2).double()  # φ: μ = 0, log τ = 0
>>> model.given(at, torch.ones(2, 1).double(), prepared).means.flatten()  # halfway between μ and y
tensor([0.5000, 2.5000], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, tree
from fedtorch.data import Design
from fedtorch.models import gaussian
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical import hyperpriors
from fedtorch.models.hierarchical.families import Family, Ordered
from fedtorch.models.hierarchical.hierarchy import Hierarchy
from fedtorch.models.hierarchical.hyperpriors import Hyperprior, Prior
from fedtorch.models.hierarchical.integrals.given import Coefficients, Given
from fedtorch.models.hierarchical.projections import LogFactor, Projected, Projection, Start
from fedtorch.models.quadrature import Nodes, QuadratureRule, default_rule, scout_rule, tilt

# Tolerated increase of a variance by the rows. Any increase is a numerical error: rules with few nodes are off by 0.05
# for uninformative rows. An increase of more than twice that means that the rule has missed its integrand.
_MISSED = 0.1
_CHUNK = 2**18  # most numbers in an array for a chunk of clients, to fit the cache


class Conditional(NamedTuple):
    """A likelihood's evidence for θ_k ~ N(mean, covariance) and the device's rows; functions compute when called."""

    log_evidence: Tensor  # (K, R)
    # weights (K, R) -> its gradient in `mean` (K, R, d), and the weighted sum of minus its second derivatives (K, d, d)
    derivatives: Callable[[Tensor], tuple[Tensor, Tensor]]
    moments: Callable[[], Moments]  # of θ_k given the rows (K, R, d), (K, R, d, d)


class Margins(NamedTuple):
    """For a likelihood that is normal in θ_k: evaluation without full covariances of θ_k at every node."""

    fit: Callable[[Sequence[Tensor]], bool]  # whether such tensors are supported
    # (prepared, θ_k before the rows, log σ² (K, R) or None, output of `local` for the same) -> Conditional
    at: Callable[[Any, Coefficients, Tensor | None, Callable[[], Conditional]], Conditional]


class DeviceLikelihood(NamedTuple):
    """The likelihood of a device's rows given θ_k."""

    prepare: Callable[[Any], Any]  # block -> input of `local`
    # (prepared, E θ_k (K, R, d), its covariances (K, R, d, d), ζ (K, R, s), log σ² (K, R) or None) -> Conditional.
    # Given φ, fixed effects are known: covariances are those of `Hierarchy.varying`, (K, R, e, e), and no derivatives
    # are needed.
    local: Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], Conditional]
    residual: Callable[[Any, Tensor, Tensor], Tensor] | None  # expected Σ (y − x'θ)² under N(mean, covariance), (K,)
    rows: Callable[[Any], Tensor]  # prepared -> numbers of rows, (K,)
    size: Callable[[Any], int]  # numbers a node of one client needs
    family: Family | None = None  # the distribution of one response, if it depends on x'θ_k
    dear: bool = False  # whether nodes are so expensive that a rule with few of them searches first
    margins: Margins | None = None
    concave: bool = False  # whether log p(rows | θ_k) is concave, so that rows never increase variances given ζ


class Model(NamedTuple):
    """A hierarchical model, ready for `ft.ep(model)`.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.models import hierarchical
    >>> model = hierarchical.linear(hierarchical.normal(1), noise=1.0)
    >>> model.names
    ('mean 0', 'log variance 0')
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.tensor([2.0]))])
    >>> log_factor = model.log_factor(torch.zeros(1, 1, 2).double(), model.prepare(data.stack([0])))
    >>> float(log_factor.exp() * (4 * torch.pi) ** 0.5)  # N(2; 0, τ + σ²) with τ = σ² = 1, and e⁻¹
    0.36787944...
    """

    names: tuple[str, ...]  # of the coordinates of φ
    hierarchy: Hierarchy  # of θ_k, whose part of φ comes first; log σ² is the last coordinate if it is learnt
    prior: Prior
    project: Projection
    start: Start
    prepare: Callable[[Any], Any]
    devices: Callable[[Moments, Any], DevicePosterior]  # (the others' information about φ, prepared data)
    log_factor: LogFactor  # (φ (K, R, p), prepared data) -> log f_k (K, R)
    # (φ (K, R, p), their weights (K, R), prepared data) -> θ_k given the rows, mixed over these φ
    given: Callable[[Tensor, Tensor, Any], DevicePosterior]
    # (the others' information about φ, prepared data) -> log ∫ f_k(φ) of the rows under it, (K,)
    log_evidence: Callable[[Moments, Any], Tensor] | None = None
    family: Family | None = None  # distribution of one response
    design: Design | None = None  # its formula, see `hierarchical.regression`
    ordered: Ordered | None = None  # the levels of an ordered response, see `cumulative`


def of(
    hierarchy: Hierarchy,
    likelihood: DeviceLikelihood,
    *,
    noise: Hyperprior | None = None,
    rule: QuadratureRule | None = None,
) -> Model:
    """Build the model of a hierarchy and a likelihood.

    Args:
        hierarchy: of θ_k given φ.
        likelihood: of a device's rows given θ_k.
        noise: hyperprior of log σ², the last coordinate of φ, if the likelihood has one.
        rule: nodes over ζ.
    """
    names, prior = hierarchy.names, hierarchy.prior
    if noise is not None:
        names, prior = (*names, "log noise"), _extended(prior, noise)
    scales = len(prior.normal.shift) - hierarchy.mean.shape[1]
    over = default_rule(scales) if rule is None else rule
    parts = _Parts(hierarchy, likelihood, noise is not None, over, hierarchy.varying)
    return Model(
        names=names,
        hierarchy=hierarchy,
        prior=prior,
        project=partial(_project, parts),
        start=Start(partial(_summary, parts), partial(_estimate, parts)),
        prepare=likelihood.prepare,
        devices=partial(_devices, parts),
        log_factor=partial(_log_factor, parts),
        given=partial(_mixture_at, parts),
        log_evidence=partial(_log_normaliser, parts),
        family=likelihood.family,
    )


class _Parts(NamedTuple):
    """Parts for the computations of a model's functions."""

    hierarchy: Hierarchy
    likelihood: DeviceLikelihood
    noise: bool  # whether the last coordinate of ζ is log σ²
    rule: QuadratureRule
    varying: Tensor  # (e,) coefficients that φ leaves unknown

    def split(self, zeta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the hierarchy's part of ζ, and log σ²."""
        return (zeta[..., :-1], zeta[..., -1]) if self.noise else (zeta, None)

    def numbers(self, data: Any, nodes: int, like: Tensor | None = None) -> int:
        """Return how many numbers a client needs for this many nodes; `like` if no moments of θ_k are needed."""
        (d, m), components, margins = self.hierarchy.mean.shape, self.hierarchy.components, self.likelihood.margins
        lean = like is not None and components is not None and margins is not None and margins.fit((like,))
        inner = d + m + len(components.rows) if lean and components is not None else d * d
        return nodes * max(inner, self.likelihood.size(data))

    def local(
        self, data: Any, given: Coefficients, log_noise: Tensor | None, spelled: Callable[[], tuple[Tensor, Tensor]]
    ) -> Conditional:
        """Evaluate the likelihood, with full means and covariances only where it needs them."""
        every = lambda: self.likelihood.local(data, *spelled(), given.zeta, log_noise)
        margins = self.likelihood.margins
        tensors = given if log_noise is None else (*given, log_noise)
        if margins is None or not margins.fit(tensors):
            return every()
        return margins.at(data, given, log_noise, every)


def _project(parts: _Parts, cavity: Moments, data: Any, key: Tensor) -> Projected:
    numbers = parts.numbers(data, len(parts.rule.weights), cavity.mean)
    return Projected(_in_chunks(partial(_tilted_moments, parts), (cavity, data), numbers), cavity)


def _devices(parts: _Parts, cavity: Moments, data: Any) -> DevicePosterior:
    numbers = parts.numbers(data, len(parts.rule.weights))
    return _in_chunks(partial(_tilted_mixture, parts), (cavity, data), numbers)


def _log_factor(parts: _Parts, phi: Tensor, data: Any) -> Tensor:
    evidence = partial(_log_evidence, parts)
    return _in_chunks(evidence, (phi, data), parts.numbers(data, phi.shape[1], phi))


def _mixture_at(parts: _Parts, phi: Tensor, weights: Tensor, data: Any) -> DevicePosterior:
    mixture = partial(_mixture_of_phi, parts)
    return _in_chunks(mixture, (phi, weights, data), parts.numbers(data, phi.shape[1]))


def _log_normaliser(parts: _Parts, cavity: Moments, data: Any) -> Tensor:
    numbers = parts.numbers(data, len(parts.rule.weights), cavity.mean)
    return _in_chunks(partial(_tilted_normaliser, parts), (cavity, data), numbers)


def _tilted_moments(parts: _Parts, given: tuple[Moments, Any]) -> Moments:
    return _moments(*_tilted(parts, *given), parts.likelihood.concave)


def _tilted_mixture(parts: _Parts, given: tuple[Moments, Any]) -> DevicePosterior:
    nodes, _ = _tilted(parts, *given)
    return _mixed(parts, nodes.weights, nodes.values, nodes.nodes)


def _tilted_normaliser(parts: _Parts, given: tuple[Moments, Any]) -> Tensor:
    return _tilted(parts, *given)[0].log_normaliser


def _log_evidence(parts: _Parts, given: tuple[Tensor, Any]) -> Tensor:
    return _conditional(parts, *given).log_evidence


def _mixture_of_phi(parts: _Parts, given: tuple[Tensor, Tensor, Any]) -> DevicePosterior:
    phi, weights, data = given
    zeta = phi[..., parts.hierarchy.mean.shape[1] :]
    return _mixed(parts, weights, _conditional(parts, phi, data), zeta)


def _tilted(parts: _Parts, cavity: Moments, data: Any) -> tuple[Nodes, Given]:
    """Return nodes over ζ under cavity times factor, and μ given ζ under the cavity."""
    given = Given.of(cavity, parts.hierarchy.mean.to(cavity.mean))
    scout = scout_rule(parts.rule.nodes.shape[1]) if parts.likelihood.dear else None
    return tilt(given.scales, partial(_factor, parts, given, data), parts.rule, scout), given


def _factor(parts: _Parts, given: Given, data: Any, zeta: Tensor) -> tuple[Tensor, Conditional]:
    """Return the log evidence at ζ with μ integrated out, and the conditional factor."""
    inner, log_noise = parts.split(zeta)

    def spelled() -> tuple[Tensor, Tensor]:
        return given.mean(zeta) @ given.design.mT, parts.hierarchy.covariance(inner) + given.spread[:, None]

    conditional = parts.local(data, given.coefficients(zeta, inner), log_noise, spelled)
    return conditional.log_evidence, conditional


def _conditional(parts: _Parts, phi: Tensor, data: Any) -> Conditional:
    """Return the likelihood's conditional factor at φ = (μ, ζ)."""
    means = parts.hierarchy.mean.to(phi)
    mu, zeta = phi.split([means.shape[1], phi.shape[-1] - means.shape[1]], -1)
    inner, log_noise = parts.split(zeta)
    given, place = Coefficients.at(mu, inner, means), parts.varying.to(phi.device)

    def spelled() -> tuple[Tensor, Tensor]:
        return mu @ means.mT, parts.hierarchy.covariance(inner)[..., place[:, None], place]

    return parts.local(data, given, log_noise, spelled)


def _mixed(parts: _Parts, weights: Tensor, conditional: Conditional, zeta: Tensor) -> DevicePosterior:
    _, log_noise = parts.split(zeta)
    log_noise = torch.full_like(weights, torch.nan) if log_noise is None else log_noise
    moments = conditional.moments()
    return DevicePosterior(weights, moments.mean, moments.covariance, log_noise)


def _summary(parts: _Parts, data: Any, prior: Prior) -> dict[str, Tensor]:
    """Return the devices' sums for a step of expectation maximisation from the prior's mean."""
    features, m = parts.hierarchy.mean.shape
    start = gaussian.moments(prior.completed())
    zero = start.mean.new_zeros(())
    if data is None:
        second = gaussian.pack(zero.expand(features, features))
        return {"mean": zero.expand(features), "second": second, "residual": zero, "count": zero}
    count, likelihood = len(tree.leaves(data)[0]), parts.likelihood
    cavity = Moments(*tree.expand(start, count))
    given = Given.of(cavity, parts.hierarchy.mean.to(start.mean))
    _, conditional = _factor(parts, given, data, cavity.mean[:, None, m:])
    mean, covariance = (part[:, 0] for part in conditional.moments())
    residual = zero.expand(count) if likelihood.residual is None else likelihood.residual(data, mean, covariance)
    away = mean - _centre(parts).to(mean)
    second = gaussian.pack(covariance + away[:, :, None] * away[:, None])
    return {"mean": away, "second": second, "residual": residual, "count": likelihood.rows(data).to(zero.dtype)}


def _estimate(parts: _Parts, total: dict[str, Tensor], count: Tensor, prior: Prior) -> Natural:
    """Return the estimate of that step, as the sum of all sites."""
    m = parts.hierarchy.mean.shape[1]
    away = total["mean"] / count
    spread = gaussian.unpack(total["second"] / count)
    if m:
        spread = spread - away[:, None] * away
    variance = (total["residual"] / total["count"].clamp(min=1)).clamp(min=torch.finfo(away.dtype).tiny)
    zeta = parts.hierarchy.scales(spread, variance.log())
    if parts.noise:
        zeta = torch.cat([zeta, variance.log()[None]])
    precision = torch.cat([1 / spread.diagonal()[:m], torch.ones_like(zeta)])
    mean = torch.cat([(_centre(parts).to(away) + away)[:m], zeta])
    return Natural(precision * mean, gaussian.pack(torch.diag(precision)))


def _centre(parts: _Parts) -> Tensor:
    """Return the common centre of sums of devices' coefficients, `(d,)`: their means in the model's prior."""
    means = parts.hierarchy.mean
    return means @ gaussian.moments(parts.hierarchy.prior.completed()).mean[: means.shape[1]]


def derivatives(mean: Tensor, covariance: Tensor, tilted: Moments, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return `Conditional.derivatives` from the moments of θ_k before and after the rows."""
    factor = torch.linalg.cholesky_ex(covariance).L
    gradient = torch.cholesky_solve((tilted.mean - mean)[..., None], factor)[..., 0]
    lost = torch.cholesky_solve(torch.cholesky_solve(covariance - tilted.covariance, factor).mT, factor)
    return gradient, (weights[..., None, None] * lost).sum(1)


def among(mean: Tensor, place: Tensor, some: Moments) -> Moments:
    """Return the moments of all coefficients, all but some of which are known.

    Args:
        mean: `(K, R, d)` before the rows.
        place: positions of the unknown ones, `(e,)`.
        some: their moments, `(K, R, e)` and `(K, R, e, e)`.
    """
    covariance = mean.new_zeros(*mean.shape, mean.shape[-1])
    covariance[..., place[:, None], place] = some.covariance
    return Moments(mean.index_copy(-1, place, some.mean), covariance)


def _moments(nodes: Nodes, given: Given, concave: bool = False) -> Moments:
    """Return the tilted moments of (μ, ζ); NaN for a client whose rows seem to increase the uncertainty of μ.

    Under a log-concave likelihood Cov[μ | ζ, y] ≤ Cov[μ | ζ] (Brascamp and Lieb, 1976) for any rows. If moments violate
    this by far, nodes have missed the integrand; if by little, as for uninformative rows and few nodes, rows are
    treated as uninformative.
    """
    size, m = nodes.nodes.shape[2], given.centre.shape[1]
    across = given.covariance @ given.design.mT
    gradient, information = nodes.values.derivatives(nodes.weights)
    both = torch.cat([nodes.nodes.mT, gradient.mT], 1)  # (K, s + d, R), in which μ given ζ has a linear mean
    average = (both @ nodes.weights[..., None])[..., 0]
    away = both - average[..., None]
    zeta, first = average[:, :size], torch.cat([given.slope, across], 2)
    mu = given.centre + (first @ torch.cat([zeta - given.scales.mean, average[:, size:]], 1)[..., None])[..., 0]
    turn = torch.cat([first, torch.eye(size, both.shape[1]).to(both).expand(len(both), -1, -1)], 1)
    total = turn @ ((away * nodes.weights[:, None]) @ away.mT) @ turn.mT
    lost = across @ information @ across.mT
    if concave and m:
        root = torch.linalg.cholesky_ex(given.covariance).L
        inverse = linalg.inverse_factor(root)
        share, directions = torch.linalg.eigh(linalg.symmetric((inverse @ lost @ inverse.mT).nan_to_num()))
        missed = (share.amin(-1) < -_MISSED) | ~lost.isfinite().all((-2, -1))
        bounded = (root @ directions * share.clamp(min=0.0)[:, None]) @ (root @ directions).mT
        lost = torch.where((share < 0).any(-1)[:, None, None], bounded, lost)
        total = total.masked_fill(missed[:, None, None], torch.nan)
    total[:, :m, :m] += given.covariance - lost
    return Moments(torch.cat([mu, zeta], 1), linalg.symmetric(total))


def _in_chunks(function: Callable[[Any], Any], stacked: Any, numbers: int) -> Any:
    """Call `function` on chunks of clients, so that its arrays stay small."""
    count = len(tree.leaves(stacked)[0])
    size = max(1, _CHUNK // max(1, numbers))
    if count <= size:
        return function(stacked)
    return tree.concatenate([function(tree.take(stacked, slice(i, i + size))) for i in range(0, count, size)])


def _extended(prior: Prior, last: Hyperprior) -> Prior:
    """Return the prior with one more coordinate."""
    size = len(prior.normal.shift)
    old = gaussian.unpack(prior.normal.precision)
    precision = torch.block_diag(old, torch.tensor([[last.precision]], dtype=old.dtype))
    shift = torch.cat([prior.normal.shift, prior.normal.shift.new_tensor([last.shift])])
    more = () if last.log_density is None else (hyperpriors.Factor(size, last.log_density),)
    return Prior(Natural(shift, gaussian.pack(precision)), (*prior.factors, *more))
