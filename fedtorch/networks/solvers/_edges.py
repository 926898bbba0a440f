"""Solvers with a dual variable per edge: their loop, differences over edges and the adjoint, optimality, ties."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtorch import linalg
from fedtorch.networks.solvers.penalties import Penalty, squared
from fedtorch.networks.solvers.problem import LinearProblem
from fedtorch.networks.solvers.solution import CHECK_EVERY, Monitor, Solution, Watch

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]  # (w, dual) -> (w, dual, the edges' differences)


class EdgeProblem:
    """A problem in terms of its edges, each from its first node to its second.

    Args:
        problem: losses, network and α.
        penalty: of the differences.
    """

    def __init__(self, problem: LinearProblem, penalty: Penalty) -> None:
        self.problem, self.penalty = problem, penalty
        self.first, self.second = problem.network.edges.to(problem.cross.device).unbind(1)
        self.strength = problem.alpha * problem.network.weights.to(problem.cross)  # (E,) α A_ij
        self.neighbours = problem.network.neighbour_counts.to(problem.cross)  # (n,)
        self.curvature = float(2 * problem.gram.diagonal(dim1=1, dim2=2).mean())  # mean curvature of a loss
        per_edge = 3 * self.curvature / float(self.neighbours.mean().clamp(min=1))
        self.scale = per_edge if per_edge > 0 else 1.0  # of the edges' own curvature
        self._unit = linalg.unit_scale(problem.gram.diagonal(dim1=1, dim2=2).mean(0))  # (d,) of each feature
        rows = (problem.gram.abs() @ self._unit) * self._unit
        self._sizes = 2 * (problem.cross * self._unit).norm(), 2 * rows.max()

    def differences(self, w: Tensor) -> Tensor:
        """Return w_i − w_j of every edge, `(E, d)`."""
        return w[self.first] - w[self.second]

    def gathered(self, first: Tensor, second: Tensor) -> Tensor:
        """Sum over each node's edges the values for their first and for their second node, `(n, d)`."""
        total = torch.zeros_like(self.problem.cross).index_add_(0, self.first, first)
        return total.index_add_(0, self.second, second)

    def proximal(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Return centre -> argmin L_i(w) + weight_i/2 ‖w‖² − ⟨centre_i, w⟩ of every node, the one of least norm."""
        eye = torch.eye(self.problem.cross.shape[1]).to(self.problem.gram)
        inverse = linalg.pseudo_inverse(2 * self.problem.gram + weight[:, None, None] * eye)
        return lambda centre: torch.bmm(inverse, (2 * self.problem.cross + centre).unsqueeze(2)).squeeze(2)

    def optimality(self, w: Tensor, dual: Tensor) -> float:
        r"""Return the residual of the Karush–Kuhn–Tucker conditions, relative to the numbers in them.

        For the penalty `squared`, whose y is known from w, that is the problem's own. Else, with features brought to
        one size by U, the larger of ‖U(∇L(w) + B'y)‖ / (‖U∇L(0)‖ + ‖U∇²L U‖ ‖U⁻¹w‖) and ‖U⁻¹(Bw − prox(Bw + cy))‖ /
        ‖U⁻¹w‖, which are zero when every edge's y is in αA_ij ∂φ(w_i − w_j); c is one over the mean curvature of the
        losses.
        """
        if self.penalty is squared:
            return self.problem.optimality(w)
        tiny = torch.finfo(w.dtype).tiny
        gram = torch.bmm(self.problem.gram, w.unsqueeze(2)).squeeze(2)
        stationary = ((2 * (gram - self.problem.cross) + self.gathered(dual, -dual)) * self._unit).norm()
        step = 1 / max(self.curvature, tiny)
        s = self.differences(w)
        feasible = ((s - self.penalty.prox(s + step * dual, step * self.strength)) / self._unit).norm()
        size = (w / self._unit).norm()
        stationary = stationary / (self._sizes[0] + self._sizes[1] * size).clamp(min=tiny)
        return max(float(stationary), float(feasible / size.clamp(min=tiny)))

    def solve(self, step: Step, scale: float, *, rounds: int, tolerance: float, watch: Watch | None = None) -> Solution:
        """Take steps from the nodes' own fits and zero duals until the optimality is within the tolerance.

        Args:
            step: a round of all nodes and edges.
            scale: of its duals `(E, d)`: times the scale they are in αA_ij ∂φ(w_i − w_j) at a minimiser.
            rounds: most rounds.
            tolerance: of `optimality`, which is checked every 20 rounds.
            watch: called with (rounds, parameters) after each round; a true result stops the solver.
        """
        monitor = Monitor(self.problem, tolerance, rounds, CHECK_EVERY, watch)
        w = self.proximal(torch.zeros_like(self.neighbours))(torch.zeros_like(self.problem.cross))
        dual = torch.zeros_like(self.differences(w))
        while True:
            w, dual, s = step(w, dual)
            stop = monitor.tell(w)
            if (stop or monitor.due()) and (monitor.check(self.optimality(w, scale * dual), w) or stop):
                return self._tied(monitor, w, scale * dual, s)

    def _tied(self, monitor: Monitor, w: Tensor, dual: Tensor, s: Tensor) -> Solution:
        """Return the result, with parameters made equal where an edge's difference `s` `(E, d)` is exactly zero."""
        tied = s == 0
        w = w.clone()
        for c in range(w.shape[1]):
            labels, count = self._components(tied[:, c])
            size = torch.bincount(labels, minlength=count)
            w[:, c] = (w.new_zeros(count).index_add_(0, labels, w[:, c]) / size)[labels]
        clusters = self._components(tied.all(1))[0] if bool(tied.any()) else None
        monitor.least = torch.inf  # averaged steps do not diverge, and no other parameters have these ties
        return monitor.solution(w, "local", optimality=lambda w: self.optimality(w, dual), clusters=clusters)

    def _components(self, tied: Tensor) -> tuple[Tensor, int]:
        """Return the component of each node under the tied edges `(E,)` only, and the number of components."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        n = len(self.problem.cross)
        ends = self.first[tied].cpu().numpy(), self.second[tied].cpu().numpy()
        count, labels = connected_components(coo_matrix((tied[tied].cpu().numpy(), ends), (n, n)), directed=False)
        return torch.from_numpy(labels).to(self.first), count
