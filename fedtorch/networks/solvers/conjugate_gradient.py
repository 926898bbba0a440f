"""Conjugate gradients with the diagonal blocks as preconditioner.

The step lengths are sums over the whole network, twice a round besides those for optimality, so this is a reference.
The same sums are Lanczos coefficients: they give the smallest eigenvalue, used in the estimate of the parameters' error
and in `chebyshev`.

Source: Hestenes and Stiefel (1952); for the eigenvalues Golub and Van Loan, "Matrix computations", section 11.3.

>>> import torch, fedtorch as ft
>>> from fedtorch.networks.solvers import linear_problem
>>> from fedtorch.networks.solvers.conjugate_gradient import conjugate_gradient
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> problem = linear_problem(data, ft.Network([[0, 1]]), alpha=1.0)
>>> conjugate_gradient(problem).parameters.flatten().round(decimals=6)
tensor([1., 2.], dtype=torch.float64)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import Monitor, Solution, Watch, start_at

_KEEP_EVERY = 20  # rounds; each is checked


def conjugate_gradient(
    problem: LinearProblem,
    *,
    rounds: int = 10_000,
    tolerance: float = 1e-10,
    start: Tensor | None = None,
    watch: Watch | None = None,
) -> Solution:
    """Solve by preconditioned conjugate gradients (reference): fewest rounds, four sums over the network in each.

    Returns the solution of least norm. See `fedgd` for the arguments; optimality is known in every round.
    """
    monitor = Monitor(problem, tolerance, rounds, _KEEP_EVERY, watch)
    iteration = ConjugateGradients(problem, start_at(problem, start), monitor, started=start is not None)
    stop = monitor.small(iteration.residual, iteration.w)
    while not stop:
        stop = iteration.step()
    return monitor.solution(iteration.w, "reference", problem.minimum_norm)


class ConjugateGradients:
    """The iteration and its coefficients.

    Args:
        problem: the problem to solve.
        w: start, overwritten.
        monitor: counts rounds and sums.
        started: False if `w` is zero, which saves a round.
    """

    def __init__(self, problem: LinearProblem, w: Tensor, monitor: Monitor, started: bool) -> None:
        self.problem, self.w, self.monitor = problem, w, monitor
        self.residual = problem.cross.clone()
        if started:
            self.residual -= problem.product(w)
            monitor.rounds += 1
        self._conditioned = self.precondition(self.residual)
        self._direction = self._conditioned.clone()
        self._size = self._dot(self.residual, self._conditioned)
        self._lengths: list[Tensor] = []
        self._ratios: list[Tensor] = []
        self._ritz = 0, math.inf  # coefficients, and the eigenvalue that they gave
        monitor.smallest = self.smallest_eigenvalue

    def precondition(self, r: Tensor) -> Tensor:
        """Solve each node's block for its residual."""
        return torch.bmm(self.problem.inverse_blocks, r.unsqueeze(2)).squeeze(2)

    def step(self) -> bool:
        """Do one round; return whether it was the last."""
        image = self.problem.product(self._direction)
        curvature = self._dot(self._direction, image)
        if not bool((self._size > 0) & (curvature > 0)):  # converged to this precision, or zero from the start
            self.monitor.rounds += 1
            return self.monitor.broken()
        length = self._size / curvature
        self.w.add_(length * self._direction)
        self.residual.sub_(length * image)
        if self.monitor.tell(self.w) | self.monitor.small(self.residual, self.w):
            return True
        self._conditioned = self.precondition(self.residual)
        size = self._dot(self.residual, self._conditioned)
        ratio, self._size = size / self._size, size
        self._direction.mul_(ratio).add_(self._conditioned)
        self._lengths.append(length)
        self._ratios.append(ratio)
        return False

    def smallest_eigenvalue(self) -> float:
        """Return the smallest Ritz value of the preconditioned Q, which decreases to the smallest eigenvalue.

        It is updated whenever a twentieth of the rounds has been added, and infinite before the first.
        """
        count, value = self._ritz
        if len(self._lengths) > 1.05 * count:
            length, ratio = (torch.stack(each).double().cpu().numpy() for each in (self._lengths, self._ratios))
            diagonal = 1 / length
            diagonal[1:] += ratio[:-1] / length[:-1]
            beside = ratio[:-1] ** 0.5 / length[:-1]
            from scipy.linalg import eigh_tridiagonal

            value = float(eigh_tridiagonal(diagonal, beside, eigvals_only=True, select="i", select_range=(0, 0))[0])
            self._ritz = len(length), value
        return value

    def _dot(self, first: Tensor, second: Tensor) -> Tensor:
        self.monitor.sums += 1
        return torch.dot(first.flatten(), second.flatten())
