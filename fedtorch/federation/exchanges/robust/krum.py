r"""Krum and multi-Krum: the messages that are nearest to their nearest neighbours.

The score of message i is the sum of its squared distances to its M − f − 2 nearest others; Krum takes the message of
the least score, multi-Krum the mean of the m messages of least scores.

Source: Blanchard, El Mhamdi, Guerraoui and Stainer (2017), "Machine learning with adversaries: Byzantine tolerant
gradient descent", section 4.

>>> import torch
>>> from fedtorch.federation.exchanges.robust.krum import krum
>>> messages = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]], dtype=torch.float64)
>>> weights = torch.full((5,), 0.2, dtype=torch.float64)
>>> krum(faulty=1).average(messages, weights)
tensor([2.], dtype=torch.float64)
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedtorch.federation.exchanges.robust.rules import (
    Rule,
    by_inner_products,
    check_faulty,
    normalised,
    squared_distances,
)


def krum(faulty: int, chosen: int = 1) -> Rule:
    """Build Krum, and multi-Krum for `chosen` > 1; it needs 2f + 3 messages.

    Args:
        faulty: f, the most messages that may be wrong.
        chosen: m, the number of messages in the weighted mean.

    Raises:
        ValueError: a negative number, or none chosen.
    """
    check_faulty(faulty)
    if not (isinstance(chosen, int) and chosen >= 1):
        raise ValueError(f"Expected at least one chosen message, but got {chosen!r}")
    name = "krum" if chosen == 1 else "multi-krum"
    least = max(2 * faulty + 3, chosen)
    return Rule(name, by_inner_products(partial(_chosen, faulty, chosen)), least, convex=True)


def scores(distances: Tensor, faulty: int, alive: Tensor | None = None, left: int = 0) -> Tensor:
    """Compute Krum's scores `(..., M)` of squared distances `(..., M, M)`, infinite for messages not `alive`.

    Args:
        distances: squared.
        faulty: f.
        alive: `(..., M)` bool, the candidates for neighbours.
        left: number of candidates in every batch.
    """
    count = distances.shape[-1]
    others = distances + torch.diag(torch.full((count,), torch.inf, dtype=distances.dtype, device=distances.device))
    if alive is not None:
        others = others.masked_fill(~(alive[..., None] & alive[..., None, :]), torch.inf)
        count = left
    neighbours = max(1, count - faulty - 2)
    return others.topk(neighbours, largest=False, sorted=False).values.sum(-1)


def _chosen(faulty: int, chosen: int, products: Tensor, weights: Tensor) -> Tensor:
    best = scores(squared_distances(products), faulty).topk(chosen, largest=False).indices
    return normalised(torch.zeros_like(weights).scatter(-1, best, weights.gather(-1, best)))
