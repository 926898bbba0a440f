"""Edges drawn on their own, in time that grows with their number and not with that of the pairs.

Source: Batagelj and Brandes (2005), "Efficient generation of large random networks": one skips a geometric number of
pairs from edge to edge.

>>> import fedtorch as ft
>>> from fedtorch.networks import _random_edges as random_edges
>>> random_edges.independent_pairs(4, 1.0, ft.random.key(0)).tolist()
[[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch import random

_BLOCK = 2**20  # skips drawn at a time


def independent_pairs(nodes: int, p: float, key: Tensor) -> Tensor:
    """Draw pairs i < j of `nodes` by coins of probability p, `(E, 2)` in lexicographic order."""
    _check_probability("p", p)
    return pair(_skips(nodes * (nodes - 1) // 2, p, key), nodes)


def stochastic_blocks(sizes: Sequence[int], within: float | Sequence[float], between: float, key: Tensor) -> Tensor:
    """Draw edges `(E, 2)` within and between blocks of consecutive nodes; see `Network.stochastic_blocks`."""
    counts = torch.as_tensor(sizes, dtype=torch.int64)
    inside = torch.as_tensor(within, dtype=torch.float64).expand(counts.shape)
    if counts.ndim != 1 or not len(counts) or int(counts.min()) < 1:
        raise ValueError(f"Expected sizes of at least one node each, but got {sizes}")
    for p in (float(inside.min()), float(inside.max())):
        _check_probability("within", p)
    _check_probability("between", between)
    block = torch.arange(len(counts)).repeat_interleave(counts)
    across = independent_pairs(int(counts.sum()), between, random.fold_in(key, 0))
    across = across[block[across[:, 0]] != block[across[:, 1]]]
    return torch.cat((across, _within_blocks(counts, inside, random.fold_in(key, 1))))


def _within_blocks(sizes: Tensor, probabilities: Tensor, key: Tensor) -> Tensor:
    """Draw edges within blocks with the largest probability, and keep them in proportion to their own."""
    pairs = sizes * (sizes - 1) // 2
    ends = pairs.cumsum(0)
    most = float(probabilities.max())
    number = _skips(int(ends[-1]), most, random.fold_in(key, 0))
    block = torch.searchsorted(ends, number, right=True)
    if not bool((probabilities == most).all()):
        coins = random.uniform(random.fold_in(key, 1), (len(number),), torch.float64)
        kept = coins * most < probabilities[block]
        number, block = number[kept], block[kept]
    first = (sizes.cumsum(0) - sizes)[block]
    return first[:, None] + pair(number - (ends - pairs)[block], sizes[block])


def check_count(nodes: int) -> None:
    """Raise a ValueError unless there are nodes."""
    if nodes < 1:
        raise ValueError(f"Expected at least one node, but got {nodes}")


def _check_probability(name: str, p: float) -> None:
    """Raise a ValueError that names a number which is no probability."""
    if not 0 <= p <= 1:
        raise ValueError(f"Expected {name} as a probability between 0 and 1, but got {p}")


def _skips(total: int, p: float, key: Tensor) -> Tensor:
    """Draw the numbers below `total` that coins of probability p choose, in ascending order."""
    if p == 0 or total == 0:
        return torch.empty(0, dtype=torch.int64)
    rate = -math.log1p(-p) if p < 1 else math.inf
    blocks, last, block = [], -1, 0
    while last < total:
        expected = (total - last) * p
        count = min(_BLOCK, int(expected + 6 * math.sqrt(expected)) + 10)
        waits = random.exponential(random.fold_in(key, block), (count,), torch.float64)
        steps = (waits / rate).clamp(max=float(total)).to(torch.int64) + 1
        blocks.append(last + steps.cumsum(0))
        last, block = int(blocks[-1][-1]), block + 1
    numbers = torch.cat(blocks)
    return numbers[numbers < total]


def pair(number: Tensor, nodes: int | Tensor) -> Tensor:
    """Return the pairs i < j of `nodes` with these numbers in lexicographic order, `(..., 2)`."""
    size = torch.as_tensor(nodes)
    before = lambda i: i * (2 * size - i - 1) // 2  # pairs whose first node is less than i
    root = ((2 * size - 1).double() ** 2 - 8 * number.double()).clamp(min=0).sqrt()
    i = (((2 * size - 1) - root) / 2).floor().to(torch.int64).clamp(min=0)
    i = i - (before(i) > number).to(torch.int64)
    i = i + (before(i + 1) <= number).to(torch.int64)
    return torch.stack((i, number - before(i) + i + 1), -1)
