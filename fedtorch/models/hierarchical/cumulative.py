r"""Cumulative logit models: ordered responses of C levels, of which a row passes thresholds.

.. math::
    P(y_i \le k) = \sigma(\tau_k - x_i'\theta), \qquad \tau_1 < \dots < \tau_{C-1} .

The intercept of x is −τ₁, and what the other thresholds are more than τ₁ are further fixed effects
:math:`c_k = \tau_k - \tau_1` of θ, 0 < c₂ < c₃ < …. With a = τ_y − x'θ and b = τ_{y−1} − x'θ a row's likelihood is

.. math:: \sigma(a) - \sigma(b) = \sigma(a)\, \sigma(-b)\, (1 - e^{-(a - b)}),

so that its logarithm is a sum of three concave functions, each of one number that is linear in θ: whether a row stays
below its upper threshold and above its lower one, two logistic regressions, and how far the two are apart, alike for
all rows of a level. The last one keeps thresholds apart, and in order: their prior is a normal density restricted to
ascending thresholds, with no Jacobian, as thresholds themselves are what it is of.

Source: McCullagh (1980), "Regression models for ordinal data", JRSS B 42; Tutz and Hennevogl (1996), "Random effects in
ordinal regression models", Computational Statistics & Data Analysis 22.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical.factor import Conditional, DeviceLikelihood, Model, among, derivatives, of
from fedtorch.models.hierarchical.families import CUMULATIVE, Ordered
from fedtorch.models.hierarchical.generalised import default_inner, default_rule
from fedtorch.models.hierarchical.hierarchy import Hierarchy
from fedtorch.models.hierarchical.integrals import smooth
from fedtorch.models.quadrature import QuadratureRule
from fedtorch.models.rows import observations, refuse

_FEW = 2  # coefficients that nodes are over together
_CLOSE = 0.01  # of two thresholds, below which the density is continued by a parabola of its logarithm


class _Data(NamedTuple):
    """Hold what rows are told apart by: x, -x and thresholds, then differences of thresholds."""

    rows: smooth.Rows
    weight: Tensor  # (K, 2 N + C - 2) zero where there is none
    count: Tensor  # type: ignore[assignment]  # (K,)


def cumulative(
    hierarchy: Hierarchy,
    levels: Sequence[str],
    *,
    rule: QuadratureRule | None = None,
    inner: QuadratureRule | str | None = "default",
) -> Model:
    """Return the model of y ∈ {0, …, C − 1}, numbers of ordered levels, with P(y > k) = σ(x'θ_k − c_k).

    Rows may have an offset of the log-odds and weights.

    Args:
        hierarchy: of the coefficients of x, one of which is `"Intercept"`, and then those of C − 2 thresholds less the
            first, which are fixed effects: see `difference_names`.
        levels: names of the levels, in order, at least two.
        rule: nodes over the variances; default: that of `generalised`.
        inner: nodes over the coefficients about their mode: over all of them, or over those that differ, for where the
            others are known, as in `ft.maximum_likelihood`; None for Laplace's method. Default, also for the other of
            the two: over those that differ, given which the others are integrated by Laplace's method at every node,
            or over all of two; seven points a coordinate.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.models import hierarchical
    >>> names = ["Intercept", *difference_names(["low", "middle", "high"])]
    >>> model = cumulative(hierarchical.normal(2, random=[], names=names), ["low", "middle", "high"])
    >>> model.names, model.ordered.names
    (('mean Intercept', 'mean middle|high - low|middle'), ('low|middle', 'middle|high'))
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.tensor([1.0]))])  # one row of "middle"
    >>> phi = torch.tensor([[[1.0, 2.0]]]).double()  # thresholds -1 and 1
    >>> model.log_factor(phi, model.prepare(data.stack([0]))).exp().round(decimals=3)  # σ(1) - σ(-1)
    tensor([[0.4620]], dtype=torch.float64)
    """
    ordered = Ordered.of(levels, hierarchy.coefficients)
    features, count = len(hierarchy.mean), len(ordered.levels)
    if len(hierarchy.coefficients) != features or not hierarchy.coefficients[features - count + 2 :] == tuple(
        difference_names(levels)
    ):
        raise ValueError(
            f"Expected coefficients that end with {difference_names(levels)}, but got {list(hierarchy.coefficients)}"
        )
    scales = len(hierarchy.prior.normal.shift) - hierarchy.mean.shape[1]
    varying = hierarchy.varying
    if isinstance(inner, QuadratureRule) and inner.nodes.shape[1] not in (features, len(varying)):
        raise ValueError(
            f"Expected inner= for the {len(varying)} coefficients that differ, or for all {features}, but got a rule "
            f"for {inner.nodes.shape[1]} dimensions"
        )
    known = _rule(inner, len(varying))
    own = isinstance(inner, QuadratureRule) and inner.nodes.shape[1] == features
    whole = _rule(inner, features) if own or (inner is not None and features <= _FEW) else known
    rules = {features: whole, len(varying): known}
    likelihood = DeviceLikelihood(
        prepare=partial(_prepared, ordered, features),
        local=partial(_local, count, varying, rules),
        residual=None,
        rows=lambda data: data.count,
        size=lambda data: data.weight.shape[1],
        family=CUMULATIVE,
        dear=True,
    )
    model = of(hierarchy, likelihood, rule=default_rule(scales) if rule is None else rule)
    return model._replace(ordered=ordered)


def difference_names(levels: Sequence[str]) -> list[str]:
    """Return the names of what thresholds are more than the first.

    >>> difference_names(["1", "2", "3", "4"])
    ['2|3 - 1|2', '3|4 - 1|2']
    """
    names = Ordered.thresholds(levels)
    return [f"{name} - {names[0]}" for name in names[1:]]


def _rule(inner: QuadratureRule | str | None, size: int) -> QuadratureRule | None:
    """Return nodes over so many coefficients."""
    if isinstance(inner, QuadratureRule) and inner.nodes.shape[1] == size:
        return inner
    return default_inner(size) if inner is not None and size else None


def _local(
    count: int,
    varying: Tensor,
    rules: dict[int, QuadratureRule | None],
    data: _Data,
    mean: Tensor,
    covariance: Tensor,
    zeta: Tensor,
    log_noise: Tensor | None,
) -> Conditional:
    """Return what rows say of θ, of which no more is integrated than what is not known."""
    features = mean.shape[-1]
    place = varying.to(mean.device)
    fixed = torch.ones(features, dtype=torch.bool, device=mean.device).index_fill(0, place, False)
    density = partial(_density, data, count)
    if covariance.shape[-1] == features:
        nothing = mean.new_zeros(()).expand(*mean.shape[:2], 1)
        order = torch.cat([fixed.nonzero()[:, 0], place])  # what differs comes last, over which nodes go
        moved, back = _ordered(data.rows, order), order.argsort()
        inner = covariance[..., order[:, None], order]
        found = smooth.conditional(density, moved, mean[..., order], inner, nothing, rules[features])
        after = found.moments()
        after = Moments(after.mean[..., back], after.covariance[..., back[:, None], back])
        return Conditional(
            found.log_evidence, lambda weights: derivatives(mean, covariance, after, weights), lambda: after
        )
    rows = _ordered(data.rows, place)
    more = (mean * fixed) @ data.rows.x.mT  # (K, R, rows) what known coefficients add
    found = smooth.conditional(density, rows, mean[..., place], covariance, more, rules[len(place)])
    crossed = (more[..., data.rows.x.shape[1] - (count - 2) :] <= 0).any(-1)
    found = found._replace(log_evidence=found.log_evidence.masked_fill(crossed, -torch.inf))

    def moments() -> Moments:
        return among(mean, place, found.moments())

    return found._replace(moments=moments)


def _ordered(rows: smooth.Rows, order: Tensor) -> smooth.Rows:
    """Return rows of these columns of x."""
    return smooth.Rows.of(rows.x[..., order], rows.offset, rows.root[..., order, :])


def _density(data: _Data, count: int, eta: Tensor, variance: Tensor, more: Tensor, whole: bool) -> smooth.Slopes:
    """Return log σ(η) of rows, log(1 - e^-η) of differences of thresholds, and derivatives, as often as they count."""
    eta, weight = eta + more, data.weight[:, None]
    rows = eta.shape[-1] - (count - 2)
    side, gap = eta[..., :rows], eta[..., rows:]
    at = gap.clamp(min=_CLOSE)
    first, less = 1 / at.expm1(), (gap - _CLOSE).clamp(max=0.0)  # how far a parabola goes on from there
    second = -first * (1 + first)
    value = (-(-at).expm1()).log() + less * (first + less * second / 2)
    value = torch.cat([torch.nn.functional.logsigmoid(side), value], -1) * weight
    if not whole:
        return smooth.Slopes(value, value, value)
    p = side.sigmoid()
    slopes, bends = (torch.cat(each, -1) for each in ((1 - p, first + less * second), (p * (p - 1), second)))
    return smooth.Slopes(value, slopes * weight, bends * weight)


def _prepared(ordered: Ordered, features: int, data: Any) -> _Data:
    """Return a block's rows as the two sides on which thresholds are, and the levels that some of them have."""
    count = len(ordered.levels)
    x, y, offset, weight, _ = observations(data, features - (count - 2), ("offset", "weight"))
    bad = ~((y >= 0) & (y < count) & (y == y.round())) & data.mask
    got = f"{float(y[bad][0]):g}" if bool(bad.any()) else ""
    refuse(
        bad.any(1),
        f"Expected numbers of the {count} levels {list(ordered.levels)}, 0 to {count - 1}, but got {got} in y; declare "
        "all levels",
        f"others than the levels {list(ordered.levels)}; declare all levels",
    )
    level = torch.nn.functional.one_hot(torch.where(data.mask & ~bad, y, 0).long(), count).to(x)
    counted = data.mask.to(x) if weight is None else weight * data.mask
    nowhere = torch.zeros_like(level[..., :2])
    above = torch.cat([level, nowhere], -1)[..., 2:count]  # c_k of the lower threshold: of level k, from the third on
    below = level[..., 1 : count - 1]  # of the upper one, of the levels between
    sides = torch.cat([torch.cat([x, -above], -1), torch.cat([-x, below], -1)], 1)
    apart = torch.eye(count - 2, dtype=x.dtype, device=x.device)
    apart = apart - torch.nn.functional.pad(apart[:, 1:], (0, 1))
    apart = torch.nn.functional.pad(apart, (x.shape[-1], 0)).expand(len(x), -1, -1)
    lower, upper = counted * (1 - level[..., 0]), counted * (1 - level[..., -1])
    between = (counted[..., None] * below).sum(1)
    moved = torch.zeros_like(y) if offset is None else offset
    rows = smooth.Rows.of(
        torch.cat([sides, apart], 1),
        torch.cat([moved, -moved, torch.zeros_like(between)], 1),
        x.new_zeros(len(x), 2 * x.shape[1] + count - 2, features, 0),
    )
    return _Data(rows, torch.cat([lower, upper, between], 1), data.count)
