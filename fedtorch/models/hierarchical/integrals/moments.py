r"""A device's evidence and the moments of its coefficients about their mode.

Of the whitened coordinates v of the normal approximation, θ = θ̂ + W v, the last ones are integrated at the nodes of a
rule (adaptive Gauss–Hermite quadrature). The others are those of fixed effects, of which one device knows little beyond
what the others do. They are integrated to first order in what the normal approximation lacks: with :math:`s_i^2` the
variance of a row's predictor :math:`\eta_i` under it,

.. math:: E[v_F] = -\tfrac12 W_F' \sum_i b'''(\hat\eta_i)\, s_i^2\, x_i, \qquad
    \mathrm{Cov}[v]^{-1} = I + W' \sum_i \bigl(E\, b''(\eta_i) - b''(\hat\eta_i)\bigr) x_i x_i'\, W ,

and at the nodes the rows' log likelihood is averaged over the fixed effects in the same way. So the number of nodes
goes with the coefficients that differ between devices, not with all of them.

Source: Tierney and Kadane (1986), "Accurate approximations for posterior moments and marginal densities"; Naylor and
Smith (1982), "Applications of a method for the efficient computation of posterior distributions".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch.models import gaussian
from fedtorch.models.hierarchical._forms import Powers, cubic, forms, twice, variances
from fedtorch.models.hierarchical.integrals.exponential import log_likelihood
from fedtorch.models.hierarchical.integrals.modes import Expansion, Problem, White, taken
from fedtorch.models.quadrature import QuadratureRule

_BLOCKS = 2  # as many linear predictors at a time as caches hold
_FEW = (1, 2, 3)  # coordinates of a rule of which the nodes are evaluated by fourth derivatives where that is enough
_MANY = 64  # responses of a client, trials each counted, from which on they may be
_REST = 2e-3  # of a log likelihood, by the sixth derivatives, up to which it is
_LOWEST = -0.7  # the least change of a row's information, as a share of it


class Integral(NamedTuple):
    """The evidence of the rows, and the moments of u given them."""

    log_evidence: Tensor  # (K, R)
    mean: Tensor  # (K, R, e)
    covariance: Tensor  # (K, R, e, e)


def integral(problem: Problem, prior: White, rule: QuadratureRule | None, exact: bool) -> Integral:
    """Integrate over u, whose last coordinates the rule is for; without one, by Laplace's method.

    Args:
        problem: what the rows say.
        prior: of θ.
        rule: for some or all coordinates of u.
        exact: whether the rows are evaluated at every node, however many they are.
    """
    expansion = problem.mode(prior, exact=rule is None)
    parts = []
    size, nodes = _BLOCKS * problem.data.at_once(), prior.mean.shape[1]
    for part in (slice(i, i + size) for i in range(0, nodes, size)):
        local = _Local.of(problem, prior.nodes(part), Expansion(*(each[:, part] for each in expansion)))
        parts.append(local.laplace() if rule is None else local.corrected(rule, exact))
    return Integral(*(torch.cat(each, 1) for each in zip(*parts)))


class _Local(NamedTuple):
    """The normal approximation u ~ N(û + CC'γ, CC') at some nodes, and where it comes from."""

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
        mean = self.at.u + (self.half @ pull[..., None])[..., 0]
        return Integral(evidence + self.lost, mean, self.half @ self.half.mT)

    def log_joint(self, nodes: Tensor) -> Tensor:
        """Return the log density of rows and u where the last coordinates of v are `nodes`, `(K, R, J)`.

        Args:
            nodes: `(K, R, J, c)` or `(J, c)`.
        """
        last = slice(self.half.shape[-1] - nodes.shape[-1], None)
        u = self.at.u[..., None, :] + nodes @ self.half[..., last].mT
        theta = self.prior.at(self.at.u)[..., None, :].expand(*u.shape[:-1], -1)
        known = theta.shape[-1] - u.shape[-1]
        moved = theta[..., known:] + nodes @ self.whole[..., last].mT
        theta = torch.cat([theta[..., :known], moved], -1) if known else moved
        return log_likelihood(self.problem.family, self.problem.data, theta) - 0.5 * u.square().sum(-1)

    def expanded(self, nodes: Tensor, bends: tuple[Tensor, Tensor, Tensor], powers: Powers) -> Tensor:
        """Return `log_joint` by its fourth derivatives, and as it is where rows are too few for that."""
        last, data = nodes.shape[1], self.problem.data
        second, third, fourth = bends
        columns = self.whole[..., self.half.shape[-1] - last :]
        spread = variances(self.problem.products, columns)
        rest = data.counted(second * spread).mul_(spread).mul_(spread).sum(-1) / 48  # E (v^½ z)⁶ / 6!
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

    def corrected(self, rule: QuadratureRule, exact: bool) -> Integral:
        nodes, weights = rule.nodes.to(self.at.u), rule.weights.to(self.at.u)
        fixed = self.half.shape[-1] - nodes.shape[1]
        few, bends = nodes.shape[1] in _FEW, None
        powers = self.problem.powers if few and not exact else None
        if powers is not None or fixed:
            eta = self.problem.data.predictors(self.prior.at(self.at.u))
            bends = self.problem.family.bends(eta)
        if powers is None or bends is None:
            log = self.log_joint(nodes)
        else:
            log = self.expanded(nodes, bends, powers)
        log = log + (weights.log() + 0.5 * nodes.square().sum(-1))
        beside = _Beside.of(self, fixed, bends) if fixed and bends is not None else None
        if beside is not None:
            log = log + beside.log_average(nodes)
        responsibility = torch.softmax(log, -1)
        mean = responsibility @ nodes
        second = gaussian.unpack(responsibility @ gaussian.pack(nodes[:, :, None] * nodes[:, None, :]))
        covariance, evidence = second - mean[..., :, None] * mean[..., None, :], log.logsumexp(-1) + self.lost
        if beside is not None:
            evidence = evidence + 0.5 * beside.mean.square().sum(-1)
            mean, covariance = beside.joined(self, mean, covariance)
        mean = self.at.u + (self.half @ mean[..., None])[..., 0]
        return Integral(evidence, mean, self.half @ covariance @ self.half.mT)


class _Beside(NamedTuple):
    """What is known of the fixed effects' coordinates of v, the first f, and what they change for the others."""

    mean: Tensor  # (K, R, f)
    slope: Tensor  # (K, R, c) of the averaged log likelihood, beyond that at the middle
    curvature: Tensor  # (K, R, c, c) minus its second derivatives, likewise
    second: Tensor  # (K, R, N) b''
    third: Tensor  # (K, R, N) b'''
    widened: Tensor  # (K, R, N) ½ E b'''' s², all of it

    @staticmethod
    def of(local: _Local, fixed: int, bends: tuple[Tensor, Tensor, Tensor]) -> _Beside:
        problem, whole, (second, third, fourth) = local.problem, local.whole, bends
        part, every = (
            problem.family.spread(variances(problem.products, columns)) for columns in (whole[..., :fixed], whole)
        )
        pull = -0.5 * (problem.data.counted(third * every) @ problem.x)
        push = -0.5 * (problem.data.counted(third * part) @ problem.x)
        mean = (local.half.mT @ local.at.gradient[..., None] + whole.mT @ pull[..., None])[..., :fixed, 0]
        slope = (whole.mT @ push[..., None])[..., fixed:, 0]
        change = torch.maximum(0.5 * fourth * part, _LOWEST * second)
        return _Beside(mean, slope, _between(problem, change, whole[..., fixed:]), second, third, 0.5 * fourth * every)

    def log_average(self, nodes: Tensor) -> Tensor:
        """Return what averaging over the fixed effects adds to the log density at nodes `(J, c)`, `(K, R, J)`."""
        return self.slope @ nodes.mT - 0.5 * ((nodes @ self.curvature) * nodes).sum(-1)

    def joined(self, local: _Local, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of v from those of its last coordinates."""
        problem, fixed = local.problem, self.mean.shape[-1]
        mean = torch.cat([self.mean, mean], -1)
        away = (local.whole @ mean[..., None])[..., 0] @ problem.x.mT
        change = _between(problem, torch.maximum(self.third * away + self.widened, _LOWEST * self.second), local.whole)
        inner, across = change[..., :fixed, :fixed], change[..., :fixed, fixed:]
        inner = inner + torch.eye(fixed, dtype=inner.dtype, device=inner.device)
        own = torch.linalg.inv_ex(inner).inverse
        gain = own @ across
        beside = -gain @ covariance
        top = torch.cat([own - beside @ gain.mT, beside], -1)
        if problem.powers is not None:  # else these are of the same order, but need sums of too many products
            skew = cubic(problem.data.counted(self.third * 1.0) @ problem.powers[0], local.whole).mT
            top = top + 0.5 * (skew[..., :fixed, :] * twice(local.whole)) @ skew.mT
        beside = top[..., fixed:]
        return mean, torch.cat([top, torch.cat([beside.mT, covariance], -1)], -2)


def _between(problem: Problem, values: Tensor, columns: Tensor) -> Tensor:
    """Return columns' Σ values xx' columns, `(K, R, c, c)`, for values of rows `(K, R, N)`, which it may overwrite."""
    return columns.mT @ gaussian.unpack(problem.data.counted(values) @ problem.products) @ columns
