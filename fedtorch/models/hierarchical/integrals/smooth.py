r"""Integrals of any smooth density about its mode, and devices whose rows have any smooth log likelihood.

A row's log likelihood is a function of its predictor η = x'θ + offset and, with missing columns, of a variance v =
|R'θ|², with derivatives in both: for rows with missing cells (`missing_cells`), which generalised linear models
(`integrals.exponential`) do not cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical.factor import Conditional, derivatives
from fedtorch.models.hierarchical.integrals.newton import TRIALS, minimised
from fedtorch.models.quadrature import QuadratureRule
from fedtorch.tree import Tree

_NOWHERE = -1e30  # log density
_AT_ONCE = 2**18  # rows times nodes that are evaluated together


class Integrated(NamedTuple):
    """The logarithm of an integral over θ, and the moments of θ, at every node."""

    log_factor: Tensor  # (K, R)
    mean: Tensor  # (K, R, d)
    covariance: Tensor  # (K, R, d, d)


class Search(NamedTuple):
    """Settings of the search for modes of θ; see `minimised`."""

    start: Tensor | None = None  # (K, R, d); default: zeros
    still: float = 0.0  # sds of the normal approximation, the last step
    trials: int = TRIALS  # evaluations, at most


class Slopes(NamedTuple):
    """A row's log likelihood and its derivatives in η and v, `(K, R, N)` each; None without v."""

    value: Tensor
    first: Tensor
    second: Tensor
    spread: Tensor | None = None  # in v
    across: Tensor | None = None  # in η and v
    spreads: Tensor | None = None  # twice in v


class Rows(NamedTuple):
    """Terms of the predictors and of their variances, zero on padding."""

    x: Tensor  # (K, N, d)
    offset: Tensor  # (K, N)
    root: Tensor  # (K, N, d, q) R
    squares: tuple[Tensor, Tensor]  # (K, N, d (d + 1) / 2) xx' and RR'

    @staticmethod
    def of(x: Tensor, offset: Tensor, root: Tensor) -> Rows:
        """Return these rows."""
        outer = x[..., :, None] * x[..., None, :]
        return Rows(x, offset, root, (gaussian.pack(outer), gaussian.pack(root @ root.mT)))

    def predictors(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return η `(K, R, N)` and R'θ `(K, R, N, q)`."""
        inner = (theta @ self.root.permute(0, 2, 1, 3).flatten(2)).unflatten(-1, self.root.shape[1:4:2])
        return theta @ self.x.mT + self.offset[:, None], inner


# (rows' η, v, inputs given at the nodes, whether with derivatives) -> `Slopes`, with only `value` otherwise
Density = Callable[[Tensor, Tensor, Any, bool], Slopes]


def integrated(
    log_joint: Callable[[Tensor, Any], Tensor],
    given: Tree,
    size: int,
    rule: QuadratureRule | None,
    slopes: Callable[[Tensor, Any], tuple[Tensor, Tensor, Tensor]] | None = None,
    rows: int = 1,
    only: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None,
    search: Search | None = None,
) -> Integrated:
    """Return ∫ exp(log_joint) dθ by a rule around the mode, and the moments of θ.

    Args:
        log_joint: (θ `(K, R, d)`, inputs given there) -> `(K, R)`.
        given: inputs that differ by node, `(K, R, ...)`.
        size: d.
        rule: over θ, or over the last of its coordinates, given which the others are integrated by Laplace's method;
            None for Laplace's method over all.
        slopes: of log_joint: value, gradient `(K, R, d)`, minus second derivatives `(K, R, d, d)`; default: by
            automatic differentiation.
        rows: of a client, which determine the chunks of the rule's nodes.
        only: (indices `(M,)` of the K · R) -> log_joint there, θ `(M, d)` -> `(M,)`; with it the search for modes
            continues without those found.
        search: for modes; default: from zeros, to rounding.

    >>> import torch
    >>> from fedtorch.models.quadrature import gauss_hermite
    >>> at = torch.tensor([[[2.0]]]).double()  # of one client, one node
    >>> found = integrated(lambda theta, at: -(theta - at).square().sum(-1), at, 1, gauss_hermite(1, 3))
    >>> found.log_factor.exp().square().round(decimals=3), found.mean.flatten()  # π, at 2
    (tensor([[3.1420]], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    first = tree.leaves(given)[0]
    clients, count = first.shape[:2]
    if size == 0:
        empty = first.new_zeros(clients, count, 0)
        return Integrated(log_joint(empty, given), empty, first.new_zeros(clients, count, 0, 0))
    shaped = lambda theta: theta.reshape(clients, count, size)

    def objective(theta: Tensor) -> Tensor:
        return -log_joint(shaped(theta), given).reshape(-1)

    def about(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, gradient, information = slopes(shaped(theta), given)  # type: ignore[misc]
        return -value.reshape(-1), -gradient.flatten(0, 1), information.flatten(0, 1)

    eye = torch.eye(size, dtype=first.dtype, device=first.device)
    metric = eye.expand(clients * count, -1, -1)
    how = Search() if search is None else search
    start = first.new_zeros(clients * count, size) if how.start is None else how.start.reshape(-1, size)
    negative = None if only is None else lambda ids: _negative(only(ids))
    by = None if slopes is None else about
    mode, curvature, least = minimised(objective, start, metric, by, negative, *how[1:])
    factor, info = torch.linalg.cholesky_ex(curvature)
    lost = (info != 0)[:, None, None]  # nodes so far out that no mode was found: they have no weight
    factor, mode = torch.where(lost, eye, factor), torch.where(lost[..., 0], 0.0, mode)
    half = torch.linalg.solve_triangular(factor.mT, eye, upper=True)
    missed = torch.where(lost[:, 0, 0], _NOWHERE, 0.0).reshape(clients, count)
    normal, shape = size / 2 * math.log(2 * math.pi) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), (clients, count)
    if rule is None:
        peak, spread = torch.where(lost[:, 0, 0], 0.0, -least) + normal, half @ half.mT
        return Integrated(peak.reshape(shape) + missed, shaped(mode), spread.reshape(*shape, size, size))
    log, centre, within = _at_nodes(log_joint, given, rule, slopes, rows, mode, half)
    spread = half @ within @ half.mT
    mean = mode + (half @ centre[..., None])[..., 0]
    return Integrated(
        (log + normal).reshape(shape) + missed,
        mean.reshape(*shape, size),
        spread.reshape(*shape, size, size),
    )


def _negative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda at: -function(at)


def _at_nodes(
    log_joint: Callable[[Tensor, Any], Tensor],
    given: Tree,
    rule: QuadratureRule,
    slopes: Callable[[Tensor, Any], tuple[Tensor, Tensor, Tensor]] | None,
    rows: int,
    mode: Tensor,
    half: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log ∫ exp(log_joint) dv over the density of a standard normal v, and mean and covariance of v.

    Args:
        log_joint, given, rule, slopes, rows: of `integrated`.
        mode: `(K R, d)`.
        half: `(K R, d, d)` of θ = mode + half v.
    """
    (clients, count), size = tree.leaves(given)[0].shape[:2], mode.shape[1]
    nodes, weights = rule.nodes.to(mode), rule.weights.to(mode)
    rest = size - nodes.shape[1]  # coordinates treated as normal given the last ones, at every node
    nodes = torch.nn.functional.pad(nodes, (rest, 0))
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in nodes.split(max(1, _AT_ONCE // max(1, clients * count * rows))):
        moved = (mode[:, None] + part @ half.mT).reshape(clients, count * len(part), size)
        repeated = tree.map(partial(torch.repeat_interleave, repeats=len(part), dim=1), given)
        if not rest or slopes is None:
            log = log_joint(moved, repeated).reshape(clients * count, len(part))
            centre, spread = mode.new_zeros(1, 1, rest), torch.eye(rest).to(mode)
        else:
            log, centre, spread = _beside(slopes(moved, repeated), half[:, None, :, :rest], len(part))
        parts.append((log, centre.expand(*log.shape, -1), spread.expand(*log.shape, -1, -1)))
    log, centre, spread = (torch.cat(each, 1) for each in zip(*parts))
    log = log + 0.5 * nodes.square().sum(1) + weights.log()
    shares = log.softmax(1)
    at = torch.cat([centre, nodes[:, rest:].expand(len(mode), -1, -1)], -1)
    mean = (shares[:, None] @ at)[:, 0]
    away = at - mean[:, None]
    covariance = (shares[..., None] * away).mT @ away
    covariance[:, :rest, :rest] += (shares[..., None, None] * spread).sum(1)
    return log.logsumexp(1), mean, covariance


def _beside(at: tuple[Tensor, Tensor, Tensor], half: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log integral, mean and covariance of the first coordinates of v, zero at nodes, given the last.

    Args:
        at: log_joint, gradient and minus the second derivatives in θ, `(K, R Q, ...)`.
        half: `(K R, 1, d, r)`, how θ moves with them.
        nodes: Q.
    """
    value, gradient, information = (each.reshape(len(half), nodes, *each.shape[2:]) for each in at)
    slope = (half.mT @ gradient[..., None])[..., 0]
    root, info = torch.linalg.cholesky_ex(half.mT @ information @ half)
    lost, eye = (info != 0)[..., None], torch.eye(half.shape[-1]).to(half)
    root, slope = torch.where(lost[..., None], eye, root), torch.where(lost, 0.0, slope)
    pull = torch.linalg.solve_triangular(root, slope[..., None], upper=False)
    mean = torch.linalg.solve_triangular(root.mT, pull, upper=True)[..., 0]
    log = value + 0.5 * pull[..., 0].square().sum(-1) - root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return log, mean, torch.cholesky_inverse(root)


def conditional(
    density: Density,
    rows: Rows,
    mean: Tensor,
    covariance: Tensor,
    given: Tree,
    rule: QuadratureRule | None,
    place: Tensor | None = None,
) -> Conditional:
    """Return the conditional of the rows for θ ~ N(mean `(K, R, d)`, covariance `(K, R, d, d)`).

    Args:
        density: of a row.
        rows: of the clients.
        mean, covariance: of θ before the rows.
        given: other inputs that differ by node, `(K, R, ...)`.
        rule: over θ about its mode; None for Laplace's method.
        place: numbers of the coordinates that `covariance` `(K, R, e, e)` is of, where others are known.
    """
    root, size = torch.linalg.cholesky_ex(covariance).L, covariance.shape[-1]
    eye = torch.eye(size, dtype=mean.dtype, device=mean.device)
    if place is not None:
        root = root.new_zeros(*mean.shape, size).index_copy(-2, place, root)

    def log_joint(u: Tensor, given: tuple[Tensor, Tensor, Tree]) -> Tensor:
        centre, half, more = given
        eta, inner = rows.predictors(centre + (half @ u[..., None])[..., 0])
        return density(eta, inner.square().sum(-1), more, False).value.sum(-1) - 0.5 * u.square().sum(-1)

    def slopes(u: Tensor, given: tuple[Tensor, Tensor, Tree]) -> tuple[Tensor, Tensor, Tensor]:
        centre, half, more = given
        value, gradient, information = _slopes(density, rows, centre + (half @ u[..., None])[..., 0], more)
        gradient = (half.mT @ gradient[..., None])[..., 0] - u
        return value - 0.5 * u.square().sum(-1), gradient, half.mT @ information @ half + eye

    integral = integrated(log_joint, (mean, root, given), size, rule, slopes, rows.x.shape[1])
    after = Moments(mean + (root @ integral.mean[..., None])[..., 0], root @ integral.covariance @ root.mT)
    evidence = integral.log_factor - size / 2 * math.log(2 * math.pi)
    return Conditional(evidence, lambda weights: derivatives(mean, covariance, after, weights), lambda: after)


def _slopes(density: Density, rows: Rows, theta: Tensor, given: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log likelihood of θ, its gradient and minus its second derivatives."""
    eta, inner = rows.predictors(theta)
    at = density(eta, inner.square().sum(-1), given, True)
    gradient, packed = at.first @ rows.x, at.second @ rows.squares[0]
    if at.spread is None or at.across is None or at.spreads is None:
        return at.value.sum(-1), gradient, -gaussian.unpack(packed)
    bent = 2 * (rows.root[:, None] @ inner[..., None])[..., 0]  # the gradient of v, (K, R, N, d)
    gradient = gradient + (at.spread[..., None, :] @ bent)[..., 0, :]
    second = gaussian.unpack(packed + 2 * at.spread @ rows.squares[1])
    mixed = rows.x.mT[:, None] @ (at.across[..., None] * bent)
    second = second + mixed + mixed.mT + bent.mT @ (at.spreads[..., None] * bent)
    return at.value.sum(-1), gradient, -second
