r"""The whole problem in one place, solved by a sparse factorisation.

Where f does not change along the directions Z, the solution of least norm is w in

.. math:: \begin{pmatrix} Q & Z \\ Z' & 0 \end{pmatrix} \begin{pmatrix} w \\ 0 \end{pmatrix} =
    \begin{pmatrix} b \\ 0 \end{pmatrix},

whose matrix is regular. Source: Jung, "Federated learning: from theory to practice", equation (3.26).
"""

from __future__ import annotations

import torch

from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import Solution


def direct(problem: LinearProblem, *, tolerance: float = 1e-10) -> Solution:
    """The solution of least norm by sparse LU in float64 (reference); what the others are compared with.

    Every node sends its Q_i and b_i to one place and gets w_i back, which is counted as one round.

    Args:
        problem: squared penalty.
        tolerance: of ‖b − Q w‖ / ‖b‖, for `converged`; the factorisation decides how small it becomes.
    """
    from scipy.sparse import block_array, coo_matrix
    from scipy.sparse.linalg import splu

    n, d = problem.cross.shape
    system, right = problem.matrix().T, problem.cross.double().cpu().numpy().reshape(-1)
    component, vectors = problem.null_space
    if len(component):
        labels = problem.components.labels
        node, which = (labels[:, None] == component).nonzero().unbind(1)
        rows = (node[:, None] * d + torch.arange(d, device=node.device)).flatten().cpu().numpy()
        values = vectors[which].double().flatten().cpu().numpy()
        border = coo_matrix((values, (rows, which.repeat_interleave(d).cpu().numpy())), (n * d, len(component)))
        system = block_array([[system, border], [border.T, None]], format="csc")
        right = torch.cat([torch.from_numpy(right), torch.zeros(len(component), dtype=torch.float64)]).numpy()
    w = torch.from_numpy(splu(system).solve(right)[: n * d]).reshape(n, d).to(problem.cross)
    optimality = problem.optimality(w)
    sent = n * (d * (d + 1) // 2 + 2 * d) * problem.cross.element_size()
    return Solution(w, optimality, optimality <= tolerance, 1, 0, sent, "reference")
