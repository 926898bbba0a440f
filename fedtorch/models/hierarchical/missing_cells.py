r"""Regressions of rows with missing covariates, which are integrated out under a normal distribution of the columns.

With :math:`z_m \mid z_o \sim N(m, C)` of a row's missing columns given its observed ones, the row's columns of x are
:math:`\hat x + R u` with standard normal u, if the formula is linear in the missing values. The predictor is then
normal given θ, with variance :math:`v(\theta) = |R'\theta|^2`:

.. math::
    p(y \mid \theta) = \int p(y \mid \hat x'\theta + s)\, N(s; 0, v(\theta))\, ds ,

which for Gaussian y is :math:`N(y; \hat x'\theta, \sigma^2 + v(\theta))` and otherwise is computed by Gauss–Hermite
nodes in s. θ enters the variance, so a device's factor is integrated about its mode over all coefficients. The normal
distribution is treated as known: intervals ignore its uncertainty.

Source: Ibrahim, Chen, Lipsitz, Herring (2005), "Missing-data methods for generalized linear models: a comparative
review", JASA 100, section 3; Little and Rubin (2019), "Statistical Analysis with Missing Data", chapter 11.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import BadClients, Design
from fedtorch.data.formulas.coding import is_factor
from fedtorch.data.frames.incomplete import Incomplete
from fedtorch.data.frames.raw_columns import RawColumns
from fedtorch.models.hierarchical.factor import Conditional, DeviceLikelihood, Model, of
from fedtorch.models.hierarchical.families import GAUSSIAN, LOGISTIC, POISSON, Family
from fedtorch.models.hierarchical.generalised import default_inner, default_rule
from fedtorch.models.hierarchical.hierarchy import Hierarchy
from fedtorch.models.hierarchical.hyperpriors import Hyperprior
from fedtorch.models.hierarchical.integrals import smooth
from fedtorch.models.hierarchical.integrals.exponential import BINARY, COUNTS, ExponentialFamily
from fedtorch.models.incomplete_normal import Normal, conditional as conditional_cells
from fedtorch.models.quadrature import QuadratureRule, gauss_hermite
from fedtorch.models.rows import Observations

_POINTS = 9  # nodes over a missing predictor
_FEW = 4  # most coefficients for which a rule over all has few nodes
_TINY = 1e-8  # least variance of a predictor, so that its sd has derivatives
_LINEAR = ("", "C", "center", "scale")  # functions of formulas
_FAMILIES = {"gaussian": GAUSSIAN, "logistic": LOGISTIC, "binomial": LOGISTIC, "poisson": POISSON}


class _Data(NamedTuple):
    """Rows with a response, zero on padding."""

    rows: smooth.Rows
    y: Tensor  # (K, N)
    weight: Tensor  # (K, N) zero on padding
    trials: Tensor  # (K, N)
    count: Tensor  # type: ignore[assignment]  # (K,)


def regression(
    design: Design,
    hierarchy: Hierarchy,
    family: str,
    normal: Normal,
    *,
    rule: QuadratureRule | None,
    noise: Hyperprior | float | None = None,
    inner: QuadratureRule | str | None = "default",
) -> Model:
    """Return the model of rows with missing cells, `ft.data.from_frame(..., formula=, missing="impute")`.

    Args:
        design: of the formula.
        hierarchy: of its coefficients.
        family: "gaussian", "logistic", "binomial" or "poisson".
        normal: of the formula's columns, the response last.
        rule: nodes over the variances.
        noise: hyperprior of log σ², of the Gaussian family.
        inner: nodes over all coefficients of a client; default: those of `generalised` for up to four, and Laplace's
            method beyond.
    """
    names, one = RawColumns(design).names, _FAMILIES[family]
    if len(normal.mean) != len(names):
        raise ValueError(
            f"Expected covariates= of the columns {list(names)}, the response last, but got a normal distribution of "
            f"{len(normal.mean)}; run ft.normal_em(columns=data.design) on the same data"
        )
    if isinstance(noise, (int, float)):
        raise ValueError(f"Expected a noise variance that is learnt where cells are missing, but got {noise}")
    normal = Normal(*(leaf.detach().to("cpu", torch.float64) for leaf in normal[:2]))
    features = len(hierarchy.mean)
    scales = len(hierarchy.prior.normal.shift) - hierarchy.mean.shape[1] + (noise is not None)
    if not isinstance(inner, QuadratureRule):
        inner = default_inner(features) if inner and features <= _FEW else None
    likelihood = DeviceLikelihood(
        prepare=partial(_prepared, design, one, normal),
        local=partial(_local, one, inner, hierarchy.varying),
        residual=_residual if one is GAUSSIAN else None,
        rows=lambda data: data.count,
        size=lambda data: data.y.shape[1] * (1 if one is GAUSSIAN else _POINTS),
        family=one,
        dear=True,
    )
    return of(hierarchy, likelihood, noise=noise, rule=default_rule(scales) if rule is None else rule)


def _local(
    family: Family,
    rule: QuadratureRule | None,
    varying: Tensor,
    data: _Data,
    mean: Tensor,
    covariance: Tensor,
    zeta: Tensor,
    log_noise: Tensor | None,
) -> Conditional:
    size, place = covariance.shape[-1], None
    if size < mean.shape[-1]:
        place = varying.to(mean.device)
        rule = None if rule is None else QuadratureRule(rule.nodes[:, rule.nodes.shape[1] - size :], rule.weights)
    if log_noise is not None:
        return smooth.conditional(partial(_gaussian, data), data.rows, mean, covariance, log_noise, rule, place)
    known = BINARY if family is LOGISTIC else COUNTS
    density = partial(_averaged, data, known, family)
    return smooth.conditional(density, data.rows, mean, covariance, mean[..., :0], rule, place)


def _gaussian(data: _Data, eta: Tensor, variance: Tensor, log_noise: Tensor, whole: bool) -> smooth.Slopes:
    """Return log N(y; η, σ² / weight + v), and its derivatives."""
    there = data.weight[:, None] > 0
    total = log_noise.exp()[..., None] / torch.where(there, data.weight[:, None], 1.0) + variance
    away = data.y[:, None] - eta
    value = torch.where(there, GAUSSIAN.log_density(data.y[:, None], eta, total), 0.0)
    if not whole:
        return smooth.Slopes(value, value, value)
    once = there / total
    first, second = away * once, once * once
    square = first.square()
    return smooth.Slopes(value, first, -once, 0.5 * (square - once), -first * once, 0.5 * second - square * once)


def _averaged(
    data: _Data, known: ExponentialFamily, family: Family, eta: Tensor, variance: Tensor, given: Tensor, whole: bool
) -> smooth.Slopes:
    """Return log E p(y | η + s z), s² = v, and its derivatives, those of the rule's sum."""
    rule = gauss_hermite(1, _POINTS)
    nodes, log_weights = (part.to(eta)[:, None, None, None] for part in (rule.nodes[:, 0], rule.weights.log()))
    y, trials, weight = data.y[:, None], data.trials[:, None], data.weight[:, None]
    sd = (variance + _TINY).sqrt()
    at = eta + sd * nodes  # (J, K, R, N)
    log = family.log_density(y, at, trials) + log_weights
    value = log.logsumexp(0)
    if not whole:
        return smooth.Slopes(value * weight, value, value)
    share, slope = (log - value).exp(), y - trials * family.mean(at)
    bend = share * (slope.square() - trials * known.slopes(at)[1])  # p''/p
    slope = share * slope
    first, spread = slope.sum(0), (slope * nodes).sum(0)
    second = bend.sum(0) - first.square()
    across = (bend * nodes).sum(0) - first * spread
    spreads = (bend * nodes.square()).sum(0) - spread.square()
    spread = spread / sd
    each = (value, first, second, spread / 2, across / (2 * sd), (spreads - spread) / (4 * sd.square()))
    return smooth.Slopes(*(part * weight for part in each))


def _residual(data: _Data, mean: Tensor, covariance: Tensor) -> Tensor:
    x = data.rows.x
    away = data.y - data.rows.offset - (x @ mean[..., None])[..., 0]
    return ((away.square() + ((x @ covariance) * x).sum(-1)) * data.weight).sum(1)


def _prepared(design: Design, family: Family, normal: Normal, data: Any) -> _Data:
    if not isinstance(data.batch, Incomplete):
        raise ValueError(
            'Expected rows with missing cells, as from_frame(..., missing="impute") makes them, but got '
            f"{type(data.batch).__name__}; leave covariates= out for complete rows"
        )
    values, observed = data.batch.values[..., :-1], data.batch.observed[..., :-1]
    gone = (~observed & data.mask[..., None]).any(1)
    _check_linear(design, gone)
    covariates = Normal(normal.mean[:-1].to(values), normal.covariance[:-1, :-1].to(values))
    expected, spread, _ = conditional_cells(Incomplete(values, observed), covariates)
    missing = (~observed).to(values.dtype)
    factor = torch.linalg.cholesky(spread + torch.diag_embed(1 - missing)) * missing[..., None] * missing[..., None, :]
    which = gone.any(0).nonzero()[:, 0].tolist()
    complete = data.batch.observed[..., -1] & data.mask
    each = [
        _client(design, expected[k, rows], factor[k, rows][..., which], data.batch.values[k, rows, -1:])
        for k, rows in enumerate(complete)
    ]
    each = each or [
        _client(design, expected[:0].flatten(0, 1), factor[:0].flatten(0, 1)[..., which], values[:0, 0, -1:])
    ]
    size = max(len(one["y"]) for one in each)
    padded = [tree.map(lambda leaf: torch.cat([leaf, leaf.new_zeros(size - len(leaf), *leaf.shape[1:])]), one)
              for one in each]  # fmt: skip
    stacked = tree.to(tree.take(tree.stack(padded), slice(len(complete))), values.device)
    rows = smooth.Rows.of(stacked["x"], stacked["offset"], stacked["root"])
    made = _Data(rows, stacked["y"], stacked["weight"], stacked["trials"], complete.sum(1))
    _check_responses(family, made)
    return made


def _client(design: Design, expected: Tensor, factor: Tensor, response: Tensor) -> dict[str, Tensor]:
    """Return a client's rows: the expected x, and its dependence on each missing column's share."""
    columns = RawColumns(design)
    make = lambda cells: design.rows_of(columns.cells(torch.cat([cells, response], 1)))
    x, y, *more = make(expected)
    extra = {"offset": torch.zeros_like(y), "weight": torch.ones_like(y), "trials": torch.ones_like(y)}
    moved = [make(expected + factor[..., j])[0] - x for j in range(factor.shape[-1])]
    root = torch.stack(moved, -1) if moved else x[..., None][..., :0]
    return {"x": x, "y": y, "root": root, **extra, **(more[0] if more else {})}


def _check_responses(family: Family, data: _Data) -> None:
    """Refuse responses that the family does not have."""
    if family is not GAUSSIAN:
        known = BINARY if family is LOGISTIC else COUNTS
        known.response(Observations(data.rows.x, data.y, None, None, data.trials), data.weight > 0)


def _check_linear(design: Design, gone: Tensor) -> None:
    """Refuse clients some of whose missing columns, `(K, q)`, do not enter the formula linearly."""
    raw = RawColumns(design)
    for k, each in enumerate(gone):
        bad = _bent(design, raw, {raw.sources[j] for j in each.nonzero()[:, 0].tolist()})
        if bad:
            raise BadClients(
                torch.tensor([k]),
                f"Expected missing cells in columns that enter the formula linearly, but got some in {bad}; complete "
                "them by ft.inference.imputed(data) and pool the fits",
            )


def _bent(design: Design, raw: RawColumns, lacking: set[str]) -> list[str]:
    """Return coefficients and offsets of terms that are not linear in missing values."""
    offsets = [(quantity.column, quantity.name) for quantity in design.parsed.offset]
    offsets += [(design.offset, design.offset)] if design.offset else []
    bad = [name for column, name in offsets if column in lacking]
    for column in design.made:
        variables = [part.variable for part in column.parts if part.variable.quantity.column in lacking]
        known = (v.quantity.name in raw.names or is_factor(v, design.encoding) for v in variables)
        if len(variables) > 1 or any(v.function not in _LINEAR for v in variables) or not all(known):
            bad.append(column.name)
    return bad
