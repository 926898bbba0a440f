r"""The geometric median: the point with the least sum of distances to the messages.

.. math:: \arg\min_z \sum_i w_i \|x_i - z\|

by Weiszfeld's iteration, smoothed where a message lies at the point itself. It starts at the mean of the messages that
are nearest to the others, as long as less than half are wrong a place among the right ones.

Source: Pillutla, Kakade and Harchaoui (2022), "Robust aggregation for federated learning", IEEE Transactions on Signal
Processing 70, Algorithm 2 (RFA).

>>> import torch
>>> from fedtorch.federation.exchanges.robust.geometric_median import geometric_median
>>> messages = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]], dtype=torch.float64)
>>> weights = torch.full((5,), 0.2, dtype=torch.float64)
>>> geometric_median().average(messages, weights).round(decimals=2)
tensor([3.], dtype=torch.float64)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtorch.federation.exchanges.robust.rules import (
    Rule,
    by_inner_products,
    distances_from,
    normalised,
    squared_distances,
)

_BLOCKS, _STEPS = 63, 32  # blocks of iterations; convergence is read on the host once a block
_TOLERANCE = 1e-12  # change of coefficients, whose sum is one, in the last iteration
_SMOOTHING = 1e-8  # of distances, relative to the messages' norms, because of the rounding of inner products


def geometric_median() -> Rule:
    """Return the geometric median of whole messages; it stays bounded if less than half of the weight is wrong.

    Messages must be finite, which runs check; a NaN or an infinite number makes the median NaN too, because distances
    are unknown.
    """
    return Rule("geometric_median", by_inner_products(_weiszfeld), convex=True)


def _weiszfeld(products: Tensor, weights: Tensor) -> Tensor:
    """Return the coefficients of the geometric median, `(..., M)`."""
    spread = squared_distances(products).sqrt().sum(-1)
    near = spread <= spread.median(-1, keepdim=True).values
    smallest = _SMOOTHING * products.diagonal(dim1=-2, dim2=-1).median(-1, keepdim=True).values.sqrt()
    coefficients = normalised(torch.where(near, weights, 0.0))
    smallest = smallest.clamp(min=torch.finfo(torch.float64).tiny)
    for _ in range(_BLOCKS):
        for _ in range(_STEPS):
            old = coefficients
            coefficients = normalised(weights / distances_from(products, old).clamp(min=smallest))
        if float((coefficients - old).abs().amax()) < _TOLERANCE:
            break
    return coefficients
