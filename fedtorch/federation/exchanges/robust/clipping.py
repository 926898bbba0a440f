r"""Messages that are shortened: to a norm (norm bounding), or towards a centre (centred clipping).

Norm bounding takes the mean of :math:`x_i \min(1, C / \|x_i\|)`. Centred clipping starts at a centre v, here the
median of every coordinate, and takes a few steps

.. math:: v \leftarrow v + \sum_i w_i (x_i - v) \min(1, \tau / \|x_i - v\|).

Source: Sun, Kairouz, Suresh and McMahan (2019), "Can you really backdoor federated learning?", section 5;
Karimireddy, He and Jaggi (2021), "Learning from history for Byzantine robust optimization", Algorithm 2.

>>> import torch
>>> from fedtorch.trust import robust
>>> messages = torch.tensor([[1.0], [2.0], [3.0], [4.0], [100.0]], dtype=torch.float64)
>>> weights = torch.full((5,), 0.2, dtype=torch.float64)
>>> robust.norm_bounding(radius=3.0).average(messages, weights)
tensor([2.4000], dtype=torch.float64)
>>> robust.centred_clipping(radius=4.0, steps=1).average(messages, weights)  # 3 + (−2 − 1 + 0 + 1 + 4) / 5
tensor([3.4000], dtype=torch.float64)
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedtorch.federation.exchanges.robust._order import ascending, middle
from fedtorch.federation.exchanges.robust.median import coordinatewise_median
from fedtorch.federation.exchanges.robust.rules import (
    Rule,
    by_inner_products,
    combined,
    distances_from,
    inner_products,
)


def norm_bounding(radius: float | None = None) -> Rule:
    """Return the mean of messages whose norms are at most `radius`.

    Args:
        radius: C; default: the median of the messages' norms, of an even number the mean of both in the middle.

    Raises:
        ValueError: a radius that is not positive.
    """
    _check(radius)
    return Rule("norm_bounding", by_inner_products(partial(_bounded, radius)))


def centred_clipping(radius: float | None = None, steps: int = 3) -> Rule:
    """Return the mean of messages clipped around a centre, which starts at the coordinatewise median.

    Args:
        radius: τ; default: in every step the median of the messages' distances from the centre.
        steps: number of moves of the centre.

    Raises:
        ValueError: a radius that is not positive, or no steps.
    """
    _check(radius)
    if not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"Expected at least one step, but got {steps!r}")
    return Rule("centred_clipping", partial(_clipped, radius, steps))


def _check(radius: float | None) -> None:
    if radius is not None and not radius > 0:
        raise ValueError(f"Expected a positive radius, but got {radius}; leave it out for the median")


def _shortened(lengths: Tensor, radius: float | None) -> Tensor:
    """Return min(1, radius / length) of lengths `(..., M)`."""
    bound = middle(ascending(lengths))[..., None] if radius is None else torch.full_like(lengths[..., :1], radius)
    return torch.where(lengths > bound, bound / lengths, 1.0)


def _bounded(radius: float | None, products: Tensor, weights: Tensor) -> Tensor:
    return weights * _shortened(products.diagonal(dim1=-2, dim2=-1).sqrt(), radius)


def _clipped(radius: float | None, steps: int, values: Tensor, weights: Tensor) -> Tensor:
    centre = coordinatewise_median(values, weights)
    values = values.to(torch.float64) - centre[..., None, :]
    products, coefficients = inner_products(values), torch.zeros_like(weights)
    for _ in range(steps):
        part = weights * _shortened(distances_from(products, coefficients), radius)
        coefficients = coefficients * (1 - part.sum(-1, keepdim=True)) + part
    return centre + combined(coefficients, values)
