"""Compute the torchmetrics that a `training_step` updates and logs, for many clients over the steps of a round.

A metric keeps its states in attributes and looks at values, which `vmap` does not allow. The copy of a module that is
trained therefore has a `MetricRecorder` in place of each metric: it keeps the arguments of every call, which leave
`vmap` as further results, stacked over the clients, and `RoundMetrics` updates the metric itself with them. A metric
begins anew with every round. The module may log

- the metric, or its `compute()`: its value over all of the client's batches in the round;
- the value that a call returned: that of the batch, averaged over the client's steps as numbers are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch.expected import loaded
from fedtorch.metrics.recorded import BatchCall, Call, ClientMetric, take_out

if TYPE_CHECKING:
    import torchmetrics


@dataclass(frozen=True)
class MetricValue:
    """A value that a metric will have; arithmetic with numbers is done when it has it.

    Attributes:
        recorder: of the metric.
        call: the number of the call in the step that it is of; None for all calls of the round.
        last: whether it is that of a client's last step, not of all.
        functions: applied to the value, one after the other.
    """

    recorder: MetricRecorder
    call: int | None = None
    last: bool = False
    functions: tuple[Callable[[Tensor], Tensor], ...] = ()

    def of_last_step(self) -> MetricValue:
        """Return the value of a client's last step: of its call there, or of the step's last call."""
        call = len(self.recorder.calls) - 1 if self.call is None else self.call
        return replace(self, call=call, last=True)

    def then(self, function: Callable[[Tensor], Tensor]) -> MetricValue:
        """Return the value with a function applied to it."""
        return replace(self, functions=(*self.functions, function))

    def __add__(self, other: Any) -> MetricValue:
        return self.then(lambda value: value + _number(other))

    def __sub__(self, other: Any) -> MetricValue:
        return self.then(lambda value: value - _number(other))

    def __rsub__(self, other: Any) -> MetricValue:
        return self.then(lambda value: _number(other) - value)

    def __mul__(self, other: Any) -> MetricValue:
        return self.then(lambda value: value * _number(other))

    def __truediv__(self, other: Any) -> MetricValue:
        return self.then(lambda value: value / _number(other))

    def __rtruediv__(self, other: Any) -> MetricValue:
        return self.then(lambda value: _number(other) / value)

    def __neg__(self) -> MetricValue:
        return self.then(torch.neg)

    __radd__, __rmul__ = __add__, __mul__

    def detach(self) -> MetricValue:
        """Return itself."""
        return self

    item = cpu = detach


def _number(other: Any) -> Any:
    if isinstance(other, (int, float)):
        return other
    raise TypeError(
        f"Expected arithmetic of a metric's value with plain numbers, but got {type(other).__name__}; log each value "
        "by itself, or make one metric of both in __init__, such as self.sum = metric_a + metric_b"
    )


class MetricRecorder(nn.Module):
    """Stands in for a torchmetrics metric in a training step: keeps the arguments of its calls.

    Attributes:
        calls: of the step that runs.
        values: the metric's, for many clients.

    Example:
        >>> import torch, torchmetrics
        >>> recorder = MetricRecorder(torchmetrics.MeanMetric())
        >>> value = 1 - recorder(torch.tensor([1.0, 3.0]))  # nothing is computed yet
        >>> value.call, len(recorder.calls)
        (0, 1)
    """

    def __init__(self, metric: torchmetrics.Metric) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.values = ClientMetric(metric)
        self.takes = metric._filter_kwargs

    def forward(self, *args: Any, **kwargs: Any) -> MetricValue:
        """Keep the arguments; return the value of this batch."""
        self.update(*args, **kwargs)
        return MetricValue(self, len(self.calls) - 1)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Keep the arguments."""
        self.calls.append((args, kwargs))

    def compute(self) -> MetricValue:
        """Return the value over all batches of the round."""
        return MetricValue(self)

    def reset(self) -> None:
        """Do nothing: a metric begins anew with every round."""


class CollectionRecorder(nn.Module):
    """Stands in for a `MetricCollection`: a recorder of each of its metrics, under the names that it gives them."""

    def __init__(self, collection: torchmetrics.MetricCollection) -> None:
        super().__init__()
        metrics = dict(collection.items(keep_base=False, copy_state=False))
        self._names, self._recorders = list(metrics), nn.ModuleList(map(MetricRecorder, metrics.values()))

    def items(self) -> list[tuple[str, Any]]:
        """Return names and recorders."""
        return list(zip(self._names, self._recorders))

    def keys(self) -> list[str]:
        """Return the names."""
        return self._names

    def __getitem__(self, name: str) -> Any:
        return dict(self.items())[name]

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, MetricValue]:
        """Keep the arguments for every metric; return the values of this batch."""
        return {name: recorder(*args, **recorder.takes(**kwargs)) for name, recorder in self.items()}

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Keep the arguments for every metric."""
        self(*args, **kwargs)

    def compute(self) -> dict[str, MetricValue]:
        """Return the values over all batches of the round."""
        return {name: recorder.compute() for name, recorder in self.items()}

    def reset(self) -> None:
        """Do nothing: metrics begin anew with every round."""


def replace_metrics(module: nn.Module) -> None:
    """Put recorders in place of the metrics of a module."""
    collection, metric = loaded("torchmetrics", "MetricCollection"), loaded("torchmetrics", "Metric")
    for name, child in list(module.named_children()):
        if isinstance(child, collection):
            setattr(module, name, CollectionRecorder(child))
        elif isinstance(child, metric):
            setattr(module, name, MetricRecorder(child))
        else:
            replace_metrics(child)


class StepCalls:
    """Keeps what the recorders of a module hold after a training step, while the step may run under `vmap`.

    Attributes:
        recorders: of the module.
        logged: what the module has logged of them, by name.
        forms: the calls of a step without (False) and with (True) padding, kept because compiled steps run no Python.
    """

    def __init__(self, module: nn.Module) -> None:
        self.recorders = [part for part in module.modules() if isinstance(part, MetricRecorder)]
        self.logged: dict[str, MetricValue] = {}
        self.forms: dict[bool, StepForm] = {}

    def begin(self) -> None:
        """Forget the calls of the step before."""
        for recorder in self.recorders:
            recorder.calls = []

    def log(self, name: str, value: Any, forked: bool = False) -> bool:
        """Take note of a metric, or a value of one, under a name; return False for anything else.

        Args:
            name: of the log.
            value: anything.
            forked: whether the last step's and the epoch's value are logged beside it, as `name_step` and `name_epoch`.
        """
        if isinstance(value, MetricRecorder):
            value = value.compute()
        if not isinstance(value, MetricValue):
            return False
        self.logged[name] = value
        if forked:
            self.logged[f"{name}_step"], self.logged[f"{name}_epoch"] = value.of_last_step(), value
        return True

    def end(self) -> list[Tensor]:
        """Return the tensors among the arguments of the step's calls."""
        calls = [(r, i, take_out(call)) for r in self.recorders for i, call in enumerate(r.calls)]
        tensors = [tensor for _, _, call in calls for tensor in call.tensors]
        self.forms[False] = StepForm(calls, [False] * len(tensors))
        return tensors

    def of_rows(self, tensors: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        """Return the tensors of a padded batch for those of its rows, `(B, ...)`, each of which was a batch of its own.

        What is one number a batch, such as its loss, is the rows' mean.
        """
        self.forms[True] = StepForm(self.forms[False].calls, [tensor.ndim > 1 for tensor in tensors])
        mean = lambda values: torch.where(weights > 0, weights * values, 0.0).sum().to(values.dtype)
        return [tensor.flatten(0, 1) if tensor.ndim > 1 else mean(tensor) for tensor in tensors]


class StepForm(NamedTuple):
    """The calls of a step without their tensors' values.

    Attributes:
        calls: with the recorder of each and its number in the step.
        padded: whether each tensor has a row for each row of the batch, padding included.
    """

    calls: list[tuple[MetricRecorder, int, Call]]
    padded: list[bool]


class RoundMetrics:
    """Collects the calls of a round, and computes what is logged of the metrics.

    Args:
        calls: of the module's steps.
        clients: K.
    """

    def __init__(self, calls: StepCalls, clients: int) -> None:
        self._step, self._clients = calls, clients
        self._batches: dict[tuple[MetricRecorder, int], list[tuple[int, BatchCall]]] = {}

    def add(self, step: int, tensors: Sequence[Any], sizes: Tensor, weighted: bool) -> None:
        """Take in one step.

        Args:
            step: its number.
            tensors: arguments of metrics, as of `StepCalls`, `(K, ...)` or by client.
            sizes: `(K,)` rows of each client's batch, 0 of a client that takes no step.
            weighted: whether the batch is padded, and its rows have weights.
        """
        calls, padded = self._step.forms[weighted]
        given = iter(zip(tensors, padded))
        for recorder, number, call in calls:
            pairs = [next(given) for _ in call.tensors]
            batch = BatchCall(call, [tensor for tensor, _ in pairs], [cut for _, cut in pairs], sizes)
            self._batches.setdefault((recorder, number), []).append((step, batch))

    def values(self) -> dict[str, Tensor]:
        """Return what the module has logged of its metrics, `(K,)` each in float64."""
        return {name: self._value(logged) for name, logged in self._step.logged.items() if self._batches}

    def _value(self, logged: MetricValue) -> Tensor:
        batches = [
            pair
            for (recorder, number), pairs in self._batches.items()
            if recorder is logged.recorder and logged.call in (None, number)
            for pair in pairs
        ]
        ordered = [batch for _, batch in sorted(batches, key=lambda pair: pair[0])]
        if not ordered:
            return torch.full((self._clients,), torch.nan, dtype=torch.float64)
        values, of_batches = logged.recorder.values, logged.call is not None
        value = values.of_batches(ordered) if of_batches else values.of_round(ordered)
        for function in logged.functions:
            value = function(value)
        if logged.last:
            steps = torch.stack([batch.sizes > 0 for batch in ordered]).long()  # (S, K)
            return value.gather(0, (steps * torch.arange(len(steps))[:, None]).argmax(0)[None])[0]
        return value.nanmean(0) if of_batches else value
