r"""FedRelax: every node minimises the objective over its own parameters, all of them at once.

.. math:: w_i \leftarrow (Q_i + \alpha d_i I)^{-1} \Big(b_i + \alpha \sum_j A_{ij} w_j\Big)

Corrected: (5.20) in print has α/2 where the minimiser of GTVMin with α needs α.

Source: Jung, "Federated learning: from theory to practice", Algorithm 5.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import Monitor, Solution, Watch, start_at

_CHECK_EVERY = 20  # rounds
_NOISE = 64  # units in the last place, times the order of a block: eigenvalues below are rounding


def fedrelax(
    problem: LinearProblem,
    *,
    rounds: int = 100_000,
    tolerance: float = 1e-10,
    start: Tensor | None = None,
    watch: Watch | None = None,
) -> Solution:
    """FedRelax (local): block-coordinate minimisation, without a learning rate; see `fedgd` for the arguments.

    Where there are several solutions the one of least norm is returned: nodes of a component then average once.
    """
    monitor = Monitor(problem, tolerance, rounds, _CHECK_EVERY, watch)
    inverse, blocks, adjacency = block_inverses(problem), problem.blocks, problem.adjacency
    w = start_at(problem, start)
    heard = torch.empty_like(w)
    while True:
        torch.addmm(problem.cross, adjacency, w, alpha=problem.alpha, out=heard)
        new = torch.bmm(inverse, heard.unsqueeze(2)).squeeze(2)
        stop = monitor.tell(new)
        if (stop or monitor.due()) and monitor.small(torch.bmm(blocks, (new - w).unsqueeze(2)).norm()):
            stop = True
        w = new
        if stop:
            return monitor.solution(problem.minimum_norm(w), "local")


def block_inverses(problem: LinearProblem) -> Tensor:
    """Pseudo-inverses of the diagonal blocks Q_i + αd_i I by their eigenvalues, `(n, d, d)`."""
    noise = _NOISE * problem.cross.shape[1] * torch.finfo(problem.cross.dtype).eps
    return torch.linalg.pinv(problem.blocks, rtol=noise, hermitian=True)
