r"""Learning the network (Jung, "Federated learning: from theory to practice", chapter 7).

Given discrepancies D(i, j) ≥ 0 of the nodes' data sets, choose weights A that make

.. math:: \sum_{i, j} A_{ij} D(i, j), \quad A_{ij} = A_{ji} \in [0, 1], \quad A_{ii} = 0

small (7.4), under one further condition: `nearest` gives every node its k nearest, `regular` fixes every node's degree
(7.6), `edge_budget` the number of edges (7.7). `ft.neighbour_search` and `ft.edge_weights` do so without any place that
has all discrepancies.

>>> import torch
>>> from fedtorch.networks import learning
>>> D = torch.tensor([[0.0, 1.0, 4.0, 2.0], [1.0, 0.0, 3.0, 5.0], [4.0, 3.0, 0.0, 1.5], [2.0, 5.0, 1.5, 0.0]])
>>> learning.edge_budget(D, 3).edges.tolist()
[[0, 1], [0, 3], [2, 3]]
>>> learning.regular(D, 2).edges.tolist()
[[0, 1], [0, 3], [1, 2], [2, 3]]
>>> learning.regular(D, 2, projected=True).edges.tolist()
[[0, 1], [0, 3], [1, 2], [2, 3]]
>>> learning.nearest(D, 1).edges.tolist()
[[0, 1], [2, 3]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedtorch._lazy import only
from fedtorch.networks.network import Network
from fedtorch.progress import tracked

__all__ = ["edge_budget", "nearest", "regular"]
__dir__ = only(__all__)

_TITLE = "Learning the network"
_STEP, _STEPS = 1e4, 100  # of projected gradients: η times the mean discrepancy, and most steps
_NEWTON_STEPS = 200  # most Newton steps of a projection
_WEIGHTLESS = 1e-7  # weights of linear programming and of projection below this are rounding


def nearest(discrepancy: Tensor, k: int, names: Sequence[str] | None = None) -> Network:
    """Join two nodes by an edge of weight one when either is among the k nearest of the other.

    For vectors, `Network.k_nearest` does so without all pairs, and `ft.neighbour_search` without any place that has all
    vectors.

    Args:
        discrepancy: D, `(n, n)` symmetric, not negative; the diagonal does not matter.
        k: from 1 to n − 1.
        names: one per node.
    """
    checked = _check(discrepancy)
    n = len(checked)
    if not 1 <= k < n:
        raise ValueError(f"Expected k from 1 to {n - 1}, one less than the nodes, but got {k}")
    return Network.from_neighbours(checked.fill_diagonal_(math.inf).topk(k, largest=False).indices, names)


def edge_budget(discrepancy: Tensor, edges: int, names: Sequence[str] | None = None) -> Network:
    """Solve (7.7) in closed form: edges of weight one where the discrepancies are smallest.

    Args:
        discrepancy: D, `(n, n)` symmetric, not negative; the diagonal does not matter.
        edges: their number; the book's E_max counts each from both ends, and is twice as large.
        names: one per node.
    """
    checked = _check(discrepancy)
    pairs = torch.combinations(torch.arange(len(checked)))
    if not 0 <= edges <= len(pairs):
        raise ValueError(f"Expected from 0 to {len(pairs)} edges, as many as there are pairs, but got {edges}")
    order = checked[pairs[:, 0], pairs[:, 1]].argsort(stable=True)[:edges]
    return Network(pairs[order], nodes=len(checked), names=names)


def regular(
    discrepancy: Tensor,
    degree: float,
    names: Sequence[str] | None = None,
    *,
    candidates: Tensor | None = None,
    projected: bool = False,
) -> Network:
    """Solve (7.6): every node has the given weighted degree; edges of weight zero are left out.

    As a linear program weights are multiples of one half if the degree is a whole number. Projected gradient steps
    (4.17) may end at the mean of several optima, with other weights.

    Args:
        discrepancy: D, `(n, n)` symmetric, not negative; the diagonal does not matter.
        degree: Σ_j A_ij of every node, above 0, at most n − 1.
        names: one per node.
        candidates: the pairs `(E, 2)` that may have an edge, such as `nearest(...).edges` with more neighbours;
            default: all n(n − 1)/2 of them.
        projected: whether to use projected gradient steps among all pairs in place of linear programming.

    Raises:
        ValueError: a degree that the candidates cannot give every node, wrong dimensions, or candidates for projected
            steps.
    """
    checked = _check(discrepancy)
    n = len(checked)
    if not 0 < degree <= n - 1:
        raise ValueError(f"Expected a degree above 0 and at most {n - 1}, one less than the nodes, but got {degree}")
    if projected and candidates is not None:
        raise ValueError("Expected projected steps among all pairs, but got candidates; leave one of the two out")
    pairs = torch.combinations(torch.arange(n)) if candidates is None else Network(candidates, nodes=n).edges
    weights = _by_projection(checked, degree) if projected else _by_linear_program(checked, degree, pairs)
    heavy = weights > _WEIGHTLESS
    rounded = torch.where((weights - 1).abs() < _WEIGHTLESS, 1.0, weights)
    return Network(pairs[heavy], rounded[heavy], n, names)


def _by_linear_program(discrepancy: Tensor, degree: float, pairs: Tensor) -> Tensor:
    """Return the optimal weights of the pairs `(E, 2)`."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    n, count = len(discrepancy), len(pairs)
    ends = pairs.numpy().T.reshape(-1), np.tile(np.arange(count), 2)
    incidence = csr_matrix((np.ones(2 * count), ends), shape=(n, count))
    cost = discrepancy[pairs[:, 0], pairs[:, 1]]
    relative = cost / cost.max() if float(cost.max()) > 0 else cost  # tolerances of the solver are absolute
    solved = linprog(relative.numpy(), A_eq=incidence, b_eq=np.full(n, float(degree)), bounds=(0, 1), method="highs")
    if not solved.success:
        raise ValueError(
            f"Expected candidates with which every node can have degree {degree}, but got none: {solved.message}; "
            "allow more pairs"
        )
    return torch.from_numpy(solved.x)


def _by_projection(discrepancy: Tensor, degree: float) -> Tensor:
    """Return the weights of all pairs by steps A ← P(A − ηD) (4.17).

    The objective is linear, so a step is one of the proximal point method, which converges after finitely many; it
    stops when a step changes nothing.
    """
    n = len(discrepancy)
    discrepancy = discrepancy.clone().fill_diagonal_(0.0)
    weights = torch.full_like(discrepancy, degree / (n - 1)).fill_diagonal_(0.0)
    mean = float(discrepancy.mean())
    for _ in tracked(range(_STEPS if mean > 0 else 0), _TITLE):
        before, weights = weights, _project(weights - _STEP / mean * discrepancy, degree)
        if float((weights - before).abs().max()) < _WEIGHTLESS / 10:
            break
    pairs = torch.combinations(torch.arange(n))
    return weights[pairs[:, 0], pairs[:, 1]]


def _check(discrepancy: Tensor) -> Tensor:
    """Return a float64 copy."""
    matrix = torch.as_tensor(discrepancy).detach().cpu().to(torch.float64).clone()
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise ValueError(f"Expected discrepancies (n, n) of two nodes or more, but got shape {tuple(matrix.shape)}")
    apart = matrix.clone().fill_diagonal_(0.0)
    if not bool(apart.isfinite().all()) or float(apart.min()) < 0:
        raise ValueError("Expected finite discrepancies that are not negative, but got others")
    if not torch.equal(apart, apart.T):
        raise ValueError("Expected symmetric discrepancies, but got D(i, j) ≠ D(j, i); take (D + D.T) / 2")
    return matrix


def _project(matrix: Tensor, degree: float) -> Tensor:
    """Return the nearest symmetric matrix with weights in [0, 1], zero diagonal and this degree.

    It is clip(M + μ_i + μ_j) for the μ that give the degree, found by Newton steps on the dual: its gradient is the
    degrees' deficit, its curvature D + A of the pairs strictly inside [0, 1]. Weights and counts of pairs are pure
    numbers, and so are the limits of rounding here.
    """
    n = len(matrix)
    eye = torch.eye(n, dtype=matrix.dtype)
    shift = matrix.new_full((n,), -float(matrix.sum() / (n * (n - 1))) / 2 + degree / (2 * (n - 1)))

    def weights(shift: Tensor) -> Tensor:
        return (matrix + (shift[:, None] + shift)).clamp(0, 1).fill_diagonal_(0.0)

    def dual(shift: Tensor) -> float:
        inside = (matrix + (shift[:, None] + shift)).fill_diagonal_(0.0)
        outside = inside - inside.clamp(0, 1)
        return float((inside.square() - outside.square()).sum() / 4 - degree * shift.sum())

    for _ in range(_NEWTON_STEPS):
        current = weights(shift)
        lack = degree - current.sum(1)
        if float(lack.abs().max()) < 1e-12 * n:
            break
        free = ((current > 0) & (current < 1)).to(matrix.dtype)
        curvature = free.sum(1).diag() + free + 1e-9 * float(lack.abs().max()) * eye + 1e-12 * eye
        direction = torch.linalg.solve(curvature, lack)
        size, value, slope = 1.0, dual(shift), float(lack @ direction)
        value += 1e-14 * abs(value)  # rounding
        while dual(shift + size * direction) > value - 1e-4 * size * slope and size > 1e-10:
            size /= 2
        shift = shift + size * direction
    return weights(shift)
