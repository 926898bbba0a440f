"""Exchange between neighbours in a network: no server, one sparse product in a round."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.exchanges.exchange import Exchange, Mean, RowsOf, Sum, indices, map_messages
from fedtorch.federation.exchanges.messages import in_order
from fedtorch.networks.network import Network
from fedtorch.tree import Rows, Tree

_PUSH = 4  # a product over all edges takes as long as pushing along a quarter of them


class Neighbourhood(NamedTuple):
    """A node's inbox in `graph`."""

    heard: Tree  # (K, ...) its row of the outbox
    degree: Tensor  # (K,) Σ_j A_ij, float64


def graph(network: Network) -> Exchange:
    r"""Exchange between neighbours: there is no server, and node i's message goes to its neighbours only.

    The aggregate has the structure of the message, `(n, ...)` and in float64 or complex128. Row i combines the messages
    of node i's neighbours that answered: for a `Sum` :math:`\sum_j A_{ij} v_j`, for a `Mean` the mean with weights
    :math:`A_{ij} w_j`, and zeros with weight zero if none did. The outbox has a row per node, as the aggregate has; an
    inbox is a `Neighbourhood`.

    If every node answers, the aggregate is one sparse product; a few active nodes push along their own edges. Blocks
    and ranks join their messages instead of adding `(n, ...)` sums, so that the product is computed once and its bits
    do not depend on the blocks.

    Traffic is counted over the edges: each message once per neighbour of its sender. Nothing is sent down.

    Args:
        network: has the clients as nodes, in their order.

    Example:
        >>> import torch, fedtorch as ft
        >>> exchange = ft.graph(ft.Network([[0, 1], [1, 2]]))
        >>> heard = exchange.finish(exchange.gather(ft.Sum(torch.tensor([1.0, 10.0, 100.0])), slice(0, 3)))
        >>> heard.value  # the middle node hears both ends
        tensor([ 10., 101.,  10.], dtype=torch.float64)
        >>> inbox: Neighbourhood = exchange.scatter(heard.value, torch.tensor([1]))
        >>> inbox
        Neighbourhood(heard=tensor([101.], dtype=torch.float64), degree=tensor([2.], dtype=torch.float64))
    """
    degrees, neighbours = network.degrees, network.neighbour_counts

    def scatter(outbox: Tree, ids: Rows) -> Neighbourhood:
        leaves = tree.leaves(outbox)
        return Neighbourhood(tree.take(outbox, ids), degrees[ids].to(leaves[0].device if leaves else "cpu"))

    return Exchange(
        scatter=scatter,
        gather=lambda messages, ids: RowsOf(indices(ids), map_messages(lambda node: node, messages)),
        merge=lambda partials: partials[0] if len(partials) == 1 else tree.concatenate(partials),
        finish=lambda partial: _hear(network, partial),
        traffic=lambda outbox, messages, ids: (int(neighbours[ids].sum()) * wire.size_of(tree.row_layout(messages)), 0),
        additive=False,
        heard_by="its neighbours",
        network=network,
    )


def _hear(network: Network, partial: RowsOf) -> Tree:
    """Return every node's aggregate of the messages of some nodes."""
    partial = in_order(partial)

    def hear(node: Mean | Sum) -> Mean | Sum:
        if isinstance(node, Sum):
            return Sum(_from_neighbours(network, partial.ids, node.value))
        weighted, weight = _from_neighbours(
            network, partial.ids, (tree.scale(tree.wide(node.value), node.weight), node.weight)
        )
        return Mean(tree.scale(weighted, torch.where(weight > 0, 1 / weight, 0.0)), weight)

    return map_messages(hear, partial.message)


def _from_neighbours(network: Network, ids: Tensor, values: Tree) -> Tree:
    """Return Σ_j A_ij v_j over the nodes j in `ids`, for all i: `(M, ...)` -> `(n, ...)` in float64 or complex128."""
    leaves = tree.leaves(tree.as_real(values))
    if not leaves:
        return values
    columns = [leaf.to(torch.float64).reshape(len(leaf), math.prod(leaf.shape[1:])) for leaf in leaves]
    rows = torch.cat(columns, 1) if len(columns) > 1 else columns[0]
    received = _product(network, ids.to(rows.device), rows).split([part.shape[1] for part in columns], 1)
    shaped = [part.reshape(network.nodes, *leaf.shape[1:]) for part, leaf in zip(received, leaves)]
    return tree.from_real(tree.refill(values, shaped), values)


def _product(network: Network, ids: Tensor, rows: Tensor) -> Tensor:
    """Return the columns `ids` of the adjacency matrix times `rows` `(M, D)`."""
    adjacency = network.adjacency(torch.float64, rows.device)
    if len(ids) == network.nodes:
        return adjacency @ rows
    first = adjacency.crow_indices().to(torch.int64)
    starts, counts = first[ids], first[ids + 1] - first[ids]
    if _PUSH * int(counts.sum()) > len(adjacency.values()):
        return adjacency @ rows.new_zeros(network.nodes, rows.shape[1]).index_copy_(0, ids, rows)
    edges = torch.arange(int(counts.sum()), device=ids.device)
    edges += (starts - counts.cumsum(0) + counts).repeat_interleave(counts)
    weighted = adjacency.values()[edges, None] * rows.repeat_interleave(counts, 0)
    return rows.new_zeros(network.nodes, rows.shape[1]).index_add_(0, adjacency.col_indices()[edges], weighted)
