r"""Bulyan: messages chosen by Krum one after another, then every coordinate's values nearest to their median.

Krum chooses M − 2f messages, one after the other, and every coordinate of the average is the mean of the M − 4f values
among them that are nearest to their median.

Source: El Mhamdi, Guerraoui and Rouault (2018), "The hidden vulnerability of distributed learning in Byzantium",
section 4.

>>> import torch
>>> from fedtorch.federation.exchanges.robust.bulyan import bulyan
>>> messages = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [100.0]], dtype=torch.float64)
>>> bulyan(faulty=1).average(messages, torch.full((7,), 1 / 7, dtype=torch.float64))
tensor([3.], dtype=torch.float64)
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedtorch.federation.exchanges.robust._order import ascending, middle
from fedtorch.federation.exchanges.robust.krum import scores
from fedtorch.federation.exchanges.robust.rules import (
    Rule,
    by_columns,
    check_faulty,
    inner_products,
    squared_distances,
)


def bulyan(faulty: int) -> Rule:
    """Build Bulyan, which needs 4f + 3 messages and takes all weights as equal.

    Args:
        faulty: f, the most messages that may be wrong.

    Raises:
        ValueError: a negative number.
    """
    check_faulty(faulty)
    return Rule("bulyan", partial(_bulyan, faulty), 4 * faulty + 3)


def _bulyan(faulty: int, values: Tensor, weights: Tensor) -> Tensor:
    distances, count = squared_distances(inner_products(values)), values.shape[-2]
    alive = torch.ones_like(weights, dtype=torch.bool)
    for taken in range(count - 2 * faulty):
        score = scores(distances, faulty, alive, count - taken)
        score = score.clamp(max=torch.finfo(torch.float64).max)  # infinite if only one message is left
        best = score.masked_fill(~alive, torch.inf).argmin(-1, keepdim=True)
        alive = alive.scatter(-1, best, False)
    chosen = alive.to(torch.int8).argsort(dim=-1, stable=True)[..., : count - 2 * faulty]
    selected = values.gather(-2, chosen[..., None].expand(*chosen.shape, values.shape[-1]))
    return by_columns(partial(_nearest_to_median, count - 4 * faulty))(selected, weights)


def _nearest_to_median(nearest: int, values: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of the `nearest` values to the median of every coordinate, a run of the sorted values."""
    ordered, count = ascending(values), values.shape[-1]
    centre = middle(ordered)[..., None]
    first, last = centre - ordered[..., : count - nearest + 1], ordered[..., nearest - 1 :] - centre
    start = torch.maximum(first, last).argmin(-1, keepdim=True)
    return ordered.gather(-1, start + torch.arange(nearest, device=ordered.device)).double().mean(-1)
