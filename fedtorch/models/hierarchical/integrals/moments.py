r"""A device's evidence and the moments of its coefficients about their mode.

Of the whitened coordinates v of the normal approximation, θ = θ̂ + W v, the last ones are integrated at the nodes of a
rule (adaptive Gauss–Hermite quadrature). The others are those of fixed effects, about which one device has little
information beyond the others'. They are integrated to first order in the error of the normal approximation: with
:math:`s_i^2` the variance of a row's predictor :math:`\eta_i` under it,

.. math:: E[v_F] = -\tfrac12 W_F' \sum_i b'''(\hat\eta_i)\, s_i^2\, x_i, \qquad
    \mathrm{Cov}[v]^{-1} = I + W' \sum_i \bigl(E\, b''(\eta_i) - b''(\hat\eta_i)\bigr) x_i x_i'\, W ,

and at the nodes the rows' log likelihood is averaged over the fixed effects in the same way. The number of nodes
therefore grows with the coefficients that differ between devices, not with all of them.

Source: Tierney and Kadane (1986), "Accurate approximations for posterior moments and marginal densities"; Naylor and
Smith (1982), "Applications of a method for the efficient computation of posterior distributions".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from fedtorch.models import gaussian
from fedtorch.models.hierarchical._forms import Powers, cubic, forms, twice, variances
from fedtorch.models.hierarchical.integrals.exponential import log_likelihood
from fedtorch.models.hierarchical.integrals.modes import Expansion, Problem, White, taken
from fedtorch.models.quadrature import QuadratureRule

_BLOCKS = 2  # linear predictors at a time, to fit the cache
# numbers of coordinates of a rule for which nodes are evaluated by fourth derivatives if these suffice
_FEW = (1, 2, 3)
_MANY = 64  # responses of a client, counting trials, above which they may be
_REST = 2e-3  # tolerated sixth-order remainder of a log likelihood
_LOWEST = -0.7  # least relative change of a row's information
_MODE = 1.0  # Newton decrement above which no mode was found
# Tolerated difference of moments from the normal approximation, in its sd or variance, for a rule about the mode.
# Errors of random designs of one and two coordinates are then below 0.07 sds; with 0.6 they reach 0.11, with 0.4 0.03,
# but more nodes of φ, most of little weight, are integrated again, and three coordinates take thrice as long.
_NORMAL = 0.5
# Variance of a row's predictor above which the row's bend away from the mode is checked. A row bends within some four
# units of its predictor, and nodes of a rule are an sd apart. For random designs with variances up to 1e5 all limits
# from 25 to 400 have the same errors; with 1600 an edge is missed by 0.2 sds.
_WIDE = 400.0
_AWAY = 2.0  # distance of that check, in sds
_BENT = 0.3  # difference of a row's slope from the expansion about the mode, in the predictor's sd
_FIRST = 25  # nodes from the mode outwards
_PANELS, _POINTS = 10, 4  # number of intervals, and nodes in each
# Share of a breakpoint due to a fall of the log density by one. A normal density down to 14 below its mode has bends of
# 2 · √28 = 10.6, and falls 7 more: in a straight tail, as of a count, intervals fall by at most 7.
_FALLS = 0.25
_DROP = 14.0  # fall of the log density below which about 1e-6 is left


class Integral(NamedTuple):
    """The evidence of the rows, and the moments of u given them."""

    log_evidence: Tensor  # (K, R)
    mean: Tensor  # (K, R, e)
    covariance: Tensor  # (K, R, e, e)


def integral(
    problem: Problem,
    prior: White,
    rule: QuadratureRule | None,
    exact: bool,
    fewer: Callable[[int], QuadratureRule] | None = None,
    directions: int = 2,
) -> Integral:
    """Integrate over u, whose last coordinates the rule is for; without one, by Laplace's method.

    Args:
        problem: the rows' log likelihood.
        prior: of θ.
        rule: for some or all coordinates of u.
        exact: whether the rows are evaluated at every node, however many they are.
        fewer: the rule for a given number of coordinates, by which nodes of φ are integrated again if the corrected
            moments are far from those of the normal approximation: along a direction by `slices`, and the rest given it
            so.
        directions: their number, one given the other.
    """
    expansion = problem.mode(prior, exact=rule is None)
    parts = []
    size, nodes = _BLOCKS * problem.data.at_once(), prior.mean.shape[1]
    for part in (slice(i, i + size) for i in range(0, nodes, size)):
        local = _Local.of(problem, prior.nodes(part), Expansion(*(each[:, part] for each in expansion)))
        if rule is None:
            parts.append(local.laplace())
            continue
        first, rough = local.corrected(rule, exact)
        if fewer is not None and directions and bool(rough.any()):
            first = _anew(local, first, rough, rule, exact, fewer, directions)
        parts.append(first)
    return Integral(*(torch.cat(each, 1) for each in zip(*parts)))


def _anew(
    local: _Local,
    first: Integral,
    rough: Tensor,
    rule: QuadratureRule,
    exact: bool,
    fewer: Callable[[int], QuadratureRule],
    directions: int,
) -> Integral:
    """Return the integral, with inaccurate nodes integrated along a direction."""
    clients = rough.any(1).nonzero()[:, 0]
    which = rough[clients].to(torch.int8).argsort(dim=1, descending=True, stable=True)
    which = which[:, : int(rough[clients].sum(1).amax())]
    some = local.nodes(clients, which)
    rest = some.half.shape[-1] - 1
    smaller = fewer(min(rule.nodes.shape[1], rest))
    better = some.sliced(lambda problem, prior: integral(problem, prior, smaller, exact, fewer, directions - 1))
    asked = rough[clients].gather(1, which)
    parts = []
    for old, new in zip(first, better, strict=True):
        mine, place = old[clients], which.view(*which.shape, *[1] * (old.ndim - 2)).expand_as(new)
        finite = asked.view(*asked.shape, *[1] * (old.ndim - 2)) & new.isfinite()
        parts.append(old.index_copy(0, clients, mine.scatter(1, place, new.where(finite, mine.gather(1, place)))))
    return Integral(*parts)


class _Local(NamedTuple):
    """The normal approximation u ~ N(û + CC'γ, CC') at some nodes, and its origin."""

    problem: Problem
    prior: White
    at: Expansion
    half: Tensor  # (K, R, e, e) C, upper triangular, so that the first coordinates of v do not move the last of u
    whole: Tensor  # (K, R, e, e) W = L C
    lost: Tensor  # (K, R) log det C

    @staticmethod
    def of(problem: Problem, prior: White, at: Expansion) -> _Local:
        factor = torch.linalg.cholesky_ex(at.information).L
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        half = torch.linalg.solve_triangular(factor.mT, eye.expand_as(factor), upper=True)
        lost = -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return _Local(problem, prior, at, half, prior.root @ half, lost)

    def laplace(self) -> Integral:
        pull = (self.half.mT @ self.at.gradient[..., None])[..., 0]
        evidence = self.log_joint(torch.zeros_like(self.at.u)[..., None, :0])[..., 0] + 0.5 * pull.square().sum(-1)
        evidence = evidence.masked_fill(~self.converged(), torch.nan)
        mean = self.at.u + (self.half @ pull[..., None])[..., 0]
        return Integral(evidence + self.lost, mean, self.half @ self.half.mT)

    def converged(self) -> Tensor:
        """Return where the expansion is about a mode, or nearly, `(K, R)`."""
        pull = (self.half.mT @ self.at.gradient[..., None])[..., 0]
        return pull.square().sum(-1) < _MODE

    def log_joint(self, nodes: Tensor) -> Tensor:
        """Return the log density of rows and u where the last coordinates of v are `nodes`, `(K, R, J)`.

        Args:
            nodes: `(K, R, J, c)` or `(J, c)`.
        """
        last = slice(self.half.shape[-1] - nodes.shape[-1], None)
        u = self.at.u[..., None, :] + nodes @ self.half[..., last].mT
        theta = self.prior.at(self.at.u)[..., None, :].expand(*u.shape[:-1], -1)
        known = theta.shape[-1] - self.whole.shape[-2]
        moved = theta[..., known:] + nodes @ self.whole[..., last].mT
        theta = torch.cat([theta[..., :known], moved], -1) if known else moved
        return log_likelihood(self.problem.family, self.problem.data, theta) - 0.5 * u.square().sum(-1)

    def expanded(self, nodes: Tensor, bends: tuple[Tensor, Tensor, Tensor], powers: Powers) -> Tensor:
        """Return `log_joint` by its fourth derivatives, and exactly if there are too few rows for that."""
        last, data = nodes.shape[1], self.problem.data
        second, third, fourth = bends
        columns = self.whole[..., self.half.shape[-1] - last :]
        spread = variances(self.problem.products, columns)
        sixth = torch.maximum(second, fourth.square() / second.clamp(min=torch.finfo(second.dtype).tiny))
        rest = data.counted(sixth * spread).mul_(spread).mul_(spread).sum(-1) / 48  # E (v^½ z)⁶ / 6!
        three, four = (data.counted(each * 1.0) @ power for each, power in zip((third, fourth), powers, strict=True))
        of_three, of_four = forms(three, four, columns).at(nodes)
        pull = (self.half.mT @ self.at.gradient[..., None])[..., -last:, 0]
        middle = self.log_joint(nodes[:1] * 0) - 0.5 * nodes.square().sum(-1)
        log = middle + pull @ nodes.mT - of_three / 6 - of_four / 24
        responses = data.count if data.times is None else data.times.sum(-1)
        rough = ~(rest < _REST) | (responses < _MANY)[:, None]
        clients = rough.any(1).nonzero()[:, 0]
        if len(clients):
            which = rough[clients].to(torch.int8).argsort(dim=1, descending=True, stable=True)
            which = which[:, : int(rough[clients].sum(1).amax())]
            exact = self.nodes(clients, which).log_joint(nodes)
            old, place = log[clients], which[..., None].expand_as(exact)
            exact = exact.where(rough[clients].gather(1, which)[..., None], old.gather(1, place))
            log = log.index_copy(0, clients, old.scatter(1, place, exact))
        return log

    def nodes(self, clients: Tensor, which: Tensor) -> _Local:
        """Return the same of some nodes `(K', R')` of some clients."""
        part = lambda values: taken(values[clients], which)
        prior, at = White(*map(part, self.prior)), Expansion(*map(part, self.at))
        return _Local(self.problem.clients(clients), prior, at, part(self.half), part(self.whole), part(self.lost))

    def sliced(self, rest: Callable[[Problem, White], Integral]) -> Integral:
        """Integrate at nodes along the predictor of the row that bends most, and over the rest given it.

        Args:
            rest: (rows, prior of θ given that predictor) -> the integral over the other coordinates.
        """
        problem, root = self.problem, self.prior.root
        row = self.bent(variances(problem.products, self.whole)).argmax(-1)  # (K, R)
        x = problem.x.gather(1, row[..., None].expand(*row.shape, problem.x.shape[-1]))
        direction = torch.nn.functional.normalize((root.mT @ x[..., None])[..., 0], dim=-1)
        beside = complement(direction)
        inner, along = root @ beside, (root @ direction[..., None])[..., 0]
        known = self.prior.mean.shape[-1] - along.shape[-1]
        along = torch.nn.functional.pad(along, (known, 0))

        def at(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean = (self.prior.mean[..., None, :] + t[..., None] * along[..., None, :]).flatten(1, 2)
            many = inner[:, :, None].expand(*t.shape, *inner.shape[-2:]).flatten(1, 2)
            middle = t[..., None] * direction[..., None, :]
            if not inner.shape[-1]:
                value = log_likelihood(problem.family, problem.data, mean)
                return value.reshape(t.shape), middle, middle.new_zeros(*t.shape, 1, 1)
            integrated = rest(problem, White(mean, many))
            moved, spread = (part.unflatten(1, t.shape[1:]) for part in integrated[1:])
            turn = beside[:, :, None]
            mean = middle + (turn @ moved[..., None])[..., 0]
            return integrated.log_evidence.reshape(t.shape), mean, turn @ spread @ turn.mT

        sd = (self.half.mT @ direction[..., None])[..., 0].norm(dim=-1)
        return Integral(*mixture(at, (self.at.u * direction).sum(-1), sd))

    def may_be_wide(self) -> bool:
        """Return whether a row's predictor may have a large variance."""
        lengths = self.problem.x.square().sum(-1)
        longest = torch.nn.functional.pad(lengths, (1, 0)).amax(1, keepdim=True)  # 0 without rows
        return bool((longest * self.whole.square().sum((-2, -1)) > _WIDE).any())

    def bent(self, spread: Tensor) -> Tensor:
        """Return the differences of rows' slopes from their expansion two sds away, given predictors' variances."""
        problem = self.problem
        eta, step = problem.data.predictors(self.prior.at(self.at.u)), spread.clamp(min=0).sqrt()
        first, second = (part.clone() for part in problem.family.slopes(eta.clone()))
        beyond = torch.zeros_like(eta)
        for side in (-_AWAY, _AWAY):
            there = problem.family.slopes(eta + side * step)[0]
            beyond = torch.maximum(beyond, (there - first - side * step * second).abs())
        return problem.data.counted(beyond * step)

    def corrected(self, rule: QuadratureRule, exact: bool) -> tuple[Integral, Tensor]:
        """Return the integral, and the nodes `(K, R)` at which it is far from the normal approximation."""
        nodes, weights = rule.nodes.to(self.at.u), rule.weights.to(self.at.u)
        fixed = self.half.shape[-1] - nodes.shape[1]
        few, bends = nodes.shape[1] in _FEW, None
        powers = self.problem.powers if few and not exact else None
        if powers is not None or fixed:
            eta = self.problem.data.predictors(self.prior.at(self.at.u))
            bends = self.problem.family.bends(eta)
        spread = variances(self.problem.products, self.whole) if fixed or self.may_be_wide() else None
        if powers is None or bends is None:
            log = self.log_joint(nodes)
        else:
            log = self.expanded(nodes, bends, powers)
        log = log + (weights.log() + 0.5 * nodes.square().sum(-1))
        beside = None
        if fixed and bends is not None and spread is not None:
            beside = _Beside.of(self, fixed, bends, spread)
        if beside is not None:
            log = log + beside.log_average(nodes)
        responsibility = torch.softmax(log, -1)
        mean = responsibility @ nodes
        second = gaussian.unpack(responsibility @ gaussian.pack(nodes[:, :, None] * nodes[:, None, :]))
        covariance, evidence = second - mean[..., :, None] * mean[..., None, :], log.logsumexp(-1) + self.lost
        if beside is not None:
            evidence = evidence + 0.5 * beside.mean.square().sum(-1)
            mean, covariance = beside.joined(self, mean, covariance)
        rough = self.rough(mean, covariance, spread)
        converged = self.converged()
        evidence, rough = evidence.masked_fill(~converged, torch.nan), rough & converged
        mean = self.at.u + (self.half @ mean[..., None])[..., 0]
        return Integral(evidence, mean, self.half @ covariance @ self.half.mT), rough

    def rough(self, mean: Tensor, covariance: Tensor, spread: Tensor | None) -> Tensor:
        """Return whether these moments of v are far from those of a standard normal density, `(K, R)`.

        If predictors have a large variance, a row is also checked far from the mode: its edge may lie there.
        """
        eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        near = (mean.abs() < _NORMAL).all(-1) & ((covariance - eye).abs() < _NORMAL).all((-2, -1))
        if spread is not None and bool((spread > _WIDE).any()):
            near &= (self.bent(spread) < _BENT).all(-1)
        return ~near


class _Beside(NamedTuple):
    """The fixed effects' coordinates of v, the first f, and their influence on the others."""

    mean: Tensor  # (K, R, f)
    slope: Tensor  # (K, R, c) of the averaged log likelihood, beyond that at the middle
    curvature: Tensor  # (K, R, c, c) minus its second derivatives, likewise
    second: Tensor  # (K, R, N) b''
    third: Tensor  # (K, R, N) b'''
    widened: Tensor  # (K, R, N) ½ E b'''' s², all of it

    @staticmethod
    def of(local: _Local, fixed: int, bends: tuple[Tensor, Tensor, Tensor], spread: Tensor) -> _Beside:
        problem, whole, (second, third, fourth) = local.problem, local.whole, bends
        part = problem.family.spread(variances(problem.products, whole[..., :fixed]))
        every = problem.family.spread(spread)
        pull = -0.5 * (problem.data.counted(third * every) @ problem.x)
        push = -0.5 * (problem.data.counted(third * part) @ problem.x)
        mean = (local.half.mT @ local.at.gradient[..., None] + whole.mT @ pull[..., None])[..., :fixed, 0]
        slope = (whole.mT @ push[..., None])[..., fixed:, 0]
        change = torch.maximum(0.5 * fourth * part, _LOWEST * second)
        return _Beside(mean, slope, _between(problem, change, whole[..., fixed:]), second, third, 0.5 * fourth * every)

    def log_average(self, nodes: Tensor) -> Tensor:
        """Return the effect of averaging over the fixed effects on the log density at nodes `(J, c)`, `(K, R, J)`."""
        return self.slope @ nodes.mT - 0.5 * ((nodes @ self.curvature) * nodes).sum(-1)

    def joined(self, local: _Local, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of v from those of its last coordinates."""
        problem, fixed = local.problem, self.mean.shape[-1]
        mean = torch.cat([self.mean, mean], -1)
        away = (local.whole @ mean[..., None])[..., 0] @ problem.x.mT
        change = _between(problem, torch.maximum(self.third * away + self.widened, _LOWEST * self.second), local.whole)
        inner, across = change[..., :fixed, :fixed], change[..., :fixed, fixed:]
        inner = inner + torch.eye(fixed, dtype=inner.dtype, device=inner.device)
        corner = torch.linalg.inv_ex(inner).inverse
        gain = corner @ across
        beside = -gain @ covariance
        top = torch.cat([corner - beside @ gain.mT, beside], -1)
        if problem.powers is not None:  # otherwise these are of the same order, but need sums of too many products
            skew = cubic(problem.data.counted(self.third * 1.0) @ problem.powers[0], local.whole).mT
            top = top + 0.5 * (skew[..., :fixed, :] * twice(local.whole)) @ skew.mT
        beside = top[..., fixed:]
        return mean, torch.cat([top, torch.cat([beside.mT, covariance], -1)], -2)


def _between(problem: Problem, values: Tensor, columns: Tensor) -> Tensor:
    """Return columns' Σ values xx' columns, `(K, R, c, c)`, for values of rows `(K, R, N)`, which it may overwrite."""
    return columns.mT @ gaussian.unpack(problem.data.counted(values) @ problem.products) @ columns


def outward(mode: Tensor, sd: Tensor) -> Tensor:
    """Return nodes that go out from modes `(...)` with these sds of the curvature there, `(..., Q)`."""
    reach = ((2 * _DROP) ** 0.5 / sd).asinh()
    steps = torch.linspace(-1, 1, _FIRST, dtype=mode.dtype, device=mode.device)
    return mode[..., None] + sd[..., None] * (reach[..., None] * steps).sinh()


def placed(t: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and log weights `(..., Q)` of ∫ dt, from a log density at ascending `t`, both `(..., P)`.

    >>> t = torch.linspace(-6, 6, 25).double()
    >>> nodes, weights = placed(t, -0.5 * t.square())
    >>> (weights.exp() * (-0.5 * nodes.square()).exp()).sum().square().round(decimals=3)  # 2π
    tensor(6.2830, dtype=torch.float64)
    """
    log = log.where(log.isfinite(), -torch.inf)
    top = log.amax(-1, keepdim=True)
    log = log.clamp(min=top - 1.5 * _DROP)
    width = t.diff(dim=-1)
    bend = -(log.diff(dim=-1) / width).diff(dim=-1) / (0.5 * (width[..., 1:] + width[..., :-1]))
    bend = torch.cat([bend[..., :1], bend, bend[..., -1:]], -1).clamp(min=0)
    seen = log > top - _DROP
    either = seen[..., 1:] | seen[..., :-1]
    length = width * torch.maximum(bend[..., 1:], bend[..., :-1]).sqrt() + _FALLS * log.diff(dim=-1).abs()
    length = length * either
    passed = torch.nn.functional.pad(length.cumsum(-1), (1, 0))
    shares = torch.linspace(0, 1, _PANELS + 1, dtype=t.dtype, device=t.device) * passed[..., -1:]
    after = torch.searchsorted(passed.contiguous(), shares.contiguous()).clamp(1, t.shape[-1] - 1)
    first = passed.gather(-1, after - 1)
    part = (shares - first) / (passed.gather(-1, after) - first)
    breaks = t.gather(-1, after - 1) + part.nan_to_num(0.0).clamp(0, 1) * width.gather(-1, after - 1)
    middle, half = 0.5 * (breaks[..., 1:] + breaks[..., :-1]), 0.5 * breaks.diff(dim=-1)
    x, weights = (torch.as_tensor(part).to(t) for part in _legendre())
    nodes = middle[..., None] + half[..., None] * x
    return nodes.flatten(-2), (half[..., None] * weights).log().flatten(-2)


def complement(direction: Tensor) -> Tensor:
    """Return orthonormal columns beside unit vectors `(..., e)`, `(..., e, e - 1)`, each near an axis, in order."""
    size = direction.shape[-1]
    most = direction.abs().argmax(-1, keepdim=True)
    sign = 2 * (direction.gather(-1, most) >= 0).to(direction) - 1
    normal = direction.scatter_add(-1, most, sign)
    mirror = torch.eye(size).to(direction) - (
        2 / normal.square().sum(-1)[..., None, None] * normal[..., :, None] * normal[..., None, :]
    )
    others = torch.arange(size - 1, device=direction.device)
    others = others + (others >= most)
    return mirror.gather(-1, others[..., None, :].expand(*direction.shape, size - 1))


def mixture(
    log: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], mode: Tensor, sd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return log ∫ N(t; 0, 1) p(t) dt, and mean and covariance of u, by nodes that lie where log p(t) bends.

    Rows that all have y = 1, or all y = 0, cut off one side of the prior. The rest has its mode near the edge and its
    mass on a plateau as wide as the prior, of which nodes about the mode cover little. Nodes therefore first go out
    from the mode, farther and farther apart; then Gauss–Legendre nodes lie between breakpoints that have equal shares
    of

    .. math:: \int \sqrt{-\tfrac{d^2}{dt^2} \log p(t)}\, dt .

    Between two breakpoints the logarithm then bends equally for an edge and for a plateau. As log p(t) falls by at
    least half the square of the distance to the mode, the necessary range of nodes is known.

    Args:
        log: t `(K, R, Q)` -> log p, and mean and covariance of u there, `(K, R, Q, e)` and `(K, R, Q, e, e)`.
        mode, sd: of N(t; 0, 1) p(t), `(K, R)`.
    """
    first = outward(mode, sd)
    nodes, weights = placed(first, log(first)[0] - 0.5 * first.square())
    value, mean, covariance = log(nodes)
    known = value.isfinite()  # elsewhere, far from the prior and the rows, no mode was found
    joint = (value - 0.5 * nodes.square() + weights).where(known, -torch.inf)
    mean, covariance = mean.where(known[..., None], 0.0), covariance.where(known[..., None, None], 0.0)
    evidence = joint.logsumexp(-1) - 0.5 * math.log(2 * math.pi)
    shares = joint.softmax(-1)
    centre = (shares[..., None] * mean).sum(-2)
    away = mean - centre[..., None, :]
    spread = (shares[..., None, None] * covariance).sum(-3) + (shares[..., None] * away).mT @ away
    return evidence, centre, spread


@cache
def _legendre() -> tuple[numpy.ndarray, numpy.ndarray]:
    return numpy.polynomial.legendre.leggauss(_POINTS)
