"""Read and write the states of torchmetrics metrics, and compute values from them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torchmetrics


def wide(state: Tensor) -> torch.dtype:
    """Return the dtype in which a state is added up over clients."""
    return torch.float64 if state.is_floating_point() else state.dtype


def summed_states(metric: torchmetrics.Metric) -> dict[str, Tensor]:
    """Return the initial states of a metric, if sums over clients make them up."""
    import torchmetrics  # here, because few need it and it takes long to import

    name = type(metric).__name__
    if any(isinstance(child, torchmetrics.Metric) for child in list(metric.modules())[1:]) or not metric._defaults:
        raise TypeError(f"Expected a metric with states of its own, but got {name}; give the metric inside it")
    advice = (
        "give thresholds=… where the metric has them, use fedtorch.metrics.calibration_error() "
        "for calibration, or give a function with one value per example"
    )
    defaults: dict[str, Tensor] = {}
    for state, default in metric._defaults.items():
        reduction = metric._reductions[state]
        if not isinstance(default, Tensor):
            raise TypeError(f"Expected states that are sums, but got {name}.{state}, a list of examples; {advice}")
        if reduction is not torchmetrics.utilities.dim_zero_sum or bool((default != 0).any()):
            how = str(getattr(reduction, "__name__", reduction)).removeprefix("dim_zero_")
            raise TypeError(
                f"Expected states that are sums from zero, but got {name}.{state}, reduced by {how}; {advice}"
            )
        defaults[state] = default.detach().clone()
    return defaults


def updated(metric: torchmetrics.Metric, prediction: Any, target: Any) -> None:
    """Update a metric; targets that are a dict are arguments of its `update` by name."""
    if isinstance(target, dict):
        metric.update(prediction, **target)
    else:
        metric.update(prediction, target)


def computed(metric: torchmetrics.Metric) -> Tensor:
    """Compute a metric from its present states: one number, NaN where they do not suffice."""
    metric._update_count = 1  # states were put in place without `update`
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = metric.compute()
        except ValueError:
            return torch.tensor(torch.nan)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"Expected a metric of one number, but {type(metric).__name__} gives {shape}; choose an average"
        )
    return value.reshape(())
