"""What a solver returns, and when it stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedtorch.networks.solvers.problem import LinearProblem

Scope = Literal["local", "reference"]
Watch = Callable[[int, Tensor], object]  # (rounds of messages so far, parameters (n, d)) -> something true to stop


class Solution(NamedTuple):
    """A solver's result. What it cost is counted as the nodes would have to pay for it."""

    parameters: Tensor  # (n, d)
    optimality: float  # see the solver: zero at a minimiser
    converged: bool  # whether `optimality` is within the tolerance
    rounds: int  # in which every node tells its neighbours d numbers, or the server
    sums: int  # numbers added up over the whole network
    bytes: int  # of all messages to neighbours or the server
    scope: Scope  # local: between checks of optimality a node needs its neighbours only
    clusters: Tensor | None = None  # (n,) int64, nodes with equal parameters; for penalties that make ties


class Monitor:
    """Counts rounds and checks now and then whether to go on.

    Args:
        problem: that is solved.
        tolerance: of the optimality.
        rounds: at most so many.
        every: rounds between two checks.
        watch: told after each round.
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
        self.optimality = torch.inf
        self._size = float(problem.cross.norm()) or 1.0

    def tell(self, w: Tensor) -> bool:
        """Counts a round that ended at `w`; whether the watcher wants to stop or no rounds are left."""
        self.rounds += 1
        stop = self.watch is not None and bool(self.watch(self.rounds, w))
        return stop or self.rounds >= self.limit

    def due(self) -> bool:
        """Whether optimality is to be checked after this round."""
        return self.rounds % self.every == 0

    def small(self, norm: float | Tensor) -> bool:
        """Takes the norm of the residual b − Q w, a sum over the network; whether it is within the tolerance."""
        self.sums += 1
        self.optimality = float(norm) / self._size
        return self.optimality <= self.tolerance

    def solution(self, w: Tensor, scope: Scope, clusters: Tensor | None = None) -> Solution:
        """The result with everything that has been counted."""
        return Solution(
            w,
            self.optimality,
            self.optimality <= self.tolerance,
            self.rounds,
            self.sums,
            self.rounds * self.problem.round_bytes,
            scope,
            clusters,
        )


def start_at(problem: LinearProblem, start: Tensor | None) -> Tensor:
    """A copy of `start`, or zeros.

    Raises:
        ValueError: a start of another shape than the parameters.
    """
    if start is None:
        return torch.zeros_like(problem.cross)
    if start.shape != problem.cross.shape:
        raise ValueError(f"Expected a start of shape {tuple(problem.cross.shape)}, but got {tuple(start.shape)}")
    return start.to(problem.cross, copy=True)
