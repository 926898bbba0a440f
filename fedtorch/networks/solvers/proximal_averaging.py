r"""Algorithm 5.3: nodes minimise near the common parameters, a server averages.

.. math:: w_i = \arg\min_v L_i(v) + \frac1\eta \|v - w\|^2, \qquad w \leftarrow \frac1n \sum_i w_i

Its fixed point is *not* the minimiser of Σ_i L_i: a node whose loss is steep moves less than one with a flat loss, so
that the mean is biased to the flat ones, by O(η). `admm` with the penalty `equal`, and `ft.scaffold`, are not.

Source: Jung, "Federated learning: from theory to practice", Algorithm 5.3 and equation (5.17).
"""

from __future__ import annotations

import torch

from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import Solution, Watch


def proximal_averaging(
    problem: LinearProblem,
    *,
    rate: float = 1.0,
    rounds: int = 10_000,
    tolerance: float = 1e-12,
    watch: Watch | None = None,
) -> Solution:
    """Algorithm 5.3 (reference, because a server averages): one model for all nodes, biased.

    `optimality` is ‖Σ(b_i − Q_i w)‖ / ‖Σ b_i‖, which stays above zero: that is the bias. `converged` says that the
    parameters have come to rest.

    Args:
        problem: whose losses are used; its network and α are not.
        rate: η.
        rounds: at most so many, each an average.
        tolerance: of the change of the parameters in a round, relative to them.
        watch: see `fedgd`.

    Raises:
        ValueError: a rate that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"Expected a positive rate, but got {rate}")
    n, d = problem.cross.shape
    factor = torch.linalg.cholesky(problem.gram + torch.eye(d).to(problem.gram) / rate)
    w = torch.zeros_like(problem.cross[0])
    for done in range(1, rounds + 1):
        own = torch.cholesky_solve((problem.cross + w / rate).unsqueeze(2), factor).squeeze(2)
        new = own.mean(0)
        still = float((new - w).norm()) <= tolerance * max(float(new.norm()), torch.finfo(w.dtype).tiny)
        w = new
        if still or (watch is not None and watch(done, w.expand(n, d))):
            break
    gradient = problem.cross.sum(0) - problem.gram.sum(0) @ w
    optimality = float(gradient.norm() / problem.cross.sum(0).norm().clamp(min=torch.finfo(w.dtype).tiny))
    sent = 2 * done * problem.cross.numel() * w.element_size()
    return Solution(w.expand(n, d).clone(), optimality, still, done, done, sent, "reference")
