"""Newton's method on many small problems at once, with damping where a second-order expansion is unreliable.

A step solves (H + λ ν D) s = g, with D the greatest diagonals of |H| so far, so that units do not matter, and ν the
least absolute eigenvalue of H in the units of D, so that λ = 1 halves the longest part of a step. If H is indefinite or
λ is not 0, absolute eigenvalues are used. λ is 0 until a step increases the objective; then it grows, and shrinks again
when the expansion predicts the gain. Each trial is evaluated with its derivatives, since most are accepted, and solved
problems are left out of further evaluations.

Source: Moré (1978), "The Levenberg–Marquardt algorithm: implementation and theory"; Dauphin et al. (2014), "Identifying
and attacking the saddle point problem in high-dimensional non-convex optimization".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import linalg, tree

TRIALS = 200  # evaluations at most
_FIRST, _GROWTH, _MOST = 1.0, 4.0, 1e9  # λ after a bad step, its factor after another, and its limit
_GOOD, _POOR = 0.75, 0.1  # shares of the foretold gain above which λ shrinks, below which it grows
_SMALL = 0.05  # λ that counts as none
_SADDLE = 1e-3  # least absolute eigenvalue used, relative to the greatest
_NEAR = 1e-12  # predicted relative gain below which a step is taken without a test
_ENOUGH = 4  # most such steps
_STILL = 1e-18  # Newton decrement, of the least point

Objective = Callable[[Tensor], Tensor]  # (K, p) -> (K,), each from its own row
Derivatives = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Least(NamedTuple):
    """The minima of the objectives."""

    at: Tensor  # (K, p)
    curvature: Tensor  # (K, p, p) the second derivatives
    value: Tensor  # (K,)


def minimised(
    objective: Objective,
    start: Tensor,
    metric: Tensor,
    derivatives: Derivatives | None = None,
    only: Callable[[Tensor], Objective] | None = None,
    still: float = 0.0,
    trials: int = TRIALS,
) -> Least:
    """Minimise `K` problems at once by Newton's method.

    Args:
        objective: `(K, p)` -> `(K,)`, each from its own row.
        start: `(K, p)`.
        metric: `(K, p, p)` positive definite, the units in directions without second derivatives.
        derivatives: of the objective: value `(K,)`, gradient `(K, p)` and second derivatives `(K, p, p)`; default: by
            automatic differentiation.
        only: (indices `(M,)`) -> the objective of these problems, `(M, p)` -> `(M,)`; with it, and without
            `derivatives`, solved problems are left out once they are a quarter of the remaining ones or more.
        still: length of a step, in units of the curvature's inverse root, that ends the search: it is taken, with its
            predicted value, and the curvature before it; 0 for rounding.
        trials: most evaluations; unsolved problems then stay at their present points.

    >>> import torch
    >>> goal = torch.tensor([[1.0, 5.0], [0.0, -3.0]]).double()
    >>> found = minimised(lambda x: (x - goal).square().sum(1), torch.zeros_like(goal), torch.eye(2).double())
    >>> found.at, found.curvature[0]
    (tensor([[ 1.,  5.], [ 0., -3.]], dtype=torch.float64), tensor([[2., 0.], [0., 2.]], dtype=torch.float64))
    """
    slopes = partial(differentiated, objective) if derivatives is None else derivatives
    state = _State.of(start, slopes(start), metric)
    ended = Least(start.clone(), state.curvature.clone(), state.value.clone())
    ids = torch.arange(len(start), device=start.device)
    for _ in range(trials):
        step, gain, ending = _step(state, max(_STILL, still * still))
        last = ending | (state.damping > _MOST) | (state.close >= _ENOUGH) | state.done
        arrived = last & ~state.done
        if bool(arrived.any()):
            taken = torch.where((state.damping > _MOST)[:, None] | ~step.isfinite(), 0.0, step)
            gained = torch.where((taken != 0).any(1), gain, 0.0)
            here = Least(state.at - taken, state.curvature, state.value - gained)
            for whole, part in zip(ended, here):
                whole[ids[arrived]] = part[arrived]
        left = int((~last).sum())
        if not left:
            return ended
        state = state._replace(done=last)
        if only is not None and derivatives is None and 4 * left <= 3 * len(last):
            going = (~last).nonzero()[:, 0]
            ids, state, step, gain = ids[going], tree.take(state, going), step[going], gain[going]
            slopes = partial(differentiated, only(ids))
        trial = torch.where(state.done[:, None], state.at, state.at - step)
        state = state.after(trial, slopes(trial), gain)
    rest = ~state.done
    for whole, part in zip(ended, (state.at, state.curvature, state.value)):
        whole[ids[rest]] = part[rest]
    return ended


class _State(NamedTuple):
    """State of the search, for the problems still in it."""

    at: Tensor  # (M, p)
    value: Tensor  # (M,)
    gradient: Tensor  # (M, p)
    curvature: Tensor  # (M, p, p)
    scale: Tensor  # (M, p) D
    damping: Tensor  # (M,) λ
    close: Tensor  # (M,) steps that have gained no more than rounding
    done: Tensor  # (M,)

    @staticmethod
    def of(at: Tensor, derivatives: tuple[Tensor, Tensor, Tensor], metric: Tensor) -> _State:
        value, gradient, curvature = derivatives
        size = curvature.diagonal(dim1=-2, dim2=-1).abs()
        scale = torch.where((size > 0) & size.isfinite(), size, metric.diagonal(dim1=-2, dim2=-1))
        never = torch.zeros_like(value, dtype=torch.bool)
        return _State(at, value, gradient, curvature, scale, torch.zeros_like(value), never.long(), never)

    def after(self, trial: Tensor, derivatives: tuple[Tensor, Tensor, Tensor], gain: Tensor) -> _State:
        """Return the state after the evaluation of a step with a predicted gain."""
        value, gradient, curvature = derivatives
        fine = value.isfinite() & gradient.isfinite().all(1) & curvature.isfinite().all((1, 2))
        near = gain <= _NEAR * (1 + self.value.abs())  # values contain rounding from here on
        good = fine & ((value <= self.value) | near) & ~self.done
        share = torch.where(near, 1.0, (self.value - value) / gain)
        less = torch.where(self.damping > _SMALL, self.damping / _GROWTH, 0.0)
        more = (self.damping * _GROWTH).clamp(min=_FIRST)
        damping = torch.where(share > _GOOD, less, self.damping)
        damping = torch.where(good & ~(share < _POOR), damping, more)
        size = curvature.diagonal(dim1=-2, dim2=-1).abs()
        mine = (trial, value, gradient, curvature, torch.maximum(self.scale, size))
        at, value, gradient, curvature, scale = tree.where(good, mine, self[:5])
        return _State(at, value, gradient, curvature, scale, damping, self.close + near, self.done)


def _step(state: _State, still: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return steps, their predicted gains, and whether they end the search: Newton's own, and short."""
    factor, info = torch.linalg.cholesky_ex(state.curvature)
    bad, damping = info != 0, state.damping
    step = torch.cholesky_solve(state.gradient[..., None], factor)[..., 0]
    slope = (step * state.gradient).sum(1)
    ending = ~bad & (slope <= still)
    damped = (bad | (damping > 0)) & ~ending
    if not bool(damped.any()):
        return step, 0.5 * slope, ending
    scale, gradient = state.scale[damped], state.gradient[damped]
    root = scale.sqrt()
    inner = state.curvature[damped] / root[:, :, None] / root[:, None]
    values, vectors = torch.linalg.eigh(torch.where(inner.isfinite(), inner, 0.0))
    values = torch.maximum(values.abs(), _SADDLE * values.abs().amax(1, keepdim=True).clamp(min=_SADDLE))
    more = damping[damped] * values.amin(1)
    turned = (vectors.mT @ (gradient / root)[..., None])[..., 0] / (values + more[:, None])
    step[damped] = (vectors @ turned[..., None])[..., 0] / root
    slope[damped] = (step[damped] * gradient).sum(1)
    spread = torch.zeros_like(slope)
    spread[damped] = (more[:, None] * scale * step[damped].square()).sum(1)
    return step, 0.5 * (slope + spread), ending


def differentiated(objective: Objective, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return value, gradient and second derivatives of an objective by automatic differentiation."""
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        value = objective(at)
        (gradient,) = torch.autograd.grad(value.sum(), at, create_graph=True)
        rows = [torch.autograd.grad(gradient[:, j].sum(), at, retain_graph=True)[0] for j in range(at.shape[1])]
    curvature = torch.stack(rows, 1)
    return value.detach(), gradient.detach(), linalg.symmetric(curvature).detach()
