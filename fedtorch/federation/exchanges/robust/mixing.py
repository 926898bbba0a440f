"""Nearest-neighbour mixing: every message is replaced by the mean of its M − f nearest ones, before another rule.

The error of any robust rule grows with the differences between honest clients' data; mixing reduces these differences
first.

Source: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan (2023), "Fixing by mixing: a recipe for optimal
Byzantine ML under heterogeneity", Algorithm 2.

>>> import torch
>>> from fedtorch.trust import robust
>>> messages = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]], dtype=torch.float64)
>>> weights = torch.full((5,), 0.2, dtype=torch.float64)
>>> robust.nearest_neighbour_mixing(1, robust.median()).average(messages, weights)
tensor([2.5000], dtype=torch.float64)
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedtorch.federation.exchanges.robust.rules import Rule, check_faulty, combined, inner_products, squared_distances


def nearest_neighbour_mixing(faulty: int, rule: Rule) -> Rule:
    """Return `rule` on mixed messages; it needs 2f + 1 messages, or as many as `rule`.

    Args:
        faulty: f, the most messages that may be wrong.
        rule: rule for the mixed messages, such as `trimmed_mean` or `krum`; weights are those of the messages.

    Raises:
        ValueError: a negative number, or a rule with a reference.
    """
    check_faulty(faulty)
    if rule.reference is not None:
        raise ValueError(f"Expected a rule without a reference, but got {rule.name}, which would be mixed with others")
    mixed = partial(_mixed, faulty, rule)
    return Rule(f"{rule.name} of nearest neighbours", mixed, max(2 * faulty + 1, rule.least), rule.convex)


def _mixed(faulty: int, rule: Rule, values: Tensor, weights: Tensor) -> Tensor:
    distances = squared_distances(inner_products(values))
    count = values.shape[-2] - faulty
    near = distances.topk(count, largest=False).indices  # each message is among its own
    mixing = torch.zeros_like(distances).scatter(-1, near, 1 / count)
    return rule.average(combined(mixing, values), weights)
