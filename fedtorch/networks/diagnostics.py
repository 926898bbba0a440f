r"""Diagnostics of a network for a GTV problem before its solution: eigenvalues, error bounds and iterations.

The problem is quadratic (Jung, "Federated learning: from theory to practice", (3.20)–(3.25)),

.. math:: f(w) = \sum_i w_i' Q_i w_i - 2 b_i' w_i + \alpha \sum_{ij \in E} A_{ij} |w_i - w_j|^2
          = w'Qw - 2 b'w + \mathrm{const}, \quad Q = \mathrm{blockdiag}(Q_i) + \alpha L \otimes I,

with Gram matrices Q_i = X_i'X_i / m_i and right-hand sides b_i = X_i'y_i / m_i, whose solutions have Qw = b. The bounds
are in terms of λ_max, the largest eigenvalue of any Q_i, λ̄_min, the smallest of their average (5.4), and λ₂ of L.

>>> import torch, fedtorch as ft
>>> rows = torch.eye(2).repeat(4, 1) * 2**0.5, torch.ones(8)
>>> data = ft.data.FederatedData(rows, counts=torch.full((4,), 2))
>>> report = ft.networks.diagnose(ft.networks.solvers.linear_problem(data, ft.Network.ring(4), alpha=2.0))
>>> print(f"{report.smallest:.3f} {report.largest:.3f} {report.condition:.3f}")
1.000 9.000 9.000
>>> report.chebyshev_rounds, report.gradient_rounds
(28, 83)
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtorch import linalg, tree
from fedtorch.networks.bounds import ClusterBound, Diagnostics
from fedtorch.networks.network import Network
from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.spectrum import largest_eigenvalue, smallest_positive_eigenvalue

_DENSE = 1000  # most unknowns for a dense eigendecomposition
_MOST_COMPONENTS = 10


def diagnose(problem: LinearProblem, *, clusters: Tensor | None = None, tolerance: float = 1e-8) -> Diagnostics:
    """Compute eigenvalues, bounds and expected rounds of a GTV problem; warn of several components or a singular one.

    Args:
        problem: of n nodes with coupling, α positive; a node without labels has zeros. It is converted to float64.
        clusters: the cluster of each node, `(n,)` integers, for (6.4); default: the ten largest components.
        tolerance: for the expected rounds, relative to the error at the start (Euclidean).

    Raises:
        ValueError: matrices Q_i that are not symmetric, positive semi-definite and finite, or all zero; α or tolerance
            out of range; or a problem without a minimum.
    """
    network, alpha = problem.network, problem.alpha
    if not alpha > 0:
        raise ValueError(f"Expected a finite alpha > 0, but got {alpha}; without coupling the nodes are on their own")
    if not 0 < tolerance < 1:
        raise ValueError(f"Expected a tolerance between 0 and 1, but got {tolerance}")
    problem = LinearProblem(network, alpha, tree.to(problem.statistics, "cpu", torch.float64))
    gram = problem.gram
    _check_gram(gram)
    _check_minimum(problem)
    nullity = len(problem.null_space[0])
    _warn(network, nullity)
    smallest, largest = _extremes(problem)
    second, last = network.extreme_eigenvalues if network.nodes > 1 else (math.inf, 0.0)
    labels = network.components.labels if clusters is None else _check_clusters(network, clusters)
    chosen, sizes = labels.unique(return_counts=True)
    if clusters is None:
        chosen = chosen[sizes.argsort(descending=True, stable=True)[:_MOST_COMPONENTS]]
    return Diagnostics(
        nodes=network.nodes,
        edges=len(network.edges),
        dimensions=gram.shape[-1],
        components=network.components.number,
        alpha=alpha,
        largest_degree=float(network.degrees.max()),
        connectivity=second,
        largest_laplacian=last,
        largest_local=float(torch.linalg.eigvalsh(gram)[:, -1].max()),
        smallest_average=_smallest(gram.mean(0)),
        smallest=smallest,
        largest=largest,
        nullity=nullity,
        tolerance=tolerance,
        clusters=tuple(_cluster_bound(network, labels == label, alpha) for label in chosen.tolist()),
    )


def cluster_boundary(network: Network, inside: Tensor) -> float:
    """Return |∂C| (6.1): the weight of the edges with one end in C.

    Args:
        network: of n nodes.
        inside: `(n,)` bool, which nodes C has.

    >>> cluster_boundary(Network.ring(4), torch.tensor([True, True, False, False]))
    2.0
    """
    ends = inside[network.edges]
    return float(network.weights[ends[:, 0] != ends[:, 1]].sum())


def _check_gram(gram: Tensor) -> None:
    largest = float(gram.abs().max())
    if not math.isfinite(largest) or largest == 0:
        raise ValueError("Expected finite Gram matrices, one of them above zero, but got NaN, infinity or zeros only")
    rounding = 1e-10 * largest
    if float((gram - gram.mT).abs().max()) > rounding:
        raise ValueError("Expected symmetric Gram matrices X'X/m, but got one that differs from its transpose")
    if float(torch.linalg.eigvalsh(gram).min()) < -rounding:
        raise ValueError("Expected positive semi-definite Gram matrices X'X/m, but got a negative eigenvalue")


def _check_clusters(network: Network, clusters: Any) -> Tensor:
    labels = torch.as_tensor(clusters)
    if labels.shape != (network.nodes,) or labels.is_floating_point():
        raise ValueError(f"Expected the cluster of each node, ({network.nodes},) integers, but got {labels.shape}")
    return labels


def _smallest(matrix: Tensor) -> float:
    """Return the smallest eigenvalue, zero if it is within rounding in any units."""
    return _smallest_positive(matrix, 0) if int(linalg.equilibrated(matrix).rank) == len(matrix) else 0.0


def _smallest_positive(matrix: Tensor, nullity: int) -> float:
    """Return the smallest eigenvalue outside the null space, by the inverse, because it may be rounding beside large
    ones.
    """
    parts = linalg.equilibrated(matrix)
    if int(parts.rank) != len(matrix) - nullity:
        return float(torch.linalg.eigvalsh(matrix)[nullity])
    return 1 / float(torch.linalg.matrix_norm(parts.inverse_root(parts.null()), 2)) ** 2


def _warn(network: Network, nullity: int) -> None:
    if network.components.number > 1:
        warnings.warn(
            f"The network has {network.components.number} components, which do not learn from each other: λ₂ = 0 and "
            "the bounds (3.31), (5.6), (8.3), (8.9) say nothing; add edges or diagnose each with subnetwork()",
            stacklevel=3,
        )
    if nullity:
        warnings.warn(
            f"The problem is singular in {nullity} dimensions, so that it has many solutions: solvers return the one "
            "of minimum norm, and the eigenvalues and rounds here are those on the complement",
            stacklevel=3,
        )


def _check_minimum(problem: LinearProblem) -> None:
    """Raise ValueError unless b is orthogonal to the null space: otherwise the objective is unbounded below."""
    b, (labels, number), (component, vectors) = problem.cross, problem.components, problem.null_space
    if not bool(b.isfinite().all()):
        raise ValueError("Expected finite right-hand sides X'y/m, but got NaN or infinity")
    total, size = (b.new_zeros(number, b.shape[1]).index_add_(0, labels, each) for each in (b, b.abs()))
    slope = (total[component] * vectors).sum(1).abs()
    if bool((slope > 1e-8 * (size[component] * vectors.abs()).sum(1)).any()):
        worst = int(component[slope.argmax()])
        raise ValueError(
            f"Expected right-hand sides in the range of the Gram matrices, but component {worst} has a"
            "  direction with gradient and without curvature: the objective has no minimum; see X'y/m and X'X/m"
        )


def _extremes(problem: LinearProblem) -> tuple[float, float]:
    """Return the smallest positive and the largest eigenvalue of Q."""
    matrix, nullity = problem.matrix(), len(problem.null_space[0])
    if matrix.shape[0] <= _DENSE:
        dense = torch.from_numpy(matrix.toarray())
        return _smallest_positive(dense, nullity), float(torch.linalg.eigvalsh(dense)[-1])

    def project(x: np.ndarray) -> np.ndarray:
        """Project stacked parameters onto the complement of the null space."""
        return problem.minimum_norm(torch.from_numpy(x).reshape(problem.cross.shape)).flatten().numpy()

    largest = largest_eigenvalue(matrix)
    return smallest_positive_eigenvalue(matrix, project, 1.01 * largest), largest


def _cluster_bound(network: Network, inside: Tensor, alpha: float) -> ClusterBound:
    ids = inside.nonzero().flatten()
    # An isolated node does not deviate from its mean, as with infinite connectivity.
    within = network if len(ids) == network.nodes else network.subnetwork(ids)
    connectivity = within.algebraic_connectivity if len(ids) > 1 else math.inf
    return ClusterBound(len(ids), connectivity, cluster_boundary(network, inside), alpha)
