r"""Graph learning by message passing: each node finds the nodes most similar to it through its neighbours.

Node i has a vector z_i, such as its mean label or the parameters of its own fit. The given network defines who can
exchange messages; it may differ from the network that is searched for. In every round a node sends its neighbours its
own vector and, of the vectors received so far, those of the `relay` nodes nearest to it. After r rounds it may thus
have vectors of nodes up to r edges away. It computes the discrepancies ‖z_i − z_j‖ itself and chooses the k nearest of
these nodes: the first way of section 7.4 to learn a network, without any place that has all vectors.

With `relay=0` nodes choose among their neighbours. With `relay=None` they pass everything on, and after as many rounds
as the network's diameter all have found their nearest nodes overall. In between they find them if similar nodes are
near each other; or by a further search over the chosen network plus some random edges.

Disclosure:

- *A node* learns the vectors it has received, with their owners, exactly: with `relay=0` its neighbours'. Vectors are
  summaries of rows, and rows can be reconstructed from parameters that fit few rows; noise should be added to the
  vectors before they become the data of this algorithm.
- *A node that lies* is not detected. It can take any place in its neighbours' lists, and with a relay also send false
  vectors in the name of nodes further away; it cannot affect nodes that receive nothing through it.
- *The server between sites* (`ft.Remote`) with `carry=ft.sites.sealed(network)` learns the network, which nodes answer
  and how long messages are: no vector, no discrepancy, and no node's choice. Without seals it reads all messages.
- *One process*, `ft.InProcess`, has everything: it simulates the nodes' search.

A message has n(m + 1) numbers for n nodes and vectors of m, zeros for absent vectors.

Source: Jung, "Federated learning: from theory to practice", section 7.4; for searches over the chosen network, Dong,
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
    """Vectors of some of the n nodes, or a sum of these over neighbours."""

    present: Tensor  # (K, n) one for a vector that is present, else zero; in sums, Σ A_ij over its senders
    vectors: Tensor  # (K, n, m) zeros for absent vectors


class _State(NamedTuple):
    """State of a node; leaves `(K, ...)`."""

    known: Vectors
    told: Tensor  # (n,) one for nodes whose vectors this node sends


class NeighboursServer(NamedTuple):
    """The nodes' received messages, `(n, ...)`; row i is node i's memory."""

    total: Tree = None


class _Outbox(NamedTuple):
    """A node's inputs; only the received messages have travelled."""

    heard: Vectors
    number: Tensor  # (n,) of the node


def neighbour_search(network: Network, k: int, width: int, *, relay: int | None = 0) -> Algorithm:
    """Build each node's search for the k nodes most similar to it, by messages over a network.

    A node's vector is the mean of its rows, all fields side by side; a known vector is passed as one row. The results
    are the nodes' tensors: `neighbours` `(k,)`, nearest first, −1 for missing ones, and their `distances`, from which
    `ft.Network.from_neighbours` makes the network. Vectors must not change during the search.

    Args:
        network: over which nodes talk, with a node for each client, in their order. Its weights do not matter.
        k: number of nodes that each node chooses.
        width: m, how many numbers a vector has.
        relay: number of nearest nodes whose vectors a node passes on; None for all.

    Shapes: server state is `NeighboursServer`; client state has the vectors that a node has, `(K, n)` and `(K, n, m)`.

    Raises:
        ValueError: k, width or relay out of range; at the start of a run, a network of another size, or rows of another
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
    """Return vectors with those of the nodes `new` `(K, n)` replaced."""
    return Vectors(
        torch.where(new, 1.0, known.present), torch.where(new[..., None], vectors.to(torch.float64), known.vectors)
    )


def heard(inbox: Neighbourhood, known: Vectors, least: float) -> Vectors:
    """Merge received vectors into each node's memory, without duplicates."""
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
    """Return the nodes whose vectors are sent, besides the node's own, `(K, n)` bool."""
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
