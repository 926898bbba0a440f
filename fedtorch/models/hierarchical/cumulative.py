r"""Cumulative logit models: ordered responses with C levels, separated by thresholds.

.. math::
    P(y_i \le k) = \sigma(\tau_k - x_i'\theta), \qquad \tau_1 < \dots < \tau_{C-1} .

The intercept of x is −τ₁, and the other thresholds' differences to τ₁ are further fixed effects
:math:`c_k = \tau_k - \tau_1` of θ, 0 < c₂ < c₃ < …. With a = τ_y − x'θ and b = τ_{y−1} − x'θ a row's likelihood is

.. math:: \sigma(a) - \sigma(b) = \sigma(a)\, \sigma(-b)\, (1 - e^{-(a - b)}),

so its logarithm is a sum of three concave functions, each of one number that is linear in θ: a logistic regression of
staying below the upper threshold, one of staying above the lower one, and a function of their distance, the same for
all rows of a level. The last one keeps thresholds apart, and in order: their prior is a normal density restricted to
ascending thresholds, without a Jacobian, because it is a density of the thresholds themselves.

Source: McCullagh (1980), "Regression models for ordinal data", JRSS B 42; Tutz and Hennevogl (1996), "Random effects in
ordinal regression models", Computational Statistics & Data Analysis 22.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch.models.hierarchical.factor import Conditional, Model, of
from fedtorch.models.hierarchical.families import CUMULATIVE, Ordered
from fedtorch.models.hierarchical.generalised import default_rule, likelihood_of, scales_of
from fedtorch.models.hierarchical.hierarchy import Hierarchy
from fedtorch.models.hierarchical.integrals.exponential import BINARY, ExponentialFamily, Rows
from fedtorch.models.quadrature import QuadratureRule
from fedtorch.models.rows import observations, refuse

_CLOSE = 0.01  # distance of two thresholds below which the logarithm of the density is continued by a parabola
# directions along which a client is integrated separately: with more, a round of tiny clients is twenty times slower
_DIRECTIONS = 1


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
        hierarchy: of the coefficients of x, one of which is `"Intercept"`, followed by the C − 2 differences of
            thresholds, which are fixed effects: see `difference_names`.
        levels: names of the levels, in order, at least two.
        rule: nodes over the variances; default: that of `generalised`.
        inner: as for `generalised`.

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
    over = default_rule(scales_of(hierarchy)) if rule is None else rule
    likelihood = likelihood_of(hierarchy, _family(count), over, inner, partial(_prepared, ordered), _DIRECTIONS)
    likelihood = likelihood._replace(
        local=partial(_ascending, likelihood.local, count - 2), rows=lambda data: (data.count - (count - 2)) // 2
    )
    return of(hierarchy, likelihood, rule=over)._replace(ordered=ordered)


def difference_names(levels: Sequence[str]) -> list[str]:
    """Return the names of the thresholds' differences to the first.

    >>> difference_names(["1", "2", "3", "4"])
    ['2|3 - 1|2', '3|4 - 1|2']
    """
    names = Ordered.thresholds(levels)
    return [f"{name} - {names[0]}" for name in names[1:]]


def _ascending(
    local: Callable[..., Conditional],
    differences: int,
    data: Rows,
    mean: Tensor,
    covariance: Tensor,
    zeta: Tensor,
    log_noise: Tensor | None,
) -> Conditional:
    """Return the rows' log likelihood of θ, −∞ for known thresholds that cross."""
    factor = local(data, mean, covariance, zeta, log_noise)
    if not differences or covariance.shape[-1] == mean.shape[-1]:
        return factor
    crossed = ~Ordered.ascend(mean[..., mean.shape[-1] - differences :])
    return factor._replace(log_evidence=factor.log_evidence.masked_fill(crossed, -torch.inf))


def _family(count: int) -> ExponentialFamily:
    """Return the family for rows whose first C − 2 are differences of thresholds, and the others threshold sides."""
    gaps = count - 2
    if not gaps:
        return BINARY._replace(extras=("offset", "weight"), outcome=CUMULATIVE)
    parted = lambda eta: (eta[..., :gaps], eta[..., gaps:])

    def ratio(eta: Tensor, rows: Rows) -> Tensor:
        gap, side = parted(eta)
        size = side.abs()
        value = torch.cat([_gap(gap), size / 2 + size.neg().exp().log1p()], -1)
        return -(value @ rows.times[..., None])[..., 0]  # type: ignore[index]

    def slopes(eta: Tensor) -> tuple[Tensor, Tensor]:
        gap, side = parted(eta)
        both = zip(_gap_bends(gap)[:2], BINARY.slopes(side))
        first, second = (torch.cat(each, -1) for each in both)
        return first, second

    def bends(eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gap, side = parted(eta)
        second, third, fourth = (torch.cat(each, -1) for each in zip(_gap_bends(gap)[1:], BINARY.bends(side)))
        return second, third, fourth

    return ExponentialFamily(
        extras=("offset", "weight"),
        response=BINARY.response,
        likely=lambda rows: None,
        ratio=ratio,
        slopes=slopes,
        bends=bends,
        spread=BINARY.spread,
        outcome=CUMULATIVE,
    )


def _gap(gap: Tensor) -> Tensor:
    """Return b = −log(1 − e^−η)."""
    at, less = gap.clamp(min=_CLOSE), (gap - _CLOSE).clamp(max=0.0)  # argument of the parabola
    first = 1 / at.expm1()
    return less * (less * first * (1 + first) / 2 - first) - (-(-at).expm1()).log()


def _gap_bends(gap: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return b', b'', b''', b''''."""
    at, less = gap.clamp(min=_CLOSE), (gap - _CLOSE).clamp(max=0.0)
    first = 1 / at.expm1()
    second, curved = first * (1 + first), less == 0
    third, fourth = second * (1 + 2 * first), second * (1 + 6 * second)
    return less * second - first, second, torch.where(curved, -third, 0.0), torch.where(curved, fourth, 0.0)


def _prepared(ordered: Ordered, data: Any, features: int, order: Tensor) -> Rows:
    """Return a block's rows: first differences of thresholds, then the upper and lower side of each row's level.

    A side has log σ(η) = η/2 − log(2 cosh η/2); a difference counts once for each row between its thresholds.
    """
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
    below = level[..., 1 : count - 1]  # of the upper threshold, for middle levels
    sides = torch.stack([torch.cat([x, -above], -1), torch.cat([-x, below], -1)], 2).flatten(1, 2)
    apart = torch.eye(count - 2, dtype=x.dtype, device=x.device)
    apart = apart - torch.nn.functional.pad(apart[:, 1:], (0, 1))
    apart = torch.nn.functional.pad(apart, (x.shape[-1], 0)).expand(len(x), -1, -1)
    passed = (counted[..., None] * torch.stack([1 - level[..., 0], 1 - level[..., -1]], -1)).flatten(1)
    between = (counted[..., None] * below).sum(1)
    moved = torch.zeros_like(y) if offset is None else offset
    moved = torch.stack([moved, -moved], -1).flatten(1)
    rows = torch.cat([apart, sides], 1)[..., order.to(x.device)]
    zero = torch.zeros_like(between)
    return Rows(
        x=rows,
        columns=rows.mT.contiguous(),
        statistic=0.5 * (torch.cat([zero, passed], 1)[:, None] @ rows)[:, 0],
        mask=torch.nn.functional.pad(data.mask.repeat_interleave(2, 1), (count - 2, 0), value=True),
        offset=None if offset is None else torch.cat([zero, moved], 1),
        times=torch.cat([between, passed], 1),
        likely=None,
        constant=0.5 * (passed * moved).sum(1),
        count=2 * data.count + (count - 2),
    )
