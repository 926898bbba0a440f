r"""Solve the whole problem at once by a sparse factorisation.

Let w = Su, where the diagonal S scales all parameters to the same size, and let Z span the directions of u along which
f does not change. Then a solution u solves

.. math:: \begin{pmatrix} SQS & Z \\ Z' & 0 \end{pmatrix} \begin{pmatrix} u \\ 0 \end{pmatrix} =
    \begin{pmatrix} Sb \\ 0 \end{pmatrix},

whose matrix is regular. Of all solutions, the w whose projection on SZ is zero has the least norm. Source: Jung,
"Federated learning: from theory to practice", equation (3.26).

>>> import torch, fedtorch as ft
>>> from fedtorch.networks.solvers import linear_problem
>>> from fedtorch.networks.solvers.direct import direct
>>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.full((2,), y)) for y in (0.0, 3.0)])
>>> problem = linear_problem(data, ft.Network([[0, 1]]), alpha=1.0)
>>> direct(problem).parameters.flatten()
tensor([1., 2.], dtype=torch.float64)
"""

from __future__ import annotations

import torch

from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import Reason, Solution, within


def direct(problem: LinearProblem, *, tolerance: float = 1e-10) -> Solution:
    """Find the solution of least norm by sparse LU in float64 (reference); the others are compared with it.

    Every node sends its Q_i and b_i to one place and gets w_i back, which is counted as one round.

    Args:
        problem: squared penalty.
        tolerance: of `LinearProblem.optimality`, for `converged`; the factorisation determines its value.
    """
    from scipy.sparse import block_array, coo_matrix, diags
    from scipy.sparse.linalg import splu

    n, d = problem.cross.shape
    scale = problem.scale.double().cpu().flatten().numpy()
    system = (diags(scale) @ problem.matrix() @ diags(scale)).tocsc()
    right = problem.cross.double().cpu().flatten().numpy() * scale
    component, vectors = problem.null_space
    if len(component):
        labels = problem.components.labels
        node, which = (labels[:, None] == component).nonzero().unbind(1)
        rows = (node[:, None] * d + torch.arange(d, device=node.device)).flatten().cpu().numpy()
        values = vectors[which].double() / problem.scale[node].double()
        size = values.new_zeros(len(component)).index_add_(0, which, values.square().sum(1)).sqrt()
        entries = (values / size[which, None]).flatten().cpu().numpy()
        border = coo_matrix((entries, (rows, which.repeat_interleave(d).cpu().numpy())), (n * d, len(component)))
        system = block_array([[system, border], [border.T, None]], format="csc")
        right = torch.cat([torch.from_numpy(right), torch.zeros(len(component), dtype=torch.float64)]).numpy()
    w = torch.from_numpy(splu(system).solve(right)[: n * d] * scale).reshape(n, d).to(problem.cross)
    w = problem.minimum_norm(w)
    optimality = problem.optimality(w)
    sent = n * (d * (d + 1) // 2 + 2 * d) * problem.cross.element_size()
    reason: Reason = "converged" if within(optimality, tolerance, w) else "breakdown"
    return Solution(w, optimality, reason, 1, 0, sent, "reference")
