r"""Results of expectation propagation in reported units: SDs and correlations in place of log variances.

φ has logarithms of variances and the entries of a triangular factor. Their posterior is transformed to SDs and
correlations at quasi-random nodes of q(φ), or at the weighted nodes of `corrected`. Coefficients are linear in φ, so
their intervals are those of the normal density itself.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.data.formulas.design import Design
from fedtorch.data.formulas.grammar import INTERCEPT
from fedtorch.federation.algorithms.ep._checked import checked
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.populations.population import feature_names, row_counts
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.models import gaussian
from fedtorch.models.estimates import Estimates, own_names
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import Hierarchy, Model
from fedtorch.models.hierarchical.dependence import alone, warn_of_dependence
from fedtorch.models.hierarchical.empty_levels import warn_of_few
from fedtorch.models.hierarchical.families import CUMULATIVE, LOGISTIC, POISSON
from fedtorch.models.hierarchical.separation import warn_of_separation
from fedtorch.models.quadrature import quasi_random

_NODES = 2**14
_SEPARABLE = LOGISTIC, POISSON, CUMULATIVE
_ONE_SIDED = (
    "such a posterior is one-sided: ask run.summary and ft.inference with given=corrected(run), of "
    "fedtorch.federation.algorithms.ep; "
)
_PRIOR = "merge levels, leave the column out, or choose the prior's sd= with care"
_HELPS = "merge levels, leave the column out, or take ft.ep, whose prior bounds it"
# Ratio of q's sd to the right sd below which a warning is given. The estimated ratio is off by 0.06 in Gaussian fits
# and by 0.2 in others, so a ratio of 0.9 is mostly detected.
_NARROW = 0.92
_SHOWN = 5  # names in a warning
_PART = 2**20  # numbers of covariances processed at a time


class Quantities(NamedTuple):
    """Quantities at the nodes of φ."""

    names: list[str]
    values: list[Tensor]  # (R,) each
    n: list[int | None]


def estimates(
    run: Run, *, given: Corrected | None = None, tolerance: float = 0.01, node: int | None = None
) -> Estimates:
    """Return the posterior of coefficients, SDs and correlations over clients, and of the noise.

    Args:
        run: a finished run of `ep`.
        given: the corrected posterior of φ; default: q(φ).
        tolerance, node: as for `posterior`, with the same warnings and errors.
    """
    model, server, _ = checked(run, tolerance, node)
    q = gaussian.moments(server.posterior)
    nodes, weights = spread_nodes(q) if given is None else (part[given.weights > 0] for part in given[1:3])
    if not isinstance(model, Model) or not model.hierarchy.coefficients:
        names = tuple(model.names) if isinstance(model, Model) else tuple(f"φ[{i}]" for i in range(len(q.mean)))
        rows = int(row_counts(run.population).sum())
        return Estimates(names, nodes, weights, len(names), q if given is None else None, (rows,) * len(names))
    shown, (names, back) = quantities(run, nodes), shown_coefficients(run)
    size, design = len(names), (back @ model.hierarchy.mean).to(nodes)
    m = design.shape[1]
    helps = (_ONE_SIDED if given is None else "") + _PRIOR
    if not check_separation(run, q.mean[:m], q.covariance[:m, :m], prior_of_means(run), helps):
        check_dependence(run, q.covariance[:m, :m])
    if model.ordered is not None and model.ordered.differences:
        means = model.hierarchy.mean.to(nodes)
        at, spread = means @ q.mean[:m], means @ q.covariance[:m, :m] @ means.mT
        warn_of_few(model.ordered, at, spread, helps=_ONE_SIDED if given is None else "", stacklevel=4)
    normal = Moments(design @ q.mean[:m], design @ q.covariance[:m, :m] @ design.mT) if given is None else None
    if normal is not None:
        _warn_of_narrow(run, q, nodes[:, m:], normal.covariance.diagonal())
    return Estimates(tuple(shown.names), torch.stack(shown.values, 1), weights, size, normal, tuple(shown.n))


def _warn_of_narrow(run: Run, q: Moments, zeta: Tensor, variances: Tensor) -> None:
    r"""Warn of coefficients whose sd under q is too small, as when the variances S(ζ) are uncertain with few clients.

    The mean of K clients has a variance of at least S(ζ) / K, which q evaluates at the mean of ζ. The average over q's
    uncertainty of ζ is larger by the factor E S(ζ) / S(E ζ).

    Args:
        run: a finished run of `ft.ep`.
        q: the posterior of φ.
        zeta: the other coordinates of φ at nodes of q, `(R, s)`.
        variances: of the shown coefficients, under q, `(q,)`.
    """
    (names, back), hierarchy, clients = shown_coefficients(run), model_of(run).hierarchy, len(run.population.names)
    m, scales = hierarchy.mean.shape[1], len(hierarchy.names)
    covariances = (hierarchy.covariance(part) for part in zeta[:, : scales - m].split(max(1, _PART // len(names) ** 2)))
    average = torch.stack([part.sum(0) for part in covariances]).sum(0) / len(zeta)
    at_mean = hierarchy.covariance(q.mean[m:scales])
    mean, between = ((back.to(each) @ each @ back.to(each).mT).diagonal() for each in (average, at_mean))
    added = torch.minimum(between / clients, variances) * torch.where(between > 0, mean / between - 1, 0.0)
    ratios = (variances / (variances + added)).sqrt().tolist()
    narrow = [f"{name!r} {1 - ratio:.0%}" for name, ratio in zip(names, ratios) if ratio < _NARROW]
    if narrow:
        shown = ", ".join(narrow[:_SHOWN]) + (", …" if len(narrow) > _SHOWN else "")
        warnings.warn(
            f"Expected clients that inform the spread between clients, but got {clients}: sds of the normal "
            f"approximation are too small, by about {shown}. Call run.summary and ft.inference with "
            "given=corrected(run), of fedtorch.federation.algorithms.ep",
            RuntimeWarning,
            stacklevel=5,
        )


def model_of(run: Run) -> Any:
    """Return the hierarchical model, or the factors, of a run."""
    return posterior_of(run.algorithm).model


def check_separation(
    run: Run,
    mean: Tensor,
    covariance: Tensor,
    before: Tensor | None = None,
    helps: str = _HELPS,
    after: Tensor | None = None,
) -> bool:
    """Warn if a regression on standardised columns looks separated; return whether it does.

    Args:
        run: of a hierarchical model.
        mean, covariance: of the means over clients, `(m,)` and `(m, m)`, on the fitted scale.
        before: their prior covariance; None without a prior.
        helps: remedy for the message.
        after: their posterior covariance with the prior, which shows the coefficients about which a likelihood without
            a prior has no information.
    """
    model, design = model_of(run), design_of(run)
    if model.family in _SEPARABLE and design is not None and design.encoding.standard:
        back = model.hierarchy.mean.to(mean)
        sds, names = (back @ covariance @ back.mT).diagonal().sqrt(), coefficient_names(run)
        slopes = [j for j in range(len(names)) if model.ordered is None or names[j] in model.ordered.names]
        known = None if before is None else (back @ before.to(mean) @ back.mT).diagonal().sqrt()[slopes]
        without = None
        if after is not None:
            scale = [design.encoding.standard[name].sd if name in design.encoding.standard else 1.0 for name in names]
            moves = torch.tensor(scale).to(mean)[:, None] * units(run).to(mean) @ back
            without = alone(prior_of_means(run).to(mean), after, moves)[slopes]
        return warn_of_separation(
            [names[j] for j in slopes],
            (back @ mean)[slopes],
            sds[slopes],
            before=known,
            alone=without,
            fixed=[j not in model.hierarchy.random and names[j] != INTERCEPT for j in slopes],
            helps=helps,
            stacklevel=6,
        )
    return False


def check_dependence(run: Run, covariance: Tensor, shown: str = "those of the prior") -> bool:
    """Warn if rows have no information about some combination of the means over clients; return whether it has warned.

    Args:
        run: of a hierarchical model.
        covariance: posterior covariance of the means, `(m, m)`.
        shown: what the estimates are without information in the rows.
    """
    names = coefficient_names(run)
    if len(names) != len(covariance):
        return False
    before = prior_of_means(run).to(covariance)
    return warn_of_dependence(names, before, covariance, shown=shown, stacklevel=6)


def prior_of_means(run: Run) -> Tensor:
    """Return the prior covariance of the means over clients, `(m, m)`."""
    model = model_of(run)
    m = model.hierarchy.mean.shape[1]
    covariance: Tensor = gaussian.moments(model.prior.completed()).covariance[:m, :m]
    return covariance


def shown_coefficients(run: Run) -> tuple[tuple[str, ...], Tensor]:
    """Return the names in tables, in the units of the frame, and the matrix `(q, d)` that maps coefficients to them."""
    ordered, back = model_of(run).ordered, units(run)
    return (coefficient_names(run), back) if ordered is None else (ordered.names, ordered.shown @ back)


def quantities(run: Run, nodes: Tensor) -> Quantities:
    """Return coefficients, SDs, correlations and noise of a run of `ft.ep`, in this order, at nodes of φ `(R, p)`."""
    model = model_of(run)
    rows, clients = int(row_counts(run.population).sum()), len(run.population.names)
    names, back = shown_coefficients(run)
    design = (back @ model.hierarchy.mean).to(nodes)
    m = design.shape[1]
    shown = Quantities(list(names), list((nodes[:, :m] @ design.mT).unbind(1)), [rows] * len(names))
    _scales(model.hierarchy, units(run), coefficient_names(run), nodes[:, m:], shown, clients)
    if len(model.names) > len(model.hierarchy.names):
        shown.names.append("sigma")
        shown.values.append((nodes[:, -1] / 2).exp())
        shown.n.append(rows)
    return shown._replace(names=[*names, *own_names(shown.names[len(names) :], names)])


def spread_nodes(q: Moments, points: int = _NODES) -> tuple[Tensor, Tensor]:
    """Return weighted nodes whose mean and covariance are those of q."""
    size = len(q.mean)
    rule = quasi_random(size, max(points, 4 * size))
    nodes = q.mean + rule.nodes.to(q.mean) @ torch.linalg.cholesky(q.covariance).mT
    return nodes, rule.weights.to(q.mean)


def coefficient_names(run: Run) -> tuple[str, ...]:
    """Return names of a run's coefficients: the model's, or the columns' if the model has numbers only."""
    names: tuple[str, ...] = model_of(run).hierarchy.coefficients
    columns = feature_names(run.population)
    numbered = names == tuple(map(str, range(len(names))))
    return columns if numbered and len(columns) == len(names) else names


def units(run: Run) -> Tensor:
    """Return the matrix `(d, d)` that maps coefficients to the units of the frame's columns, if these were scaled."""
    design = design_of(run)
    size = len(model_of(run).hierarchy.mean)
    if design is None:
        return torch.eye(size, dtype=torch.float64)
    back = design.back()  # coefficients without a column, such as thresholds, have no units
    return torch.block_diag(back, torch.eye(size - len(back), dtype=torch.float64))


def design_of(run: Run) -> Design | None:
    """Return the formula of a run's model: the model's own, or else that of its rows, if they are here."""
    model, population = model_of(run), run.population
    if model.design is not None or hasattr(population, "counts"):
        return model.design
    design: Design | None = getattr(population.data, "design", None)
    return design if design is not None and len(design.columns) == len(model.hierarchy.mean) else None


def _scales(
    hierarchy: Hierarchy, back: Tensor, names: tuple[str, ...], zeta: Tensor, shown: Quantities, clients: int
) -> None:
    """Add the SDs and correlations of the coefficients that vary between clients."""
    zeta = zeta[:, : len(hierarchy.names) - hierarchy.mean.shape[1]]
    place = torch.tensor(hierarchy.random, dtype=torch.int64)
    parts = zeta.split(max(1, _PART // len(names) ** 2))
    inner = torch.cat([(back @ hierarchy.covariance(part) @ back.mT)[:, place[:, None], place] for part in parts])
    sd = inner.diagonal(dim1=-2, dim2=-1).sqrt()
    for i, j in enumerate(hierarchy.random):
        shown.names.append(f"sd({names[j]})")
        shown.values.append(sd[:, i])
        shown.n.append(clients)
    for i in range(len(place)):
        for j in range(i):
            if bool(inner[:, i, j].any()):
                shown.names.append(f"cor({names[place[j]]}, {names[place[i]]})")
                shown.values.append(inner[:, i, j] / (sd[:, i] * sd[:, j]))
                shown.n.append(clients)
