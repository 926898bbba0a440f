"""Who hears whom, and how messages add up.

Two kinds of message. A `Mean` is fresh each round: the exchange multiplies by the weights and sums, so weights travel
inside and the aggregate is Σ w_k v_k / Σ w_k. An `Increment` telescopes: the exchange sums it, and an algorithm that
sends increments keeps in its client state what it has `sent` so far, so that *server sum = Σ sent* at all times.

A block's weighted sum is computed in the dtype of its values; sums of blocks and ranks are kept in float64, so that all
of them agree up to that rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.tree import Rows, Tree

__all__ = ["Exchange", "Increment", "Mean", "RowsOf", "client_count", "indices", "private_rows", "star"]


class Mean(NamedTuple):
    """A message that is averaged. Aggregated, `weight` holds the total weight."""

    value: Tree  # (K, ...)
    weight: Tensor  # (K,) positive


class Increment(NamedTuple):
    """A message that is added to what its sender has told before."""

    value: Tree  # (K, ...)


class RowsOf(NamedTuple):
    """The aggregate of `private_rows`: the messages as they came, in ascending order of the clients."""

    ids: Tensor  # (M,)
    message: Tree  # (M, ...)


class Exchange(NamedTuple):
    """How a round's values travel. `ids` are the clients of a block: indices, or a slice of consecutive ones (views).

    A partial aggregate of one block is merged with others, and finished once. `additive` says that partials merge by
    adding their leaves, so that ranks can meet by `all_reduce`; otherwise they are gathered.
    """

    scatter: Callable[[Tree, Rows], Tree]  # (outbox, ids) -> inboxes (K, ...)
    gather: Callable[[Tree, Rows], Tree]  # (messages (K, ...), ids) -> partial aggregate
    merge: Callable[[Sequence[Tree]], Tree]  # partials -> partial
    finish: Callable[[Tree], Tree]  # partial -> aggregate
    traffic: Callable[[Tree, Tree, Rows], tuple[int, int]]  # (outbox, messages, ids) -> (bytes up, bytes down)
    additive: bool


def client_count(ids: Rows) -> int:
    """How many clients `ids` names."""
    return ids.stop - ids.start if isinstance(ids, slice) else len(ids)


def indices(ids: Rows) -> Tensor:
    """`ids` as a tensor of indices."""
    return torch.arange(ids.start, ids.stop) if isinstance(ids, slice) else ids


def star() -> Exchange:
    """A server in the middle: every client hears the outbox, and the server hears everybody's sum.

    The aggregate has the structure of the message, without the leading dimension and in float64: `Mean(value, weight)`
    holds the weighted mean and the total weight, `Increment(value)` the sum.
    """
    return Exchange(
        scatter=lambda outbox, ids: tree.expand(outbox, client_count(ids)),
        gather=lambda messages, ids: _map_messages(_sum, messages),
        merge=_add_all,
        finish=lambda partial: _map_messages(_divide, partial),
        traffic=lambda outbox, messages, ids: (
            client_count(ids) * wire.row_size(messages),
            client_count(ids) * wire.size(outbox),
        ),
        additive=True,
    )


def private_rows() -> Exchange:
    """A row of the outbox per client: client k hears row k only, and its message arrives as row k of `RowsOf`."""
    return Exchange(
        scatter=tree.take,
        gather=lambda messages, ids: RowsOf(indices(ids), _map_messages(lambda node: node, messages)),
        merge=tree.concatenate,
        finish=_in_order,
        traffic=lambda outbox, messages, ids: (
            client_count(ids) * wire.row_size(messages),
            client_count(ids) * wire.row_size(outbox),
        ),
        additive=False,
    )


def _map_messages(function: Callable[[Mean | Increment], Tree], message: Tree) -> Tree:
    def apply(node: Mean | Increment | Tensor) -> Tree:
        if isinstance(node, Tensor):
            raise TypeError("Expected the message's nodes to be Mean or Increment, but got a bare tensor; wrap it")
        return function(node)

    return tree.map(apply, message, is_leaf=(Mean, Increment))


def _sum(message: Mean | Increment) -> Mean | Increment:
    """The partial aggregate of one block: Σ w v and Σ w, or Σ v."""
    if isinstance(message, Increment):
        return Increment(tree.map(lambda v: v.sum(0, dtype=torch.float64), message.value))
    weight = message.weight
    return Mean(tree.map(lambda v: _weighted_sum(weight, v), message.value), weight.sum(dtype=torch.float64))


def _weighted_sum(weight: Tensor, value: Tensor) -> Tensor:
    dtype = value.dtype if value.dtype in (torch.float32, torch.float64) else torch.float64
    rows = value.flatten(1) if value.ndim > 1 else value[:, None]
    return (weight.to(dtype) @ rows.to(dtype)).to(torch.float64).reshape(value.shape[1:])


def _divide(partial: Mean | Increment) -> Mean | Increment:
    if isinstance(partial, Increment):
        return partial
    total = float(partial.weight)
    if not total > 0:
        raise ValueError(f"Expected a positive total weight of the clients that answered, but got {total}; see weight=")
    return Mean(tree.scale(partial.value, 1 / total), partial.weight)


def _add_all(partials: Sequence[Tree]) -> Tree:
    total = partials[0]
    for partial in partials[1:]:
        total = tree.add(total, partial)
    return total


def _in_order(partial: RowsOf) -> RowsOf:
    order = partial.ids.argsort()
    rows = tree.map(lambda leaf: leaf.index_select(0, order.to(leaf.device)), partial.message)
    return RowsOf(partial.ids[order], rows)
