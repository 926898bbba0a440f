"""What solvers with a variable per edge share: differences and their adjoint, optimality, ties."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtorch.networks.solvers.penalties import Penalty
from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import Monitor, Scope, Solution


class EdgeProblem:
    """A problem seen from its edges, each from its first node to its second.

    Args:
        problem: losses, network and α.
        penalty: of the differences.
    """

    def __init__(self, problem: LinearProblem, penalty: Penalty) -> None:
        self.problem, self.penalty = problem, penalty
        self.first, self.second = problem.network.edges.to(problem.cross.device).unbind(1)
        self.strength = problem.alpha * problem.network.weights.to(problem.cross)  # (E,) α A_ij
        self.neighbours = problem.network.neighbour_counts.to(problem.cross)  # (n,)
        self._values, self._vectors = torch.linalg.eigh(problem.gram)
        self.curvature = float(2 * self._values.mean())  # of a loss, on average
        per_edge = 3 * self.curvature / float(self.neighbours.mean().clamp(min=1))
        self.scale = max(per_edge, torch.finfo(self.strength.dtype).eps)  # of the edges' own curvature

    def differences(self, w: Tensor) -> Tensor:
        """w_i − w_j of every edge, `(E, d)`."""
        return w[self.first] - w[self.second]

    def gathered(self, first: Tensor, second: Tensor) -> Tensor:
        """Sums over each node's edges of what they say to their first and to their second node, `(n, d)`."""
        total = torch.zeros_like(self.problem.cross).index_add_(0, self.first, first)
        return total.index_add_(0, self.second, second)

    def proximal(self, centre: Tensor, weight: Tensor) -> Tensor:
        """argmin L_i(w) + weight_i/2 ‖w‖² − ⟨centre_i, w⟩ of every node, the one of least norm."""
        curvature = 2 * self._values + weight[:, None]
        limit = 64 * curvature.shape[1] * torch.finfo(curvature.dtype).eps * curvature[:, -1:]
        target = (self._vectors.mT @ (2 * self.problem.cross + centre).unsqueeze(2)).squeeze(2)
        inside = torch.where(curvature > limit, target / curvature, 0.0)
        return (self._vectors @ inside.unsqueeze(2)).squeeze(2)

    def optimality(self, w: Tensor, dual: Tensor) -> float:
        r"""How far the Karush–Kuhn–Tucker conditions are from holding, relative to the numbers in them.

        The larger of ‖∇L(w) + B'y‖ / ‖∇L(0)‖ and ‖Bw − prox(Bw + cy)‖ / ‖w‖, which are zero when every edge's y is in
        αA_ij ∂φ(w_i − w_j); c is one over the mean curvature of the losses.
        """
        tiny = torch.finfo(w.dtype).tiny
        gram = torch.bmm(self.problem.gram, w.unsqueeze(2)).squeeze(2)
        stationary = (2 * (gram - self.problem.cross) + self.gathered(dual, -dual)).norm()
        step = 1 / max(self.curvature, tiny)
        s = self.differences(w)
        feasible = (s - self.penalty.prox(s + step * dual, step * self.strength)).norm()
        stationary = stationary / (2 * self.problem.cross.norm()).clamp(min=tiny)
        return max(float(stationary), float(feasible / w.norm().clamp(min=tiny)))

    def solution(self, monitor: Monitor, w: Tensor, dual: Tensor, s: Tensor, scope: Scope) -> Solution:
        """The result, with parameters made equal where an edge's difference `s` `(E, d)` is exactly zero."""
        tied = s == 0
        w = w.clone()
        for c in range(w.shape[1]):
            labels, count = self._components(tied[:, c])
            size = torch.bincount(labels, minlength=count)
            w[:, c] = (w.new_zeros(count).index_add_(0, labels, w[:, c]) / size)[labels]
        monitor.optimality = self.optimality(w, dual)
        clusters = self._components(tied.all(1))[0] if bool(tied.any()) else None
        return monitor.solution(w, scope, clusters)

    def _components(self, kept: Tensor) -> tuple[Tensor, int]:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        n = len(self.problem.cross)
        ends = self.first[kept].cpu().numpy(), self.second[kept].cpu().numpy()
        count, labels = connected_components(coo_matrix((kept[kept].cpu().numpy(), ends), (n, n)), directed=False)
        return torch.from_numpy(labels).to(self.first), count
