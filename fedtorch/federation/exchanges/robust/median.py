"""The median of every coordinate.

Source: Yin, Chen, Ramchandran and Bartlett (2018), "Byzantine-robust distributed learning: towards optimal statistical
rates", Definition 1.

>>> import torch
>>> from fedtorch.federation.exchanges.robust.median import median
>>> messages = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]], dtype=torch.float64)
>>> weights = torch.full((5,), 0.2, dtype=torch.float64)
>>> median().average(messages, weights)
tensor([3.], dtype=torch.float64)
"""

from __future__ import annotations

from fedtorch.federation.exchanges.robust import order_statistics
from fedtorch.federation.exchanges.robust._order import by_order, middle
from fedtorch.federation.exchanges.robust.rules import Rule


def median() -> Rule:
    """Return the weighted median of each coordinate, among the right values while less than half the weight is wrong.

    If two values halve the weight, the result is their midpoint, so equal weights give the usual median.
    """
    return Rule("median", coordinatewise_median)


coordinatewise_median = by_order(middle, order_statistics.median)
