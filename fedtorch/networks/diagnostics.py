r"""What a network promises for a GTV problem before it is solved: eigenvalues, error bounds and iterations.

The problem is quadratic (Jung, "Federated learning: from theory to practice", (3.20)–(3.25)),

.. math:: f(w) = \sum_i w_i' Q_i w_i - 2 b_i' w_i + \alpha \sum_{ij \in E} A_{ij} |w_i - w_j|^2
          = w'Qw - 2 b'w + \mathrm{const}, \quad Q = \mathrm{blockdiag}(Q_i) + \alpha L \otimes I,

with Gram matrices Q_i = X_i'X_i / m_i and right-hand sides b_i = X_i'y_i / m_i, whose solutions have Qw = b. The bounds
are in terms of λ_max, the largest eigenvalue of any Q_i, λ̄_min, the smallest of their average (5.4), and λ₂ of L.

>>> import torch, fedtorch as ft
>>> report = ft.networks.diagnose(ft.Network.ring(4), torch.eye(2).expand(4, 2, 2), alpha=2.0)
>>> print(f"{report.smallest:.3f} {report.largest:.3f} {report.condition:.3f}")
1.000 9.000 9.000
>>> report.chebyshev_rounds, report.gradient_rounds
(28, 83)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtorch.networks.network import Network
from fedtorch.networks.spectrum import largest_eigenvalue, smallest_positive_eigenvalue

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = [
    "ClusterBound",
    "Diagnostics",
    "chebyshev_rounds",
    "cluster_boundary",
    "conjugate_gradient_rounds",
    "contraction",
    "diagnose",
    "gradient_rounds",
    "perturbed_gradient_bound",
    "system_matrix",
]

_DENSE = 1000  # unknowns up to which the eigenvalues come from the whole matrix
_MOST_COMPONENTS = 10


class ClusterBound(NamedTuple):
    """The bound (6.4) on how far the solutions of a cluster C are from their mean."""

    nodes: int
    connectivity: float  # λ₂ of the network within C
    boundary: float  # |∂C| (6.1), the weight of the edges that leave it
    alpha: float

    def deviation(self, noise: float, centre: float, outside: float) -> float:
        r"""Σ_C |w_i − mean|² ≤ (Σ_C |ε_i|²/m_i + 2α|∂C|(|w̄|² + R²)) / (α λ₂).

        Args:
            noise: Σ_C |ε_i|²/m_i of y_i = X_i w̄ + ε_i.
            centre: |w̄|², of the parameters that the cluster shares.
            outside: R², the largest |w_i|² of nodes outside.
        """
        if self.connectivity == 0:
            return math.inf
        leak = 2 * self.alpha * self.boundary * (centre + outside) if self.boundary else 0.0
        return (noise + leak) / (self.alpha * self.connectivity)


@dataclass(frozen=True)
class Diagnostics:
    """What `diagnose` found; `print` shows it as a table.

    Equation numbers are those of the book.
    """

    nodes: int
    edges: int
    dimensions: int  # d, parameters of a node
    components: int
    alpha: float
    largest_degree: float  # d_max, weighted
    connectivity: float  # λ₂ of the Laplacian
    largest_laplacian: float  # λ_n of the Laplacian
    largest_local: float  # λ_max (5.4)
    smallest_average: float  # λ̄_min (5.4)
    smallest: float  # the smallest positive eigenvalue of Q
    largest: float  # the largest eigenvalue of Q
    nullity: int  # dimensions in which Q is singular
    tolerance: float  # of the rounds below, relative and Euclidean
    clusters: tuple[ClusterBound, ...]

    @property
    def lower_bound(self) -> float:
        """(5.6): a bound from below on all eigenvalues of Q; zero where it says nothing."""
        squared = self.ratio**2
        return min(self.connectivity * self.alpha * squared, self.smallest_average / 2) / (1 + squared)

    @property
    def upper_bounds(self) -> tuple[float, float]:
        """(5.5): bounds from above on all eigenvalues of Q, by λ_n and by d_max."""
        return (
            self.largest_local + self.alpha * self.largest_laplacian,
            self.largest_local + 2 * self.alpha * self.largest_degree,
        )

    @property
    def ratio(self) -> float:
        """ρ = λ̄_min / (4 λ_max), below (5.6)."""
        return self.smallest_average / (4 * self.largest_local) if self.largest_local > 0 else 0.0

    @property
    def condition(self) -> float:
        """The condition number of Q, on the complement of its null space if it is singular."""
        return self.largest / self.smallest

    @property
    def learning_rate(self) -> float:
        """(4.9): the step 1/(λ₁ + λ_dn) with which gradient descent contracts most."""
        return 1 / (self.smallest + self.largest)

    @property
    def safe_learning_rate(self) -> float:
        """(4.11) by (5.5): a step below 1/λ_dn that needs no eigenvalue of Q."""
        return 1 / self.upper_bounds[1]

    @property
    def contraction(self) -> float:
        """(4.12): the factor by which gradient descent with `learning_rate` contracts, (κ − 1)/(κ + 1)."""
        return contraction(self.learning_rate, self.smallest, self.largest)

    @property
    def gradient_rounds(self) -> int:
        """(4.8): gradient steps with `learning_rate` to `tolerance`."""
        return gradient_rounds(self.condition, self.tolerance)

    @property
    def chebyshev_rounds(self) -> int:
        """Chebyshev iterations with known eigenvalues to `tolerance`."""
        return chebyshev_rounds(self.condition, self.tolerance)

    @property
    def conjugate_gradient_rounds(self) -> int:
        """Iterations after which conjugate gradients have surely reached `tolerance`."""
        return conjugate_gradient_rounds(self.condition, self.tolerance)

    def deviation_bound(self, noise: float) -> float:
        """(3.31): Σ_i |w_i − mean|² where all nodes share their true parameters.

        Args:
            noise: Σ_i |ε_i|²/m_i of y_i = X_i w̄ + ε_i.
        """
        return noise / (self.connectivity * self.alpha) if self.connectivity > 0 else math.inf

    def sensitivity_bound(self, perturbation: float) -> float:
        """(8.3): Σ_i |w_i − w̃_i|² when the labels y_i become y_i + ε_i.

        Args:
            perturbation: Σ_i |ε_i|²; Σ_i |ε_i|²/m_i does, too, and is sharper.
        """
        lower = self.lower_bound
        return self.largest_local * perturbation / lower**2 if lower > 0 else math.inf

    def estimation_bound(self, noise: float) -> float:
        """(8.9): |mean of w_i − w̄|² where all nodes share their true parameters w̄.

        Args:
            noise: Σ_i |ε_i|²/m_i of y_i = X_i w̄ + ε_i.
        """
        if self.connectivity == 0 or self.smallest_average == 0:
            return math.inf
        factor = self.largest_local + self.largest_local**2 / (self.connectivity * self.alpha)
        return 2 * factor * noise / (self.nodes * self.smallest_average**2)

    def lasting_error(self, perturbation: float, learning_rate: float | None = None) -> float:
        """(4.14) after many rounds: |w − ŵ| when every round adds an error of at most `perturbation` (Euclidean)."""
        rate = self.learning_rate if learning_rate is None else learning_rate
        factor = contraction(rate, self.smallest, self.largest)
        return perturbation / (1 - factor) if factor < 1 else math.inf

    def __str__(self) -> str:
        return "\n".join(f"{name:<46}{value}" for name, value in _lines(self))


def diagnose(
    network: Network,
    gram: Tensor,
    alpha: float,
    *,
    right_hand_side: Tensor | None = None,
    clusters: Tensor | None = None,
    tolerance: float = 1e-8,
) -> Diagnostics:
    """Eigenvalues, bounds and expected rounds of a GTV problem; warns about several components or a singular problem.

    Args:
        network: of n nodes.
        gram: Q_i, `(n, d, d)` symmetric positive semi-definite; zero for a node without labels.
        alpha: of the coupling, positive.
        right_hand_side: b_i, `(n, d)`; with it, it is checked that the problem has a minimum.
        clusters: the cluster of each node, `(n,)` integers, for (6.4); default: the ten largest components.
        tolerance: of the expected rounds, relative to the error at the start (Euclidean).

    Raises:
        ValueError: wrong dimensions, matrices that are not symmetric, positive semi-definite and finite, not one
            of them above zero, alpha or tolerance out of range, or a problem without a minimum.
    """
    gram = _check_gram(network, gram, alpha, tolerance)
    local = torch.linalg.eigvalsh(gram)
    null = _null_space(network, gram)
    if right_hand_side is not None:
        _check_minimum(null, network, right_hand_side, gram)
    nullity = sum(basis.shape[1] for basis in null)
    _warn(network, nullity)
    smallest, largest = _extremes(network, gram, alpha, null)
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
        largest_local=float(local[:, -1].max()),
        smallest_average=_smallest(gram.mean(0)),
        smallest=smallest,
        largest=largest,
        nullity=nullity,
        tolerance=tolerance,
        clusters=tuple(_cluster_bound(network, labels == label, alpha) for label in chosen.tolist()),
    )


def contraction(learning_rate: float, smallest: float, largest: float) -> float:
    """(4.7): the factor max(|1 − 2ηλ₁|, |1 − 2ηλ_dn|) by which a gradient step reduces the distance to the solution."""
    return max(abs(1 - 2 * learning_rate * smallest), abs(1 - 2 * learning_rate * largest))


def gradient_rounds(condition: float, tolerance: float) -> int:
    """(4.8) with (4.12): gradient steps with the best fixed learning rate to a relative error of `tolerance`."""
    if condition == 1:
        return 1
    return math.ceil(_tidy(math.log(1 / tolerance) / math.log((condition + 1) / (condition - 1))))


def chebyshev_rounds(condition: float, tolerance: float) -> int:
    r"""Chebyshev iterations to a relative error of `tolerance`: the least k with 1/T_k((κ + 1)/(κ − 1)) ≤ tolerance.

    Source: Saad (2003), "Iterative methods for sparse linear systems", (6.113) and section 12.3.
    """
    if condition == 1:
        return 1
    return math.ceil(_tidy(math.acosh(1 / tolerance) / math.acosh((condition + 1) / (condition - 1))))


def conjugate_gradient_rounds(condition: float, tolerance: float) -> int:
    """Iterations that surely suffice for conjugate gradients: Chebyshev's, in the energy norm, so √κ times as sharp."""
    return chebyshev_rounds(condition, tolerance / math.sqrt(condition))


def perturbed_gradient_bound(factor: float, start: float, perturbations: Sequence[float]) -> list[float]:
    r"""(4.14), corrected: distances to the solution of gradient steps with errors, such as those of lost messages.

    .. math:: |w^{(k)} - \hat w| \le \kappa^k |w^{(0)} - \hat w| + \sum_{k'=1}^k \kappa^{k'-1} |\varepsilon^{(k-k')}|

    The book prints κ^{k'}, which is too small by a factor κ: after one step from the solution the error is ε⁽⁰⁾.

    Args:
        factor: κ, the `contraction` of the step without errors.
        start: |w⁽⁰⁾ − ŵ|.
        perturbations: |ε⁽⁰⁾|, |ε⁽¹⁾|, … of the steps.

    Returns:
        the bounds for k = 0, 1, …, one more than there are perturbations.

    >>> perturbed_gradient_bound(0.5, 0.0, [1.0, 1.0])
    [0.0, 1.0, 1.5]
    """
    bounds = [start]
    for perturbation in perturbations:
        bounds.append(factor * bounds[-1] + perturbation)
    return bounds


def cluster_boundary(network: Network, inside: Tensor) -> float:
    """|∂C| (6.1): the weight of the edges with one end in C.

    Args:
        network: of n nodes.
        inside: `(n,)` bool, which nodes C has.
    """
    ends = inside[network.edges]
    return float(network.weights[ends[:, 0] != ends[:, 1]].sum())


def system_matrix(network: Network, gram: Tensor, alpha: float) -> csr_matrix:
    """Q = blockdiag(Q_i) + α L ⊗ I (3.24) as a SciPy CSR matrix `(n d, n d)`, d consecutive rows a node."""
    from scipy.sparse import bsr_matrix, identity, kron

    nodes, size, _ = gram.shape
    blocks = gram.detach().cpu().to(torch.float64).numpy()
    diagonal = bsr_matrix((blocks, np.arange(nodes), np.arange(nodes + 1)), shape=(nodes * size, nodes * size))
    return (diagonal.tocsr() + alpha * kron(network.scipy_laplacian, identity(size), format="csr")).tocsr()


def _tidy(rounds: float) -> float:
    """Without the rounding that would make 5 + 1e-16 rounds six."""
    return rounds * (1 - 1e-12)


def _check_gram(network: Network, gram: Tensor, alpha: float, tolerance: float) -> Tensor:
    found = torch.as_tensor(gram).detach().cpu().to(torch.float64)
    if found.ndim != 3 or found.shape[1] != found.shape[2] or len(found) != network.nodes or found.numel() == 0:
        raise ValueError(f"Expected gram ({network.nodes}, d, d), but got shape {tuple(found.shape)}")
    largest = float(found.abs().max())
    if not math.isfinite(largest) or largest == 0:
        raise ValueError("Expected finite Gram matrices, one of them above zero, but got NaN, infinity or zeros only")
    rounding = 1e-10 * largest
    if float((found - found.mT).abs().max()) > rounding:
        raise ValueError("Expected symmetric Gram matrices X'X/m, but got one that differs from its transpose")
    if float(torch.linalg.eigvalsh(found).min()) < -rounding:
        raise ValueError("Expected positive semi-definite Gram matrices X'X/m, but got a negative eigenvalue")
    if not 0 < alpha < math.inf:
        raise ValueError(f"Expected a finite alpha > 0, but got {alpha}; without coupling the nodes are on their own")
    if not 0 < tolerance < 1:
        raise ValueError(f"Expected a tolerance between 0 and 1, but got {tolerance}")
    return (found + found.mT) / 2


def _check_clusters(network: Network, clusters: Any) -> Tensor:
    found = torch.as_tensor(clusters)
    if found.shape != (network.nodes,) or found.is_floating_point():
        raise ValueError(f"Expected the cluster of each node, ({network.nodes},) integers, but got {found.shape}")
    return found


def _smallest(matrix: Tensor) -> float:
    """The smallest eigenvalue, zero where it is rounding."""
    values = torch.linalg.eigvalsh(matrix)
    return float(values[0]) if float(values[0]) > 10 * len(matrix) * torch.finfo(matrix.dtype).eps * values[-1] else 0.0


def _null_space(network: Network, gram: Tensor) -> list[Tensor]:
    """Orthonormal directions `(d, r)` per component in which Q is singular.

    w'Qw is zero only if w is constant on every component C and Σ_C Q_i w = 0.
    """
    labels, number = network.components
    total = gram.new_zeros(number, *gram.shape[1:]).index_add_(0, labels, gram)
    values, vectors = torch.linalg.eigh(total)
    sizes = labels.bincount(minlength=number).to(gram.dtype)
    rounding = gram.shape[-1] * torch.finfo(gram.dtype).eps * sizes.clamp_min(10) * values[:, -1].clamp_min(0)
    return [basis[:, small] for basis, small in zip(vectors, values <= rounding[:, None])]


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


def _check_minimum(null: list[Tensor], network: Network, right_hand_side: Tensor, gram: Tensor) -> None:
    """b must be orthogonal to the null space, or the objective falls without end."""
    b = torch.as_tensor(right_hand_side).detach().cpu().to(gram.dtype)
    if b.shape != gram.shape[:2] or not bool(b.isfinite().all()):
        raise ValueError(f"Expected a finite right-hand side {tuple(gram.shape[:2])}, but got {tuple(b.shape)}")
    labels, number = network.components
    total = b.new_zeros(number, b.shape[1]).index_add_(0, labels, b)
    size = float(b.abs().sum())
    for component, basis in enumerate(null):
        if float((basis.mT @ total[component]).norm()) > 1e-8 * size:
            raise ValueError(
                f"Expected right-hand sides in the range of the Gram matrices, but component {component} has a "
                "direction with gradient and without curvature: the objective has no minimum; see X'y/m and X'X/m"
            )


def _extremes(network: Network, gram: Tensor, alpha: float, null: list[Tensor]) -> tuple[float, float]:
    """The smallest positive and the largest eigenvalue of Q."""
    matrix = system_matrix(network, gram, alpha)
    if matrix.shape[0] <= _DENSE:
        values = torch.linalg.eigvalsh(torch.from_numpy(matrix.toarray()))
        return float(values[sum(basis.shape[1] for basis in null)]), float(values[-1])
    largest = largest_eigenvalue(matrix)
    return smallest_positive_eigenvalue(matrix, _projection(network, null), 1.01 * largest), largest


def _projection(network: Network, null: list[Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    """Takes stacked parameters to the complement of the null space."""
    labels, number = network.components
    weights = 1 / labels.bincount(minlength=number).to(torch.float64)
    onto = torch.stack([weight * basis @ basis.mT for weight, basis in zip(weights, null)])  # (C, d, d)

    def project(x: np.ndarray) -> np.ndarray:
        stacked = torch.from_numpy(x).reshape(len(labels), -1)
        total = stacked.new_zeros(number, stacked.shape[1]).index_add_(0, labels, stacked)
        return (stacked - (onto @ total[..., None])[..., 0][labels]).flatten().numpy()

    return project if any(basis.shape[1] for basis in null) else lambda x: x


def _cluster_bound(network: Network, inside: Tensor, alpha: float) -> ClusterBound:
    ids = inside.nonzero().flatten()
    # A node alone has no deviation from its mean: as good as a connectivity without end.
    within = network if len(ids) == network.nodes else network.subnetwork(ids)
    connectivity = within.algebraic_connectivity if len(ids) > 1 else math.inf
    return ClusterBound(len(ids), connectivity, cluster_boundary(network, inside), alpha)


def _lines(report: Diagnostics) -> list[tuple[str, str]]:
    tight, loose = report.upper_bounds
    lines = [
        ("nodes, edges, parameters a node", f"{report.nodes}, {report.edges}, {report.dimensions}"),
        ("components, largest degree", f"{report.components}, {report.largest_degree:.4g}"),
        ("λ₂, λ_n of the Laplacian", f"{report.connectivity:.4g}, {report.largest_laplacian:.4g}"),
        ("λ_max, λ̄_min of the Gram matrices (5.4)", f"{report.largest_local:.4g}, {report.smallest_average:.4g}"),
        ("eigenvalues of Q", f"{report.smallest:.4g} … {report.largest:.4g}"),
        ("  at most (5.5), by λ_n and by degree", f"{tight:.4g}, {loose:.4g}"),
        ("  at least (5.6)", f"{report.lower_bound:.4g}"),
        ("singular dimensions", f"{report.nullity}" + (", minimum-norm solution" if report.nullity else "")),
        ("condition number", f"{report.condition:.4g}"),
        ("best learning rate (4.9), safe one (5.5)", f"{report.learning_rate:.4g}, {report.safe_learning_rate:.4g}"),
        (f"rounds to {report.tolerance:.0e}: gradient descent", f"{report.gradient_rounds}"),
        ("  Chebyshev", f"{report.chebyshev_rounds}"),
        ("  conjugate gradients", f"at most {report.conjugate_gradient_rounds}"),
        ("Σ|wᵢ − mean|² (3.31)", f"≤ {report.deviation_bound(1.0):.4g} · Σ|εᵢ|²/mᵢ"),
        ("Σ|wᵢ − w̃ᵢ|², labels moved by ε (8.3)", f"≤ {report.sensitivity_bound(1.0):.4g} · Σ|εᵢ|²"),
        ("|mean − true|² (8.9)", f"≤ {report.estimation_bound(1.0):.4g} · Σ|εᵢ|²/mᵢ"),
        ("lost messages: |w − ŵ| in the end (4.14)", f"≤ {report.lasting_error(1.0):.4g} · largest error of a round"),
    ]
    return lines + [_cluster_line(index, bound) for index, bound in enumerate(report.clusters)]


def _cluster_line(index: int, bound: ClusterBound) -> tuple[str, str]:
    noise = bound.deviation(1.0, 0.0, 0.0)
    leak = bound.deviation(0.0, 1.0, 0.0)
    value = f"≤ {noise:.4g} · Σ|εᵢ|²/mᵢ" + (f" + {leak:.4g} · (|w̄|² + R²)" if bound.boundary else "")
    return f"cluster {index}, {bound.nodes} nodes: Σ|wᵢ − mean|² (6.4)", value
