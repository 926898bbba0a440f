r"""Algorithm 5.3: nodes minimise near the common parameters, and a server averages.

.. math:: w_i = \arg\min_v L_i(v) + \frac1\eta \|v - w\|^2, \qquad w \leftarrow \frac1n \sum_i w_i

Its fixed point is *not* the minimiser of Σ_i L_i: a node with a steep loss moves less than one with a flat loss, so the
mean is biased towards the flat ones, by O(η). `admm` with the penalty `equal`, and `ft.scaffold`, have no such bias.

Source: Jung, "Federated learning: from theory to practice", Algorithm 5.3 and equation (5.17).

>>> import torch, fedtorch as ft
>>> from fedtorch.networks.solvers import linear_problem
>>> from fedtorch.networks.solvers.proximal_averaging import proximal_averaging
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> problem = linear_problem(data, ft.Network([[0, 1]]), alpha=1.0)
>>> proximal_averaging(problem).parameters.flatten().round(decimals=6)
tensor([1.5000, 1.5000], dtype=torch.float64)
"""

from __future__ import annotations

import torch

from fedtorch import linalg
from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import Reason, Solution, Watch


def proximal_averaging(
    problem: LinearProblem,
    *,
    rate: float = 1.0,
    rounds: int = 10_000,
    tolerance: float = 1e-12,
    watch: Watch | None = None,
) -> Solution:
    """Solve by Algorithm 5.3 (reference, because a server averages): one model for all nodes, biased.

    `optimality` is ‖U Σ(b_i − Q_i w)‖ relative to ‖U Σ b_i‖ + ‖U ΣQ_i U‖ ‖U⁻¹w‖, where U scales the features to one
    size; it stays above zero because of the bias. `converged` means that the parameters no longer change.

    Args:
        problem: provides the losses; its network and α are not used.
        rate: η.
        rounds: most rounds, each with one average.
        tolerance: of the parameters' relative change in a round, with features scaled to one size.
        watch: see `fedgd`.

    Raises:
        ValueError: a rate that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"Expected a positive rate, but got {rate}")
    n, d = problem.cross.shape
    factor = torch.linalg.cholesky(problem.gram + torch.eye(d).to(problem.gram) / rate)
    gram, cross = problem.gram.sum(0), problem.cross.sum(0)
    unit = linalg.unit_scale(gram.diagonal())
    w = torch.zeros_like(problem.cross[0])
    reason: Reason = "rounds"
    for done in range(1, rounds + 1):
        local = torch.cholesky_solve((problem.cross + w / rate).unsqueeze(2), factor).squeeze(2)
        new = local.mean(0)
        still = float(((new - w) / unit).norm()) <= tolerance * float((new / unit).norm())
        w = new
        if still or (watch is not None and watch(done, w.expand(n, d))):
            reason = "converged" if still else "watch"
            break
    size = (unit * cross).norm() + ((gram.abs() @ unit) * unit).max() * (w / unit).norm()
    optimality = float((unit * (cross - gram @ w)).norm() / size.clamp(min=torch.finfo(w.dtype).tiny))
    sent = 2 * done * problem.cross.numel() * w.element_size()
    return Solution(w.expand(n, d).clone(), optimality, reason, done, done, sent, "reference")
