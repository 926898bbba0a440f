"""Whether messages can be added up: finite, with weights of at least 0; and whose cannot."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.exchanges.exchange import Mean, Sum
from fedtorch.tree import Tree


def is_finite(partial: Tree, messages: Tree = None) -> bool:
    """Return whether a partial aggregate is finite and no weight of messages is negative; one number is read.

    NaN and Inf in messages add up to NaN or Inf; a negative weight counts as NaN here.
    """
    sums = [leaf.sum() for leaf in tree.leaves(partial) if leaf.is_floating_point()]
    sums += [torch.where((weight < 0).any(), torch.nan, 0.0) for weight in weights(messages)]
    return not sums or math.isfinite(sum(sums[1:], sums[0]))


def has_negative_weights(messages: Tree) -> bool:
    """Return whether a `Mean` of messages, or of a partial aggregate, has a weight below 0."""
    return any(bool((weight < 0).any()) for weight in weights(messages))


def not_finite(messages: Tree) -> dict[int, str]:
    """The rows of messages `(K, ...)` that have NaN, Inf or a negative weight, and the field in which they have it."""
    found: dict[int, str] = {}
    those = {id(weight) for weight in weights(messages)}
    for name, leaf in tree.items(messages):
        if leaf.numel():
            bad = ~leaf.reshape(len(leaf), -1).isfinite().all(1)
            if id(leaf) in those:
                bad |= leaf < 0
            found = {**dict.fromkeys(bad.nonzero()[:, 0].tolist(), name), **found}
    return found


def check_sum(partial: Tree, clients: int) -> None:
    """Raises ValueError if messages that are finite add up to what is not."""
    for name, leaf in tree.items(partial):
        if not bool(leaf.isfinite().all()):
            raise ValueError(
                f"Expected messages of {clients} clients with a finite sum, but got NaN or Inf in {name!r}; make their "
                "weights or values smaller"
            )


def weights(messages: Tree) -> list[Tensor]:
    """The weights of every `Mean` of messages, or of a partial aggregate."""
    found: list[Tensor] = []

    def look(node: Mean | Sum | Tensor) -> Mean | Sum | Tensor:
        if isinstance(node, Mean):
            found.append(node.weight)
        return node

    tree.map(look, messages, is_leaf=(Mean, Sum))
    return found
