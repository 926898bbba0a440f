r"""A star exchange whose server takes a robust average.

Rules act on `Mean`s, each client's as one vector, and refuse `Sum`s, from which no client can be excluded. The messages
of all clients are stored until the end of the round, so partial aggregates merge by concatenation.

**What is not believed.** Messages with NaN, Inf or numbers beyond 1e100, and weights that are not positive and finite,
are left out. (A run refuses messages with NaN or Inf before they come here, and stops unless it was told
`on_bad_message="drop"`.) Weights are taken as nearly equal: a client that claims many rows must not win. They count
between `1/spread` and `spread` times their median, so that f wrong ones of M have less than half of the weight while
f · spread² < M − f.

**What that costs.** With equal weights the aggregate estimates the mean over clients, not over rows: where clients
with many rows differ from those with few, it is biased by the covariance of rows and messages divided by the mean
number of rows. `experiments/robustness.py` measures it, as "mean of equals" without any attack.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.exchanges.exchange import Exchange, Mean, RowsOf, Sum, indices
from fedtorch.federation.exchanges.messages import in_order, kept, like, rows
from fedtorch.federation.exchanges.robust._order import ascending, middle
from fedtorch.federation.exchanges.robust.rules import Rule
from fedtorch.federation.exchanges.star import star as plain_star
from fedtorch.tree import Rows, Tree

_LARGEST = 1e100  # squares of larger numbers would overflow in sums


def star(rule: Rule, *, spread: float = 1.0) -> Exchange:
    """Build a star exchange whose server takes a robust average of every `Mean`.

    Args:
        rule: the average, such as `median()` or `krum(3)`.
        spread: largest ratio of a weight to the median weight, at least 1: 1 makes all equal, infinity trusts the
            weights that clients send.

    Raises:
        ValueError: a spread below 1; or in a round with too few messages for the rule.
        TypeError: in a round with `Sum`s.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.trust import robust
        >>> messages = ft.Mean(torch.tensor([[1.0], [2.0], [9.0]]), weight=torch.tensor([1.0, 1.0, 100.0]))
        >>> for spread in (1.0, 100.0):  # the third client says that it has a hundred times as many rows
        ...     exchange = star(robust.median(), spread=spread)
        ...     print(exchange.finish(exchange.gather(messages, slice(0, 3))).value)
        tensor([2.], dtype=torch.float64)
        tensor([9.], dtype=torch.float64)
    """
    if not spread >= 1:
        raise ValueError(f"Expected a spread of at least 1, but got {spread}; 1 takes all weights as equal")
    exchange = kept(plain_star(), partial(_finish, rule, spread))
    return exchange._replace(gather=partial(_gather, rule))


def bounded(weights: Tensor, spread: float) -> Tensor:
    """Return weights `(..., M)` between 1/spread and spread times their median, float64."""
    weights = weights.to(torch.float64)
    median = middle(ascending(weights))[..., None]
    return weights.clamp(median / spread, median * spread)


def credible(values: Tensor) -> Tensor:
    """Return which messages `(M, D)` are finite with squares that are finite too, `(M,)` bool."""
    return torch.maximum(-values.amin(-1), values.amax(-1)).to(torch.float64) <= _LARGEST  # False for NaN


def _gather(rule: Rule, messages: Tree, ids: Rows) -> RowsOf:
    return RowsOf(indices(ids), tree.map(partial(_only_mean, rule.name), messages, is_leaf=(Mean, Sum)))


def _only_mean(name: str, node: Mean | Sum | Tensor) -> Mean:
    if isinstance(node, Tensor):
        raise TypeError("Expected the message's nodes to be Mean or Sum, but got a bare tensor; wrap it")
    if isinstance(node, Sum):
        raise TypeError(
            f"Expected messages that are Mean for {name}, but got a Sum, from which no client can be left out; use an "
            "algorithm whose messages are averaged, such as ft.fedavg, or leave robust.rule out"
        )
    return node


def _finish(rule: Rule, spread: float, batch: RowsOf) -> Tree:
    if rule.reference is not None and not bool((batch.ids == rule.reference).any()):
        raise ValueError(f"Expected client {rule.reference}, which {rule.name} trusts, in every round; use cohort=None")
    return tree.map(partial(_average, rule, spread), in_order(batch, rule.reference).message, is_leaf=Mean)


def _average(rule: Rule, spread: float, mean: Mean) -> Mean:
    values = rows(mean.value)
    good = credible(values) & (mean.weight > 0) & mean.weight.isfinite().to(values.device)
    if not bool(good.all()):
        values, mean = values[good], mean._replace(weight=mean.weight[good])
    if len(values) < rule.least or (rule.reference is not None and not bool(good[0])):
        raise ValueError(
            f"Expected at least {rule.least} credible messages for {rule.name}, but got {len(values)} of {len(good)}; "
            "ask more clients, or take a rule that needs fewer"
        )
    weight = bounded(mean.weight, spread)
    total = weight.sum()
    return Mean(like(rule.average(values, weight / total), mean.value), total)
