"""Who hears whom, and how messages add up.

Two kinds of message, both about this round and over those who answer. A `Mean` is multiplied by its weights and summed,
so weights travel inside and the aggregate is Σ w_k v_k / Σ w_k; a `Sum` is added up. What clients tell for good
(`Algorithm.told`) travels beside them as the `Sum` of its changes, see `Sent`.

A block's weighted sum is computed in the dtype of its values, with weights scaled to a sum of about one; sums of blocks
and ranks are in float64, so that all of them agree up to that rounding. The server takes what is fresh in the dtype of
the messages, and totals in float64.

What an author of an exchange needs, for clients that are a slice or a tensor of numbers:

>>> import torch, fedtorch as ft
>>> from fedtorch.federation.exchanges import exchange
>>> ids = slice(2, 4)
>>> exchange.client_count(ids), exchange.indices(ids)
(2, tensor([2, 3]))
>>> told = torch.tensor([[1.0], [4.0]])
>>> exchange.check_shapes(ft.Sum(told), ids)  # a row of each
>>> total = exchange.sum_over(ft.star(), told, ids)
>>> exchange.in_dtypes_of(ft.Sum(told), ft.Sum(total))  # of float64, as a server takes it
Sum(value=tensor([5.]))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.exchanges.weighted_sum import weighted_sum
from fedtorch.kernels.neighbours import neighbours
from fedtorch.tree import Rows, Tree

if TYPE_CHECKING:
    from fedtorch.networks.network import Network

_PUSH = 4  # a product over all edges takes as long as pushing along this part of them


class Mean(NamedTuple):
    """A message that is averaged. Aggregated, `weight` holds the total weight.

    Example:
        >>> import torch, fedtorch as ft
        >>> message = ft.Mean(torch.tensor([[1.0], [4.0]]), weight=torch.tensor([2.0, 1.0]))  # of two clients
        >>> exchange = ft.star()
        >>> exchange.finish(exchange.gather(message, slice(0, 2))).value
        tensor([2.], dtype=torch.float64)
    """

    value: Tree  # (K, ...)
    weight: Tensor  # (K,) not negative


class Sum(NamedTuple):
    """A message that is added up.

    Example:
        >>> import torch, fedtorch as ft
        >>> exchange = ft.star()
        >>> exchange.finish(exchange.gather(ft.Sum(torch.tensor([[1.0], [4.0]])), slice(0, 2))).value
        tensor([5.], dtype=torch.float64)
    """

    value: Tree  # (K, ...)


class Sent(NamedTuple):
    """What clients of an algorithm with `told` send in a round; the exchange treats both alike.

    >>> import torch, fedtorch as ft
    >>> ft.star().finish(ft.star().gather(Sent(Sum(torch.ones(3)), told=Sum(torch.tensor([1.0, 0.0, 4.0]))), slice(3)))
    Sent(fresh=Sum(value=tensor(3., dtype=torch.float64)), told=Sum(value=tensor(5., dtype=torch.float64)))
    """

    fresh: Tree  # the message of the `Reply`
    told: Sum  # by how much what it tells for good has changed


class RowsOf(NamedTuple):
    """The aggregate of `private_rows`: the messages as they came, in ascending order of the clients."""

    ids: Tensor  # (M,)
    message: Tree  # (M, ...)


class Neighbourhood(NamedTuple):
    """What a node of `graph` hears."""

    heard: Tree  # (K, ...) its row of the outbox
    degree: Tensor  # (K,) Σ_j A_ij, float64


class Exchange(NamedTuple):
    """How a round's values travel. `ids` are the clients of a block: indices, or a slice of consecutive ones (views).

    A partial aggregate of one block is merged with others, and finished once. `additive` says that partials merge by
    adding their leaves, so that ranks can meet by `all_reduce`; otherwise they are gathered. Who in between can read
    messages is not the exchange's business, but that of a population's `carry`.

    Example:
        >>> import torch, fedtorch as ft
        >>> exchange = ft.star()
        >>> blocks = [exchange.gather(ft.Sum(torch.ones(len(ids), 1)), torch.tensor(ids)) for ids in ([0, 1], [2])]
        >>> exchange.finish(exchange.merge(blocks)).value
        tensor([3.], dtype=torch.float64)
    """

    scatter: Callable[[Tree, Rows], Tree]  # (outbox, ids) -> inboxes (K, ...)
    gather: Callable[[Tree, Rows], Tree]  # (messages (K, ...), ids) -> partial aggregate
    merge: Callable[[Sequence[Tree]], Tree]  # partials -> partial
    finish: Callable[[Tree], Tree]  # partial -> aggregate: Mean and Sum where the message has them, or RowsOf
    traffic: Callable[[Tree, Tree, Rows], tuple[int, int]]  # (outbox, messages, ids) -> (bytes up, bytes down)
    additive: bool


def client_count(ids: Rows) -> int:
    """How many clients `ids` names."""
    return ids.stop - ids.start if isinstance(ids, slice) else len(ids)


def sum_over(exchange: Exchange, value: Tree, ids: Rows) -> Tree:
    """What `exchange` makes of the `Sum` of `value` `(K, ...)` over the clients `ids`."""
    return exchange.finish(exchange.gather(Sum(value), ids)).value


def in_dtypes_of(messages: Tree, aggregate: Tree) -> Tree:
    """The aggregate as a server takes it: floats in the dtypes of the messages, sums of whole numbers in float64."""
    if isinstance(aggregate, RowsOf):
        return aggregate  # as they came

    def cast(total: Tensor, sent: Tensor) -> Tensor:
        return total.to(sent.dtype) if sent.is_floating_point() else total

    return tree.map(
        lambda node, sent: node._replace(value=tree.map(cast, node.value, sent.value)),
        aggregate,
        messages,
        is_leaf=(Mean, Sum),
    )


def check_shapes(messages: Tree, ids: Rows) -> None:
    """Raises ValueError unless every tensor of the messages has a row per client, and weights nothing more."""
    count = client_count(ids)

    def check(node: Mean | Sum) -> Mean | Sum:
        for name, leaf in tree.items(node):
            if leaf.shape[:1] != (count,) or (isinstance(node, Mean) and leaf is node.weight and leaf.ndim > 1):
                wanted = "weights (K,)" if name == "weight" else "values (K, ...)"
                raise ValueError(
                    f"Expected messages with {wanted} of K = {count} clients, but got shape {tuple(leaf.shape)} in "
                    f"{name!r} of a {type(node).__name__}; see what Algorithm.client returns"
                )
        return node

    _map_messages(check, messages)


def indices(ids: Rows) -> Tensor:
    """`ids` as a tensor of indices."""
    return torch.arange(ids.start, ids.stop) if isinstance(ids, slice) else ids


def star() -> Exchange:
    """A server in the middle: every client hears the outbox, and the server hears everybody's sum.

    The aggregate has the structure of the message, without the leading dimension and in float64: `Mean(value, weight)`
    holds the weighted mean and the total weight, `Sum(value)` the sum.

    Example:
        >>> import torch, fedtorch as ft
        >>> ft.star().scatter(torch.tensor([1.0, 2.0]), slice(0, 3)).shape  # all three clients hear the same
        torch.Size([3, 2])
    """
    return Exchange(
        scatter=lambda outbox, ids: tree.expand(outbox, client_count(ids)),
        gather=_add_up,
        merge=_add_all,
        finish=_average,
        traffic=lambda outbox, messages, ids: (
            client_count(ids) * wire.row_size(messages),
            client_count(ids) * wire.size(outbox),
        ),
        additive=True,
    )


def private_rows() -> Exchange:
    """A row of the outbox per client: client k hears row k only, and its message arrives as row k of `RowsOf`.

    Example:
        >>> import torch, fedtorch as ft
        >>> exchange = ft.private_rows()
        >>> exchange.scatter(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2]))  # client 2 hears row 2
        tensor([[3.]])
        >>> blocks = [exchange.gather(ft.Sum(torch.tensor([k + 1.0])), torch.tensor([k])) for k in (2, 0)]
        >>> heard: RowsOf = exchange.finish(exchange.merge(blocks))
        >>> heard
        RowsOf(ids=tensor([0, 2]), message=Sum(value=tensor([1., 3.])))
    """
    return Exchange(
        scatter=tree.take,
        gather=lambda messages, ids: RowsOf(indices(ids), _map_messages(lambda node: node, messages)),
        merge=tree.concatenate,  # a copy even of one block, so that the server may keep rows
        finish=_in_order,
        traffic=lambda outbox, messages, ids: (
            client_count(ids) * wire.row_size(messages),
            client_count(ids) * wire.row_size(outbox),
        ),
        additive=False,
    )


def graph(network: Network) -> Exchange:
    r"""Neighbours hear each other: there is no server, and node i's message goes to its neighbours only.

    The aggregate has the structure of the message, `(n, ...)` and in float64. Row i is what the neighbours of node i
    have told: for a `Sum` :math:`\sum_j A_{ij} v_j` over those that answered, for a `Mean` the mean with
    weights :math:`A_{ij} w_j`, and zeros with weight zero where nobody did. The outbox has a row per node, as the
    aggregate has; an inbox is a `Neighbourhood`.

    When every node answers, the aggregate is one sparse product; a few active nodes push along their own edges. Blocks
    and ranks meet by joining their messages, not by adding `(n, ...)` sums, so that the product is done once and
    its bits are the same in any blocks.

    Traffic is what goes over the edges: a message as often as its sender has neighbours. Nothing comes down.

    Args:
        network: whose nodes are the clients, in their order.

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
        gather=lambda messages, ids: RowsOf(indices(ids), _map_messages(lambda node: node, messages)),
        merge=lambda partials: partials[0] if len(partials) == 1 else tree.concatenate(partials),
        finish=lambda partial: _hear(network, partial),
        traffic=lambda outbox, messages, ids: (int(neighbours[ids].sum()) * wire.row_size(messages), 0),
        additive=False,
    )


def _add_up(messages: Tree, ids: Rows) -> Tree:
    return _map_messages(_sum, messages)


def _average(partial: Tree) -> Tree:
    return _map_messages(_divide, partial)


def _map_messages(function: Callable[[Mean | Sum], Tree], message: Tree) -> Tree:
    def apply(node: Mean | Sum | Tensor) -> Tree:
        if isinstance(node, Tensor):
            raise TypeError("Expected the message's nodes to be Mean or Sum, but got a bare tensor; wrap it")
        return function(node)

    return tree.map(apply, message, is_leaf=(Mean, Sum))


def _sum(message: Mean | Sum) -> Mean | Sum:
    """The partial aggregate of one block: Σ w v and Σ w, or Σ v."""
    if isinstance(message, Sum):
        return Sum(tree.map(lambda v: v.sum(0, dtype=torch.float64), message.value))
    return Mean(tree.map(lambda v: weighted_sum(message.weight, v), message.value), message.weight.double().sum())


def _divide(partial: Mean | Sum) -> Mean | Sum:
    if isinstance(partial, Sum):
        return partial
    total = float(partial.weight)
    if not total > 0:
        raise ValueError(f"Expected a positive total weight of the clients that answered, but got {total}; see weight=")
    return Mean(tree.map(lambda leaf: leaf / total, partial.value), partial.weight)


def _add_all(partials: Sequence[Tree]) -> Tree:
    total = partials[0]
    for partial in partials[1:]:
        total = tree.add(total, partial)
    return total


def _hear(network: Network, partial: RowsOf) -> Tree:
    """What every node hears of the messages of some."""
    partial = _in_order(partial)

    def hear(node: Mean | Sum) -> Mean | Sum:
        if isinstance(node, Sum):
            return Sum(_from_neighbours(network, partial.ids, node.value))
        weighted, weight = _from_neighbours(
            network, partial.ids, (tree.scale(tree.to(node.value, torch.float64), node.weight), node.weight)
        )
        return Mean(tree.scale(weighted, torch.where(weight > 0, 1 / weight, 0.0)), weight)

    return _map_messages(hear, partial.message)


def _from_neighbours(network: Network, ids: Tensor, values: Tree) -> Tree:
    """Σ_j A_ij v_j over the nodes j in `ids`, for all i: `(M, ...)` -> `(n, ...)` in float64."""
    leaves = tree.leaves(values)
    if not leaves:
        return values
    columns = [leaf.to(torch.float64).reshape(len(leaf), math.prod(leaf.shape[1:])) for leaf in leaves]
    rows = torch.cat(columns, 1) if len(columns) > 1 else columns[0]
    heard = _product(network, ids.to(rows.device), rows).split([part.shape[1] for part in columns], 1)
    return tree.refill(values, [part.reshape(network.nodes, *leaf.shape[1:]) for part, leaf in zip(heard, leaves)])


def _product(network: Network, ids: Tensor, rows: Tensor) -> Tensor:
    """The columns `ids` of the adjacency matrix times `rows` `(M, D)`."""
    adjacency = network.adjacency(torch.float64, rows.device)
    if len(ids) == network.nodes:
        return neighbours(adjacency, rows)
    first = adjacency.crow_indices().to(torch.int64)
    starts, counts = first[ids], first[ids + 1] - first[ids]
    if _PUSH * int(counts.sum()) > len(adjacency.values()):
        return neighbours(adjacency, rows.new_zeros(network.nodes, rows.shape[1]).index_copy_(0, ids, rows))
    edges = torch.arange(int(counts.sum()), device=ids.device)
    edges += (starts - counts.cumsum(0) + counts).repeat_interleave(counts)
    told = adjacency.values()[edges, None] * rows.repeat_interleave(counts, 0)
    return rows.new_zeros(network.nodes, rows.shape[1]).index_add_(0, adjacency.col_indices()[edges], told)


def _in_order(partial: RowsOf) -> RowsOf:
    """The messages in ascending order of the clients, as a single block's already are."""
    if bool((partial.ids[1:] > partial.ids[:-1]).all()):
        return partial
    order = partial.ids.argsort()
    rows = tree.map(lambda leaf: leaf.index_select(0, order.to(leaf.device)), partial.message)
    return RowsOf(partial.ids[order], rows)
