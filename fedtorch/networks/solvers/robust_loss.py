r"""ADMM over edges and rows: GTV minimisation of linear models whose losses are robust.

.. math:: f(w) = \sum_i \frac1{m_i} \sum_r \ell(y_r - x_r' w_i) + \alpha \sum_{\{i,j\} \in E} A_{ij} \phi(w_i - w_j)

A loss is a `Penalty` of residuals: `norm1` is the absolute error, on which few wrong labels have a bounded effect,
`huber(δ)` is in between, `squared` is least squares. Every row has a copy :math:`z_r` of its residual and a scaled dual
v, as every edge has in `admm`, and a node's step is a linear system that is factorised once:

.. math::
    z_r &= \mathrm{prox}_{\ell / \kappa}(y_r - x_r' w_i + v_r), \qquad v_r \leftarrow y_r - x_r' w_i + v_r - z_r \\
    w_i &\leftarrow \arg\min_w \frac{\kappa}{2 m_i} \sum_r (y_r - x_r'w - z_r + v_r)^2 + \text{what edges add in ADMM}.

κ starts as one over the mean absolute residual of the separate least squares fits of the nodes, and is balanced.

Source: Jung, "Federated learning: from theory to practice", section 10.3, for the losses; Boyd et al. (2011),
"Distributed optimization and statistical learning via ADMM", section 6.1 (least absolute deviations and Huber fitting).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedtorch import linalg, tree
from fedtorch.data import FederatedData
from fedtorch.models.rows import regression_fields
from fedtorch.networks.network import Network
from fedtorch.networks.solvers._edges import EdgeProblem
from fedtorch.networks.solvers.penalties import Penalty, norm1, squared
from fedtorch.networks.solvers.problem import linear_problem
from fedtorch.networks.solvers.solution import CHECK_EVERY, Monitor, Solution, Watch

_BALANCED = 2000  # rounds in which κ is still changed


def robust_loss(
    data: FederatedData,
    network: Network,
    alpha: float,
    loss: Penalty = norm1,
    penalty: Penalty = squared,
    *,
    rounds: int = 20_000,
    tolerance: float = 1e-8,
    watch: Watch | None = None,
) -> Solution:
    """Minimise GTV with a robust loss (local: a node uses its neighbours' messages and its own rows).

    Args:
        data: rows (x `(d,)`, y `()`), a client per node.
        network: has the clients as nodes.
        alpha: strength α of the coupling.
        loss: ℓ of the residuals: `norm1`, `huber(delta)`, `squared` or another.
        penalty: φ of neighbours' differences.
        rounds: most rounds.
        tolerance: of the Karush–Kuhn–Tucker conditions' relative residual, checked every 20 rounds.
        watch: see `fedgd`.

    Raises:
        ValueError: as for `linear_problem`.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.networks import solvers
        >>> labels = torch.tensor([1.0, 1.0, 1.0, 1.0, 100.0])  # the last one is wrong
        >>> data = ft.data.from_tensors([(torch.ones(5, 1), labels), (torch.ones(5, 1), torch.ones(5))])
        >>> network = ft.Network.from_edges([(0, 1)])
        >>> solvers.robust_loss(data, network, alpha=1.0).parameters.flatten().round(decimals=4)
        tensor([1., 1.], dtype=torch.float64)
        >>> solvers.direct(solvers.linear_problem(data, network, 1.0)).parameters.flatten().round(decimals=4)
        tensor([14.2000,  7.6000], dtype=torch.float64)
    """
    problem = linear_problem(data, network, alpha)
    edges, rows = EdgeProblem(problem, penalty), _Rows(data)
    monitor = Monitor(problem, tolerance, rounds, CHECK_EVERY, watch)
    w = edges.proximal(torch.zeros_like(edges.neighbours))(torch.zeros_like(problem.cross))
    residual = rows.residuals(w)
    kappa = 1 / float(residual.abs().mean().clamp(min=1e-9 * float(rows.y.abs().max()) + torch.finfo(w.dtype).tiny))
    rho, inverse = _factorised(edges, kappa)
    v, u, z = torch.zeros_like(residual), torch.zeros_like(edges.differences(w)), residual
    while True:
        gap, pull, before = edges.differences(w) + 2 * u, rows.residuals(w) + v, z
        s = penalty.prox(gap, 2 * edges.strength / rho)
        z = loss.prox(pull[:, None], torch.full_like(pull, 1 / kappa))[:, 0]
        u, v = (gap - s) / 2, pull - z
        middle, push = (w[edges.first] + w[edges.second]) / 2, s / 2 - u
        centre = kappa * rows.gathered(rows.y - z + v) + rho * edges.gathered(middle + push, middle - push)
        w = torch.bmm(inverse, centre.unsqueeze(2)).squeeze(2)
        stop = monitor.tell(w)
        if not (stop or monitor.due()):
            continue
        force = partial(_optimality, edges, rows, loss, slope=kappa * v, dual=rho * u)
        if monitor.check(force(w), w) or stop:
            monitor.least = torch.inf  # as in `EdgeProblem.solve`: no other parameters have these duals
            return monitor.solution(w, "local", optimality=force)
        if monitor.rounds <= _BALANCED:
            change = _balance(rows, kappa, rows.residuals(w) - z, z - before, kappa * v)
            kappa, u, v = kappa * change, u / change, v / change
            rho, inverse = (rho, inverse) if change == 1 else _factorised(edges, kappa)


def _factorised(edges: EdgeProblem, kappa: float) -> tuple[float, Tensor]:
    """Return the strength ρ of the edges' constraints beside κ of the rows', and the inverses of the nodes' systems."""
    gram = edges.problem.gram
    rho = edges.scale * kappa / 2  # this loss has curvature κQ_i, where least squares has 2Q_i
    eye = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    return rho, linalg.pseudo_inverse(kappa * gram + (rho * edges.neighbours)[:, None, None] * eye)


def _balance(rows: _Rows, kappa: float, gap: Tensor, step: Tensor, slope: Tensor) -> float:
    """Return the factor of κ that balances the copies' error with their movement (Boyd et al., section 3.4.1)."""
    tiny = torch.finfo(gap.dtype).tiny
    primal = gap.norm() / rows.y.norm().clamp(min=tiny)
    dual = kappa * rows.gathered(step).norm() / rows.gathered(slope.abs() + slope.abs().mean()).norm().clamp(min=tiny)
    if float(primal) > 10 * float(dual):
        return 2.0
    return 0.5 if float(dual) > 10 * float(primal) else 1.0


class _Rows:
    """All rows, one after the other."""

    def __init__(self, data: FederatedData) -> None:
        x, y = regression_fields(tree.map(lambda leaf: leaf[None], data.rows))
        self.x, self.y = x[0].to(torch.float64), y[0].to(torch.float64)
        counts = data.counts.to(self.x.device)
        self.node = torch.arange(len(counts), device=self.x.device).repeat_interleave(counts)
        self.share = (1 / counts.to(torch.float64))[self.node]  # (R,) 1 / m_i
        self.shape = (len(counts), x.shape[2])

    def residuals(self, w: Tensor) -> Tensor:
        """Return y − x'w_i, `(R,)`."""
        return self.y - (self.x * w[self.node]).sum(1)

    def gathered(self, values: Tensor) -> Tensor:
        """Return X'values / m_i of every node, `(n, d)`."""
        zeros = torch.zeros(self.shape, dtype=torch.float64, device=self.x.device)
        return zeros.index_add_(0, self.node, self.x * (self.share * values)[:, None])


def _optimality(edges: EdgeProblem, rows: _Rows, loss: Penalty, w: Tensor, slope: Tensor, dual: Tensor) -> float:
    """Return the largest relative residual of the forces on nodes, the loss's slopes and the penalty's duals.

    Args:
        edges, rows, loss: the problem.
        w: `(n, d)`.
        slope: `(R,)` of the loss at every residual.
        dual: `(E, d)` of the edges.
    """
    tiny = torch.finfo(w.dtype).tiny
    unit = linalg.unit_scale(edges.problem.gram.diagonal(dim1=1, dim2=2).mean(0))
    force = (edges.gathered(dual, -dual) - rows.gathered(slope)) * unit
    size = torch.zeros_like(w).index_add_(0, rows.node, (rows.x * (rows.share * slope)[:, None]).abs()) * unit
    residual = rows.residuals(w)
    once = residual.abs().mean().clamp(min=tiny).expand(residual.shape)
    step = residual - loss.prox((residual + once * slope)[:, None], once)[:, 0]
    s = edges.differences(w)
    reach = 1 / max(edges.curvature, tiny)
    away = (s - edges.penalty.prox(s + reach * dual, reach * edges.strength)) / unit
    parts = (
        force.norm() / size.norm().clamp(min=tiny),
        step.norm() / rows.y.norm().clamp(min=tiny),
        away.norm() / (w / unit).norm().clamp(min=tiny),
    )
    return max(map(float, parts))
