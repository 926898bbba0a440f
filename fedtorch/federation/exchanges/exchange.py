"""Exchanges: which client receives from which, and how messages add up.

There are two kinds of message, both about this round and over the clients that answer. A `Mean` is multiplied by its
weights and summed, so weights travel inside and the aggregate is Σ w_k v_k / Σ w_k; a `Sum` is added up. Persistent
contributions of clients (`Algorithm.told`) travel as the `Sum` of their changes, see `Sent`.

A block's weighted sum is computed in the dtype of its values, with weights scaled to a sum of about one; sums of blocks
and ranks are in float64, so that all of them agree up to that rounding. The server receives the round's means in the
dtype of the messages, and totals in float64. Complex numbers stay complex: each is summed as two real numbers.

Helpers for authors of an exchange, with clients given as a slice or a tensor of indices:

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

from fedtorch import tree
from fedtorch.tree import Rows, Tree

if TYPE_CHECKING:
    from fedtorch.networks.network import Network


class Mean(NamedTuple):
    """A message that is averaged. In an aggregate, `weight` is the total weight.

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
    """A round's message of an algorithm with `told`; the exchange treats both parts alike."""

    fresh: Tree  # the message of the `Reply`
    told: Sum  # change of the persistent contribution


class RowsOf(NamedTuple):
    """Aggregate of `private_rows`: the unchanged messages, in ascending order of the clients."""

    ids: Tensor  # (M,)
    message: Tree  # (M, ...)


class Exchange(NamedTuple):
    """How a round's values travel. `ids` are the clients of a block: indices, or a slice of consecutive ones.

    A partial aggregate of one block is merged with others, and finished once. `additive` means that partials merge by
    adding their leaves, so that ranks can use `all_reduce`; otherwise they are gathered. Confidentiality towards
    intermediaries is not part of the exchange, but of a population's `carry`.

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
    heard_by: str = "the server"  # recipient of the clients' messages, as disclosures name it
    network: Network | None = None  # network with the clients as nodes, for reports and records


def client_count(ids: Rows) -> int:
    """Return how many clients `ids` names."""
    return ids.stop - ids.start if isinstance(ids, slice) else len(ids)


def sum_over(exchange: Exchange, value: Tree, ids: Rows) -> Tree:
    """Return the aggregate of the `Sum` of `value` `(K, ...)` over the clients `ids`."""
    return exchange.finish(exchange.gather(Sum(value), ids)).value


def in_dtypes_of(messages: Tree, aggregate: Tree) -> Tree:
    """Cast an aggregate for the server to the dtypes of the messages; sums of integers stay float64."""
    if isinstance(aggregate, RowsOf):
        return aggregate  # unchanged

    def cast(total: Tensor, sent: Tensor) -> Tensor:
        return total.to(sent.dtype) if sent.is_floating_point() or sent.is_complex() else total

    return tree.map(
        lambda node, sent: node._replace(value=tree.map(cast, node.value, sent.value)),
        aggregate,
        messages,
        is_leaf=(Mean, Sum),
    )


def check_shapes(messages: Tree, ids: Rows) -> None:
    """Raise ValueError unless every tensor of the messages has a row per client, and weights are vectors."""
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

    map_messages(check, messages)


def indices(ids: Rows) -> Tensor:
    """Return `ids` as a tensor of indices."""
    return torch.arange(ids.start, ids.stop) if isinstance(ids, slice) else ids


def map_messages(function: Callable[[Mean | Sum], Tree], message: Tree) -> Tree:
    """Apply a function to every Mean and Sum of a message; raise TypeError for bare tensors.

    >>> map_messages(lambda node: type(node).__name__, {"mean": Mean(torch.ones(2), torch.ones(2)), "sum": Sum(None)})
    {'mean': 'Mean', 'sum': 'Sum'}
    """

    def apply(node: Mean | Sum | Tensor) -> Tree:
        if isinstance(node, Tensor):
            raise TypeError("Expected the message's nodes to be Mean or Sum, but got a bare tensor; wrap it")
        return function(node)

    return tree.map(apply, message, is_leaf=(Mean, Sum))


def is_finite(partial: Tree, messages: Tree = None) -> bool:
    """Return whether a partial aggregate is finite and no weight of messages is negative; one number is read.

    NaN and Inf in messages add up to NaN or Inf; a negative weight counts as NaN here.
    """
    numbers = [leaf for leaf in tree.leaves(tree.as_real(partial)) if leaf.is_floating_point()]
    all_weights = weights(messages)
    sums = [leaf.sum() for leaf in numbers]
    sums += [weight.clamp(max=0).sqrt().sum() for weight in all_weights]  # roots of negative weights are NaN
    return not sums or math.isfinite(sum(sums[1:], sums[0]))


def has_negative_weights(messages: Tree) -> bool:
    """Return whether a `Mean` of messages, or of a partial aggregate, has a weight below 0.

    >>> has_negative_weights(Mean(torch.ones(2, 1), weight=torch.tensor([1.0, -2.0])))
    True
    """
    return any(bool((weight < 0).any()) for weight in weights(messages))


def not_finite(messages: Tree) -> dict[int, str]:
    """Return the rows of messages `(K, ...)` that have NaN, Inf or a negative weight, and the field that has it."""
    refused: dict[int, str] = {}
    of_means = {id(weight) for weight in weights(messages)}
    for name, leaf in tree.items(messages):
        if leaf.numel():
            bad = ~leaf.reshape(len(leaf), -1).isfinite().all(1)
            if id(leaf) in of_means:
                bad |= leaf < 0
            refused = {**dict.fromkeys(bad.nonzero()[:, 0].tolist(), name), **refused}
    return refused


def check_sum(partial: Tree, clients: int) -> None:
    """Raise ValueError if finite messages add up to a sum that is not finite.

    >>> check_sum(Sum(torch.tensor([torch.inf])), clients=3)
    Traceback (most recent call last):
    ValueError: Expected messages of 3 clients with a finite sum, but got NaN or Inf in 'value'; make their weights ...
    """
    for name, leaf in tree.items(partial):
        if not bool(leaf.isfinite().all()):
            raise ValueError(
                f"Expected messages of {clients} clients with a finite sum, but got NaN or Inf in {name!r}; make their "
                "weights or values smaller"
            )


def weights(messages: Tree) -> list[Tensor]:
    """Return the weights of every `Mean` of messages, or of a partial aggregate."""
    if isinstance(messages, Mean):
        return [messages.weight]
    if messages is None or isinstance(messages, (Tensor, Sum)):
        return []
    nodes = messages.values() if isinstance(messages, dict) else messages
    return [weight for node in nodes for weight in weights(node)]
