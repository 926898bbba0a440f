r"""Projections of a density times a factor onto the normal densities, for any factor f(φ).

A projection takes the cavity and returns two sets of moments: `tilted`, of cavity times factor, and `reference`, of the
cavity itself as the same nodes or draws see it. Expectation propagation uses the difference of their natural
parameters, so that errors common to both cancel. (Independent draws of tilted moments alone add up to an error of
159 % over a thousand clients with two thousand draws each, differences from the same draws to 5 %.)

A factor is `log_factor(phi, data)`: φ `(K, R, p)`, the clients' prepared data -> `(K, R)`. It need not be normalised.

Source: Vehtari et al. (2020), "Expectation propagation as a way of life", sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedtorch import linalg, random, tree
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical.hyperpriors import Prior
from fedtorch.models.quadrature import QuadratureRule, default_rule, tilt
from fedtorch.tree import Tree

_NEWTON_STEPS = 50
_HALVINGS = 12
_NEAR = 1e-12  # Newton decrement, relative to the objective, from which a step is taken whole


class Projected(NamedTuple):
    """Moments `(K, p)`, `(K, p, p)`; `Projection` and `quadrature` have examples."""

    tilted: Moments  # of cavity times factor
    reference: Moments  # of the cavity, as the same nodes see it


class Start(NamedTuple):
    """The first estimate, from sums over the clients.

    >>> import torch, fedtorch as ft
    >>> from fedtorch.federation.algorithms.ep import posterior, settled
    >>> from fedtorch.federation.algorithms.ep._start import Factors
    >>> def summary(data, prior):  # the clients' means; zeros of one client before there are any data
    ...     return torch.zeros(1).double() if data is None else data.batch[0].mean(1)
    >>> def estimate(total, count, prior):  # around their mean with the precision of that many rows
    ...     return Natural(total, count[None])
    >>> factor = lambda phi, data: -0.5 * (phi - data.batch[0][:, None, 0]).square().sum(-1)  # y_k ~ N(φ, 1)
    >>> prior = Natural(torch.zeros(1).double(), torch.ones(1).double())  # N(0, 1)
    >>> factors = Factors(laplace(factor), prior, Start(summary, estimate))
    >>> data = ft.InProcess(ft.data.from_tensors([(torch.tensor([[y]]).double(),) for y in (1.0, 8.0)]))
    >>> posterior(ft.run(ft.ep(factors), data, rounds=9, until=settled())).mean.round(decimals=3)  # (0 + 1 + 8) / 3
    tensor([3.], dtype=torch.float64)
    """

    summary: Callable[[Any, Prior], Tree]  # (prepared data, prior) -> a tree, (K, ...)
    estimate: Callable[[Tree, Tensor, Prior], Natural]  # (sum of summaries, how many, prior) -> all sites' sum


class Projection(Protocol):
    """(cavity, prepared data, keys `(K,)`) -> moments of cavity times factor.

    One of your own, exact for y_k ~ N(φ, 1):

    >>> import torch
    >>> def exact(cavity, y, key):
    ...     precision = 1 / cavity.covariance + 1
    ...     mean = (cavity.mean / cavity.covariance[..., 0] + y) / precision[..., 0]
    ...     return Projected(Moments(mean, 1 / precision), cavity)
    >>> project: Projection = exact  # as `Factors(project, prior)` takes it
    >>> cavity = Moments(torch.zeros(1, 1), torch.ones(1, 1, 1))
    >>> project(cavity, torch.tensor([[4.0]]), torch.zeros(1, dtype=torch.int64)).tilted.mean
    tensor([[2.]])
    """

    def __call__(self, cavity: Moments, data: Any, key: Tensor) -> Projected: ...


LogFactor = Callable[[Tensor, Any], Tensor]


def quadrature(log_factor: LogFactor, rule: QuadratureRule | None = None, *, apart: bool = False) -> Projection:
    """Return moments by nodes that go where the product is; see `fedtorch.models.quadrature`.

    Args:
        log_factor: (φ `(K, R, p)`, data) -> `(K, R)`.
        rule: for all p dimensions; default: a product rule for up to four, quasi-random points beyond.
        apart: whether all leaves of the data are `(K, ...)`, so that clients whose nodes stay are left out of moves of
            the others: for a factor that is dear.

    >>> import torch
    >>> factor = lambda phi, y: -0.5 * (phi[..., 0] - y).square()  # y ~ N(φ, 1)
    >>> cavity = Moments(torch.zeros(1, 1).double(), torch.ones(1, 1, 1).double())
    >>> found = quadrature(factor)(cavity, torch.tensor([[4.0]]), torch.zeros(1, dtype=torch.int64))
    >>> found.tilted.mean.round(decimals=3), found.tilted.covariance.round(decimals=3)
    (tensor([[2.]], dtype=torch.float64), tensor([[[0.5000]]], dtype=torch.float64))
    """

    def project(cavity: Moments, data: Any, key: Tensor) -> Projected:
        chosen = default_rule(cavity.mean.shape[1]) if rule is None else rule
        only = lambda ids: lambda phi: (log_factor(phi, tree.take(data, ids)), None)
        nodes = tilt(cavity, lambda phi: (log_factor(phi, data), None), chosen, only=only if apart else None)
        return Projected(_weighted(nodes.nodes, nodes.weights), cavity)

    return project


def importance(log_factor: LogFactor, draws: int = 2000) -> Projection:
    """Return moments by importance sampling from the cavity: tilted and reference from the same draws.

    Args:
        log_factor: (φ `(K, R, p)`, data) -> `(K, R)`.
        draws: R, in antithetic pairs.

    >>> import torch, fedtorch as ft
    >>> factor = lambda phi, y: -0.5 * (phi[..., 0] - y).square()  # y ~ N(φ, 1)
    >>> cavity = Moments(torch.zeros(1, 1).double(), torch.ones(1, 1, 1).double())
    >>> found = importance(factor, draws=10_000)(cavity, torch.tensor([[1.0]]), ft.random.key(0)[None])
    >>> round(float(found.tilted.mean), 1), round(float(found.reference.mean), 1)
    (0.5, 0.0)
    """
    if draws < 2 or draws % 2:
        raise ValueError(f"Expected an even number of draws of at least 2, but got {draws}")

    def project(cavity: Moments, data: Any, key: Tensor) -> Projected:
        size = cavity.mean.shape[1]
        half = random.normal(key, (draws // 2, size), dtype=cavity.mean.dtype)
        white = torch.cat([half, -half], 1)
        phi = cavity.mean[:, None] + white @ torch.linalg.cholesky_ex(cavity.covariance).L.mT
        weights = torch.softmax(log_factor(phi, data), 1)
        return Projected(_weighted(phi, weights), _weighted(phi, torch.full_like(weights, 1 / draws)))

    return project


def laplace(log_factor: LogFactor) -> Projection:
    """Project by mode and curvature of cavity times factor; two derivatives of `log_factor` are needed.

    A client whose curvature at the mode is not positive gets NaN, so that it keeps its site for the round.

    >>> import torch
    >>> factor = lambda phi, y: y * phi[..., 0] - phi[..., 0].exp()  # a count of log mean φ
    >>> cavity = Moments(torch.zeros(1, 1).double(), torch.ones(1, 1, 1).double())
    >>> found = laplace(factor)(cavity, torch.tensor([[1.0]]), torch.zeros(1, dtype=torch.int64)).tilted
    >>> found.mean.abs().round(decimals=3), found.covariance  # 1 − e^φ − φ = 0 at 0, where the curvature is 2
    (tensor([[0.]], dtype=torch.float64), tensor([[[0.5000]]], dtype=torch.float64))
    """

    def project(cavity: Moments, data: Any, key: Tensor) -> Projected:
        precision = torch.cholesky_inverse(torch.linalg.cholesky_ex(cavity.covariance).L)

        def objective(phi: Tensor) -> Tensor:
            away = phi - cavity.mean
            quadratic = 0.5 * (away[:, None] @ precision @ away[..., None])[:, 0, 0]
            return quadratic - log_factor(phi[:, None], data)[:, 0]

        mode, curvature = minimised(objective, cavity.mean, precision)
        factor, info = torch.linalg.cholesky_ex(curvature)
        covariance = torch.where((info == 0)[:, None, None], torch.cholesky_inverse(factor), torch.nan)
        return Projected(Moments(mode, covariance), cavity)

    return project


def from_the_prior(project: Projection) -> Start:
    """Project the whole prior at each client; the mean with the prior's precision is the first estimate.

    >>> import torch, fedtorch as ft
    >>> factor = lambda phi, y: -0.5 * (phi[..., 0] - y).square()  # y ~ N(φ, 1)
    >>> prior = Prior(Natural(torch.zeros(1).double(), torch.ones(1).double()), ())  # N(0, 1)
    >>> start = from_the_prior(quadrature(factor))
    >>> summary = start.summary(torch.tensor([[4.0], [2.0]]).double(), prior).round(decimals=3)
    >>> summary  # of each client as if it were alone
    tensor([[2.],
            [1.]], dtype=torch.float64)
    """

    def summary(data: Any, prior: Prior) -> Tree:
        own = prior.completed()
        if data is None:
            return torch.zeros_like(own.shift)
        count = len(tree.leaves(data)[0])
        cavity = tree.expand(gaussian.moments(own), count)
        tilted = project(Moments(*cavity), data, torch.zeros(count, dtype=torch.int64, device=own.shift.device)).tilted
        return torch.where(tilted.mean.isfinite().all(-1, keepdim=True), tilted.mean, cavity.mean)

    def estimate(total: Tree, count: Tensor, prior: Prior) -> Natural:
        own = prior.completed()
        mean = total / count
        return Natural((gaussian.unpack(own.precision) @ mean[:, None])[:, 0], own.precision)

    return Start(summary, estimate)


Objective = Callable[[Tensor], Tensor]  # (K, p) -> (K,), each from its own row


def minimised(
    objective: Objective,
    start: Tensor,
    metric: Tensor,
    derivatives: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None,
    only: Callable[[Tensor], Objective] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Newton's method on `K` problems at once: where each is least, `(K, p)`, and the second derivatives there.

    Args:
        objective: `(K, p)` -> `(K,)`, each from its own row.
        start: `(K, p)`.
        metric: `(K, p, p)` positive definite, used for a step where the second derivatives are not.
        derivatives: of the objective: value `(K,)`, gradient `(K, p)` and second derivatives `(K, p, p)`; default: by
            automatic differentiation.
        only: (indices `(M,)`) -> the objective of these problems, `(M, p)` -> `(M,)`; with it, and without
            `derivatives`, problems that are solved are left out once they are half or more.

    >>> import torch
    >>> goal = torch.tensor([[1.0, 5.0], [0.0, -3.0]]).double()
    >>> at, curvature = minimised(lambda x: (x - goal).square().sum(1), torch.zeros_like(goal), torch.eye(2).double())
    >>> at, curvature[0]
    (tensor([[ 1.,  5.], [ 0., -3.]], dtype=torch.float64), tensor([[2., 0.], [0., 2.]], dtype=torch.float64))
    """
    found = partial(_derivatives, objective) if derivatives is None else derivatives
    at = start.clone()
    ids = torch.arange(len(start), device=start.device)  # of the problems that are not solved
    mine, slopes, part = objective, found, start
    for _ in range(_NEWTON_STEPS):
        value, gradient, curvature = slopes(part)
        bad = (torch.linalg.cholesky_ex(curvature).info != 0)[:, None, None]
        step = torch.linalg.solve_ex(torch.where(bad, metric, curvature), gradient[..., None]).result[..., 0]
        near = (step * gradient).sum(1).abs() <= _NEAR * (1 + value.abs())  # its values tell rounding from here on
        length = _lengths(mine, part, step, value, near, None if only is None else partial(_those, only, ids))
        part = part - length[:, None] * step
        done = (step * gradient).sum(1).abs() * length < 1e-18
        at[ids] = part
        solved = int(done.sum())
        if solved == len(done):
            break
        if only is not None and derivatives is None and 2 * solved >= len(done):
            ids, metric, part = ids[~done], metric[~done], part[~done]
            mine = only(ids)
            slopes = partial(_derivatives, mine)
    return at, found(at)[2]


def _those(only: Callable[[Tensor], Objective], ids: Tensor, some: Tensor) -> Objective:
    """Return the objective of some of the problems `ids`."""
    return only(ids[some])


def _lengths(
    objective: Objective,
    at: Tensor,
    step: Tensor,
    value: Tensor,
    near: Tensor,
    only: Callable[[Tensor], Objective] | None,
) -> Tensor:
    """Return the shares of steps `(K,)`, halved until the objective is no greater; 0 where it is after all halvings."""
    length = torch.ones_like(value)
    worse = ~((objective(at - step) <= value) | near)
    for _ in range(_HALVINGS - 1):
        if not bool(worse.any()):
            return length
        length = torch.where(worse, length / 2, length)
        if only is None or 2 * int(worse.sum()) > len(worse):
            worse = ~((objective(at - length[:, None] * step) <= value) | near)
        else:
            some = worse.nonzero()[:, 0]
            worse[some] = ~(only(some)(at[some] - length[some, None] * step[some]) <= value[some])  # NaN is worse
    return torch.where(worse, 0.0, length)


def _derivatives(objective: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        value = objective(at)
        (gradient,) = torch.autograd.grad(value.sum(), at, create_graph=True)
        rows = [torch.autograd.grad(gradient[:, j].sum(), at, retain_graph=True)[0] for j in range(at.shape[1])]
    curvature = torch.stack(rows, 1)
    return value.detach(), gradient.detach(), linalg.symmetric(curvature).detach()


def _weighted(nodes: Tensor, weights: Tensor) -> Moments:
    mean = (weights[..., None] * nodes).sum(1)
    centred = nodes - mean[:, None]
    return Moments(mean, linalg.symmetric((weights[..., None] * centred).mT @ centred))
