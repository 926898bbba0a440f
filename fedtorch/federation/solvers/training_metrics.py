"""Compute the torchmetrics that a `training_step` updates and logs, for many clients over the steps of a round.

A metric stores its states in attributes and reads values, which `vmap` does not allow. The copy of a module for
training therefore has a `MetricRecorder` in place of each metric: it collects the arguments of every call, which leave
`vmap` as further results, stacked over the clients, and `RoundMetrics` updates the metric itself with them. A metric is
reset in every round. The module may log

- the metric, or its `compute()`: its value over all of the client's batches in the round;
- the value that a call returned: that of the batch, reduced over the client's steps as numbers are.

Arguments besides tensors, and operations on a call's value, may differ from step to step: they are stored for each
(`StepForm`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch.expected import loaded

if TYPE_CHECKING:
    import torchmetrics

    from fedtorch.metrics.recorded import BatchCall, Call


class Reduction(NamedTuple):
    """How a number that each step logs becomes one of the round: by mean, sum, min, max or last.

    Attributes:
        name: one of these.
        weighted: whether a mean is over rows, and not over steps.
    """

    name: str = "mean"
    weighted: bool = False

    def of(self, values: Tensor, sizes: Tensor) -> Tensor:
        """Reduce `(S, K)` values of batches with numbers of rows, 0 if a client takes no step; NaN without steps.

        Example:
            >>> values, sizes = torch.tensor([[1.0, 5.0], [4.0, 9.0]]), torch.tensor([[2, 0], [1, 0]])
            >>> Reduction("mean", weighted=True).of(values, sizes), Reduction("last").of(values, sizes)
            (tensor([2., nan]), tensor([4., nan]))
        """
        there = sizes > 0
        reduced = self._of(values, sizes, there)
        reduced = reduced if reduced.is_floating_point() or reduced.is_complex() else reduced.double()
        return torch.where(there.any(0), reduced, torch.nan)

    @property
    def of_all(self) -> bool:
        """Return whether the reduction uses the values of all steps."""
        return self.name in ("mean", "sum")

    def _of(self, values: Tensor, sizes: Tensor, there: Tensor) -> Tensor:
        if self.name == "last":
            steps = 1 + torch.arange(len(values), device=values.device)[:, None]
            return values.gather(0, (there * steps).argmax(0, keepdim=True))[0]
        if self.name in ("min", "max"):
            none = torch.inf if self.name == "min" else -torch.inf
            return getattr(torch.where(there, values, none), f"a{self.name}")(0)
        if self.name == "sum":
            return torch.where(there, values, 0.0).sum(0)
        weights = sizes if self.weighted else there
        return torch.where(there, weights * values, 0.0).sum(0) / weights.sum(0)


_OVER_STEPS = Reduction()


@dataclass(frozen=True)
class MetricValue:
    """A value that a metric will have; arithmetic with numbers is done when it has it.

    Attributes:
        recorder: of the metric.
        call: index of the call in its step; None for all calls of the round.
        reduction: over a client's steps, of a call's values.
        operations: operations with another number, applied to the value one after the other.
    """

    recorder: MetricRecorder
    call: int | None = None
    reduction: Reduction = _OVER_STEPS
    operations: tuple[tuple[Callable[[Any, Any], Any], Any], ...] = ()

    def of_last_step(self) -> MetricValue:
        """Return the value of a client's last step: of its call there, or of the step's last call."""
        call = len(self.recorder.calls) - 1 if self.call is None else self.call
        return replace(self, call=call, reduction=Reduction("last"))

    def after(self, value: Tensor) -> Tensor:
        """Return a value after the operations."""
        for operation, other in self.operations:
            value = operation(value, other)
        return value

    def _then(self, operation: Callable[[Any, Any], Any], other: Any) -> MetricValue:
        return replace(self, operations=(*self.operations, (operation, _number(other))))

    def __add__(self, other: Any) -> MetricValue:
        return self._then(operator.add, other)

    def __sub__(self, other: Any) -> MetricValue:
        return self._then(operator.sub, other)

    def __rsub__(self, other: Any) -> MetricValue:
        return -self + other

    def __mul__(self, other: Any) -> MetricValue:
        return self._then(operator.mul, other)

    def __truediv__(self, other: Any) -> MetricValue:
        return self._then(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> MetricValue:
        return self._then(_divided_into, other)

    def __neg__(self) -> MetricValue:
        return self * -1

    __radd__, __rmul__ = __add__, __mul__

    def detach(self) -> MetricValue:
        """Return itself."""
        return self

    item = cpu = detach


def _divided_into(value: Any, other: Any) -> Any:
    return other / value


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
        calls: of the running step.
        values: the metric's, for many clients.

    Example:
        >>> import torch, torchmetrics
        >>> recorder = MetricRecorder(torchmetrics.MeanMetric())
        >>> value = 1 - recorder(torch.tensor([1.0, 3.0]))  # nothing is computed yet
        >>> value.call, len(recorder.calls)
        (0, 1)
    """

    def __init__(self, metric: torchmetrics.Metric) -> None:
        from fedtorch.metrics.recorded import ClientMetric

        super().__init__()
        self.calls: list[Any] = []
        self.values = ClientMetric(metric)
        self.takes = metric._filter_kwargs

    def forward(self, *args: Any, **kwargs: Any) -> MetricValue:
        """Record the arguments; return the value of this batch."""
        self.update(*args, **kwargs)
        return MetricValue(self, len(self.calls) - 1)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Record the arguments."""
        self.calls.append((args, kwargs))

    def compute(self) -> MetricValue:
        """Return the value over all batches of the round."""
        return MetricValue(self)

    def reset(self) -> None:
        """Do nothing: a metric is reset in every round."""


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
        """Record the arguments for every metric; return the values of this batch."""
        return {name: recorder(*args, **recorder.takes(**kwargs)) for name, recorder in self.items()}

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Record the arguments for every metric."""
        self(*args, **kwargs)

    def compute(self) -> dict[str, MetricValue]:
        """Return the values over all batches of the round."""
        return {name: recorder.compute() for name, recorder in self.items()}

    def reset(self) -> None:
        """Do nothing: metrics are reset in every round."""


def replace_metrics(module: nn.Module) -> None:
    """Replace the metrics of a module by recorders, also in its dicts, lists and tuples."""
    known: dict[int, nn.Module] = {}
    for part in list(module.modules()):
        for name, child in list(part._modules.items()):
            if child is not None and (recorder := _replaced(child, known)) is not child:
                setattr(part, name, recorder)
        for name, value in list(vars(part).items()):
            if name not in _TABLES and type(value) not in _PLAIN and (new := _replaced(value, known)) is not value:
                vars(part)[name] = new


def refuse_hidden_metrics(module: nn.Module) -> None:
    """Raise TypeError for a metric in whose place `replace_metrics` puts none: of another object, or of a class."""
    for path, part in module.named_modules():
        for name, value in () if isinstance(part, MetricRecorder) else _attributes(part):
            attribute = next(_hidden(value, name, set()), None)
            if attribute is not None:
                where = ".".join(filter(None, (path, attribute)))
                raise TypeError(
                    f"Expected metrics that are parts of {type(module).__name__}, but {where} is one of another "
                    "object or of a class, whose state clients would share; register it in __init__, for example "
                    "self.accuracy = …, an nn.ModuleDict or nn.ModuleList, or a dict or list of the module"
                )


_TABLES = ("_modules", "_parameters", "_buffers")
_PLAIN = {bool, bytes, complex, float, int, str, type(None), Tensor}
_NO_OBJECTS = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)


def _replaced(value: Any, known: dict[int, nn.Module]) -> Any:
    """Replace the metrics in a value by recorders, one for each metric; dicts and lists change in place."""
    if isinstance(value, loaded("torchmetrics", "MetricCollection")):
        return known.setdefault(id(value), CollectionRecorder(value))
    if isinstance(value, loaded("torchmetrics", "Metric")):
        return known.setdefault(id(value), MetricRecorder(value))
    if isinstance(value, (dict, list)) and not hasattr(value, "_metadata"):
        for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if type(child) not in _PLAIN and (new := _replaced(child, known)) is not child:
                value[key] = new
    if isinstance(value, tuple):
        children = [_replaced(child, known) for child in value]
        if any(new is not child for new, child in zip(children, value)):
            return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    return value


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a part of a module, and of its user-defined classes."""
    yield from ((name, value) for name, value in vars(part).items() if name not in _TABLES)
    for cls in type(part).__mro__:
        if not _of_a_library(cls):
            yield from vars(cls).items()


def _of_a_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("builtins", "lightning", "pytorch_lightning", "torch", "torchmetrics")


def _hidden(value: Any, path: str, seen: set[int]) -> Iterator[str]:
    """Yield where metrics are in a value, also among the attributes of objects."""
    if isinstance(value, (loaded("torchmetrics", "Metric"), loaded("torchmetrics", "MetricCollection"))):
        yield path
    if type(value) in _PLAIN or isinstance(value, _NO_OBJECTS) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        for key, child in list(value.items()):
            yield from _hidden(child, f"{path}[{key!r}]", seen)
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            yield from _hidden(child, f"{path}[{i}]", seen)
    elif not _of_a_library(type(value)):
        for name, child in list(getattr(value, "__dict__", {}).items()):
            yield from _hidden(child, f"{path}.{name}", seen)


def _recorders(value: Any) -> Iterator[MetricRecorder]:
    """Yield the recorders in a module, a dict, a list or a tuple."""
    if isinstance(value, nn.Module):
        for part in value.modules():
            if isinstance(part, MetricRecorder):
                yield part
            else:
                for name, child in vars(part).items():
                    if name not in _TABLES and isinstance(child, (dict, list, tuple)):
                        yield from _recorders(child)
    elif isinstance(value, (dict, list, tuple)):
        for child in value.values() if isinstance(value, dict) else value:
            if isinstance(child, (MetricRecorder, CollectionRecorder, dict, list, tuple)):
                yield from _recorders(child)


class StepCalls:
    """Collects the recorders' calls after a training step, which may run under `vmap`.

    Attributes:
        recorders: of the module.
        form: of the last step.
    """

    def __init__(self, module: nn.Module) -> None:
        self.recorders = list(dict.fromkeys(_recorders(module)))
        self.form = StepForm([], [], {})
        self._logged: dict[str, MetricValue] = {}

    def begin(self) -> None:
        """Forget the calls of the step before."""
        self._logged = {}
        for recorder in self.recorders:
            recorder.calls = []

    def log(self, name: str, value: Any, reduction: Reduction, forked: bool = False) -> bool:
        """Record a metric, or a value of one, under a name; return False for anything else.

        Args:
            name: name of the log.
            value: any value.
            reduction: over the steps, of a call's value.
            forked: whether the last step's and the epoch's value are logged beside it, as `name_step` and `name_epoch`.
        """
        if isinstance(value, MetricRecorder):
            value = value.compute()
        if not isinstance(value, MetricValue):
            return False
        value = replace(value, reduction=reduction)
        self._logged[name] = value
        if forked:
            self._logged[f"{name}_step"], self._logged[f"{name}_epoch"] = value.of_last_step(), value
        return True

    def end(self) -> list[Tensor]:
        """Return the tensors among the arguments of the step's calls."""
        from fedtorch.metrics.recorded import take_out

        calls = [(r, i, take_out(call)) for r in self.recorders for i, call in enumerate(r.calls)]
        tensors = [tensor for _, _, call in calls for tensor in call.tensors]
        self.form = StepForm(calls, [False] * len(tensors), self._logged)
        return tensors

    def of_rows(self, tensors: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        """Convert the tensors of rows, `(B, ...)`, each a batch of its own, to those of a padded batch.

        Values with one number a batch, such as a loss, become the rows' mean.
        """
        self.form = self.form._replace(padded=[tensor.ndim > 1 for tensor in tensors])
        mean = lambda values: torch.where(weights > 0, weights * values, 0.0).sum().to(values.dtype)
        return [tensor.flatten(0, 1) if tensor.ndim > 1 else mean(tensor) for tensor in tensors]


class StepForm(NamedTuple):
    """The calls of a step without their tensors' values.

    Attributes:
        calls: with the recorder of each and its index in the step.
        padded: whether each tensor has a row for each row of the batch, padding included.
        logged: the step's logs of metrics, by name.
    """

    calls: list[tuple[MetricRecorder, int, Call]]
    padded: list[bool]
    logged: dict[str, MetricValue]

    def same(self, other: StepForm) -> bool:
        """Return whether another form is known to be the same."""
        return self is other or (
            [(recorder, number) for recorder, number, _ in self.calls]
            == [(recorder, number) for recorder, number, _ in other.calls]
            and all(mine.alike(theirs) for (_, _, mine), (_, _, theirs) in zip(self.calls, other.calls))
            and self.padded == other.padded
            and self.logged == other.logged
        )


class Recorded(NamedTuple):
    """The arguments of some clients' metrics in one step.

    Attributes:
        form: of the calls.
        tensors: among the arguments, `(K, ...)` each, or by the number of a client.
        clients: their positions; None for all.
    """

    form: StepForm
    tensors: Sequence[Any]
    clients: Sequence[int] | None = None

    def at(self, places: Sequence[int]) -> Recorded:
        """Return it with the numbers of clients in a larger stack."""
        rows = range(len(places)) if self.clients is None else self.clients
        tensors = [{places[row]: tensor[row] for row in rows} for tensor in self.tensors]
        return Recorded(self.form, tensors, [places[row] for row in rows])


def joined_calls(parts: Sequence[Recorded]) -> list[Recorded]:
    """Join the arguments of several clients' metrics, grouped by form; see `Recorded.at`."""
    whole: list[Recorded] = []
    for part in parts:
        place = next((i for i, other in enumerate(whole) if other.form.same(part.form)), None)
        if place is None:
            whole.append(Recorded(part.form, [dict(tensor) for tensor in part.tensors], list(part.clients or ())))
            continue
        for mine, theirs in zip(whole[place].tensors, part.tensors):
            mine.update(theirs)
        whole[place] = whole[place]._replace(clients=[*(whole[place].clients or ()), *(part.clients or ())])
    return whole


class RoundMetrics:
    """Collects the calls of a round, and computes the logged metrics.

    Args:
        clients: K.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._batches: dict[tuple[MetricRecorder, int], list[tuple[int, BatchCall, dict[str, MetricValue]]]] = {}
        self._logged: dict[str, MetricValue] = {}

    def add(self, step: int, recorded: Sequence[Recorded], sizes: Tensor) -> None:
        """Add one step.

        Args:
            step: its number.
            recorded: arguments of the metrics.
            sizes: `(K,)` rows of each client's batch, 0 of a client that takes no step.
        """
        from fedtorch.metrics.recorded import BatchCall

        for (calls, padded, logged), tensors, clients in recorded:
            row_counts = sizes
            if clients is not None:
                row_counts = torch.zeros_like(sizes)
                row_counts[list(clients)] = sizes[list(clients)]
            self._logged.update(logged)
            given = iter(zip(tensors, padded))
            for recorder, number, call in calls:
                pairs = [next(given) for _ in call.tensors]
                batch = BatchCall(call, [tensor for tensor, _ in pairs], [cut for _, cut in pairs], row_counts)
                self._batches.setdefault((recorder, number), []).append((step, batch, logged))

    def of_batches(self, steps: int) -> set[str]:
        """Return the names of values that may depend on a single batch in a round of this many steps."""
        return {name for name, logged in self._logged.items() if not self._is_of_all(logged, steps)}

    def _is_of_all(self, logged: MetricValue, steps: int) -> bool:
        if logged.call is not None and not logged.reduction.of_all:
            return False
        return len({step for step, *_ in self._found(logged)}) == steps

    def values(self) -> dict[str, Tensor]:
        """Return the module's logs of its metrics, `(K,)` each in float64."""
        return {name: self._value(name, logged) for name, logged in self._logged.items() if self._batches}

    def _found(self, logged: MetricValue) -> list[tuple[int, BatchCall, dict[str, MetricValue]]]:
        """Return the calls that a value is of."""
        return [
            each
            for (recorder, number), batches in self._batches.items()
            if recorder is logged.recorder and logged.call in (None, number)
            for each in batches
        ]

    def _value(self, name: str, logged: MetricValue) -> Tensor:
        ordered = sorted(self._found(logged), key=lambda each: each[0])
        batches = [batch for _, batch, _ in ordered]
        if not batches:
            return torch.full((self._clients,), torch.nan, dtype=torch.float64)
        if logged.call is None:
            return logged.after(logged.recorder.values.of_round(batches))
        values = logged.recorder.values.of_batches(batches)
        for row, (_, _, states) in zip(values, ordered):
            row.copy_(states[name].after(row) if name in states else torch.nan * row)
        sizes = torch.stack([batch.sizes for batch in batches])
        return logged.reduction.of(values, torch.where(values.isnan(), 0, sizes.to(values.device)))
