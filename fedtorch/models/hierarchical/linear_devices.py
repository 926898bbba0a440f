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

from fedtorch import linalg, tree
from fedtorch.models._reduced import Reduced, reduced
from fedtorch.models.device_posterior import DevicePosterior
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import hyperpriors
from fedtorch.models.hierarchical.factor import Conditional, DeviceLikelihood, Margins, Model, among, of
from fedtorch.models.hierarchical.families import GAUSSIAN
from fedtorch.models.hierarchical.hierarchy import Components, Hierarchy
from fedtorch.models.hierarchical.hyperpriors import Hyperprior
from fedtorch.models.hierarchical.integrals.given import Coefficients
from fedtorch.models.linear import LINEAR_EXTRAS, SufficientStatistics, sufficient_statistics
from fedtorch.models.quadrature import QuadratureRule
from fedtorch.models.rows import log_weights, observations, refuse
from fedtorch.programs import variance_components
from fedtorch.programs.variance_components import VarianceComponents


def linear(
    hierarchy: Hierarchy,
    *,
    noise: Hyperprior | float | Callable[[SufficientStatistics], Tensor] | None = None,
    rule: QuadratureRule | None = None,
    statistics: Callable[[Any, int], SufficientStatistics] | None = None,
) -> Model:
    """Build linear regression: y_k ~ N(X_k θ_k + offset, σ² / weight), for rows with an optional offset and weight.

    Args:
        hierarchy: of the coefficients, such as `normal(d)`.
        noise: a hyperprior of log σ², shared by all devices and learnt; the known variance; or a function of the
            sufficient statistics that gives each device's σ_k², `(K,)`. Default: learnt, log-normal(0, 5). Otherwise
            known variances, such as eight schools' standard errors, are weights 1/σ_k² of the devices' rows, with
            noise=1.0.
        rule: nodes over ζ (and log σ²); default: `quadrature.default_rule`.
        statistics: (a block's rows, d) -> their sums, the only use of the rows; default: the plain sums over rows, for
            responses about the client's least squares fit.

    Raises:
        TypeError: variances by device number, which does not follow from a device's rows.
        ValueError: a noise variance that is not positive; or, when a population is bound, rows of another form, or a
            device for which `noise` gives no positive variance.
    """
    noise = hyperpriors.log_normal(0.0, 5.0) if noise is None else noise
    if not (isinstance(noise, (int, float, Hyperprior)) or callable(noise)):
        raise TypeError(
            f"Expected noise= as a hyperprior, a number or a function of the sufficient statistics, but got a "
            f"{type(noise).__name__}; known variances of devices are weights of their rows, 1/variance, with noise=1.0"
        )
    if isinstance(noise, (int, float)) and not noise > 0:
        raise ValueError(f"Expected a positive noise variance, but got {noise}")

    varying = hierarchy.varying

    def local(data: _Data, mean: Tensor, covariance: Tensor, zeta: Tensor, log_noise: Tensor | None) -> Conditional:
        known = data.log_noise[:, None].expand(mean.shape[:2])
        place = None if covariance.shape[-1] == mean.shape[-1] else varying.to(mean.device)
        factor = _conjugate(data.rows, mean, covariance, known if log_noise is None else log_noise, place)
        return factor._replace(log_evidence=factor.log_evidence + 0.5 * data.log_weights[:, None])

    def fit(tensors: Sequence[Tensor]) -> bool:
        return variance_components.usable(len(hierarchy.mean), tensors)

    def margin(
        data: _Data, given: Coefficients, log_noise: Tensor | None, spelled: Callable[[], Conditional]
    ) -> Conditional:
        assert hierarchy.components is not None
        known = data.log_noise[:, None].expand(given.zeta.shape[:2]) if log_noise is None else log_noise
        factor = _marginal(data.rows, hierarchy.components, given, known, spelled)
        return factor._replace(log_evidence=factor.log_evidence + 0.5 * data.log_weights[:, None])

    def prepare(data: Any) -> _Data:
        features, rows = len(hierarchy.mean), None
        if statistics is None:
            rows = observations(data, features, LINEAR_EXTRAS).whitened()
            sums = sufficient_statistics(*rows)._replace(count=data.count.to(torch.float64))
        else:
            sums = statistics(data, features)
        if isinstance(noise, Hyperprior):
            known = torch.ones_like(sums.power)
        else:
            known = noise(sums) if callable(noise) else torch.full_like(sums.power, noise)
        bad = ~((known > 0) & known.isfinite())
        refuse(bad, f"Expected positive noise variances, but noise= gave {known[bad].tolist()}; bound them from below")
        return _Data(reduced(sums, rows), known.log(), log_weights(data))

    likelihood = DeviceLikelihood(
        prepare,
        local,
        lambda data, mean, covariance: expected_residual(data.rows, mean, covariance),
        lambda data: data.rows.count,
        lambda data: 1,
        GAUSSIAN,
        margins=None if hierarchy.components is None else Margins(fit, margin),
    )
    return of(hierarchy, likelihood, noise=noise if isinstance(noise, Hyperprior) else None, rule=rule)


def adapted(model: Model, posterior: MultivariateNormal, data: Any) -> DevicePosterior:
    """Return new devices' posteriors from q(φ) and their own few rows, without any other device.

    Args:
        model: the model of q(φ).
        posterior: q(φ).
        data: a block of the new devices' rows, such as `data.stack([0, 1])`; a device may have none.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.models.hierarchical import normal
    >>> model = linear(normal(1), noise=1.0)
    >>> sure = MultivariateNormal(torch.zeros(2).double(), 1e-9 * torch.eye(2).double())  # θ_k ~ N(0, 1)
    >>> rows, counts = (torch.ones(3, 1), torch.full((3,), 4.0)), torch.tensor([3, 0])
    >>> new = ft.data.FederatedData(rows, counts, allow_empty=True)
    >>> adapted(model, sure, new.stack([0, 1])).marginals().mean.round(decimals=3).flatten()  # 3 · 4 / (3 + 1)
    tensor([3., 0.], dtype=torch.float64)
    """
    count = len(data.count)
    moments = Moments(posterior.mean, posterior.covariance_matrix)
    return model.devices(Moments(*tree.expand(moments, count)), model.prepare(data))


def expected_residual(data: Reduced, mean: Tensor, covariance: Tensor) -> Tensor:
    """Return E ‖y_k − X_k θ_k‖² under θ_k ~ N(mean `(K, d)`, covariance `(K, d, d)`), `(K,)`.

    >>> import torch
    >>> from fedtorch.models.linear import sufficient_statistics
    >>> data = reduced(sufficient_statistics(torch.ones(1, 2, 1), torch.tensor([[1.0, 3.0]])))
    >>> found = expected_residual(data, torch.tensor([[2.0]]).double(), torch.tensor([[[0.5]]]).double())
    >>> found.round(decimals=6)  # 2 · (1 + ½)
    tensor([3.], dtype=torch.float64)
    """
    misfit = data.misfit(mean[:, None])[:, 0]
    return data.rest + misfit.square().sum(1) + (data.root * (covariance @ data.root)).sum((1, 2))


class _Data(NamedTuple):
    """The statistics of `K` devices' rows for the linear model."""

    rows: Reduced
    log_noise: Tensor  # (K,) if the noise is known, and 0 if it is learnt
    log_weights: Tensor  # (K,) Σ log w, where a row's variance is σ² / w


def _conjugate(data: Reduced, mean: Tensor, covariance: Tensor, log_noise: Tensor, place: Tensor | None) -> Conditional:
    """Return the exact linear model: d rows B' with responses z + B'θ̂ ~ N(B'm, B'ΣB + σ² I) represent all rows.

    Args:
        data: the rows.
        mean: of θ `(K, R, d)`.
        covariance: of θ `(K, R, d, d)`, or of some of its coordinates `(K, R, e, e)`, the others being known.
        log_noise: log σ² `(K, R)`.
        place: the numbers of these coordinates `(e,)`; None for all.
    """
    (clients, nodes, d), root = mean.shape, data.root
    variance, some = log_noise.exp(), root if place is None else root[:, place]
    e = some.shape[1]
    half = (covariance.reshape(clients, nodes * e, e) @ some).reshape(clients, nodes, e, d)  # ΣB
    total = (half.mT.reshape(clients, nodes * d, e) @ some).reshape(clients, nodes, d, d)
    total.diagonal(dim1=-2, dim2=-1).add_(variance[..., None])
    factor = torch.linalg.cholesky_ex(total).L
    misfit = data.misfit(mean)
    white = torch.linalg.solve_triangular(factor, misfit[..., None], upper=False)
    deviance = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + white.square().sum((-2, -1))

    def derivatives(weights: Tensor) -> tuple[Tensor, Tensor]:
        inverse = linalg.inverse_factor(factor)
        every = (inverse * weights[..., None, None].sqrt()).reshape(clients, nodes * d, d)
        return (inverse.mT @ white)[..., 0] @ root.mT, root @ (every.mT @ every) @ root.mT

    def moments() -> Moments:
        outer = torch.linalg.cholesky_ex(covariance).L
        design = outer.mT @ some[:, None] / variance[..., None, None].sqrt()
        eye = torch.eye(e, dtype=mean.dtype, device=mean.device)
        inner = torch.linalg.cholesky_ex(eye + design @ design.mT).L
        whole = torch.linalg.solve_triangular(inner, outer.mT, upper=False)
        scaled = misfit / variance[..., None]
        gain = whole.mT @ (whole @ (some[:, None] @ scaled[..., None]))
        if place is not None:
            return among(mean, place, Moments(mean[..., place] + gain[..., 0], whole.mT @ whole))
        return Moments(mean + gain[..., 0], whole.mT @ whole)

    return Conditional(_log_evidence(data, log_noise, variance, deviance), derivatives, moments)


def _marginal(
    data: Reduced,
    components: Components,
    given: Coefficients,
    log_noise: Tensor,
    spelled: Callable[[], Conditional],
) -> Conditional:
    """Return the same from the components of Σ, whose full form is needed for the moments of θ_k only."""
    root = data.root
    centre = data.misfit(given.mean[:, None])[:, 0]
    shared, slope, variance = root.mT @ given.shared @ root, given.slope @ root, log_noise.exp()
    rows, columns = (part.to(root.device) for part in components[1:])
    values, (inputs, origin) = components.values(given.zeta), given[1:3]
    margins = VarianceComponents(values, inputs, variance, rows, columns, root, shared, origin, centre, slope)

    def derivatives(weights: Tensor) -> tuple[Tensor, Tensor]:
        score, information = variance_components.scores(margins, weights)
        return score @ root.mT, root @ information @ root.mT

    log_evidence = _log_evidence(data, log_noise, variance, variance_components.log_densities(margins))
    return Conditional(log_evidence, derivatives, lambda: spelled().moments())


def _log_evidence(data: Reduced, log_noise: Tensor, variance: Tensor, deviance: Tensor) -> Tensor:
    """Return the log evidence of all rows from log |M| + u'M⁻¹u of the d representative rows."""
    count, d = data.count[:, None], data.response.shape[1]
    rows = count * math.log(2 * math.pi) + (count - d) * log_noise + data.rest[:, None] / variance
    return -0.5 * (rows + deviance)
