r"""GTV minimisation of linear models: the problem that the solvers of this folder solve.

.. math:: f(w) = \sum_i \frac1{m_i} \|y_i - X_i w_i\|^2 + \alpha \sum_{\{i,j\} \in E} A_{ij} \phi(w_i - w_j)

Only Q_i = X_i'X_i / m_i, b_i = X_i'y_i / m_i and ‖y_i‖² / m_i of the rows are used. For the squared norm φ the
minimisers are the solutions of Q w = b, where

.. math:: (Q w)_i = Q_i w_i + \alpha \Big(d_i w_i - \sum_j A_{ij} w_j\Big).

Q may be singular: f does not change along w_i = v for all i of a connected component if X_i v = 0 for all of them.
These v are computed with all features scaled to one size; the returned solution has the least norm in the units of the
given features. A feature that is zero everywhere has parameters zero.

Features may have any units. All solvers stop by one criterion, which no units change: with S diagonal so that SQS has a
unit diagonal, up to powers of two, it is ‖S(b − Qw)‖ relative to ‖Sb‖ + ‖SQS‖ ‖S⁻¹w‖.

Source: Jung, "Federated learning: from theory to practice", equations (3.20) to (3.26), where q = −2b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedtorch import linalg, tree
from fedtorch.data import FederatedData
from fedtorch.models.linear import SufficientStatistics, warn_of_dependence
from fedtorch.networks.network import Components, Network
from fedtorch.networks.solvers.penalties import Penalty, squared

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """GTV minimisation of linear models; all fields on one device and of one dtype.

    Attributes:
        network: n nodes.
        alpha: strength α of the coupling.
        statistics: of the nodes, per row: Q_i `(n, d, d)`, b_i `(n, d)` and ‖y_i‖² / m_i `(n,)`, beside m_i.

    >>> from fedtorch.models.linear import sufficient_statistics
    >>> rows = torch.ones(2, 1, 1), torch.tensor([[0.0], [3.0]])  # y of two nodes, x = 1
    >>> problem = LinearProblem(Network([[0, 1]]), alpha=1.0, statistics=sufficient_statistics(*rows).per_row())
    >>> w = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    >>> problem.objective(w), problem.optimality(w)  # 1² + 1² + (2 − 1)²
    (3.0, 0.0)
    """

    network: Network
    alpha: float
    statistics: SufficientStatistics

    def __post_init__(self) -> None:
        n, d = self.network.nodes, self.cross.shape[-1]
        shapes = [tuple(leaf.shape) for leaf in self.statistics]
        if shapes != [(n, d, d), (n, d), (n,), (n,)]:
            raise ValueError(
                f"Expected statistics of shapes {(n, d, d)}, {(n, d)}, {(n,)} and {(n,)} for {n} nodes, "
                f"but got {shapes}"
            )
        if not (self.alpha >= 0 and math.isfinite(self.alpha)):
            raise ValueError(f"Expected alpha of at least 0 and finite, but got {self.alpha}")

    @property
    def gram(self) -> Tensor:
        """Return Q_i, `(n, d, d)`."""
        return self.statistics.gram

    @property
    def cross(self) -> Tensor:
        """Return b_i, `(n, d)`."""
        return self.statistics.cross

    @cached_property
    def adjacency(self) -> Tensor:
        """Return A as sparse CSR `(n, n)`."""
        return self.network.adjacency(self.cross.dtype, self.cross.device)

    @cached_property
    def degrees(self) -> Tensor:
        """Return d_i, `(n,)`."""
        return self.network.degrees.to(self.cross)

    @cached_property
    def blocks(self) -> Tensor:
        """Return the diagonal blocks of Q, Q_i + αd_i I, `(n, d, d)`."""
        eye = torch.eye(self.cross.shape[1], dtype=self.cross.dtype, device=self.cross.device)
        return torch.addcmul(self.gram, self.degrees[:, None, None], eye, value=self.alpha)

    @cached_property
    def inverse_blocks(self) -> Tensor:
        """Return P⁻¹, the pseudo-inverses of `blocks`, `(n, d, d)`."""
        return linalg.pseudo_inverse(self.blocks)

    @cached_property
    def safe_rate(self) -> float:
        """Return a learning rate at which `fedgd` converges, 0.95 / max_i (λ_max(Q_i) + 2αd_i).

        It is a sharper form, node by node, of the bound (5.5), λ_max(Q) ≤ max_i λ_max(Q_i) + 2α max_i d_i, with
        λ_max(Q_i) replaced by its largest row sum of absolute values, which is an upper bound. Nodes agree on the
        maximum once.
        """
        largest = self.gram.abs().sum(2).amax(1)
        bound = float((largest + 2 * self.alpha * self.degrees).max())
        return 0.95 / bound if bound > 0 else 1.0

    @property
    def round_bytes(self) -> int:
        """Return the bytes of a round of messages: d numbers over every edge in both directions."""
        return 2 * len(self.network.edges) * self.cross.shape[1] * self.cross.element_size()

    def product(self, w: Tensor, out: Tensor | None = None) -> Tensor:
        """Return Q w for `w` `(n, d)`, into `out` if given: one round of messages."""
        out = torch.mul(w, self.alpha * self.degrees[:, None], out=out)
        torch.addmm(out, self.adjacency, w, alpha=-self.alpha, out=out)
        return out.unsqueeze(2).baddbmm_(self.gram, w.unsqueeze(2)).squeeze(2)

    @cached_property
    def scale(self) -> Tensor:
        """Return the diagonal of S, `(n, d)`: powers of two with which SQS has a diagonal between a half and two."""
        return linalg.unit_scale(self.blocks.diagonal(dim1=1, dim2=2))

    @cached_property
    def _sizes(self) -> tuple[Tensor, Tensor]:
        """Return ‖Sb‖ and ‖SQS‖, the largest sum of absolute values in a row."""
        size = 1 / self.scale
        diagonal = torch.bmm(self.blocks.abs(), self.scale.unsqueeze(2)).squeeze(2)
        rows = torch.addmm(diagonal, self.adjacency, self.scale, alpha=self.alpha) / size
        return (self.cross / size).norm(), rows.max()

    def residual_size(self, residual: Tensor) -> float:
        """Return ‖S(b − Qw)‖ of a residual b − Q w, `(n, d)`."""
        return float((self.scale * residual).norm())

    def size(self, w: Tensor) -> float:
        """Return ‖Sb‖ + ‖SQS‖ ‖S⁻¹w‖, the size of the numbers in Q w = b at `w` `(n, d)`."""
        right, matrix = self._sizes
        return float((right + matrix * (w / self.scale).norm()).clamp(min=torch.finfo(w.dtype).tiny))

    def optimality(self, w: Tensor) -> float:
        """Return the distance of `w` `(n, d)` from a minimiser: `residual_size` relative to `size`, free of units."""
        return self.residual_size(self.cross - self.product(w)) / self.size(w)

    @cached_property
    def pooled_eigenvalue(self) -> float:
        """Return the smallest v'Qv / v'Pv, with P the `blocks`, over v that a component's nodes share; 1 if uncoupled.

        It bounds the smallest eigenvalue of P⁻¹Q from above, closely at a strong coupling.
        """
        labels, count = self.components
        pooled, blocks = (
            matrix.new_zeros(count, *matrix.shape[1:]).index_add_(0, labels, matrix)
            for matrix in (self.gram, self.blocks)
        )
        parts = linalg.equilibrated(pooled)
        root = parts.inverse_root(parts.null())
        return 1 / max(1.0, float(torch.linalg.eigvalsh(root.mT @ blocks @ root).max()))

    def error(self, residual: Tensor, w: Tensor, smallest: float = torch.inf) -> float:
        """Estimate how far `w` is from a solution relative to its size, both in the norm of the `blocks` P.

        That is ‖b − Qw‖ in the norm of P⁻¹ over the smallest eigenvalue of P⁻¹Q, which units of features do not change.

        Args:
            residual: b − Q w at `w` `(n, d)`.
            w: the parameters.
            smallest: an estimate of the eigenvalue, if it is below `pooled_eigenvalue`.
        """
        conditioned, size = (
            (m @ x.unsqueeze(2)).squeeze(2) for m, x in ((self.inverse_blocks, residual), (self.blocks, w))
        )
        far, near = (residual * conditioned).sum().clamp(min=0).sqrt(), (w * size).sum().clamp(min=0).sqrt()
        return float(far / near) / min(smallest, self.pooled_eigenvalue) if bool(far > 0) else 0.0

    def objective(self, w: Tensor, penalty: Penalty = squared) -> float:
        """Return f at `w` `(n, d)`."""
        loss = (
            self.statistics.power.sum() + (w * (torch.bmm(self.gram, w.unsqueeze(2)).squeeze(2) - 2 * self.cross)).sum()
        )
        ends = self.network.edges.to(w.device)
        variation = penalty.value(w[ends[:, 0]] - w[ends[:, 1]])
        return float(loss + self.alpha * (self.network.weights.to(w) * variation).sum())

    @cached_property
    def null_space(self) -> tuple[Tensor, Tensor]:
        """Return directions along which f does not change: components `(Z,)` and orthonormal v `(Z, d)` of each.

        They are w_i = v for all nodes i of a component, see `components`. Linearly dependent features give a warning.
        """
        labels, count = self.components
        empty = SufficientStatistics(*(leaf.new_zeros(count, *leaf.shape[1:]) for leaf in self.statistics))
        total = tree.map(lambda zeros, leaf: zeros.index_add_(0, labels, leaf), empty, self.statistics)
        parts = linalg.equilibrated(total.gram)
        warn_of_dependence(total, parts.rank)
        component, which = (parts.values == 0).nonzero().unbind(1)
        return component, parts.null().mT[component, which]

    def minimum_norm(self, w: Tensor) -> Tensor:
        """Return `w` without its part along which f does not change: a minimiser becomes the one of least norm."""
        component, vectors = self.null_space
        if not len(component):
            return w
        labels, count = self.components
        size = torch.bincount(labels, minlength=count).to(w)
        mean = w.new_zeros(count, w.shape[1]).index_add_(0, labels, w) / size[:, None]
        excess = (mean[component] * vectors).sum(1, keepdim=True) * vectors
        return w - w.new_zeros(count, w.shape[1]).index_add_(0, component, excess)[labels]

    @cached_property
    def components(self) -> Components:
        """Return the components of the network; with α = 0 every node is a component."""
        if self.alpha == 0:
            return Components(torch.arange(self.network.nodes, device=self.cross.device), self.network.nodes)
        labels, count = self.network.components
        return Components(labels.to(self.cross.device), count)

    def matrix(self) -> csr_matrix:
        """Return Q (3.24) as a SciPy CSR matrix of float64, `(n d, n d)`, d consecutive rows a node."""
        from scipy.sparse import bsr_matrix, identity, kron

        n, d = self.cross.shape
        gram = self.gram.detach().double().cpu().numpy()
        blocks = bsr_matrix((gram, range(n), range(n + 1)), shape=(n * d, n * d))
        return (blocks + self.alpha * kron(self.network.scipy_laplacian, identity(d))).tocsr()


def linear_problem(
    data: FederatedData,
    network: Network,
    alpha: float,
    *,
    dtype: torch.dtype = torch.float64,
    unlabelled: bool = False,
) -> LinearProblem:
    """Return the problem of data whose rows are (x `(d,)`, y `()` or `(1,)`), without intercept.

    Args:
        data: a client per node, in the order of the network's nodes.
        network: has the clients as nodes.
        alpha: strength α of the coupling.
        dtype: of the solution; the sums over rows are in float64.
        unlabelled: whether nodes may have no rows; such a node has L_i = 0, and its solution follows from its
            neighbours'.

    Raises:
        ValueError: rows of other shapes, another number of clients than nodes, nodes without rows, a negative α.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1)), (torch.ones(1, 1), -torch.ones(1))])
        >>> problem = ft.networks.solvers.linear_problem(data, ft.Network.from_edges([(0, 1)]), alpha=0.5)
        >>> ft.networks.solvers.direct(problem).parameters.round(decimals=4)  # ±1 / (1 + 2α)
        tensor([[ 0.5000],
                [-0.5000]], dtype=torch.float64)
    """
    if len(data) != network.nodes:
        raise ValueError(
            f"Expected a network of as many nodes as there are clients, {len(data)}, but got {network.nodes} nodes"
        )
    empty = (data.counts == 0).nonzero()[:, 0]
    if len(empty) and not unlabelled:
        raise ValueError(
            f"Expected every node to have rows, but node {data.names[int(empty[0])]!r} has none; pass unlabelled=True "
            "if it is to follow its neighbours"
        )
    return LinearProblem(network, float(alpha), tree.to(SufficientStatistics.of(data).per_row(), dtype))
