"""All clients' messages of a round together, stored until its end, and as rows of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.exchanges.exchange import Exchange, Mean, RowsOf, Sum, indices
from fedtorch.tree import Tree


def kept(exchange: Exchange, finish: Callable[[RowsOf], Tree]) -> Exchange:
    """Build an exchange that stores the messages of a round, and finishes with all of them in ascending order of
    clients.

    Args:
        exchange: scatters the outbox and counts the traffic.
        finish: messages `(M, ...)` of a round -> aggregate.
    """
    return exchange._replace(
        gather=lambda messages, ids: RowsOf(indices(ids), messages),
        merge=lambda partials: partials[0] if len(partials) == 1 else tree.concatenate(partials),
        finish=lambda batch: finish(in_order(batch)),
        additive=False,
    )


@dataclass(frozen=True)
class Changed:
    """Finish of an exchange after a change of the round's messages together."""

    exchange: Exchange
    change: Callable[[RowsOf], RowsOf]
    refusal: str  # why the exchange does not support changed messages; empty if it does

    def __call__(self, batch: RowsOf) -> Tree:
        if self.refusal:
            raise ValueError(self.refusal)
        changed_rows = self.change(in_order(batch))
        return self.exchange.finish(self.exchange.gather(changed_rows.message, changed_rows.ids))


def changed(exchange: Exchange, change: Callable[[RowsOf], RowsOf], refusal: str = "") -> Exchange:
    """Build `exchange` with a change of each round's messages that needs all of them at once."""
    return kept(exchange, in_order)._replace(finish=Changed(exchange, change, refusal))


def before_changes(exchange: Exchange) -> tuple[Exchange, Callable[[Exchange], Exchange]]:
    """Return the exchange before changes, and a function that applies the same changes before another exchange."""
    outer = exchange.finish
    if not isinstance(outer, Changed):
        return exchange, lambda other: other
    plain, again = before_changes(outer.exchange._replace(scatter=exchange.scatter, traffic=exchange.traffic))
    return plain, lambda other: changed(again(other), outer.change)


def in_order(messages: RowsOf, first: int | None = None) -> RowsOf:
    """Return messages in ascending order of the clients, one of them first."""
    ids = messages.ids if first is None else torch.where(messages.ids == first, -1, messages.ids)
    if bool((ids[1:] > ids[:-1]).all()):
        return messages
    return tree.take(messages, ids.argsort())


def rows(value: Tree) -> Tensor:
    """Return a stacked tree `(M, ...)` as one matrix `(M, D)` in the widest of its dtypes.

    A complex number is two real ones, side by side.
    """
    leaves = [leaf.reshape(len(leaf), leaf.shape[1:].numel()) for leaf in tree.leaves(tree.as_real(value))]
    return torch.cat(leaves, 1) if len(leaves) > 1 else leaves[0]


def like(numbers: Tensor, value: Tree) -> Tree:
    """Return numbers `(..., D)` in the structure of a stacked tree `(M, ...)`, whose leading dimension they lack."""
    shapes = [leaf.shape[1:] for leaf in tree.leaves(tree.as_real(value))]
    parts = numbers.split([shape.numel() for shape in shapes], -1)
    shaped = [part.reshape((*numbers.shape[:-1], *shape)) for part, shape in zip(parts, shapes)]
    return tree.from_real(tree.refill(value, shaped), value)


def as_sums(node: Mean | Sum) -> Mean | Sum:
    """Return the part of a message that is added up, in the widest dtype of its kind."""
    wide = tree.wide(node.value)
    if isinstance(node, Sum):
        return Sum(wide)
    weight = node.weight.to(torch.float64)
    return Mean(tree.scale(wide, weight), weight)


def as_aggregate(node: Mean | Sum) -> Mean | Sum:
    """Return a star's aggregate from added messages."""
    if isinstance(node, Sum):
        return node
    weight = node.weight
    if not float(weight) > 0:
        raise ValueError(f"Expected a positive total weight of the clients that answered, but got {float(weight)}")
    return Mean(tree.scale(node.value, 1 / float(weight)), weight)
