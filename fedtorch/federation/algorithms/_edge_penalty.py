r"""GTV minimisation of any module with a penalty that makes nodes exactly equal, by ADMM over the edges.

With s an edge's value for the difference of i and j, and u its dual, both at the server, a round is

.. math::
    w_i \approx \arg\min_w L_i(w) + \frac\rho2 \sum_j \Big\|w - \frac{w_i + w_j}2 \mp \Big(\frac s2 - u\Big)\Big\|^2,
    \qquad \delta = w_i - w_j + 2u, \quad s = \mathrm{prox}_{(2\alpha A_{ij}/\rho)\phi}(\delta), \quad
    u \leftarrow (\delta - s)/2 .

For node i that is one `Quadratic`, so any local solver can be used; with an exact one it is the method of
`fedtorch.networks.solvers.admm`. An edge is updated once both its ends have answered. Nodes joined by edges with s = 0
predict with their mean, so their predictions are equal to the bit.

Source: Hallac, Leskovec and Boyd (2015), "Network lasso: clustering and optimization in large graphs".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import LocalSolver, Quadratic, Reply
from fedtorch.federation.exchanges.exchange import RowsOf, Sum
from fedtorch.federation.exchanges.messages import like as as_tree, rows
from fedtorch.federation.exchanges.rows import private_rows
from fedtorch.federation.turn import Turn
from fedtorch.networks.network import Network
from fedtorch.networks.solvers.penalties import Penalty
from fedtorch.tree import Tree


class EdgeServer(NamedTuple):
    """The nodes' parameters, and the variables of every edge."""

    parameters: Tensor  # (n, p) the coupled w_i, float64
    dual: Tensor  # (E, p) u
    difference: Tensor  # (E, p) s
    labels: Tensor  # (n,) of the nodes that are tied
    heard: Tensor  # (n,) bool


class _Outbox(NamedTuple):
    """Broadcast to the nodes, one row each."""

    precision: Tensor  # (n,) λ
    shift: Tensor  # (n, p) h
    tied: Tensor  # (n, p) mean over each group of equal nodes


class _State(NamedTuple):
    """State of a node; leaves `(K, ...)`."""

    parameters: dict[str, Tensor]
    solver: Tree


class _Parts(NamedTuple):
    """Functions and constants of a round."""

    local: LocalSolver
    network: Network
    alpha: float
    penalty: Penalty
    rho: float
    names: Sequence[str]  # names of the coupled parameters

    def joined(self, parameters: Tree) -> Tensor:
        """Return the coupled parameters of stacked nodes as vectors, `(K, p)` in float64."""
        return rows({name: parameters[name] for name in self.names}).to(torch.float64)

    def divided(self, vectors: Tensor, like: Tree) -> dict[str, Tensor]:
        """Split `joined` into leaves with the shapes and dtypes of `like`."""
        coupled = {name: like[name] for name in self.names}
        return tree.map(lambda new, old: new.to(old.dtype), as_tree(vectors, coupled), coupled)


def edge_rounds(
    local: LocalSolver, network: Network, alpha: float, penalty: Penalty, rho: float, names: Sequence[str]
) -> dict[str, Any]:
    """Return the functions and the exchange of an `Algorithm` with this penalty on edges."""
    parts = _Parts(local, network, alpha, penalty, rho, names)
    return {
        "init": partial(_init, parts=parts),
        "outbox": partial(_outbox, parts=parts),
        "client": partial(_client, parts=parts),
        "server": partial(_server, parts=parts),
        "model": partial(_model, parts=parts),
        "exchange": private_rows()._replace(network=network),
        "report": _report,
    }


def _init(parameters: Tree, clients: int, *, parts: _Parts) -> tuple[EdgeServer, _State]:
    if clients != parts.network.nodes:
        raise ValueError(
            f"Expected a network of as many nodes as there are clients, {clients}, but got {parts.network.nodes} nodes"
        )
    rows = parts.joined(tree.expand(parameters, clients))
    edges = rows.new_zeros(len(parts.network.edges), rows.shape[1])
    nodes = torch.arange(clients)
    server = EdgeServer(rows, edges, edges, nodes, torch.zeros(clients, dtype=torch.bool))
    return server, _State(parameters, parts.local.init(parameters))


def _outbox(server: EdgeServer, *, parts: _Parts) -> _Outbox:
    """Send every node its quadratic; none before its first answer, so that it first finds its own solution."""
    first, second = parts.network.edges.to(server.parameters.device).T
    w = server.parameters
    middle, push = (w[first] + w[second]) / 2, server.difference / 2 - server.dual
    shift = torch.zeros_like(w).index_add(0, first, middle + push).index_add(0, second, middle - push)
    degree = parts.network.neighbour_counts.to(w)
    rho = torch.where(server.heard, parts.rho, 0.0)
    return _Outbox(rho * degree, rho[:, None] * shift, _tied(w, server.labels))


def _tied(w: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over nodes with the same label, `(n, p)`; a node without others keeps every bit."""
    count = torch.zeros_like(w[:, 0]).index_add(0, labels, torch.ones_like(w[:, 0]))
    mean = (torch.zeros_like(w).index_add(0, labels, w) / count.clamp(min=1)[:, None])[labels]
    return torch.where((count[labels] > 1)[:, None], mean, w)


def _client(inbox: _Outbox, state: _State, data: Any, turn: Turn, *, parts: _Parts) -> Reply:
    shift = {**tree.zeros_like(state.parameters), **parts.divided(inbox.shift, state.parameters)}
    none = torch.zeros_like(inbox.precision)
    precision = {name: inbox.precision if name in parts.names else none for name in state.parameters}
    alike = len(parts.names) == len(state.parameters)
    quadratic = Quadratic(inbox.precision if alike else precision, {name: shift[name] for name in state.parameters})
    solved = parts.local.solve(state.parameters, state.solver, data, quadratic, turn)
    return Reply(Sum(parts.joined(solved.parameters)), _State(solved.parameters, solved.state), solved.info)


def _server(state: EdgeServer, aggregate: RowsOf, key: Tensor, *, parts: _Parts) -> EdgeServer:
    """Update the edges both of whose ends have answered."""
    ids = aggregate.ids.to(state.parameters.device)
    w = state.parameters.index_copy(0, ids, aggregate.message.value.to(torch.float64))
    answered = torch.zeros_like(state.heard).index_fill(0, ids, True)
    first, second = parts.network.edges.to(w.device).T
    strength = 2 * parts.alpha * parts.network.weights.to(w.device) / parts.rho
    gap = w[first] - w[second] + 2 * state.dual
    settled = parts.penalty.prox(gap, strength)
    both = (answered[first] & answered[second])[:, None]
    difference = torch.where(both, settled, state.difference)
    dual = torch.where(both, (gap - settled) / 2, state.dual)
    answered_once = state.heard | answered
    joined = (difference == 0).all(1) & answered_once[first] & answered_once[second]
    labels = Network(parts.network.edges[joined.cpu()], nodes=parts.network.nodes).components.labels.to(w.device)
    return EdgeServer(w, dual, difference, labels, answered_once)


def _model(inbox: _Outbox, state: _State, *, parts: _Parts) -> Tree:
    tied = parts.divided(inbox.tied, state.parameters)
    return parts.local.tensors({name: tied.get(name, leaf) for name, leaf in state.parameters.items()}, state.solver)


def _report(server: EdgeServer) -> dict[str, Tensor]:
    """Return the number of clusters of equal nodes."""
    return {"clusters": server.labels.max() + 1}
