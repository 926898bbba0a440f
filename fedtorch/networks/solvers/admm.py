r"""ADMM over the edges: every edge has copies of its two nodes' parameters, which the penalty makes agree.

In scaled form, with u the dual of an edge from i to j:

.. math::
    \delta &= w_i - w_j + 2u, \qquad s = \mathrm{prox}_{(2\alpha A_{ij}/\rho) \phi}(\delta), \qquad
    u \leftarrow (\delta - s) / 2 \\
    w_i &\leftarrow \arg\min_w L_i(w) + \frac\rho2 \sum_j \Big\|w - \frac{w_i + w_j}2 \mp \Big(\frac s2 - u\Big)\Big\|^2

A node receives its neighbours' w_j and updates both ends of its edges itself. For the norms s is exactly zero on edges
with equal nodes. With the penalty `equal` this is consensus ADMM: one model per component, without the bias of
`proximal_averaging`.

Source: Hallac, Leskovec and Boyd (2015), "Network lasso: clustering and optimization in large graphs"; Boyd et al.
(2011), "Distributed optimization and statistical learning via ADMM".

>>> import torch, fedtorch as ft
>>> from fedtorch.networks.solvers import linear_problem
>>> from fedtorch.networks.solvers.admm import admm
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> problem = linear_problem(data, ft.Network([[0, 1]]), alpha=1.0)
>>> admm(problem).parameters.flatten().round(decimals=4)
tensor([1., 2.], dtype=torch.float64)
"""

from __future__ import annotations

from torch import Tensor

from fedtorch.networks.solvers._edges import EdgeProblem
from fedtorch.networks.solvers.penalties import Penalty, squared
from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import Solution, Watch


def admm(
    problem: LinearProblem,
    penalty: Penalty = squared,
    *,
    rho: float | None = None,
    rounds: int = 20_000,
    tolerance: float = 1e-8,
    watch: Watch | None = None,
) -> Solution:
    """Solve by ADMM (local), for any penalty; parameters tie exactly where the penalty makes them.

    Args:
        problem: losses, network and α.
        penalty: φ: `squared`, `norm2`, `norm1`, `equal` or another.
        rho: strength ρ of the constraint; default: three times the losses' mean curvature per neighbour.
        rounds: most rounds.
        tolerance: of the optimality, the Karush–Kuhn–Tucker conditions' relative residual, checked every 20 rounds.
        watch: see `fedgd`.

    Raises:
        ValueError: a ρ that is not positive.
    """
    edges = EdgeProblem(problem, penalty)
    rho = edges.scale if rho is None else rho
    if not rho > 0:
        raise ValueError(f"Expected a positive rho, but got {rho}")
    nearest = edges.proximal(rho * edges.neighbours)

    def step(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gap = edges.differences(w) + 2 * u
        s = penalty.prox(gap, 2 * edges.strength / rho)
        u = (gap - s) / 2
        middle, push = (w[edges.first] + w[edges.second]) / 2, s / 2 - u
        return nearest(rho * edges.gathered(middle + push, middle - push)), u, s

    return edges.solve(step, rho, rounds=rounds, tolerance=tolerance, watch=watch)
