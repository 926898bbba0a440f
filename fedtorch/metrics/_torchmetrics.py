"""Read and write the states of torchmetrics metrics, and compute values from them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedtorch.expected import loaded

if TYPE_CHECKING:
    import torchmetrics


def wide(state: Tensor) -> torch.dtype:
    """Return the dtype in which a state is added up over clients."""
    return torch.float64 if state.is_floating_point() else state.dtype


def metrics_in(module: nn.Module) -> Iterator[tuple[str, torchmetrics.Metric]]:
    """Return the metrics of a module with their names, each with separate states.

    Metrics of a `MetricCollection` that share one state have it separately afterwards.

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


def takes_shape_from_rows(metric: torchmetrics.Metric) -> bool:
    """Return whether the states of a metric have a value for each output, and get their shape at the first update."""
    from torchmetrics import ExplainedVariance, R2Score

    return isinstance(metric, (R2Score, ExplainedVariance))


def check_of_rows(metric: torchmetrics.Metric) -> None:
    """Refuse metrics of the latest updates: their values depend on how a client's rows are divided into batches.

    Raises:
        TypeError: the metric, or one in it, is `Running` or a `MetricTracker`.
    """
    from torchmetrics.wrappers import MetricTracker, Running

    for part in metric.modules():
        if isinstance(part, (Running, MetricTracker)):
            inner = getattr(part, "base_metric", getattr(part, "_base_metric", None))
            raise TypeError(
                f"Expected a metric of all of a client's rows, but got {type(part).__name__}, whose value depends on "
                f"how rows are divided into updates; give the metric inside it, {type(inner).__name__}"
            )


def updated(metric: torchmetrics.Metric, prediction: Any, target: Any) -> None:
    """Update a metric; targets that are a dict are arguments of its `update` by name."""
    if isinstance(target, dict):
        metric.update(prediction, **target)
    else:
        metric.update(prediction, target)


def computed(metric: torchmetrics.Metric) -> Any:
    """Compute a metric from its present states; None where it raises ValueError, because they do not suffice."""
    for _, part in metrics_in(metric):
        part._update_count = max(part._update_count, 1)  # states may have been put in place without `update`
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a class that a client lacks, for every client and round
        try:
            return metric.compute()
        except ValueError:
            return None


def number_computed(metric: torchmetrics.Metric) -> Tensor:
    """Compute a metric of one number, `()`; NaN where its states do not suffice.

    Raises:
        TypeError: its value is not a single number.
    """
    value = computed(metric)
    if value is None:
        return torch.tensor(torch.nan)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"Expected a metric of one number, but {type(metric).__name__} gives {shape}; choose an average"
        )
    return value.reshape(())


def mapped(function: Any, value: Any) -> Any:
    """Return a metric's value, a tree of tensors and numbers, with a function applied to each as a tensor.

    Example:
        >>> mapped(lambda leaf: leaf + 1, {"by_class": (1, torch.tensor([2.0]))})
        {'by_class': (tensor(2), tensor([3.]))}
    """
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [mapped(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value))


@contextmanager
def undefined_of_one_class(metric: torchmetrics.Metric) -> Iterator[None]:
    """Let a metric, and metrics in it, return NaN if they compare classes and the rows have one class.

    These are the area under the ROC curve, the curve, and values read off it. torchmetrics returns 0 there, with a
    warning that it has no meaning. With several labels, all of them must have one class.
    """
    changed: list[tuple[Any, Any]] = []
    parts: list[Any] = [part for _, part in metrics_in(metric) if compares_classes(part)]
    try:
        for part in parts:
            changed.append((part, part.compute))
            part.compute = partial(_of_two_classes, part, part.compute)
        yield
    finally:
        for part, compute in changed:
            part.compute = compute


def _of_two_classes(metric: Any, compute: Callable[[], Any]) -> Any:
    value = compute()
    if not _has_one_class(metric):
        return value
    return mapped(lambda leaf: torch.full(leaf.shape, torch.nan, device=leaf.device), value)


def _has_one_class(metric: Any) -> bool:
    """Return whether a metric that compares classes has been updated with one class only."""
    if isinstance(getattr(metric, "confmat", None), Tensor):  # (thresholds, …, target, prediction)
        return not bool(two_classes(metric.confmat[None]))
    targets = metric.target
    target = torch.cat(targets) if isinstance(targets, list) else targets
    columns = target.unsqueeze(1) if target.ndim == 1 else target
    ignored = getattr(metric, "ignore_index", None)
    return all(len(column[column != ignored].unique()) < 2 for column in columns.unbind(1))


def two_classes(confusion: Tensor) -> Tensor:
    """Return whether counts `(K, thresholds, …, 2, 2)` by target and prediction are of two classes, of any label."""
    by_target = confusion[:, 0].sum(-1)
    return (by_target > 0).all(-1).reshape(len(confusion), -1).any(1)


def compares_classes(metric: torchmetrics.Metric) -> bool:
    """Return whether a metric compares rows of different classes, and is undefined for one class."""
    return isinstance(metric, _compare_classes())


@cache
def _compare_classes() -> tuple[type, ...]:
    from torchmetrics import classification

    kinds = "AUROC", "ROC", "SensitivityAtSpecificity", "SpecificityAtSensitivity"
    names = [f"{task}{kind}" for task in ("Binary", "Multiclass", "Multilabel") for kind in kinds]
    return tuple(getattr(classification, name) for name in names)
