r"""FedGD: every node takes a gradient step on its loss and on its differences to its neighbours.

.. math:: w_i \leftarrow w_i + 2\eta\Big(b_i - Q_i w_i + \alpha \sum_j A_{ij} (w_j - w_i)\Big)

Source: Jung, "Federated learning: from theory to practice", Algorithm 5.1 and equation (5.9).

>>> import torch, fedtorch as ft
>>> from fedtorch.networks.solvers import linear_problem
>>> from fedtorch.networks.solvers.fedgd import fedgd, gradient_step
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> problem = linear_problem(data, ft.Network([[0, 1]]), alpha=1.0)
>>> fedgd(problem).parameters.flatten().round(decimals=6)
tensor([1., 2.], dtype=torch.float64)
>>> step, w = gradient_step(problem, rate=0.25), torch.tensor([[0.0], [2.0]]).double()
>>> step(w, torch.empty_like(w)).flatten()  # w + 0.5 (0 − 0 + 2, 3 − 2 − 2)
tensor([1.0000, 1.5000], dtype=torch.float64)
>>> round(problem.safe_rate, 4)  # 0.95 / (1 + 2)
0.3167
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import CHECK_EVERY, Monitor, Solution, Watch, start_at


def fedgd(
    problem: LinearProblem,
    *,
    rate: float | None = None,
    rounds: int = 100_000,
    tolerance: float = 1e-10,
    start: Tensor | None = None,
    watch: Watch | None = None,
) -> Solution:
    """Solve by FedGD (local), gradient descent by messages between neighbours; `chebyshev` needs fewer rounds.

    From a start of zero it converges to the solution of least norm, from another to the nearest one.

    Args:
        problem: squared penalty.
        rate: learning rate η, below 1/λ_max(Q); default: `problem.safe_rate`.
        rounds: most rounds.
        tolerance: of `LinearProblem.optimality`, which is checked every 20 rounds; 0 takes all rounds.
        start: `(n, d)`; default: zeros.
        watch: called with (rounds, parameters) after each round, which it must not change; a true result stops the
            solver.

    Raises:
        ValueError: a rate that is not positive, or a start of the wrong shape.
    """
    rate = problem.safe_rate if rate is None else rate
    if not rate > 0:
        raise ValueError(f"Expected a positive rate, but got {rate}")
    monitor = Monitor(problem, tolerance, rounds, CHECK_EVERY, watch)
    step = gradient_step(problem, rate)
    w = start_at(problem, start)
    new = torch.empty_like(w)
    while True:
        step(w, new)
        stop = monitor.tell(new)
        if (stop or monitor.due()) and monitor.small((new - w) / (2 * rate), w):
            stop = True
        w, new = new, w
        if stop:
            return monitor.solution(w, "local")


def gradient_step(problem: LinearProblem, rate: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (w, out) -> out: one round into a buffer, in three passes: own part, neighbours, Gram matrices."""
    keep = (1 - 2 * rate * problem.alpha * problem.degrees)[:, None]
    shift = 2 * rate * problem.cross
    adjacency, gram = problem.adjacency, problem.gram

    def step(w: Tensor, out: Tensor) -> Tensor:
        torch.addcmul(shift, w, keep, out=out)
        torch.addmm(out, adjacency, w, alpha=2 * rate * problem.alpha, out=out)
        out.unsqueeze(2).baddbmm_(gram, w.unsqueeze(2), alpha=-2 * rate)
        return out

    return step
