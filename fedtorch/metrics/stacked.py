"""Metrics of stacked clients: sums over rows from which a value is computed, of one client or of all."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.expected import loaded
from fedtorch.metrics._torchmetrics import compares_classes, number_computed, summed_states, two_classes, updated, wide
from fedtorch.metrics.losses import torch_loss
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import torchmetrics

Function = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class StackedMetric:
    """A metric that sums make up.

    Attributes:
        update: (prediction `(K, N, ...)`, target `(K, N, ...)`, mask `(K, N)`) -> sums, leaves `(K, ...)`. Rows outside
            the mask are padding and change nothing, with any content.
        compute: sums with any batch shape in front, `(K, ...)` or `()` -> values of that batch shape, in
            float64. Without rows the value is NaN.
        largest_is_best: whether large values are good, or small ones as for losses; None if unknown.
        defined: sums `(K, ...)` -> `(K,)` bool, whether a client's rows define it; None if NaN indicates that.
    """

    update: Callable[[Tensor, Tensor, Tensor], Tree]
    compute: Callable[[Tree], Tensor]
    largest_is_best: bool | None = None
    defined: Callable[[Tree], Tensor] | None = None


@dataclass(frozen=True)
class FunctionMetric(StackedMetric):
    """A function of a client's predictions and targets, `(N, ...)`; its sums are those of values per row.

    Attributes:
        function: as given.
    """

    function: Function = torch.eq


def mean_of(function: Function, largest_is_best: bool | None = None) -> StackedMetric:
    """Build a metric, with its direction, from a function of a client's predictions and targets.

    Args:
        function: (prediction `(N, ...)`, target `(N, ...)`) -> a value per row, `(N,)`, which is averaged, or one
            number. It is called with one client's own rows, without padding, like `loss=`.
        largest_is_best: whether large values are good; None if unknown.

    Example:
        >>> import torch, fedtorch as ft
        >>> near = ft.metrics.mean_of(lambda prediction, target: (prediction - target).abs() < 0.5, True)
        >>> near.compute(near.update(torch.zeros(1, 4), torch.tensor([[0.1, 0.2, 0.3, 9.0]]), torch.ones(1, 4).bool()))
        tensor([0.7500], dtype=torch.float64)
    """

    def update(prediction: Tree, target: Tree, mask: Tensor) -> Tree:
        total = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
        for k in mask.any(1).nonzero()[:, 0].tolist():
            value = function(*rows_of(k, mask, prediction), *rows_of(k, mask, target))
            values = values_per_row(value, int(mask[k].sum()))
            if values is None:
                raise TypeError(
                    "Expected a value per row, the sum of which is all that clients in other processes send, but got "
                    f"{_described(value)}; leave the mean over rows to the metric"
                )
            total[k] = values.sum()
        return {"sum": total, "rows": _rows(mask)}

    return FunctionMetric(update, lambda sums: sums["sum"] / sums["rows"], largest_is_best, function=function)


def rows_of(client: int, mask: Tensor, *values: Tree) -> tuple[Tree, ...]:
    """Return a client's own rows of stacked values `(K, N, ...)`, those in the mask `(K, N)`, without gradients."""
    inside = mask[client]
    whole = bool(inside.all())
    select = lambda leaf: leaf[client].detach() if whole else leaf[client][inside].detach()
    return tuple(tree.map(select, value) for value in values)


def values_per_row(value: Any, rows: int) -> Tensor | None:
    """Return a function's values per row in float64, `(N,)`; None where its value is one number, or a tree.

    Raises:
        ValueError: a tensor of another shape.
        TypeError: neither numbers nor a tree of numbers.
    """
    if isinstance(value, (dict, list, tuple)):
        return None
    try:
        number = torch.as_tensor(value)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"Expected one number or a value per row, but got {type(value).__name__}") from error
    if number.ndim == 0:
        return None
    if number.shape not in ((rows,), (rows, 1)):
        raise ValueError(
            f"Expected one number or a value per row, shape ({rows},), but got shape {tuple(number.shape)}; return the "
            "mean of a row's several values, or a dict to keep outputs without a mean"
        )
    return number.detach().reshape(rows).double()


def _described(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__}"
    return "one number"


def _mean_of_rows(each: Callable[[Tensor, Tensor], Tensor], largest_is_best: bool) -> StackedMetric:
    """Return the mean of a value per row of stacked clients, `(K, N)`, with zeros in the padding."""

    def update(prediction: Tensor, target: Tensor, mask: Tensor) -> Tree:
        values = each(_zero_padding(prediction, mask), _zero_padding(target, mask))
        return {"sum": _masked(values, mask).sum(1), "rows": _rows(mask)}

    return StackedMetric(update, lambda sums: sums["sum"] / sums["rows"], largest_is_best)


def accuracy() -> StackedMetric:
    """Return the share of examples with the largest logit at the target: logits `(K, N, C)`, classes `(K, N)`.

    Binary logits, `(K, N)` or `(K, N, 1)`, predict class 1 if positive. NaN is never right.
    """

    def hits(prediction: Tensor, target: Tensor) -> Tensor:
        logits, classes = _classification(prediction, target)
        return (logits.argmax(-1) == classes) & ~logits.isnan().any(-1)

    return _mean_of_rows(hits, True)


def cross_entropy() -> StackedMetric:
    r"""Return the mean of :math:`-\log p(y \mid x)`, in nats, from logits `(K, N, C)` and classes `(K, N)`.

    Binary logits, `(K, N)` or `(K, N, 1)`, are log odds of class 1.
    """

    def surprise(prediction: Tensor, target: Tensor) -> Tensor:
        logits, classes = _classification(prediction, target)
        return -logits.log_softmax(-1).gather(-1, classes.unsqueeze(-1)).squeeze(-1)

    return _mean_of_rows(surprise, False)


def mean_squared_error() -> StackedMetric:
    """Return the mean of squared differences, over examples and over an example's outputs if it has several."""

    def squared(prediction: Tensor, target: Tensor) -> Tensor:
        if prediction.shape == (*target.shape, 1):
            prediction = prediction.squeeze(-1)
        if prediction.shape != target.shape:
            raise ValueError(
                f"Expected predictions in the shape of the target, {tuple(target.shape)}, "
                f"but got {tuple(prediction.shape)}"
            )
        squares = (prediction.double() - target.double()).square()
        return squares.flatten(2).mean(2) if squares.ndim > 2 else squares

    return _mean_of_rows(squared, False)


def calibration_error(bins: int = 15) -> StackedMetric:
    r"""Return the expected calibration error of the most likely class, from logits `(K, N, C)` and classes `(K, N)`.

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{n} |\mathrm{acc}_b - \mathrm{conf}_b|
        = \frac{1}{n} \sum_b \Big|\sum_{i \in b} (\mathrm{hit}_i - p_i)\Big|

    with bins of equal width over the confidences :math:`p_i`: a client sends only the sums of
    :math:`\mathrm{hit}_i - p_i` per bin. As in torchmetrics, a bin contains its left end and a confidence of exactly
    one has its own bin. Binary logits, `(K, N)` or `(K, N, 1)`, are log odds of class 1.

    Args:
        bins: number of bins.

    Reference: Guo, Pleiss, Sun, Weinberger, On calibration of modern neural networks (2017), equation 5.

    Example:
        >>> import torch, fedtorch as ft
        >>> rows = torch.zeros(1, 4, 2), torch.tensor([[0, 0, 0, 1]]), torch.ones(1, 4).bool()  # says ½, right in ¾
        >>> error, entropy = ft.metrics.calibration_error(), ft.metrics.cross_entropy()
        >>> error.compute(error.update(*rows)), entropy.compute(entropy.update(*rows))  # ¾ − ½, log 2
        (tensor([0.2500], dtype=torch.float64), tensor([0.6931], dtype=torch.float64))
    """
    if bins < 1:
        raise ValueError(f"Expected at least one bin, but got {bins}")

    def update(prediction: Tensor, target: Tensor, mask: Tensor) -> Tree:
        logits, classes = _classification(_zero_padding(prediction, mask), _zero_padding(target, mask))
        confidence, best = logits.softmax(-1).max(-1)
        edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)
        bin_of = torch.bucketize(confidence, edges, right=True) - 1
        gap = _masked((best == classes).double() - confidence.double(), mask)
        zeros = gap.new_zeros(len(mask), bins + 1)
        return {"gap": zeros.scatter_add(1, bin_of.clamp(0, bins), gap), "rows": _rows(mask)}

    def compute(sums: Tree) -> Tensor:
        return sums["gap"].abs().sum(-1) / sums["rows"]

    return StackedMetric(update, compute, False)


def from_torchmetrics(metric: torchmetrics.Metric) -> StackedMetric:
    """Return a torchmetrics metric, all of whose states are sums, on stacked clients.

    The metric is copied, and runs client by client on the rows inside the mask. `compute` gives NaN for clients without
    rows and if the metric is undefined for them (the R² of one row). Warnings of the metric, such as about a class that
    a client lacks, are not repeated for every client and round.

    Args:
        metric: gives one number; its own states are left alone.

    Raises:
        TypeError: the metric has states other than sums (lists of examples, running means, extremes), wraps other
            metrics, or gives more than one number; the message names an alternative.
    """
    name = type(metric).__name__
    copy = metric.clone()
    copy.reset()
    copy.compute_with_cache = False
    copy.distributed_available_fn = lambda: False  # sums are exchanged elsewhere, never by this metric's own all_gather
    defaults = summed_states(copy)
    number_computed(copy)

    def update(prediction: Tensor, target: Tensor, mask: Tensor) -> Tree:
        copy.to(prediction.device)
        states = {
            state: torch.zeros(len(mask), *default.shape, dtype=wide(default), device=mask.device)
            for state, default in defaults.items()
        }
        for k in mask.any(1).nonzero().flatten().tolist():
            copy.reset()
            updated(copy, *tree.map(lambda leaf, k=k: leaf[k][mask[k]].detach(), (prediction, target)))
            for state, values in states.items():
                value = getattr(copy, state)
                if value.shape != values.shape[1:]:
                    raise TypeError(
                        f"Expected {name}.{state} to keep its shape {tuple(values.shape[1:])}, but got "
                        f"{tuple(value.shape)} after an update; in one process it is computed, elsewhere give the "
                        "metric of one output, as split= chooses it"
                    )
                values[k] = value
        copy.reset()
        return {"states": states, "rows": _rows(mask)}

    def compute(sums: Tree) -> Tensor:
        rows, states = sums["rows"], sums["states"]
        values = torch.full_like(rows, torch.nan)
        copy.to(rows.device)
        for index in itertools.product(*(range(n) for n in rows.shape)):
            if rows[index] > 0:
                for state, default in defaults.items():
                    setattr(copy, state, states[state][index].to(default.dtype, copy=True))
                values[index] = _number_or_nan(copy)
        copy.reset()
        return values

    def defined(sums: Tree) -> Tensor:
        return two_classes(sums["states"]["confmat"])

    return StackedMetric(update, compute, metric.higher_is_better, defined if compares_classes(copy) else None)


def as_stacked(metric: Any) -> StackedMetric:
    """Return a metric given in any form: stacked, of torchmetrics, a loss of torch, or a function.

    Raises:
        TypeError: it is none of these.
        ValueError: a loss of torch with a reduction that it does not have.
    """
    if isinstance(metric, StackedMetric):
        return metric
    if isinstance(metric, loaded("torchmetrics", "Metric")):
        return from_torchmetrics(metric)
    kinds = "a StackedMetric, a torchmetrics.Metric or a function (prediction, target) -> one number or (N,)"
    if isinstance(metric, loaded("torchmetrics", "MetricCollection")):
        raise TypeError(f"Expected {kinds}, but got a MetricCollection; give its metrics one by one")
    if isinstance(metric, type):
        raise TypeError(f"Expected {kinds}, but got the class {metric.__name__}; call it first")
    if not callable(metric):
        raise TypeError(f"Expected {kinds}, but got {type(metric).__name__}")
    loss = torch_loss(metric)
    if loss is not None:
        return StackedMetric(loss.sums, loss.value, False)
    return mean_of(metric, False if _is_loss(metric) else None)


def _is_loss(function: Function) -> bool:
    """Return whether a function has a `reduction`, by which losses are known."""
    if hasattr(function, "reduction"):
        return True
    with suppress(ValueError, TypeError):  # of functions without a signature
        return "reduction" in inspect.signature(function).parameters
    return False


def _number_or_nan(metric: torchmetrics.Metric) -> Tensor:
    """Compute a metric from its states; NaN if it is undefined, or cannot be computed."""
    try:
        return number_computed(metric)
    except TypeError:
        raise
    except Exception:  # torchmetrics raises many kinds where rows do not suffice
        return torch.tensor(torch.nan)


def _rows(mask: Tensor) -> Tensor:
    return mask.sum(1, dtype=torch.float64)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values `(K, N)` in float64, zero in the padding."""
    return values.detach().double().masked_fill(~mask, 0)


def _zero_padding(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values `(K, N, ...)` with zeros in the padding, which are finite numbers and valid classes."""
    if values.shape[:2] != mask.shape:
        raise ValueError(
            f"Expected examples (K, N, ...) with a mask (K, N), but got {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    return values.detach().masked_fill(~tree.along(mask, values), 0)


def _classification(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits `(K, N, C)` and classes `(K, N)`; a binary logit z is the pair (0, z)."""
    if target.ndim == 3 and target.shape[-1] == 1:
        target = target.squeeze(-1)
    if prediction.ndim == 2:
        prediction = prediction.unsqueeze(-1)
    if target.ndim != 2 or prediction.ndim != 3:
        raise ValueError(
            "Expected logits (K, N, C), (K, N, 1) or (K, N) and classes (K, N), "
            f"but got {tuple(prediction.shape)} and {tuple(target.shape)}"
        )
    if prediction.shape[-1] == 1:
        prediction = torch.cat([torch.zeros_like(prediction), prediction], -1)
    return prediction, target.long()
