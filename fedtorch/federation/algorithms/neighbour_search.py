r"""Graph learning by message passing: nodes look for those most like them by talking to their neighbours.

Node i has a vector z_i, such as its mean label or the parameters of its own fit, and the network says who can talk to
whom, which may be quite another network than the one that is looked for. In every round a node tells its neighbours its
own vector and, of the vectors that it has heard, those of the `relay` nodes nearest to it. So after r rounds it may
know nodes up to r edges away. It works out the discrepancies ‖z_i − z_j‖ itself and chooses the k nearest nodes that it
knows: the first way of section 7.4 to learn a network, without a place that has all vectors.

With `relay=0` nodes choose among their neighbours. With `relay=None` they pass everything on, and after as many rounds
as the network is wide all have found their nearest of all. In between they find them where like nodes are near each
other; or by another search that takes what was chosen as the network to talk over, some random edges besides.

Who learns what:

- *a node* the vectors that it has heard and whose they are, exactly: with `relay=0` its neighbours'. Vectors are
  summaries of rows, and from parameters that fit few rows the rows can be worked out; noise belongs on the vectors,
  before they are the data of this algorithm.
- *a node that lies* is believed. It can take any place in its neighbours' lists, and with a relay also put vectors into
  the mouths of nodes further away; it cannot change what nodes know that hear nothing by way of it.
- *the server between sites* (`ft.Remote`) with `carry=ft.sites.sealed(network)` who can talk to whom, who answers and
  how long messages are: no vector, no discrepancy, and not what nodes choose. Without seals it reads all messages.
- *one process*, `ft.InProcess`, holds everything: it shows what the nodes would find.

A message has n(m + 1) numbers for n nodes and vectors of m, zeros where nothing is told.

Source: Jung, "Federated learning: from theory to practice", section 7.4; for searches over what was chosen, Dong,
Moses and Li, "Efficient k-nearest neighbor graph construction for generic similarity measures", WWW 2011.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.data import BadClients, ClientData
from fedtorch.federation.algorithm import Algorithm, Reply
from fedtorch.federation.exchanges.graph import Neighbourhood, graph
from fedtorch.federation.told import Told
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.networks.network import Network
from fedtorch.tree import Tree


@tells(Learns("the numbers by which nodes are compared, such as means of their columns, of every node that it knows"))
class Vectors(NamedTuple):
    """Hold vectors of some of the n nodes, or a sum of such over neighbours."""

    present: Tensor  # (K, n) one where the vector is there, else zero; summed, Σ A_ij of those that told it
    vectors: Tensor  # (K, n, m) zeros where it is not


class _State(NamedTuple):
    """Hold a node's own state; leaves `(K, ...)`."""

    known: Vectors
    told: Tensor  # (n,) one for the nodes whose vectors it tells


class NeighboursServer(NamedTuple):
    """Hold what the nodes have heard, `(n, ...)`; row i is node i's memory."""

    total: Tree = None


class _Outbox(NamedTuple):
    """Hold what a node works with; only the heard part of it has travelled."""

    heard: Vectors
    number: Tensor  # (n,) of the node


def neighbour_search(network: Network, k: int, width: int, *, relay: int | None = 0) -> Algorithm:
    """Build the search of every node for the k nodes most like it, by messages over a network.

    A node's vector is the mean of its rows, all fields side by side; a vector that is known is one row. What it has
    found are its tensors: `neighbours` `(k,)`, nearest first, −1 where it knows fewer, and their `distances`, of which
    `ft.Network.from_neighbours` makes the network. Vectors have to stay as they are while nodes search.

    Args:
        network: over which nodes talk, with a node for each client, in their order. Its weights do not matter.
        k: how many nodes each chooses.
        width: m, how many numbers a vector has.
        relay: of how many nodes, those nearest to it, a node passes the vectors on; None for all that it knows.

    Shapes: server state is `NeighboursServer`; client state has what it knows, `(K, n)` and `(K, n, m)`.

    Raises:
        ValueError: k, width or relay out of range; when a run begins, a network of another size, or rows of another
            width.

    Example:
        >>> import torch, fedtorch as ft
        >>> path = ft.Network.from_edges([(0, 1), (1, 2), (2, 3)])
        >>> data = ft.data.from_tensors([(torch.tensor([[z]]),) for z in (1.0, 5.0, 1.1, 5.2)])
        >>> search = ft.neighbour_search(path, k=1, width=1, relay=None)
        >>> for rounds in (1, 3):  # with neighbours alone, and with everybody
        ...     run = ft.run(search, ft.InProcess(data), rounds=rounds)
        ...     ft.Network.from_neighbours(run.tensors()["neighbours"]).edges.tolist()
        [[0, 1], [1, 2], [2, 3]]
        [[0, 2], [1, 3]]
    """
    expected.kind(network, Network, "a network", "make one with ft.Network.from_edges, k_nearest, ring, …")
    nodes = network.nodes
    if not 1 <= k < nodes:
        raise ValueError(f"Expected k from 1 to {nodes - 1}, one less than the nodes, but got {k}")
    if width < 1 or (relay is not None and relay < 0):
        raise ValueError(f"Expected a width of at least 1 and a relay of at least 0 or None, but got {width}, {relay}")
    least = float(network.weights.min()) / 2 if len(network.weights) else 0.5

    def init(parameters: Tree, clients: int) -> tuple[NeighboursServer, _State]:
        if clients != nodes:
            raise ValueError(
                f"Expected a network of as many nodes as there are clients, {clients}, but got {nodes} nodes"
            )
        nothing = torch.zeros(nodes, dtype=torch.float64)
        return NeighboursServer(), _State(Vectors(nothing, nothing.new_zeros(nodes, width)), nothing)

    def client(inbox: Neighbourhood, state: _State, data: Tensor, turn: Turn) -> Reply:
        own = inbox.heard.number[:, None] == torch.arange(nodes, device=data.device)
        known = with_vectors(heard(inbox, state.known, least), own, data[:, None])
        told = state.told.to(torch.bool) | own | _passed_on(known, inbox, relay)
        return Reply(None, _State(known, told.to(torch.float64)), {"known": known.present.sum(1) - 1})

    def model(inbox: Neighbourhood, state: _State) -> dict[str, Tensor]:
        order, distances = _nearest(heard(inbox, state.known, least), inbox, k)
        return {"neighbours": torch.where(distances.isfinite(), order, -1), "distances": distances}

    return Algorithm(
        init=init,
        outbox=lambda server: _Outbox(server.total, torch.arange(nodes, device=server.total.present.device)),
        client=client,
        server=lambda server, aggregate, key: server,
        model=model,
        exchange=graph(network),
        prepare=lambda data: means(data, width),
        told=Told(lambda state: Vectors(state.told, state.known.vectors * state.told[..., None]), counts=("present",)),
        settings={
            "algorithm": "neighbour_search",
            "k": k,
            "width": width,
            "relay": relay,
            "edges": network.edges,
            "weights": network.weights,
        },
        start={},
    )


def with_vectors(known: Vectors, new: Tensor, vectors: Tensor) -> Vectors:
    """Return vectors with those of the nodes `new` `(K, n)` in place."""
    return Vectors(
        torch.where(new, 1.0, known.present), torch.where(new[..., None], vectors.to(torch.float64), known.vectors)
    )


def heard(inbox: Neighbourhood, known: Vectors, least: float) -> Vectors:
    """Return what nodes know with what is in their memory; those that several have told are the same."""
    heard: Vectors = inbox.heard.heard
    there = heard.present > least
    return with_vectors(known, there, heard.vectors / torch.where(there, heard.present, 1.0)[..., None])


def _nearest(known: Vectors, inbox: Neighbourhood, count: int) -> tuple[Tensor, Tensor]:
    """Return the nearest known others of each node and their distances, infinite ones last, `(K, count)`."""
    number = inbox.heard.number
    self_match = known.vectors.gather(1, number[:, None, None].expand(-1, 1, known.vectors.shape[2]))
    other = (known.present > 0) & (number[:, None] != torch.arange(known.present.shape[1], device=number.device))
    distances, order = torch.where(other, (known.vectors - self_match).norm(dim=2), math.inf).sort(dim=1, stable=True)
    return order[:, :count], distances[:, :count]


def _passed_on(known: Vectors, inbox: Neighbourhood, relay: int | None) -> Tensor:
    """Return the nodes whose vectors are told, besides one's own, `(K, n)` bool."""
    if relay is None:
        return known.present > 0
    order, distances = _nearest(known, inbox, relay)
    return torch.zeros_like(known.present, dtype=torch.bool).scatter(1, order, distances.isfinite())


def means(data: ClientData, width: int) -> Tensor:
    """Return the mean row of each client, `(K, m)` float64."""
    fields = [
        leaf.to(torch.float64).flatten(2) if leaf.ndim > 2 else leaf[..., None] for leaf in tree.leaves(data.batch)
    ]
    rows = torch.cat([leaf.to(torch.float64) for leaf in fields], 2)
    if rows.shape[2] != width:
        raise ValueError(f"Expected rows of {width} numbers, the width of the search, but got {rows.shape[2]}")
    empty = (data.count == 0).cpu().nonzero()[:, 0]
    if len(empty):
        raise BadClients(
            empty, "expected rows, the mean of which is the node's vector, but got none; leave the node out"
        )
    return rows.sum(1) / data.count[:, None]
