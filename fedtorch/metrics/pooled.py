"""Torchmetrics of any states on stacked clients: of each client, and of all clients' rows together.

What sums make up is a `StackedMetric`. A metric that keeps examples, as AUROC without thresholds does, or that gives a
matrix, is updated client by client here; the clients have to be in this process, where their rows are.

>>> import torch, torchmetrics
>>> metric = PooledMetric(torchmetrics.ConfusionMatrix("binary"))
>>> scores = torch.tensor([[0.9, 0.2], [0.8, 0.0]]), torch.tensor([[1, 0], [0, 0]])
>>> metric.begin(clients=2)
>>> metric.update(*scores, torch.tensor([[True, True], [True, False]]))  # the second client has one row
>>> score = metric.score(metric.end())
>>> score.overall.tolist(), score.clients[1].tolist()
([[1.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 0.0]])
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.expected import loaded
from fedtorch.metrics._torchmetrics import updated
from fedtorch.metrics.joined import JoinedStates, metrics_in
from fedtorch.metrics.scores import Score, named_metrics
from fedtorch.metrics.stacked import StackedMetric, as_stacked
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import torchmetrics


_NOT_SUMS = TypeError("Expected a metric that sums make up")


class PooledMetric:
    """A metric's values for clients in blocks, and for all of them.

    Args:
        metric: is copied.
        reason: why sums do not make it up.
    """

    def __init__(self, metric: torchmetrics.Metric, reason: TypeError = _NOT_SUMS) -> None:
        self.reason = reason
        self._metric = metric.clone()
        self._metric.reset()
        for _, part in metrics_in(self._metric):
            part.compute_with_cache = False
            part.distributed_available_fn = lambda: False
        self._all = {name: JoinedStates() for name, _ in metrics_in(self._metric)}
        self._copies: list[torchmetrics.Metric] = []
        self._values: list[Tensor | None] = []  # of the clients in the order in which they came
        self._failed: list[bool] = []

    @property
    def largest_is_best(self) -> bool | None:
        """Return whether the metric is large for good predictions; None where it does not say."""
        return self._metric.higher_is_better

    def begin(self, clients: int) -> None:
        """Begin with the next so many clients."""
        self._copies = [self._metric.clone() for _ in range(clients)]
        self._failed.extend([False] * clients)

    def update(self, prediction: Tree, target: Tree, mask: Tensor) -> None:
        """Update the clients' metrics with rows of theirs, `(K, N, ...)`; those in the mask `(K, N)` count."""
        for k in mask.any(1).nonzero()[:, 0].tolist():
            rows = tree.map(lambda leaf, k=k: leaf[k][mask[k]].detach(), prediction)
            finite = all(bool(leaf.isfinite().all()) for leaf in tree.leaves(rows))
            self._failed[len(self._values) + k] |= not finite
            updated(self._copies[k].to(mask.device), rows, tree.map(lambda leaf, k=k: leaf[k][mask[k]], target))

    def end(self) -> Tensor:
        """Keep the values of these clients; return the places `(K,)` where they stand."""
        first = len(self._values)
        for copy in self._copies:
            self._values.append(_value(copy))
            for name, part in metrics_in(copy):
                self._all[name].add(part)
        self._copies = []
        return torch.arange(first, len(self._values))

    def score(self, places: Tensor) -> Score:
        """Return the score of all clients, in the order of their places."""
        whole = self._metric.clone()
        for name, part in metrics_in(whole):
            self._all[name].write(part)
        overall = _value(whole)
        shape = () if overall is None else overall.shape
        none = torch.full(shape, torch.nan, dtype=torch.float64)
        clients = [none if value is None else value for value in map(self._values.__getitem__, places.tolist())]
        failed = torch.tensor(self._failed)[places.cpu()]
        best = none if overall is None else overall
        return Score(best if shape else float(best), torch.stack(clients), self.largest_is_best, failed)


def any_metrics(metrics: Any) -> dict[str, StackedMetric | PooledMetric]:
    """Return metrics in whatever form by name: those that sums make up stacked, other torchmetrics pooled."""
    return {name: _as_any(metric) for name, metric in named_metrics(metrics).items()}


def _as_any(metric: Any) -> StackedMetric | PooledMetric:
    try:
        return as_stacked(metric)
    except TypeError as error:
        if not isinstance(metric, loaded("torchmetrics", "Metric")):
            raise
        return PooledMetric(metric, error)


def _value(metric: torchmetrics.Metric) -> Tensor | None:
    """Return a metric's value in float64, None where it has no rows, or too few.

    Raises:
        TypeError: it is no tensor.
    """
    if not any(part._update_count for _, part in metrics_in(metric)):
        return None
    metric._update_count = max(metric._update_count, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a class that a client lacks, for every client and round
        try:
            value = metric.compute()
        except ValueError:
            return None
    if not isinstance(value, Tensor):
        name = type(metric).__name__
        raise TypeError(f"Expected a metric of a number or a tensor, but {name} gives {type(value).__name__}")
    return value.detach().to("cpu", torch.float64).reshape(() if value.numel() == 1 else value.shape)
