r"""HM2: devices whose coefficients come from one distribution, as factors for expectation propagation.

.. math::
    y_k \mid \theta_k \sim p(y_k \mid X_k \theta_k), \qquad \theta_k \mid \varphi \sim N(\mu, S(\zeta)), \qquad
    \varphi = (\mu, \zeta),

with ζ the logarithms of the variances τ (and more for a full covariance, and log σ² where the noise is learnt). Given
ζ, μ and θ_k are jointly normal, so a device's factor f_k(φ) = ∫ p(y_k | θ_k) p(θ_k | φ) dθ_k and its tilted moments
need nodes over ζ only (`quadrature.tilt`): μ and θ_k integrate exactly for the linear model, and by a normal
approximation at the mode of θ_k for logistic and Poisson regression (`generalised.py`).

A coefficient that is not `random` has variance 0, a fixed effect: that makes linear mixed-effects models.

A device's own posterior (section 4.2.1) is the mixture, over the nodes of its tilted distribution, of the normal
densities of θ_k given ζ: composition sampling from the cavity without its Monte Carlo error.

Source: Yue, Kontar, Estrada Gómez (2022), "Federated data analytics: a study on linear models", Example 4.1 and
sections 4.2.1 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch import tree
from fedtorch.models import gaussian, hyperpriors
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hyperpriors import Hyperprior, Prior
from fedtorch.models.projections import Projected, Start
from fedtorch.models.quadrature import Nodes, Rule, default_rule, tilt

__all__ = [
    "Hierarchy",
    "Likelihood",
    "Local",
    "Model",
    "Statistics",
    "adapted",
    "expected_residual",
    "linear",
    "normal",
    "of",
    "rows",
    "statistics",
]

_CHUNK = 2**21  # numbers in one array of the nodes of a chunk of clients


class Hierarchy(NamedTuple):
    """How θ_k depends on φ = (μ, ζ)."""

    names: tuple[str, ...]  # of the coordinates of φ
    mean: Tensor  # (d, m) E θ_k = mean · μ
    covariance: Callable[[Tensor], Tensor]  # ζ (..., s) -> S (..., d, d)
    scales: Callable[[Tensor, Tensor], Tensor]  # (E θθ' about μ (d, d), log σ² ()) -> ζ (s,) that would give it
    prior: Prior  # of φ


class Local(NamedTuple):
    """What a likelihood tells of θ_k ~ N(mean, covariance) and the device's rows."""

    log_evidence: Tensor  # (K, R)
    mean: Tensor  # (K, R, d) of θ_k given the rows
    covariance: Tensor  # (K, R, d, d)


class Likelihood(NamedTuple):
    """How rows depend on θ_k."""

    prepare: Callable[[Any], Any]  # block -> what `local` needs
    # (prepared, E θ_k (K, R, d), its covariances (K, R, d, d), ζ (K, R, s), log σ² (K, R) or None) -> Local
    local: Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], Local]
    residual: Callable[[Any, Tensor, Tensor], Tensor] | None  # expected Σ (y − x'θ)² under N(mean, covariance), (K,)
    size: Callable[[Any], int]  # numbers a node of one client needs


class Model(NamedTuple):
    """A hierarchical model, ready for `ft.ep(model.project, model.prior, start=…, prepare=…)`."""

    names: tuple[str, ...]  # of the coordinates of φ
    prior: Prior
    project: Callable[[Moments, Any, Tensor], Projected]
    start: Start
    prepare: Callable[[Any], Any]
    devices: Callable[[Moments, Any], DevicePosterior]  # (what the others know of φ, prepared data)


class Statistics(NamedTuple):
    """Sums over the rows of each client, in float64: all that a linear model needs of them."""

    gram: Tensor  # (K, d, d) X'X
    cross: Tensor  # (K, d) X'y
    square: Tensor  # (K,) y'y
    count: Tensor  # type: ignore[assignment]  # (K,)


def normal(
    features: int,
    *,
    random: Sequence[int | str] | None = None,
    correlated: bool = False,
    mean: float | Tensor = 0.0,
    sd: float | Tensor = 1.0,
    variance: Hyperprior | Sequence[Hyperprior] | None = None,
    names: Sequence[str] | None = None,
) -> Hierarchy:
    r"""θ_k ~ N(μ, diag(τ)), or with a full covariance; μ_j ~ N(mean_j, sd_j²) and hyperpriors of log τ_j.

    With `correlated`, S = L L' with :math:`L = \mathrm{diag}(\tau^{1/2}) U`, U unit lower triangular with free entries
    :math:`U_{ij} \sim N(0, 1)`: τ_i is the variance of coefficient i given those before it.

    Args:
        features: d.
        random: numbers or names of the coefficients that differ between devices; default: all. The others are fixed
            effects, θ_kj = μ_j.
        correlated: whether the random coefficients are.
        mean, sd: of the prior of μ, numbers or `(d,)`.
        variance: hyperprior of x_j = log τ_j, one or one for each; default: log-normal(0, 1).
        names: of the coefficients; default: "0", "1", ….
    """
    labels = tuple(str(j) for j in range(features)) if names is None else tuple(names)
    if len(labels) != features or features < 1:
        raise ValueError(f"Expected a name for each of {features} coefficients (at least 1), but got {len(labels)}")
    chosen = list(range(features)) if random is None else [_number(which, labels) for which in random]
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"Expected distinct random coefficients, but got {list(random or ())}")
    r = len(chosen)
    own = hyperpriors.log_normal() if variance is None else variance
    each = [own] * r if isinstance(own, Hyperprior) else list(own)
    if len(each) != r:
        raise ValueError(f"Expected a hyperprior for each of {r} random coefficients, but got {len(each)}")
    row, column = torch.tril_indices(r, r, -1) if correlated else torch.zeros(2, 0, dtype=torch.int64)
    place = torch.tensor(chosen, dtype=torch.int64)

    def root(zeta: Tensor) -> Tensor:
        unit = torch.eye(r, dtype=zeta.dtype, device=zeta.device).expand(*zeta.shape[:-1], r, r).clone()
        unit[..., row, column] = zeta[..., r:]
        return (zeta[..., :r, None] / 2).exp() * unit

    def covariance(zeta: Tensor) -> Tensor:
        full = zeta.new_zeros((*zeta.shape[:-1], features, features))
        if not correlated:
            full[..., place, place] = zeta.exp()
            return full
        half = root(zeta)
        full[..., place[:, None], place] = half @ half.mT
        return full

    def scales(matrix: Tensor, log_noise: Tensor) -> Tensor:
        inner = matrix[place[:, None], place]
        if not correlated:
            return inner.diagonal().log()
        half = torch.linalg.cholesky(inner)
        return torch.cat([2 * half.diagonal().log(), (half / half.diagonal()[:, None])[row, column]])

    shape = torch.ones(features, dtype=torch.float64)
    prior = hyperpriors.prior(
        mean * shape, torch.diag((sd * shape).square()), [*each, *[hyperpriors.log_normal()] * len(row)]
    )
    titles = [f"mean {name}" for name in labels] + [f"log variance {labels[j]}" for j in chosen]
    titles += [f"dependence {labels[chosen[i]]} on {labels[chosen[j]]}" for i, j in zip(row, column)]
    return Hierarchy(tuple(titles), torch.eye(features, dtype=torch.float64), covariance, scales, prior)


def linear(
    hierarchy: Hierarchy,
    *,
    noise: Hyperprior | float | Callable[[Statistics], Tensor] | None = None,
    rule: Rule | None = None,
) -> Model:
    """Linear regression: y_k ~ N(X_k θ_k, σ² I).

    Args:
        hierarchy: of the coefficients, such as `normal(d)`.
        noise: a hyperprior of log σ², shared by all devices and learnt; the known variance; or a function of the
            sufficient statistics that gives each device's σ_k², `(K,)`. Default: learnt, log-normal(0, 5).
        rule: nodes over ζ (and log σ²); default: `quadrature.default_rule`.
    """
    noise = hyperpriors.log_normal(0.0, 5.0) if noise is None else noise
    if isinstance(noise, (int, float)) and not noise > 0:
        raise ValueError(f"Expected a positive noise variance, but got {noise}")

    def local(data: Statistics, mean: Tensor, covariance: Tensor, zeta: Tensor, log_noise: Tensor | None) -> Local:
        if log_noise is None:
            known = noise(data) if callable(noise) else torch.full_like(data.square, noise)  # type: ignore[arg-type]
            log_noise = known.log()[:, None].expand(mean.shape[:2])
        return _conjugate(data, mean, covariance, log_noise)

    def prepare(data: Any) -> Statistics:
        return statistics(data, hierarchy.mean.shape[0])

    likelihood = Likelihood(prepare, local, expected_residual, lambda data: 1)
    return of(hierarchy, likelihood, noise=noise if isinstance(noise, Hyperprior) else None, rule=rule)


def of(
    hierarchy: Hierarchy, likelihood: Likelihood, *, noise: Hyperprior | None = None, rule: Rule | None = None
) -> Model:
    """The model of a hierarchy and a likelihood.

    Args:
        hierarchy: of θ_k given φ.
        likelihood: of a device's rows given θ_k.
        noise: hyperprior of log σ², the last coordinate of φ, if the likelihood has one.
        rule: nodes over ζ.
    """
    means = hierarchy.mean
    features, m = means.shape
    names, prior = hierarchy.names, hierarchy.prior
    if noise is not None:
        names, prior = (*names, "log noise"), _extended(prior, noise)
    scales = len(prior.normal.shift) - m
    rule = default_rule(scales) if rule is None else rule

    def split(zeta: Tensor) -> tuple[Tensor, Tensor | None]:
        return (zeta[..., :-1], zeta[..., -1]) if noise is not None else (zeta, None)

    def tilted(cavity: Moments, data: Any) -> tuple[Nodes, _Given]:
        given = _Given.of(cavity, means.to(cavity.mean))

        def factor(zeta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Local]]:
            inner, log_noise = split(zeta)
            mean, covariance = given.mean(zeta) @ given.design.mT, hierarchy.covariance(inner) + given.spread[:, None]
            found = likelihood.local(data, mean, covariance, inner, log_noise)
            return found.log_evidence, (mean, covariance, found)

        return tilt(given.scales, factor, rule), given

    def project(cavity: Moments, data: Any, key: Tensor) -> Projected:
        def moments(part: tuple[Moments, Any]) -> Moments:
            return _moments(*tilted(*part))

        return Projected(_in_chunks(moments, (cavity, data), _numbers(data)), cavity)

    def devices(cavity: Moments, data: Any) -> DevicePosterior:
        def mixture(part: tuple[Moments, Any]) -> DevicePosterior:
            nodes, _ = tilted(*part)
            _, log_noise = split(nodes.nodes)
            found = nodes.values[2]
            log_noise = torch.full_like(nodes.weights, torch.nan) if log_noise is None else log_noise
            return DevicePosterior(nodes.weights, found.mean, found.covariance, log_noise)

        return _in_chunks(mixture, (cavity, data), _numbers(data))

    def _numbers(data: Any) -> int:
        return len(rule.weights) * max(features**2, likelihood.size(data))

    def summary(data: Any, prior: Prior) -> dict[str, Tensor]:
        """One step of expectation maximisation from the prior's mean."""
        own = gaussian.moments(prior.completed())
        zero = own.mean.new_zeros(())
        if data is None:
            return {"mean": zero.expand(features), "second": gaussian.pack(zero.expand(features, features)),
                    "residual": zero, "count": zero}  # fmt: skip
        count = len(tree.leaves(data)[0])
        cavity = Moments(*tree.expand(own, count))
        given = _Given.of(cavity, means.to(own.mean))
        inner, log_noise = split(cavity.mean[:, None, m:])
        found = likelihood.local(
            data, given.mean(cavity.mean[:, None, m:]) @ given.design.mT,
            hierarchy.covariance(inner) + given.spread[:, None], inner, log_noise,
        )  # fmt: skip
        mean, covariance = found.mean[:, 0], found.covariance[:, 0]
        residual = zero.expand(count) if likelihood.residual is None else likelihood.residual(data, mean, covariance)
        rows = data.count.to(zero.dtype) if hasattr(data, "count") else zero.expand(count)
        second = gaussian.pack(covariance + mean[:, :, None] * mean[:, None])
        return {"mean": mean, "second": second, "residual": residual, "count": rows}

    def estimate(total: dict[str, Tensor], count: Tensor, prior: Prior) -> Natural:
        average = total["mean"] / count
        spread = gaussian.unpack(total["second"] / count)
        if m:
            spread = spread - average[:, None] * average
        variance = (total["residual"] / total["count"].clamp(min=1)).clamp(min=torch.finfo(average.dtype).tiny)
        zeta = hierarchy.scales(spread, variance.log())
        if noise is not None:
            zeta = torch.cat([zeta, variance.log()[None]])
        precision = torch.cat([1 / spread.diagonal()[:m], torch.ones_like(zeta)])
        mean = torch.cat([average[:m], zeta])
        return Natural(precision * mean, gaussian.pack(torch.diag(precision)))

    return Model(names, prior, project, Start(summary, estimate), likelihood.prepare, devices)


def adapted(model: Model, posterior: MultivariateNormal, data: Any) -> DevicePosterior:
    """New devices' posteriors from q(φ) and their own few rows: no other device takes part.

    Args:
        model: that q(φ) was learnt with.
        posterior: q(φ).
        data: a block of the new devices' rows, such as `data.stack([0, 1])`; a device may have none.
    """
    count = len(data.count)
    moments = Moments(posterior.mean, posterior.covariance_matrix)
    return model.devices(Moments(*tree.expand(moments, count)), model.prepare(data))


def statistics(data: Any, features: int) -> Statistics:
    """Sufficient statistics of a block with rows (x `(d,)`, y `()`).

    Raises:
        ValueError: the rows have another shape.
    """
    if isinstance(data, Statistics):
        return data
    x, y, _ = rows(data, features)
    return Statistics(x.mT @ x, (x.mT @ y[..., None])[..., 0], y.square().sum(1), data.count)


def expected_residual(data: Statistics, mean: Tensor, covariance: Tensor) -> Tensor:
    """E ‖y_k − X_k θ_k‖² under θ_k ~ N(mean `(K, d)`, covariance `(K, d, d)`), `(K,)`."""
    second = covariance + mean[:, :, None] * mean[:, None]
    return (data.square - 2 * (data.cross * mean).sum(1) + (data.gram * second).sum((1, 2))).clamp(min=0)


def rows(data: Any, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """x `(K, N, d)`, y `(K, N)` and the mask `(K, N)` of a block, in float64, zero where there is no row.

    Raises:
        ValueError: the rows are not (x, y) of these shapes.
    """
    batch = data.batch
    shapes = [tuple(leaf.shape[2:]) for leaf in tree.leaves(batch)]
    if shapes not in ([(features,), ()], [(features,), (1,)]):
        raise ValueError(f"Expected rows (x, y) of shapes ({features},) and (), but got {shapes}")
    x, y = (leaf.to(torch.float64) for leaf in tree.leaves(batch))
    mask = data.mask
    return x * mask[..., None], y.reshape(y.shape[:2]) * mask, mask


class _Given(NamedTuple):
    """μ given ζ under the cavity: μ ~ N(centre + slope (ζ − E ζ), covariance)."""

    scales: Moments  # of ζ
    centre: Tensor  # (K, m)
    slope: Tensor  # (K, m, s)
    covariance: Tensor  # (K, m, m)
    design: Tensor  # (d, m)
    spread: Tensor  # (K, d, d) of E θ_k given ζ

    @staticmethod
    def of(cavity: Moments, design: Tensor) -> _Given:
        m = design.shape[1]
        total, inner = cavity.covariance, cavity.covariance[:, m:, m:]
        factor = torch.linalg.cholesky_ex(inner).L
        half = torch.linalg.solve_triangular(factor, total[:, m:, :m], upper=False)
        slope = torch.linalg.solve_triangular(factor.mT, half, upper=True).mT
        covariance = total[:, :m, :m] - half.mT @ half
        scales = Moments(cavity.mean[:, m:], inner)
        return _Given(scales, cavity.mean[:, :m], slope, covariance, design, design @ covariance @ design.mT)

    def mean(self, zeta: Tensor) -> Tensor:
        """E μ given ζ, `(K, R, m)`."""
        return self.centre[:, None] + (zeta - self.scales.mean[:, None]) @ self.slope.mT


def _moments(nodes: Nodes, given: _Given) -> Moments:
    """The tilted moments of (μ, ζ) from those of θ_k given ζ."""
    mean, covariance, found = nodes.values
    m = given.centre.shape[1]
    across = (given.covariance @ given.design.mT)[:, None].expand(*nodes.weights.shape, m, -1)
    factor = torch.linalg.cholesky_ex(covariance).L
    gain = torch.cholesky_solve(across.mT, factor).mT
    mu = given.mean(nodes.nodes) + (gain @ (found.mean - mean)[..., None])[..., 0]
    inner = given.covariance[:, None] + gain @ (found.covariance - covariance) @ gain.mT
    phi = torch.cat([mu, nodes.nodes], -1)
    centre = (nodes.weights[..., None] * phi).sum(1)
    away = phi - centre[:, None]
    total = (nodes.weights[..., None] * away).mT @ away
    total[:, :m, :m] += (nodes.weights[..., None, None] * inner).sum(1)
    return Moments(centre, (total + total.mT) / 2)


def _conjugate(data: Statistics, mean: Tensor, covariance: Tensor, log_noise: Tensor) -> Local:
    """The linear model: exact."""
    precision = (-log_noise).exp()
    root = torch.linalg.cholesky_ex(covariance).L
    eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    inner = eye + root.mT @ data.gram[:, None] @ root * precision[..., None, None]
    factor = torch.linalg.cholesky_ex(inner).L
    half = torch.linalg.solve_triangular(factor, root.mT, upper=False)
    fitted = (data.gram[:, None] @ mean[..., None])[..., 0]
    misfit = (data.cross[:, None] - fitted) * precision[..., None]
    score = (half @ misfit[..., None])[..., 0]
    squares = data.square[:, None] - (mean * (2 * data.cross[:, None] - fitted)).sum(-1)
    log_evidence = (
        -0.5 * data.count[:, None] * (math.log(2 * math.pi) + log_noise)
        - 0.5 * squares * precision
        - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        + 0.5 * score.square().sum(-1)
    )
    return Local(log_evidence, mean + (half.mT @ score[..., None])[..., 0], half.mT @ half)


def _in_chunks(function: Callable[[Any], Any], stacked: Any, numbers: int) -> Any:
    """`function` on some clients at a time, so that its arrays stay small."""
    count = len(tree.leaves(stacked)[0])
    size = max(1, _CHUNK // max(1, numbers))
    if count <= size:
        return function(stacked)
    return tree.concatenate([function(tree.take(stacked, slice(i, i + size))) for i in range(0, count, size)])


def _extended(prior: Prior, last: Hyperprior) -> Prior:
    """The prior with one more coordinate."""
    size = len(prior.normal.shift)
    old = gaussian.unpack(prior.normal.precision)
    precision = torch.block_diag(old, torch.tensor([[last.precision]], dtype=old.dtype))
    shift = torch.cat([prior.normal.shift, prior.normal.shift.new_tensor([last.shift])])
    more = () if last.log_density is None else (hyperpriors.Factor(size, last.log_density),)
    return Prior(Natural(shift, gaussian.pack(precision)), (*prior.factors, *more))


def _number(which: int | str, names: Sequence[str]) -> int:
    if isinstance(which, str):
        if which not in names:
            raise ValueError(f"Expected one of the coefficients {list(names)}, but got {which!r}")
        return list(names).index(which)
    if not 0 <= which < len(names):
        raise ValueError(f"Expected the number of a coefficient below {len(names)}, but got {which}")
    return which
