"""A torchmetrics metric of all clients' rows together, from the states of the metrics of each.

States are merged as over the ranks of a process group, with clients in place of ranks: sums are added, extremes are
compared, lists of examples are concatenated, and states with the metric's own merge are stacked.

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
    """Return a metric's value, one number; NaN if it has no rows, or cannot be computed from them.

    Raises:
        TypeError: it is not a single number.

    Example:
        >>> import torchmetrics
        >>> value_of(torchmetrics.MeanMetric())
        nan
    """
    # not synchronised, or in their own way
    counts = isinstance(metric, loaded("torchmetrics.wrappers.abstract", "WrapperMetric"))
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
    """Merged states of copies of a metric that were updated with different rows."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self.updates = 0

    def add(self, metric: torchmetrics.Metric) -> None:
        """Merge the states of a copy; a copy without updates has none."""
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
        """Write the merged states to a copy; a metric without updates is not changed."""
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
                    stacked = stacked.to(torch.float64)  # torch has no mean of integers
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
    """Merge stacked states of the targets' spread into one, pair by pair (Chan et al., 1983).

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
