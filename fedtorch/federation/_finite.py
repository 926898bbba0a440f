"""Whether messages are finite, and whose are not."""

from __future__ import annotations

import math

from fedtorch import tree
from fedtorch.tree import Tree


def is_finite(partial: Tree) -> bool:
    """Whether a partial aggregate is finite, as it is where all messages are: NaN and Inf add up to NaN or Inf."""
    sums = [leaf.sum() for leaf in tree.leaves(partial) if leaf.is_floating_point()]
    return not sums or math.isfinite(sum(sums[1:], sums[0]))


def not_finite(messages: Tree) -> dict[int, str]:
    """The rows of messages `(K, ...)` that have NaN or Inf, and the field in which they have it."""
    found: dict[int, str] = {}
    for name, leaf in tree.items(messages):
        if leaf.is_floating_point() and leaf.numel():
            bad = ~leaf.reshape(len(leaf), -1).isfinite().all(1)
            found = {**dict.fromkeys(bad.nonzero()[:, 0].tolist(), name), **found}
    return found
