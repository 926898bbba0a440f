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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch.expected import loaded
from fedtorch.metrics._torchmetrics import metrics_in as metrics_in, number_computed, undefined_of_one_class, wide

if TYPE_CHECKING:
    import torchmetrics


def value_of(metric: torchmetrics.Metric) -> float:
    """Return a metric's value, one number; NaN where it has seen no rows, or cannot be computed of those it has seen.

    Raises:
        TypeError: it is no single number.

    Example:
        >>> import torchmetrics
        >>> value_of(torchmetrics.MeanMetric())
        nan
    """
    counts = isinstance(metric, loaded("torchmetrics.wrappers.abstract", "WrapperMetric"))  # not, or in its own way
    counts = counts or any(part._update_count for _, part in metrics_in(metric))
    try:
        return float(number_computed(metric)) if counts else float("nan")
    except TypeError:
        raise
    except Exception:  # torchmetrics raises many kinds where rows do not suffice
        return float("nan")


def value_at_client(metric: torchmetrics.Metric) -> float:
    """Return a metric's value of one client's rows as `value_of` does; NaN too where it compares classes of one.

    Example:
        >>> import torch, torchmetrics
        >>> metric = torchmetrics.AUROC("binary")
        >>> metric.update(torch.tensor([0.2, 0.7]), torch.tensor([1, 1]))
        >>> value_at_client(metric)
        nan
    """
    with undefined_of_one_class(metric):
        return value_of(metric)


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
                if getattr(how, "__name__", "") == "dim_zero_mean":
                    stacked = stacked.to(torch.float64)  # of whole numbers torch has no mean
                setattr(metric, name, how(stacked).to(default.dtype) if callable(how) else stacked)
        if isinstance(metric, loaded("torchmetrics", "NormalizedRootMeanSquaredError")):
            _join_spreads(metric)
        metric._update_count, metric._computed = self.updates, None


_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}


def _join_spreads(metric: Any) -> None:
    """Bring stacked states of the targets' spread to those of one client, two by two (Chan et al., 1983).

    torchmetrics does it for two clients, and raises IndexError for more.
    """
    names = ("total", "mean_val", "var_val", "target_squared", "min_val", "max_val")
    total, mean, squares, raw, least, most = (getattr(metric, name).double() for name in names)
    joined, centre, spread = total[0], mean[0], squares[0]
    for more, other, its in zip(total[1:], mean[1:], squares[1:]):
        both = joined + more
        spread = spread + its + (other - centre).square() * joined * more / both
        centre = centre + (other - centre) * more / both
        joined = both
    joined_parts = (joined, centre, spread, raw.sum(0), least.amin(0), most.amax(0))
    for name, value in zip(names, joined_parts):
        setattr(metric, name, value.to(metric._defaults[name].dtype))
