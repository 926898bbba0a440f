r"""Primal–dual proximal steps: nodes step towards their own minimum, edges towards their dual.

.. math::
    w_i^+ &= \mathrm{prox}_{\tau_i L_i}\big(w_i - \tau_i (B'y)_i\big), \qquad
    v = y + \sigma B (2 w^+ - w) \\
    y^+ &= v - \sigma\, \mathrm{prox}_{(\alpha A_{ij} / \sigma) \phi}(v / \sigma)

B takes differences over edges, B' sums over a node's. Steps are τ_i = θ / (number of neighbours) and σ = 1 / 2θ, for
which it converges at any θ. The proximal step of the edges is exactly zero where its nodes are equal.

Source: Chambolle and Pock (2011), Algorithm 1, with the steps of Pock and Chambolle (2011); for networks Jung (2020),
"On the duality between network flows and network lasso".

>>> import torch, fedtorch as ft
>>> from fedtorch.networks.solvers import linear_problem, squared
>>> from fedtorch.networks.solvers.primal_dual import primal_dual
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> problem = linear_problem(data, ft.Network([[0, 1]]), alpha=1.0)
>>> primal_dual(problem, squared).parameters.flatten().round(decimals=4)
tensor([1., 2.], dtype=torch.float64)
"""

from __future__ import annotations

from torch import Tensor

from fedtorch.networks.solvers._edges import EdgeProblem
from fedtorch.networks.solvers.penalties import Penalty, norm2
from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import Solution, Watch


def primal_dual(
    problem: LinearProblem,
    penalty: Penalty = norm2,
    *,
    theta: float | None = None,
    rounds: int = 20_000,
    tolerance: float = 1e-8,
    watch: Watch | None = None,
) -> Solution:
    """Solve by primal–dual steps (local), for any penalty; parameters tie exactly where the penalty makes them.

    Args:
        problem: losses, network and α.
        penalty: φ: `norm2`, `norm1`, `squared`, `equal` or another.
        theta: θ, how long the nodes' steps are beside the edges'; default: one over three times the losses' mean
            curvature per neighbour.
        rounds: most rounds.
        tolerance: of the optimality, the Karush–Kuhn–Tucker conditions' relative residual, checked every 20 rounds.
        watch: see `fedgd`.

    Raises:
        ValueError: a θ that is not positive.
    """
    edges = EdgeProblem(problem, penalty)
    theta = 1 / edges.scale if theta is None else theta
    if not theta > 0:
        raise ValueError(f"Expected a positive theta, but got {theta}")
    pull, sigma = edges.neighbours / theta, 1 / (2 * theta)  # pull is 1 / τ
    nearest = edges.proximal(pull)

    def step(w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new = nearest(pull[:, None] * w - edges.gathered(y, -y))
        v = y + sigma * edges.differences(2 * new - w)
        s = penalty.prox(v / sigma, edges.strength / sigma)
        return new, v - sigma * s, s

    return edges.solve(step, 1.0, rounds=rounds, tolerance=tolerance, watch=watch)
