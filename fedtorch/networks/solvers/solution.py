"""The result of a solver, and its stopping rule.

A user-defined solver starts, counts and stops like this:

>>> import torch, fedtorch as ft
>>> from fedtorch.networks.solvers.solution import Monitor, Solution, start_at, within
>>> def jacobi(problem, *, rounds=100, tolerance=1e-10, start=None, watch=None) -> Solution:
...     monitor, w = Monitor(problem, tolerance, rounds, watch=watch), start_at(problem, start)
...     own, stop = problem.blocks.diagonal(dim1=1, dim2=2), False
...     while not stop:
...         residual = problem.cross - problem.product(w)
...         stop = monitor.small(residual, w) or monitor.tell(w := w + residual / own)
...     return monitor.solution(w, "local")
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> found = jacobi(ft.networks.solvers.linear_problem(data, ft.Network([[0, 1]]), alpha=1.0))
>>> found.parameters.flatten().round(decimals=6)
tensor([1., 2.], dtype=torch.float64)
>>> found.reason, within(found.optimality, 1e-10, found.parameters)
('converged', True)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.progress import Progress

Scope = Literal["local", "reference"]
Watch = Callable[[int, Tensor], object]  # (rounds of messages so far, parameters (n, d)) -> true to stop
Reason = Literal["converged", "ill-conditioned", "rounds", "watch", "breakdown"]
CHECK_EVERY = 20  # rounds between two checks of solvers that check now and then
_EXACT = 8  # units in the last place: a relative residual cannot be reliably smaller


class Solution(NamedTuple):
    """A solver's result, with its costs in messages of the nodes.

    `reason` is why the solver stopped: it "converged", all its "rounds" are used up, the "watch" stopped it, or
    "breakdown": numbers that are not finite, or no further progress in this precision. If later parameters are worse,
    the best checked ones are returned. None of them are NaN.

    If the equations are badly conditioned, as with couplings that differ by many orders of magnitude, they may hold to
    ten digits at parameters without a correct digit. Solvers that check the residual of Q w = b therefore also continue
    until the `error` is below the square root of the tolerance. "ill-conditioned" means that the equations hold to
    rounding while the parameters are less accurate: use `direct`, or couplings of more similar size.
    """

    parameters: Tensor  # (n, d)
    optimality: float  # of these parameters, see `LinearProblem.optimality`: zero at a minimiser
    reason: Reason
    rounds: int  # rounds in which every node sends d numbers to its neighbours, or the server
    sums: int  # numbers added up over the whole network
    bytes: int  # of all messages to neighbours or the server
    scope: Scope  # local: between checks of optimality a node needs its neighbours only
    clusters: Tensor | None = None  # (n,) int64, nodes with equal parameters; for penalties that make ties
    error: float | None = None  # estimated error of these parameters, see `LinearProblem.error`; None if unknown

    @property
    def converged(self) -> bool:
        """Return whether `optimality` is within the tolerance or exact to rounding, and an `error` within its square
        root.
        """
        return self.reason == "converged"


def within(optimality: float, tolerance: float, like: Tensor) -> bool:
    """Return whether an optimality is within the tolerance, or at the rounding limit of `like`'s precision."""
    return optimality <= max(tolerance, _EXACT * torch.finfo(like.dtype).eps)


class Monitor:
    """Counts rounds, and periodically checks the stopping conditions.

    Args:
        problem: the problem to solve.
        tolerance: of the optimality.
        rounds: most rounds.
        every: rounds between two checks.
        watch: called after each round.
    """

    def __init__(
        self, problem: LinearProblem, tolerance: float, rounds: int, every: int = 1, watch: Watch | None = None
    ) -> None:
        if not tolerance >= 0:
            raise ValueError(f"Expected a tolerance of at least 0, but got {tolerance}")
        if rounds < 1:
            raise ValueError(f"Expected at least one round, but got {rounds}")
        self.problem, self.tolerance, self.limit, self.every, self.watch = problem, tolerance, rounds, every, watch
        self.rounds = self.sums = 0
        self.optimality = self.least = torch.inf
        self.best: Tensor | None = None
        self._size = 1.0  # size of the numbers in the equations, which changes slowly
        self.reason: Reason = "rounds"
        self.smallest: Callable[[], float] = lambda: math.inf  # smallest known eigenvalue of P⁻¹Q
        self._progress = Progress("GTV minimisation")

    def tell(self, w: Tensor) -> bool:
        """Count a round that ended at `w`; return whether `watch` or the number of rounds stops the solver."""
        self.rounds += 1
        self._progress.update(tell=self._shown)
        if self.watch is not None and bool(self.watch(self.rounds, w)):
            self.reason = "watch"
            return True
        return self.rounds >= self.limit

    def _shown(self) -> dict[str, str]:
        return {"optimality": f"{self.optimality:.2g}"}

    def due(self) -> bool:
        """Return whether optimality is to be checked after this round."""
        return self.rounds % self.every == 0

    def small(self, residual: Tensor, w: Tensor) -> bool:
        """Check the residual b − Q w at `w`, by two sums over the network; return whether to stop."""
        size = self.problem.residual_size(residual)
        if self.due() or self._within(size / self._size):
            self._size = self.problem.size(w)
        return self.check(size / self._size, w, lambda: self.problem.error(residual, w, self.smallest()))

    def check(self, optimality: float, w: Tensor, error: Callable[[], float] = lambda: 0.0) -> bool:
        """Check the optimality of `w`, by two sums over the network, and store the best; return whether to stop.

        Args:
            optimality: of `w`.
            w: parameters.
            error: returns the parameters' error; called if the optimality is within the tolerance.
        """
        self.sums += 2
        self.optimality = optimality
        if not math.isfinite(optimality):
            return self.broken()
        if optimality < self.least:
            self.least = optimality
            if self.due():
                self.best = w.clone()
        if self._within(optimality):
            self.sums += 2
            if self._certain(error()):
                self.reason = "converged"
                return True
            if within(optimality, 0.0, w):
                self.reason = "ill-conditioned"
                return True
        return False

    def _certain(self, error: float) -> bool:
        """Return whether parameters have half of the digits required of the equations."""
        return within(error**2, self.tolerance, self.problem.cross)

    def _within(self, optimality: float) -> bool:
        return within(optimality, self.tolerance, self.problem.cross) if self.tolerance else optimality == 0

    def broken(self) -> bool:
        """Record a breakdown; return True."""
        self.reason = "breakdown"
        return True

    def solution(
        self,
        w: Tensor,
        scope: Scope,
        finish: Callable[[Tensor], Tensor] = lambda w: w,
        optimality: Callable[[Tensor], float] | None = None,
        clusters: Tensor | None = None,
    ) -> Solution:
        """Return the result with everything that has been counted: `w`, or the best that was checked, if `w` is worse.

        Args:
            w: `(n, d)`, where the solver is.
            scope: of the solver.
            finish: postprocesses the parameters.
            optimality: of parameters; default: the problem's.
            clusters: of `w`.
        """
        self._progress.close()
        squared = optimality is None
        optimality = optimality or self.problem.optimality
        w = finish(w)
        reached = optimality(w)
        if not reached <= self.least:
            other = torch.zeros_like(w) if self.best is None else finish(self.best)
            value = optimality(other)
            if not reached <= value:
                w, reached, clusters = other, value, None
        residual = self.problem.cross - self.problem.product(w)
        error = self.problem.error(residual, w, self.smallest()) if squared else None
        reason, small = self.reason, within(reached, self.tolerance, w)
        if small and self._certain(error or 0.0):
            reason = "converged"
        elif reason not in ("rounds", "watch"):  # an updated residual may drift from the true one
            reason = "ill-conditioned" if small else "breakdown"
        cost = self.rounds, self.sums, self.rounds * self.problem.round_bytes
        return Solution(w, reached, reason, *cost, scope, clusters, error)


def start_at(problem: LinearProblem, start: Tensor | None) -> Tensor:
    """Return a copy of `start`, or zeros.

    Raises:
        ValueError: a start of another shape than the parameters.
    """
    if start is None:
        return torch.zeros_like(problem.cross)
    if start.shape != problem.cross.shape:
        raise ValueError(f"Expected a start of shape {tuple(problem.cross.shape)}, but got {tuple(start.shape)}")
    return start.to(problem.cross, copy=True)
