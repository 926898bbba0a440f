r"""FedRelax: every node minimises the objective over its own parameters, all nodes at once.

.. math:: w_i \leftarrow (Q_i + \alpha d_i I)^{-1} \Big(b_i + \alpha \sum_j A_{ij} w_j\Big)

Corrected: (5.20) in print has α/2 where the minimiser of GTVMin with α needs α.

Source: Jung, "Federated learning: from theory to practice", Algorithm 5.4.

>>> import torch, fedtorch as ft
>>> from fedtorch.networks.solvers import linear_problem
>>> from fedtorch.networks.solvers.fedrelax import fedrelax
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> problem = linear_problem(data, ft.Network([[0, 1]]), alpha=1.0)
>>> fedrelax(problem).parameters.flatten().round(decimals=6)
tensor([1., 2.], dtype=torch.float64)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import CHECK_EVERY, Monitor, Solution, Watch, start_at


def fedrelax(
    problem: LinearProblem,
    *,
    rounds: int = 100_000,
    tolerance: float = 1e-10,
    start: Tensor | None = None,
    watch: Watch | None = None,
) -> Solution:
    """Solve by FedRelax (local), block-coordinate minimisation without a learning rate; see `fedgd` for the arguments.

    If there are several solutions the one of least norm is returned: nodes of a component then average once.
    """
    monitor = Monitor(problem, tolerance, rounds, CHECK_EVERY, watch)
    inverse, adjacency = problem.inverse_blocks, problem.adjacency
    w = start_at(problem, start)
    right = torch.empty_like(w)
    while True:
        torch.addmm(problem.cross, adjacency, w, alpha=problem.alpha, out=right)
        new = torch.bmm(inverse, right.unsqueeze(2)).squeeze(2)
        stop = monitor.tell(new)
        if (stop or monitor.due()) and monitor.small(torch.bmm(problem.blocks, (new - w).unsqueeze(2)).squeeze(2), w):
            stop = True
        w = new
        if stop:
            return monitor.solution(w, "local", problem.minimum_norm)
