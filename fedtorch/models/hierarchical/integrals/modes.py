"""The mode of a device's coefficients, at many nodes at once, by Newton's method.

All nodes start from a quadratic expansion of the rows' log likelihood about one mode, that of their median prior, so
that a step or two remain. A step is halved if it does not reduce the gradient, and only nodes that still move are
evaluated again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.models import gaussian
from fedtorch.models.hierarchical._forms import Powers, monomials
from fedtorch.models.hierarchical.integrals.exponential import ExponentialFamily, Rows

_STEPS = 200
# Newton's method stops at steps of so many sds of the normal approximation, because integration about the mode
# corrects for its error.
_NEAR = 0.03
_EXACT = 1e-9  # likewise for Laplace's method, which does not correct for it
_STILL = 0.3  # likewise for the first mode, from which the search for the others starts
_MOST = 5  # most coefficients for which all products of four columns are formed
_NUMBERS = 2**25  # about the most elements of all these products
_LEAST = 2.0**-60  # smallest share of a step; a wide prior sd needs small ones, as predictors are curved over few units


class White(NamedTuple):
    """The normal prior of θ, a + L u with standard normal u, whose last e coordinates are uncertain.

    If t = w'u is known, u = t w + B z with standard normal z `(e − 1,)`, so that L is (e, e − 1).
    """

    mean: Tensor  # (K, R, d) a
    root: Tensor  # (K, R, e, q) L

    def at(self, u: Tensor) -> Tensor:
        """Return θ `(K, R, d)` at u `(K, R, q)`."""
        moved = (self.root @ u[..., None])[..., 0]
        known = self.mean.shape[-1] - moved.shape[-1]
        if not known:
            return self.mean + moved
        return torch.cat([self.mean[..., :known], self.mean[..., known:] + moved], -1)

    def nodes(self, which: Tensor | slice) -> White:
        """Return the prior of some nodes: a slice, or numbers `(K, R')`."""
        if isinstance(which, slice):
            return White(self.mean[:, which], self.root[:, which])
        return White(taken(self.mean, which), taken(self.root, which))


class Expansion(NamedTuple):
    """The log density of u about a point, to second order."""

    u: Tensor  # (K, R, q)
    gradient: Tensor  # (K, R, q)
    information: Tensor  # (K, R, q, q) minus the second derivatives


class Problem(NamedTuple):
    """The likelihood of the rows of `K` clients in their last e coefficients: columns and their products."""

    family: ExponentialFamily
    data: Rows
    x: Tensor  # (K, N, e)
    products: Tensor  # (K, N, e (e + 1) / 2)
    powers: Powers | None  # products of three and four columns, unless there are too many

    @staticmethod
    def of(family: ExponentialFamily, data: Rows, uncertain: int) -> Problem:
        """Return the problem of these rows in the last `uncertain` coefficients."""
        data = data.trimmed()
        x = data.x[..., data.x.shape[-1] - uncertain :]
        powers = monomials(x) if 0 < uncertain <= _MOST and x.numel() * uncertain**3 <= _NUMBERS else None
        return Problem(family, data, x, gaussian.pack(x[..., :, None] * x[..., None, :]), powers)

    def clients(self, which: Tensor) -> Problem:
        """Return the problem of some clients."""
        data = tree.take(self.data, which)
        return Problem.of(self.family, data, self.x.shape[-1])

    def about(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient `(K, R, e)` and information `(K, R, e, e)` of the log likelihood at θ `(K, R, d)`."""
        parts = []
        for part in torch.split(theta, self.data.at_once(), 1):
            first, second = self.family.slopes(self.data.predictors(part))
            if self.data.times is not None:
                times = self.data.times[:, None]
                first, second = first * times, second * times
            parts.append((first @ self.x, second @ self.products))
        first, second = (torch.cat(each, 1) for each in zip(*parts))
        statistic = self.data.statistic[:, None, self.data.x.shape[-1] - self.x.shape[-1] :]
        return statistic - first, gaussian.unpack(second)

    def expanded(self, prior: White, u: Tensor) -> Expansion:
        """Expand the log density of u."""
        return _whitened(prior, u, *self.about(prior.at(u)))

    def mode(self, prior: White, exact: bool = False) -> Expansion:
        """Expand the log density of u about a point near its mode, or at it to rounding, at every node."""
        size = prior.root.shape[-1]
        if not size:  # nothing is uncertain
            nothing = prior.mean[..., :0]
            return Expansion(nothing, nothing, prior.root[..., :0, :])
        # contiguous, because torch's median of an expanded dimension reads uninitialised memory
        middle = White(*(part.contiguous().nanmedian(1, keepdim=True).values for part in prior))
        nowhere = torch.zeros_like(middle.mean[..., :size])
        start = self._newton(middle, self.expanded(middle, nowhere), _STILL)
        at = middle.at(start.u)
        gradient, information = self.about(at)
        away = (at - prior.mean)[..., -self.x.shape[-1] :]
        slope = gradient + (information @ away[..., None])[..., 0]
        first = _whitened(prior, torch.zeros_like(away[..., :size]), slope, information)
        u = torch.linalg.solve_ex(first.information, first.gradient[..., None]).result[..., 0]
        return self._newton(prior, self.expanded(prior, u), _EXACT if exact else _NEAR)

    def _newton(self, prior: White, at: Expansion, near: float) -> Expansion:
        share = torch.ones_like(at.u[..., 0])
        for _ in range(_STEPS):
            step = torch.linalg.solve_ex(at.information, at.gradient[..., None]).result[..., 0]
            moves = ((step * at.gradient).sum(-1) > near * near) & (share > _LEAST)
            count = int(moves.sum(1).amax()) if moves.numel() else 0
            if not count:
                break
            which = moves.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
            some, length = Expansion(*(taken(part, which) for part in at)), taken(share, which)
            trial = some.u + length[..., None] * taken(step, which)
            reached = self.expanded(prior.nodes(which), trial)
            better = reached.gradient.square().sum(-1) < some.gradient.square().sum(-1)
            chosen, moved = taken(moves, which), better & taken(moves, which)
            new = [torch.where(_index(a, moved), b, a) for a, b in zip(some, reached, strict=True)]
            at = Expansion(*(_placed(part, which, value) for part, value in zip(at, new, strict=True)))
            length = torch.where(moved, (2 * length).clamp(max=1), torch.where(chosen, length / 2, length))
            share = share.scatter(1, which, length)
        return at


def _whitened(prior: White, u: Tensor, slope: Tensor, information: Tensor) -> Expansion:
    gradient = (prior.root.mT @ slope[..., None])[..., 0] - u
    inner = prior.root.mT @ information @ prior.root
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    return Expansion(u, gradient, inner)


def _index(values: Tensor, which: Tensor) -> Tensor:
    return which.view(*which.shape, *[1] * (values.ndim - 2)).expand(*which.shape, *values.shape[2:])


def taken(values: Tensor, which: Tensor) -> Tensor:
    """Return the values of some nodes `(K, R')` of `(K, R, ...)`."""
    return values.gather(1, _index(values, which))


def _placed(values: Tensor, which: Tensor, new: Tensor) -> Tensor:
    return values.scatter(1, _index(values, which), new)
