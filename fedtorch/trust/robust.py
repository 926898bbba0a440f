r"""Exchanges that some wrong clients cannot move far: the median and the trimmed mean, coordinate by coordinate.

They act on `Mean`s, whose weights count as so many copies of a client's value, and refuse `Sum`s: a sum that
telescopes cannot leave somebody out. Messages of all clients are kept until the round is finished, so partial
aggregates merge by concatenation.

Source: Yin, Chen, Ramchandran and Bartlett (2018), "Byzantine-robust distributed learning: towards optimal statistical
rates", Definitions 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.exchange import Exchange, Mean, Sum, star
from fedtorch.tree import Rows, Tree


def median() -> Exchange:
    """A star whose server takes the weighted median of every coordinate of a `Mean`.

    Between two values that halve the weight it is their middle, so equal weights give the usual median.

    Raises:
        TypeError: in a round with `Sum`s.
    """
    return _robust("median", _median)


def trimmed_mean(fraction: float) -> Exchange:
    """A star whose server leaves out the lowest and the highest `fraction` of the weight in every coordinate.

    Args:
        fraction: on each side, at least 0 and below one half; 0 is the weighted mean.

    Raises:
        ValueError: a fraction out of range.
        TypeError: in a round with `Sum`s.
    """
    if not 0 <= fraction < 0.5:
        raise ValueError(f"Expected a fraction of at least 0 and below 0.5, but got {fraction}; use median() for more")

    def average(value: Tensor, weight: Tensor) -> Tensor:
        ordered, share, above = _ordered(value, weight)
        kept = (above.clamp(max=1 - fraction) - (above - share).clamp(min=fraction)).clamp(min=0)
        return torch.where(kept > 0, kept * ordered, 0.0).sum(0) / (1 - 2 * fraction)

    return _robust("trimmed_mean", average)


def _robust(name: str, average: Callable[[Tensor, Tensor], Tensor]) -> Exchange:
    def gather(messages: Tree, ids: Rows) -> Tree:
        return tree.map(_means_only(name), messages, is_leaf=(Mean, Sum))

    def finish(partial: Tree) -> Tree:
        return tree.map(lambda mean: _aggregate(mean, average), partial, is_leaf=(Mean, Sum))

    return star()._replace(gather=gather, merge=tree.concatenate, finish=finish, additive=False)


def _means_only(name: str) -> Callable[[Tree], Mean]:
    def check(node: Tree) -> Mean:
        if isinstance(node, Sum):
            raise TypeError(
                f"Expected messages that are Mean for {name}, but got a Sum, a sum that cannot leave clients "
                "out; use an algorithm whose messages are averaged, such as ft.fedavg, or the exchange that this one "
                "comes with"
            )
        if not isinstance(node, Mean):
            raise TypeError("Expected the message's nodes to be Mean or Sum, but got a bare tensor; wrap it")
        return node

    return check


def _aggregate(mean: Mean, average: Callable[[Tensor, Tensor], Tensor]) -> Mean:
    weight = mean.weight.to(torch.float64)
    total = weight.sum()
    if not float(total) > 0:
        raise ValueError(f"Expected a positive total weight of the clients that answered, but got {float(total)}")
    return Mean(tree.map(lambda value: average(value.to(torch.float64), weight / total), mean.value), total)


def _ordered(value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(values in ascending order, their weights, the weights summed up to each), `(M, ...)`."""
    ordered, order = value.sort(0)
    share = weight[order]
    return ordered, share, share.cumsum(0)


def _median(value: Tensor, weight: Tensor) -> Tensor:
    ordered, _, above = _ordered(value, weight)
    slack = 1e-12  # rounding of the summed weights must not decide which value is in the middle
    low = (above < 0.5 - slack).sum(0).clamp(max=len(value) - 1)
    high = (above < 0.5 + slack).sum(0).clamp(max=len(value) - 1)
    return 0.5 * (ordered.gather(0, low[None]) + ordered.gather(0, high[None]))[0]
