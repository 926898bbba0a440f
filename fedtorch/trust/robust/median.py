"""The median of every coordinate.

Source: Yin, Chen, Ramchandran and Bartlett (2018), "Byzantine-robust distributed learning: towards optimal statistical
rates", Definition 1.
"""

from __future__ import annotations

from torch import Tensor

from fedtorch.trust.robust.order import ascending, equal, ordered
from fedtorch.trust.robust.rule import Rule, by_columns

_SLACK = 1e-12  # rounding of the summed weights must not decide which value is in the middle


def median() -> Rule:
    """The weighted median of every coordinate: with less than half of the weight wrong, it is among the right values.

    Between two values that halve the weight it is their middle, so equal weights give the usual median.
    """
    return Rule("median", coordinatewise_median)


def _median(values: Tensor, weights: Tensor) -> Tensor:
    if equal(weights):
        found, count = ascending(values), values.shape[-1]
        return 0.5 * (found[..., (count - 1) // 2].double() + found[..., count // 2].double())
    found, _, above = ordered(values, weights)
    last = values.shape[-1] - 1
    low = (above < 0.5 - _SLACK).sum(-1, keepdim=True).clamp(max=last)
    high = (above < 0.5 + _SLACK).sum(-1, keepdim=True).clamp(max=last)
    return 0.5 * (found.gather(-1, low).double() + found.gather(-1, high).double())[..., 0]


coordinatewise_median = by_columns(_median)
