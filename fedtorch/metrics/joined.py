"""A torchmetrics metric of all clients' rows together, from the states of the metrics of each.

States meet as they do over the ranks of a process group, a client in the place of a rank: sums add up, of extremes the
extreme is taken, examples are put one after the other, and what the metric merges itself is stacked.

>>> import torch, torchmetrics
>>> together = JoinedStates()
>>> for scores, classes in ((torch.tensor([0.9, 0.2]), torch.tensor([1, 0])), (torch.tensor([0.1, 0.7]),) * 2):
...     client = torchmetrics.AUROC("binary")
...     client.update(scores, classes.round().int())
...     together.add(client)
>>> together.write(metric := torchmetrics.AUROC("binary"))
>>> metric.compute()
tensor(1.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedtorch.expected import loaded
from fedtorch.metrics._torchmetrics import computed, wide

if TYPE_CHECKING:
    import torchmetrics


def metrics_in(module: nn.Module) -> Iterator[tuple[str, torchmetrics.Metric]]:
    """Return the metrics of a module with their names, each with states of its own.

    Those of a `MetricCollection` that share one state have it afterwards.

    Example:
        >>> import torchmetrics
        >>> module = nn.ModuleDict({"scores": torchmetrics.MetricCollection([torchmetrics.MeanMetric()])})
        >>> [name for name, _ in metrics_in(module)]
        ['scores.MeanMetric']
    """
    metric, collection = loaded("torchmetrics", "Metric"), loaded("torchmetrics", "MetricCollection")
    for name, part in module.named_modules():
        if isinstance(part, collection):
            list(part.items(keep_base=True, copy_state=False))
        if isinstance(part, metric):
            yield name, part


def value_of(metric: torchmetrics.Metric) -> float:
    """Return a metric's value, one number; NaN where it has seen no rows, or too few.

    Example:
        >>> import torchmetrics
        >>> value_of(torchmetrics.MeanMetric())
        nan
    """
    counts = isinstance(metric, loaded("torchmetrics.wrappers.abstract", "WrapperMetric"))  # not, or in its own way
    counts = counts or any(part._update_count for _, part in metrics_in(metric))
    return float(computed(metric)) if counts else float("nan")


class JoinedStates:
    """The states of copies of a metric that have seen different rows, as of one that has seen them all."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self.updates = 0

    def add(self, metric: torchmetrics.Metric) -> None:
        """Take in the states of a copy; one that has not been updated has none."""
        if metric._update_count == 0:
            return
        self.updates += metric._update_count
        for name, how in metric._reductions.items():
            value = getattr(metric, name)
            if isinstance(value, list):
                self._states.setdefault(name, []).extend(value)
            elif (pair := _PAIRWISE.get(getattr(how, "__name__", ""))) is not None:
                before, new = self._states.get(name), value.detach().to(wide(value))
                self._states[name] = new.clone() if before is None else pair(before, new)
            else:
                self._states.setdefault(name, []).append(value.detach().clone())

    def write(self, metric: torchmetrics.Metric) -> None:
        """Give all states to a copy; a metric that nobody has updated stays as it is."""
        if not self.updates:
            return
        for name, how in metric._reductions.items():
            default, states = metric._defaults[name], self._states[name]
            if isinstance(default, list):
                setattr(metric, name, list(states))
            elif isinstance(states, Tensor):
                setattr(metric, name, states.to(default.dtype))
            elif getattr(how, "__name__", "") == "dim_zero_cat":
                setattr(metric, name, torch.cat(states))
            else:
                stacked = torch.stack(states)
                setattr(metric, name, how(stacked) if callable(how) else stacked)
        metric._update_count, metric._computed = self.updates, None


_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}
