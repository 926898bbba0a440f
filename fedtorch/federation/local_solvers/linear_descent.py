r"""Gradient descent of a linear model in closed form: T steps are one affine map.

With the squared loss ‖y − Xθ‖²/n and the `Quadratic` of the others, client k's gradient is Hθ − c with
H = 2X'X/n + λI, so that T full-batch steps of rate η from θ⁰ end at

.. math:: \theta^0 - V \varphi(g + \lambda) V' (H\theta^0 - c), \qquad
    \varphi(x) = \frac{1 - (1 - \eta x)^T}{x},

where 2X'X/n = V diag(g) V' is factorised once, when the data are prepared. A round costs O(d²), whatever the numbers of
rows and steps; T = ∞ is the exact solution, φ(x) = 1/x.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.federation.algorithm import Local, LocalSolver, Quadratic
from fedtorch.federation.local_solvers.gradient_descent import LocalState
from fedtorch.federation.local_solvers.prediction import predictor
from fedtorch.models import functional
from fedtorch.models.linear import LinearHead, sufficient_statistics
from fedtorch.tree import Tree

__all__ = ["Factorised", "linear_descent"]

_ROUNDING = 64 * torch.finfo(torch.float64).eps  # curvature below, times p and the largest, is rounding of sums


class Factorised(NamedTuple):
    """A client's mean squared error in the axes of its Gram matrix, in float64."""

    values: Tensor  # (K, p) g, the eigenvalues of 2X'X / n
    vectors: Tensor  # (K, p, p) V
    cross: Tensor  # (K, p) 2V'X'y / n
    power: Tensor  # (K,) y'y / n
    count: Tensor  # type: ignore[assignment]  # (K,) n


def linear_descent(head: LinearHead, *, steps: int | None = None, rate: float | None = None) -> LocalSolver:
    """A local solver of `head` with squared loss: `steps` full-batch gradient steps at the cost of one.

    The result is that of `ft.gradient_descent` with `mse_loss`, SGD and `batch_size=None`, to rounding. Where the exact
    solution is not unique it is the one nearest to the start. `Local.info` has the mean squared `loss` at the end.

    Args:
        head: data are rows `(x, y)` with inputs x `(N, q)` of the head and y `(N,)`.
        steps: how many; None solves exactly.
        rate: η; default: 1 / the largest curvature, of each client with its quadratic, which never increases its loss.

    Raises:
        TypeError: `head` is not a `LinearHead`.
        ValueError: `steps` or `rate` is not positive; or the data do not fit (when a population is bound).

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.tensor([1.0, 3.0]))])
        >>> local = ft.linear_descent(LinearHead(1, intercept=False), steps=1, rate=0.25)
        >>> next(ft.run(ft.fedavg(local), ft.InProcess(data))).server
        {'coefficients': tensor([1.])}
    """
    if not isinstance(head, LinearHead):
        raise TypeError(f"Expected a LinearHead, but got {type(head).__name__}; see fedtorch.models.linear")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"Expected steps to be a whole number of at least 1, or None, but got {steps}")
    if rate is not None and not rate > 0:
        raise ValueError(f"Expected a positive rate, but got {rate}; leave it out to have it from the data")
    head = copy.deepcopy(head)
    parameters = functional.parameters(head)

    def prepare(data: Any) -> Factorised:
        if isinstance(data, Factorised):
            return data
        x, y = data.batch
        with torch.no_grad():
            statistics = sufficient_statistics(head.design(x), y, data.mask)
        n = statistics.rows.clamp(min=1)
        values, vectors = torch.linalg.eigh(statistics.gram * (2 / n)[:, None, None])
        cross = (vectors.mT @ statistics.cross[..., None])[..., 0] * (2 / n)[:, None]
        return Factorised(values.clamp(min=0), vectors, cross, statistics.power / n, data.count)

    def solve(start: Tree, state: Tree, data: Any, quadratic: Quadratic | None, key: Tensor) -> Local:
        g = prepare(data)
        old = start["coefficients"].to(torch.float64)
        rotated = (g.vectors.mT @ old[..., None])[..., 0]
        curvature, gradient = g.values, g.values * rotated - g.cross
        if quadratic is not None:
            precision = quadratic.precision.to(torch.float64)[:, None]
            shift = quadratic.shift["coefficients"].to(torch.float64)
            curvature = curvature + precision
            gradient = gradient + precision * rotated - (g.vectors.mT @ shift[..., None])[..., 0]
        reach, taken = _reach(curvature, steps, rate)
        moved = -reach * gradient
        new = rotated + moved
        loss = (g.power + (new * (0.5 * g.values * new - g.cross)).sum(1)).clamp(min=0)
        coefficients = old + (g.vectors @ moved[..., None])[..., 0]
        solution = {**start, "coefficients": coefficients.to(start["coefficients"].dtype)}
        return Local(solution, state, taken, {"loss": loss})

    return LocalSolver(
        solve=solve,
        parameters=parameters,
        init=lambda parameters: LocalState({}, {}, None),
        predict=predictor(head),
        tensors=lambda parameters, state: parameters,
        prepare=prepare,
        module=head,
    )


def _reach(curvature: Tensor, steps: int | None, rate: float | None) -> tuple[Tensor, Tensor]:
    """φ of every curvature `(K, p)`, and the sum of the learning rates `(K,)`; exact solutions take no steps."""
    largest = curvature.amax(1, keepdim=True)
    if steps is None:
        known = curvature > _ROUNDING * curvature.shape[1] * largest
        return torch.where(known, 1 / torch.where(known, curvature, 1.0), 0.0), torch.zeros_like(largest[:, 0])
    eta = torch.where(largest > 0, 1 / largest, 0.0) if rate is None else torch.full_like(largest, rate)
    step = eta * curvature
    small = step < 0.5  # where 1 − (1 − step)^T would cancel
    covered = torch.where(
        small,
        -torch.expm1(steps * torch.log1p(-torch.where(small, step, 0.0))),
        1 - (1 - torch.where(small, 1.0, step)) ** steps,
    )
    flat = step < torch.finfo(step.dtype).tiny
    reach = torch.where(flat, eta * steps, covered / torch.where(flat, 1.0, curvature))
    return reach, steps * eta[:, 0]
