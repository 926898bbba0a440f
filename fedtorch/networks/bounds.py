r"""Error bounds of a GTV problem from its eigenvalues, and the rounds that solvers need.

Equation numbers are those of Jung, "Federated learning: from theory to practice". Q is the matrix of the problem
(`fedtorch.networks.solvers.LinearProblem.matrix`), λ_max the largest eigenvalue of any node's Q_i, λ̄_min the smallest
of their average (5.4), and λ₂ that of the Laplacian.

>>> from fedtorch.networks import bounds
>>> bounds.contraction(learning_rate=0.1, smallest=1.0, largest=9.0)  # at the best rate, 1 / (1 + 9)
0.8
>>> condition, tolerance = 9.0, 1e-3
>>> bounds.gradient_rounds(condition, tolerance)  # 0.8³¹ < 0.001
31
>>> bounds.chebyshev_rounds(condition, tolerance), bounds.conjugate_gradient_rounds(condition, tolerance)
(11, 13)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ClusterBound(NamedTuple):
    """The bound (6.4) on how far the solutions of a cluster C are from their mean.

    >>> triangle = ClusterBound(nodes=3, connectivity=3.0, boundary=1.0, alpha=0.5)  # one edge leaves it
    >>> triangle.deviation(noise=6.0, centre=1.0, outside=2.0)  # (6 + 2 · 0.5 · (1 + 2)) / (0.5 · 3)
    6.0
    """

    nodes: int
    connectivity: float  # λ₂ of the network within C
    boundary: float  # |∂C| (6.1), the weight of the edges that leave it
    alpha: float

    def deviation(self, noise: float, centre: float, outside: float) -> float:
        r"""Bound Σ_C |w_i − mean|² by (Σ_C |ε_i|²/m_i + 2α|∂C|(|w̄|² + R²)) / (α λ₂).

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
    """The result of `fedtorch.networks.diagnose`; `print` shows it as a table.

    >>> import torch, fedtorch as ft
    >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.zeros(1))] * 2)
    >>> report = ft.networks.diagnose(ft.networks.solvers.linear_problem(data, ft.Network([[0, 1]]), alpha=1.0))
    >>> round(report.smallest, 6), round(report.largest, 6), round(report.learning_rate, 6)  # of Q = (2 −1; −1 2)
    (1.0, 3.0, 0.25)
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
        """Bound all eigenvalues of Q from below by (5.6); zero if the bound is vacuous."""
        squared = self.ratio**2
        return min(self.connectivity * self.alpha * squared, self.smallest_average / 2) / (1 + squared)

    @property
    def upper_bounds(self) -> tuple[float, float]:
        """Bound all eigenvalues of Q from above by (5.5), by λ_n and by d_max."""
        return (
            self.largest_local + self.alpha * self.largest_laplacian,
            self.largest_local + 2 * self.alpha * self.largest_degree,
        )

    @property
    def ratio(self) -> float:
        """Return ρ = λ̄_min / (4 λ_max), below (5.6)."""
        return self.smallest_average / (4 * self.largest_local) if self.largest_local > 0 else 0.0

    @property
    def condition(self) -> float:
        """Return the condition number of Q, on the complement of its null space if it is singular."""
        return self.largest / self.smallest

    @property
    def learning_rate(self) -> float:
        """Return (4.9), the step 1/(λ₁ + λ_dn) with which gradient descent contracts most."""
        return 1 / (self.smallest + self.largest)

    @property
    def safe_learning_rate(self) -> float:
        """Return (4.11) by (5.5): a step below 1/λ_dn that needs no eigenvalue of Q."""
        return 1 / self.upper_bounds[1]

    @property
    def contraction(self) -> float:
        """Return (4.12), the factor by which gradient descent with `learning_rate` contracts, (κ − 1)/(κ + 1)."""
        return contraction(self.learning_rate, self.smallest, self.largest)

    @property
    def gradient_rounds(self) -> int:
        """Return (4.8), gradient steps with `learning_rate` to `tolerance`."""
        return gradient_rounds(self.condition, self.tolerance)

    @property
    def chebyshev_rounds(self) -> int:
        """Return Chebyshev iterations with known eigenvalues to `tolerance`."""
        return chebyshev_rounds(self.condition, self.tolerance)

    @property
    def conjugate_gradient_rounds(self) -> int:
        """Return iterations after which conjugate gradients have surely reached `tolerance`."""
        return conjugate_gradient_rounds(self.condition, self.tolerance)

    def deviation_bound(self, noise: float) -> float:
        """Bound Σ_i |w_i − mean|² where all nodes share their true parameters (3.31).

        Args:
            noise: Σ_i |ε_i|²/m_i of y_i = X_i w̄ + ε_i.
        """
        return noise / (self.connectivity * self.alpha) if self.connectivity > 0 else math.inf

    def sensitivity_bound(self, perturbation: float) -> float:
        """Bound Σ_i |w_i − w̃_i|² when the labels y_i become y_i + ε_i (8.3).

        Args:
            perturbation: Σ_i |ε_i|²; Σ_i |ε_i|²/m_i does, too, and is sharper.
        """
        lower = self.lower_bound
        return self.largest_local * perturbation / lower**2 if lower > 0 else math.inf

    def estimation_bound(self, noise: float) -> float:
        """Bound |mean of w_i − w̄|² where all nodes share their true parameters w̄ (8.9).

        Args:
            noise: Σ_i |ε_i|²/m_i of y_i = X_i w̄ + ε_i.
        """
        if self.connectivity == 0 or self.smallest_average == 0:
            return math.inf
        factor = self.largest_local + self.largest_local**2 / (self.connectivity * self.alpha)
        return 2 * factor * noise / (self.nodes * self.smallest_average**2)

    def lasting_error(self, perturbation: float, learning_rate: float | None = None) -> float:
        """Bound |w − ŵ| after many rounds, each with an error of at most `perturbation` (Euclidean), by (4.14)."""
        rate = self.learning_rate if learning_rate is None else learning_rate
        factor = contraction(rate, self.smallest, self.largest)
        return perturbation / (1 - factor) if factor < 1 else math.inf

    def __str__(self) -> str:
        return "\n".join(f"{name:<46}{value}" for name, value in _lines(self))


def contraction(learning_rate: float, smallest: float, largest: float) -> float:
    """Return the factor max(|1 − 2ηλ₁|, |1 − 2ηλ_dn|) by which a gradient step reduces the distance (4.7)."""
    return max(abs(1 - 2 * learning_rate * smallest), abs(1 - 2 * learning_rate * largest))


def gradient_rounds(condition: float, tolerance: float) -> int:
    """Return (4.8) with (4.12): gradient steps with the best fixed learning rate to a relative error of `tolerance`."""
    if condition == 1:
        return 1
    return math.ceil(_tidy(math.log(1 / tolerance) / math.log((condition + 1) / (condition - 1))))


def chebyshev_rounds(condition: float, tolerance: float) -> int:
    r"""Return the least k with 1/T_k((κ + 1)/(κ − 1)) ≤ tolerance, the Chebyshev iterations to that relative error.

    Source: Saad (2003), "Iterative methods for sparse linear systems", (6.113) and section 12.3.
    """
    if condition == 1:
        return 1
    return math.ceil(_tidy(math.acosh(1 / tolerance) / math.acosh((condition + 1) / (condition - 1))))


def conjugate_gradient_rounds(condition: float, tolerance: float) -> int:
    """Return iterations that suffice for conjugate gradients: Chebyshev's in the energy norm, √κ times as sharp."""
    return chebyshev_rounds(condition, tolerance / math.sqrt(condition))


def perturbed_gradient_bound(factor: float, start: float, perturbations: Sequence[float]) -> list[float]:
    r"""Bound the distances to the solution of gradient steps with errors, as of lost messages: (4.14), corrected.

    .. math:: |w^{(k)} - \hat w| \le \kappa^k |w^{(0)} - \hat w| + \sum_{k'=1}^k \kappa^{k'-1} |\varepsilon^{(k-k')}|

    The book prints κ^{k'}, which is too small by a factor κ: after one step from the solution the error is ε⁽⁰⁾.

    Args:
        factor: κ, the `contraction` of the step without errors.
        start: |w⁽⁰⁾ − ŵ|.
        perturbations: |ε⁽⁰⁾|, |ε⁽¹⁾|, … of the steps.

    Returns:
        the bounds for k = 0, 1, …, one more than the perturbations.

    >>> perturbed_gradient_bound(0.5, 0.0, [1.0, 1.0])
    [0.0, 1.0, 1.5]
    """
    bounds = [start]
    for perturbation in perturbations:
        bounds.append(factor * bounds[-1] + perturbation)
    return bounds


def _tidy(rounds: float) -> float:
    """Round away errors that would turn 5 + 1e-16 rounds into six."""
    return rounds * (1 - 1e-12)


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
