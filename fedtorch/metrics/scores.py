"""Scores of stacked predictions: of all rows together and of each client's, from summed statistics.

>>> import torch, fedtorch as ft
>>> metric = stacked_metrics({"mse": torch.nn.functional.mse_loss})["mse"]
>>> metric.largest_is_best
False
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.expected import loaded
from fedtorch.metrics import stacked as fm
from fedtorch.tables.rendering import facts
from fedtorch.tree import Tree


class Score(NamedTuple):
    """One metric over a federation.

    A metric's value is one number, a tensor such as a confusion matrix, or a tree of them: a tuple, list or dict.

    Example:
        >>> import torch, fedtorch as ft
        >>> score = ft.Score(0.75, torch.tensor([0.5, 1.0]), largest_is_best=True)
        >>> score.mean(), score.worst()
        (0.75, 0.5)
        >>> score
        Score(0.75 over all rows; 2 clients: mean 0.75, worst 0.5)
    """

    overall: Any  # a float, of all rows together; a tensor or a tree of a metric with several numbers
    # (K,) of each client's rows, or (K, ...) of a metric of several numbers; where clients' shapes differ, and of
    # trees, a list of K values. NaN where a client has no rows, has failed, or the metric is undefined.
    clients: Any
    largest_is_best: bool | None = None  # the metric's own attribute
    failed: Tensor | None = None  # (K,) bool, clients that have rows and whose predictions give NaN
    undefined: Tensor | None = None  # (K,) bool, clients that have rows, on which the metric is not defined

    def __repr__(self) -> str:
        overall, count, *others = self._facts().items()
        clients = f"{count[1]} client{'s' * (len(self.clients) != 1)}"
        words = [f"{name} {value}" if name in ("mean", "worst") else f"{value} {name}" for name, value in others]
        return f"Score({overall[1]} over all rows; {clients}{': ' if words else ''}{', '.join(words)})"

    def _repr_html_(self) -> str:
        return facts("Score", self._facts())

    def _facts(self) -> dict[str, str]:
        """Return the number of all rows, how many clients there are, and what there is to say of theirs."""
        if not self.is_number:
            shape = f" of shape {tuple(self.overall.shape)}" if isinstance(self.overall, Tensor) else ""
            return {"all rows": f"a {type(self.overall).__name__}{shape}", "clients": str(len(self.clients))}
        found = {
            "all rows": f"{float(self.overall):.4g}",
            "clients": str(len(self.clients)),
            "mean": f"{self.mean():.4g}",
        }
        if self.largest_is_best is not None:
            found["worst"] = f"{self.worst():.4g}"
        if self._any_failed():
            found["failed"] = str(int(self.failed.sum()))  # type: ignore[union-attr]
        if self.count_undefined():
            found["undefined"] = str(self.count_undefined())
        return found

    @property
    def is_number(self) -> bool:
        """Return whether the metric is one number."""
        return isinstance(self.clients, Tensor) and self.clients.ndim == 1

    def mean(self) -> float:
        """Return the mean over the clients for which it is defined; NaN if one failed, or if there is none."""
        self._check_one_number()
        return math.nan if self._any_failed() else float(self.clients.nanmean())

    def worst(self, largest_is_best: bool | None = None) -> float:
        """Return the worst client's value, in the given direction or the metric's.

        NaN if a client failed, which is worse than any number, or if it is defined for no client.
        """
        ordered = self._from_worst(largest_is_best)
        return math.nan if self._any_failed() else float(ordered[:1].mean())

    def worst_decile(self, largest_is_best: bool | None = None) -> float:
        """Return the mean of the worst tenth of the clients, of one at least; NaN as in `worst`."""
        ordered = self._from_worst(largest_is_best)
        return math.nan if self._any_failed() else float(ordered[: math.ceil(len(ordered) / 10)].mean())

    def count_undefined(self) -> int:
        """Return for how many clients that have rows the metric is not defined."""
        return 0 if self.undefined is None else int(self.undefined.sum())

    def _any_failed(self) -> bool:
        return self.failed is not None and bool(self.failed.any())

    def _check_one_number(self) -> None:
        if not self.is_number:
            what = "values of each client in a list"
            if isinstance(self.clients, Tensor):
                what = f"{tuple(self.clients.shape[1:])} numbers of each client"
            raise ValueError(
                f"Expected a metric of one number, but got {what}; see score.overall and score.clients, or choose an "
                "average"
            )

    def _from_worst(self, largest_is_best: bool | None) -> Tensor:
        """Return the scores of the clients that have one, the worst first."""
        self._check_one_number()
        known = self.clients[~self.clients.isnan()]
        if not len(known):
            return known
        return known.sort(descending=not is_largest_best(largest_is_best, self.largest_is_best)).values


def is_largest_best(given: bool | None, own: bool | None) -> bool:
    """Return the given direction, or else the metric's.

    Raises:
        ValueError: neither is known.

    Example:
        >>> is_largest_best(None, own=False)  # as errors say of themselves
        False
    """
    if given is None and own is None:
        raise ValueError(
            "Expected largest_is_best=True (as for accuracy) or False (as for errors), because a function as metric "
            "does not define which end is worst; pass it, or use ft.metrics.mean_of(function, largest_is_best)"
        )
    return bool(own if given is None else given)


def stacked_metrics(metrics: Mapping[str, Any]) -> dict[str, fm.StackedMetric]:
    """Return metrics given in any form, by name.

    Raises:
        TypeError: they have no names, or one is not a metric that sums determine.
        ValueError: no metrics.
    """
    return {name: fm.as_stacked(metric) for name, metric in named_metrics(metrics).items()}


def named_metrics(metrics: Any) -> dict[str, Any]:
    """Return metrics by name, those of a `MetricCollection` one by one: `name_MulticlassF1Score`.

    Raises:
        TypeError: they have no names.
        ValueError: no metrics.
    """
    collection = loaded("torchmetrics", "MetricCollection")
    if isinstance(metrics, collection):
        return dict(metrics.items(keep_base=False, copy_state=False))
    expected.kind(metrics, Mapping, "metrics by name", "pass metrics={'accuracy': ft.metrics.accuracy()}")
    if not metrics:
        raise ValueError("Expected at least one metric, but got none; pass metrics={'accuracy': ft.metrics.accuracy()}")
    named: dict[str, Any] = {}
    for name, metric in metrics.items():
        inner = named_metrics(metric) if isinstance(metric, collection) else {"": metric}
        named.update({f"{name}_{part}" if part else name: each for part, each in inner.items()})
    return named


def score_of(metric: fm.StackedMetric, sums: Tree, raised: Tensor | None = None) -> Score:
    """Return the score of the clients' sums, leaves `(K, ...)`.

    Args:
        metric: source of the sums.
        sums: of the clients' rows.
        raised: `(K,)` bool, clients whose sums could not be had; their rows are left out.

    Example:
        >>> import torch, fedtorch as ft
        >>> metric = stacked_metrics({"mse": torch.nn.functional.mse_loss})["mse"]
        >>> prediction, there = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[True, True], [True, False]])
        >>> sums = metric.update(prediction, torch.zeros(2, 2), there)  # two rows of the first client, one of the other
        >>> score_of(metric, sums).clients, round(score_of(metric, sums).overall, 3)
        (tensor([5., 0.], dtype=torch.float64), 3.333)
    """
    leaves = [leaf.unsqueeze(-1).flatten(1) for leaf in tree.leaves(sums)]
    raised = torch.zeros(len(leaves[0]), dtype=torch.bool) if raised is None else raised.cpu()
    known = sums if not bool(raised.any()) else tree.take(sums, (~raised).nonzero()[:, 0].to(leaves[0].device))
    overall = metric.compute(tree.map(lambda leaf: leaf.sum(0), known))
    clients = metric.compute(sums).to("cpu", torch.float64).masked_fill(raised, torch.nan)
    if metric.defined is not None:
        clients = clients.masked_fill(~metric.defined(sums).cpu(), torch.nan)
    failed = undefined = clients.isnan()
    if bool(failed.any()):  # without rows the sums are zero, of predictions with NaN they are not finite
        there = torch.stack([(leaf != 0).any(1).cpu() for leaf in leaves]).any(0)
        broken = torch.stack([~leaf.isfinite().all(1).cpu() for leaf in leaves]).any(0)
        failed, undefined = failed & broken & ~raised, (undefined & there & ~broken) | raised
    return Score(float(overall), clients, metric.largest_is_best, failed, undefined)
