r"""Graph learning under constraints by message passing: the nodes compute the weights of their edges from prices.

Node i has a vector z_i. An edge of the network allows two nodes to be joined and to exchange messages, and only these
two nodes know their discrepancy D(i, j) = ‖z_i − z_j‖. The algorithm finds weights A_ij = A_ji in [0, 1] with the least
Σ A_ij D(i, j) (7.4) under one of the conditions

.. math:: \sum_j A_{ij} = d \text{ for all } i \quad (7.6), \qquad \sum_{i<j} A_{ij} = E \quad (7.7).

Each node has a price μ_i, the multiplier of its degree, and an edge is used if the prices of its ends add up to its
discrepancy. Nodes send their prices to their neighbours; both ends of an edge then take the same step with the same
numbers, and each node moves its own price by the deficit of its degree (a primal-dual step for linear programs):

.. math:: A_{ij} \leftarrow \Big[A_{ij} - \tfrac{t_{ij}}{2}\big(D(i, j) - \mu_i - \mu_j\big)\Big]_0^1, \qquad
    \mu_i \leftarrow \mu_i + \Big(d - \sum_j (2 A_{ij} - A^-_{ij})\Big) \Big/ \sum_j t_{ij}

with A⁻ the previous weight, and t_ij the inverse of the mean discrepancy at both ends, so no step size has to be chosen
and units do not matter. A budget of E edges is a degree of 2E/n that nodes may trade with their neighbours: y_ij =
−y_ji is the amount of i's degree that j has received, and moves with the difference of their prices,

.. math:: y_{ij} \leftarrow y_{ij} + \tfrac{t_{ij}}{2}(\mu_i - \mu_j), \qquad
    \sum_j A_{ij} + \sum_j y_{ij} = 2E/n,

so that all prices converge to one value, half of the largest joined discrepancy. The steps converge to an optimum of
the linear program; if it is unique, weights reach their bounds after finitely many steps.

A node takes its next step once all its neighbours have taken the last, and sends its last two prices. A node that is
silent in a round, or whose messages are lost or late, therefore delays its neighbours and changes nothing in the
results.

Disclosure: *a node* learns its neighbours' vectors, mean discrepancies and prices, and nothing about other pairs. *The
server between sites* with `carry=ft.sites.sealed(network)` learns the network. Vectors are summaries of rows, so noise
should be added before they become the data of this algorithm. A message has n(m + 5) numbers for n nodes and vectors of
m.

Source: Jung, "Federated learning: from theory to practice", section 7.4, (7.6) and (7.7), which leaves the method open;
Pock and Chambolle, "Diagonal preconditioning for first order primal-dual algorithms in convex optimization", ICCV 2011,
for the steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.algorithms.neighbour_search import Vectors, heard, means
from fedtorch.federation.exchanges.graph import Neighbourhood, graph
from fedtorch.federation.told import Told
from fedtorch.federation.turn import Turn
from fedtorch.networks.network import Network
from fedtorch.tree import Tree

_RATIO = 10.0  # ratio of steps in weights to steps in prices, both in their own units


class _Row(NamedTuple):
    """State of a node; leaves `(K, ...)`."""

    known: Vectors  # per neighbour: vector, mean discrepancy, steps taken, last price, previous price
    place: Tensor  # (n,) one at the node itself, after its first round
    own: Tensor  # (m + 4,) the node's own entries of `known`
    weights: Tensor  # (n,) A_ij
    traded: Tensor  # (n,) y_ij


class EdgeWeightsServer(NamedTuple):
    """The nodes' received messages, `(n, ...)`; row i is node i's memory."""

    total: Tree = None


class _Outbox(NamedTuple):
    """A node's inputs; only the received messages have travelled."""

    heard: Vectors
    number: Tensor  # (n,) of the node


def edge_weights(network: Network, width: int, *, degree: float | None = None, edges: float | None = None) -> Algorithm:
    """Build the nodes' choice of edge weights, for a given degree of every node or a budget of edges.

    A node's vector is the mean of its rows, all fields side by side; a known vector is passed as one row. The results
    are the nodes' tensors: `weights` `(n,)` of the edges to all others, from which `ft.Network.from_matrix` makes the
    network, `lack` `()`, the deficit in the condition, and `steps` `()`, the number of steps. `ft.neighbour_search`
    finds candidate edges.

    Args:
        network: the edges that may be used, which are also those of the messages, with a node for each client, in their
            order. Its weights do not matter.
        width: m, how many numbers a vector has.
        degree: d of every node, at most as many as the fewest neighbours of a node (7.6).
        edges: E, how many edges, or their total weight (7.7); the network has to be connected.

    Shapes: server state is `EdgeWeightsServer`; client state has the node's view, `(K, n)` and `(K, n, m + 4)`.

    Raises:
        ValueError: both conditions or none, an infeasible condition, or a disconnected network with `edges`; at the
            start of a run, a network of another size, or rows of another width.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.tensor([[z]]),) for z in (1.0, 5.0, 1.1, 5.2)])
        >>> everybody = ft.Network.complete(4)
        >>> run = ft.run(ft.edge_weights(everybody, 1, degree=1), ft.InProcess(data), rounds=60)
        >>> ft.Network.from_matrix(run.tensors()["weights"].round(decimals=6)).edges.tolist()
        [[0, 2], [1, 3]]
    """
    expected.kind(network, Network, "a network", "make one with ft.Network.from_neighbours, k_nearest, complete, …")
    if width < 1:
        raise ValueError(f"Expected a width of at least 1, but got {width}")
    target = _target(network, degree, edges)
    nodes = network.nodes
    joined = Network(network.edges, nodes=nodes)  # unit weights, so every edge carries a message unscaled
    adjacent = joined.adjacency().to_dense() > 0

    def init(parameters: Tree, clients: int) -> tuple[EdgeWeightsServer, _Row]:
        if clients != nodes:
            raise ValueError(
                f"Expected a network of as many nodes as there are clients, {clients}, but got {nodes} nodes"
            )
        nothing = torch.zeros(nodes, dtype=torch.float64)
        known = Vectors(nothing, nothing.new_zeros(nodes, width + 4))
        return EdgeWeightsServer(), _Row(known, nothing, known.vectors[0], nothing, nothing)

    def client(inbox: Neighbourhood, state: _Row, data: Tensor, turn: Turn) -> Reply:
        number = inbox.heard.number
        known, beside = heard(inbox, state.known, 0.5), adjacent[number.cpu()].to(data.device)
        place = (number[:, None] == torch.arange(nodes, device=data.device)).to(torch.float64)
        state = state._replace(known=known, place=place)
        after = _stepped(state, data, beside, target, trading=edges is not None)
        waits = beside & (known.vectors[..., width + 1] < state.own[:, None, width + 1])
        new = tree.where(waits.any(1), state, after)
        return Reply(None, new, {"lack": _lack(new, target).abs()})

    return Algorithm(
        init=init,
        outbox=lambda server: _Outbox(server.total, torch.arange(nodes, device=server.total.present.device)),
        client=client,
        server=lambda server, aggregate, key: server,
        model=lambda inbox, state: {
            "weights": state.weights,
            "lack": _lack(state, target),
            "steps": state.own[..., width + 1],
        },
        exchange=graph(joined),
        prepare=lambda data: means(data, width),
        told=Told(
            lambda state: Vectors(state.place, state.place[..., None] * state.own[..., None, :]), counts=("present",)
        ),
        settings={
            "algorithm": "edge_weights",
            "width": width,
            "degree": degree,
            "edges": edges,
            "joined": joined.edges,
        },
        start={},
    )


def _target(network: Network, degree: float | None, edges: float | None) -> float:
    """Return the degree of every node, or its share of the budget."""
    if (degree is None) == (edges is None):
        raise ValueError(f"Expected a degree or a number of edges, but got {degree} and {edges}; leave one of them out")
    if degree is not None:
        fewest = int(network.neighbour_counts.min()) if network.nodes else 0
        if not 0 < degree <= fewest:
            raise ValueError(
                f"Expected a degree above 0 and at most {fewest}, the fewest neighbours of a node, but got {degree}; "
                "give the network more edges"
            )
        return float(degree)
    assert edges is not None
    if not 0 < edges <= len(network.edges):
        raise ValueError(f"Expected more than 0 edges and at most {len(network.edges)}, the network's, but got {edges}")
    if network.components.number > 1:
        raise ValueError(
            f"Expected a connected network, over which nodes share a budget, but got one of "
            f"{network.components.number} components; add edges"
        )
    return 2 * edges / network.nodes


def _lack(state: _Row, target: float) -> Tensor:
    """Return the deficits of nodes' degrees, `(K,)`."""
    return target - state.weights.sum(-1) - state.traded.sum(-1)


def _stepped(state: _Row, data: Tensor, beside: Tensor, target: float, *, trading: bool) -> _Row:
    """Return the nodes after their next step: the first sends the vector, the second a price, the others move the
    prices.

    Args:
        state: of K nodes, with their received messages.
        data: their vectors `(K, m)`.
        beside: their neighbours `(K, n)` bool.
        target: target degrees.
        trading: whether they may trade degrees.
    """
    vector, (scale, taken, price, _) = data.to(torch.float64), state.own[:, -4:].unbind(1)
    others, (scales, steps, prices, earlier) = state.known.vectors[..., :-4], state.known.vectors[..., -4:].unbind(-1)
    apart = torch.where(beside, (others - vector[:, None]).norm(dim=2), 0.0)
    mean = apart.sum(1) / beside.sum(1)
    theirs = torch.where(steps > taken[:, None], earlier, prices)  # after as many steps as the node itself
    both = (scale[:, None] + scales) / 2
    pace = torch.where(beside, _RATIO / torch.where(both > 0, both, 1.0), 0.0)  # t_ij
    moved = (state.weights - pace / 2 * (apart - price[:, None] - theirs)).clamp(0, 1)
    traded = state.traded + pace / 2 * (price[:, None] - theirs) * float(trading)
    ahead = 2 * (moved + traded) - state.weights - state.traded
    paid = price + (target - ahead.sum(1)) / (pace.sum(1) * (1 + trading))
    settled = taken >= 2
    new = torch.stack(
        [
            torch.where(settled, scale, torch.where(taken == 1, mean, 0.0)),
            taken + 1,
            torch.where(settled, paid, torch.where(taken == 1, mean / 2, 0.0)),
            price,
        ],
        1,
    )
    return state._replace(
        own=torch.cat([vector, new], 1),
        weights=torch.where(settled[:, None], moved, 0.0),
        traded=torch.where(settled[:, None], traded, 0.0),
    )
