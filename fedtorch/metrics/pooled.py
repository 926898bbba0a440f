"""Metrics that sums do not make up, on stacked clients: of each client's rows, and of all clients' rows together.

These are torchmetrics that store examples, such as AUROC without thresholds, or return more than one number, and
functions. Each is called with one client's own rows at a time; the clients have to be in this process, with their rows.

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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.expected import loaded
from fedtorch.metrics._torchmetrics import (
    check_of_rows,
    computed,
    mapped,
    metrics_in,
    takes_shape_from_rows,
    undefined_of_one_class,
    updated,
)
from fedtorch.metrics.scores import Score, named_metrics
from fedtorch.metrics.stacked import FunctionMetric, StackedMetric, as_stacked, rows_of, values_per_row
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import torchmetrics


class _Client(NamedTuple):
    """A metric at one client."""

    value: Any  # None without a value
    rows: int
    finite: bool  # whether its predictions are


class _Pooled:
    """Clients in blocks, and their values."""

    largest_is_best: bool | None

    def __init__(self, name: str) -> None:
        self._name = name
        self._clients: list[_Client] = []  # in the order of their arrival
        self._error: Exception | None = None  # the first that the metric has raised

    def _of_rows(self, prediction: Tree, target: Tree, mask: Tensor) -> list[tuple[int, tuple[Tree, Tree]]]:
        """Return the clients that have rows, and these."""
        some = mask.any(1).nonzero()[:, 0].tolist()
        return [(k, (*rows_of(k, mask, prediction), *rows_of(k, mask, target))) for k in some]

    def _raised(self, error: Exception) -> None:
        self._error = self._error or error

    def _score(self, overall: Any, places: Tensor) -> Score:
        """Return the score of the clients at these places.

        Raises:
            ValueError: the metric has raised an error at every client, and of all rows.
        """
        clients = [self._clients[place] for place in places.tolist()]
        values = [client.value for client in clients]
        if self._error is not None and overall is None and all(value is None for value in values):
            error = self._error
            raise ValueError(
                f"Expected metric {self._name!r} to have a value for the rows of a client, but it raises "
                f"{type(error).__name__} for every client: {error}"
            ) from error
        best, each = _alike(overall, values)
        there = torch.tensor([client.rows > 0 for client in clients], dtype=torch.bool)
        broken = torch.tensor([not client.finite for client in clients], dtype=torch.bool)
        unknown = torch.tensor([value is None or _all_nan(value) for value in values], dtype=torch.bool)
        return Score(best, each, self.largest_is_best, broken, there & unknown & ~broken)


class PooledMetric(_Pooled):
    """A torchmetrics metric's values for clients in blocks, and for all of them, with private copies of the metric.

    Args:
        metric: it is copied.
        name: its name.

    Raises:
        TypeError: its value depends on how rows are divided into batches.
    """

    def __init__(self, metric: torchmetrics.Metric, name: str = "metric") -> None:
        super().__init__(name)
        check_of_rows(metric)
        self._metric = metric.clone()
        self._metric.reset()
        for _, part in metrics_in(self._metric):
            part.compute_with_cache = False
            part.distributed_available_fn = lambda: False
        self.largest_is_best = self._metric.higher_is_better
        defaults = (default for _, part in metrics_in(self._metric) for default in part._defaults.values())
        self._keeps_examples = any(isinstance(default, list) for default in defaults)
        self._copies: list[torchmetrics.Metric] = []
        self._finite: list[bool] = []
        self._parts: list[list[_Part]] = []
        self._waiting: dict[int, list[_Part]] = {}  # by position, until all clients have arrived, whose order counts
        self._all = _AllRows(self._metric.clone())

    def begin(self, clients: int) -> None:
        """Start with the next clients, this many."""
        self._copies = [self._metric.clone() for _ in range(clients)]
        self._finite = [True] * clients
        self._parts = [[] for _ in range(clients)]

    def update(self, prediction: Tree, target: Tree, mask: Tensor) -> None:
        """Update the clients' metrics with their rows, `(K, N, ...)`; those in the mask `(K, N)` count."""
        for k, rows in self._of_rows(prediction, target, mask):
            self._finite[k] &= all(bool(leaf.isfinite().all()) for leaf in tree.leaves(rows[0]))
            counts = True
            try:
                updated(self._copies[k].to(mask.device), *rows)
            except Exception as error:  # a client's rows may be insufficient; the others continue
                self._raised(error)
                counts = False
            self._parts[k].append(_Part(rows, counts))

    def end(self) -> Tensor:
        """Store the values of these clients; return their positions `(K,)`."""
        first = len(self._clients)
        for copy, parts, finite in zip(self._copies, self._parts, self._finite):
            value = None
            if parts and all(part.counts for part in parts):
                with undefined_of_one_class(copy):
                    value = self._value(copy)
            if self._keeps_examples:
                self._waiting[len(self._clients)] = parts
            else:
                self._take(parts)
            self._clients.append(_Client(value, len(parts), finite))
        self._copies, self._parts = [], []
        return torch.arange(first, len(self._clients))

    def score(self, places: Tensor) -> Score:
        """Return the score of all clients, in the order of their places."""
        for place in places.tolist():
            self._take(self._waiting.pop(place, []))
        overall = None
        try:
            whole = self._all.metric_of_all()
        except Exception as error:
            self._raised(error)
        else:
            overall = None if whole is None else self._value(whole)
        return self._score(overall, places)

    def _take(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            self._all.add(part)

    def _value(self, metric: torchmetrics.Metric) -> Any:
        """Return a metric's value in float64, None where its rows do not suffice."""
        try:
            value = computed(metric)
        except Exception as error:  # torchmetrics raises many kinds where rows do not suffice
            self._raised(error)
            return None
        return None if value is None else _in_float64(value)


class _Part(NamedTuple):
    """Rows of a client, with which a metric has been updated."""

    rows: tuple[Tree, Tree]  # (prediction, target)
    counts: bool  # whether the metric could be updated with them alone


class _AllRows:
    """A metric of all clients' rows, including rows with which alone it cannot be updated.

    Such rows are joined with those of another client: a client whose labels are all ignored has no rows left.
    """

    def __init__(self, metric: torchmetrics.Metric) -> None:
        self._metric = metric
        self._held: tuple[Tree, Tree] | None = None
        self._apart: list[tuple[Tree, Tree]] = []
        self._error: Exception | None = None

    def add(self, part: _Part) -> None:
        """Add a client's rows; the latest valid ones are held back, for others to join them."""
        if not part.counts:
            self._apart.append(part.rows)
            return
        if self._held is not None:
            self._update(self._held)
        self._held = part.rows

    def metric_of_all(self) -> torchmetrics.Metric | None:
        """Return the metric updated with all rows; None without rows.

        Raises:
            Exception: the metric's error for rows of several clients.
        """
        held = [] if self._held is None else [self._held]
        if not held and not self._apart:
            return None
        self._update(*held, *self._apart)
        if self._error is not None:
            raise self._error
        return self._metric

    def _update(self, *rows: tuple[Tree, Tree]) -> None:
        try:
            joined = rows[0] if len(rows) == 1 else tree.concatenate(rows)
            updated(self._metric.to(tree.leaves(joined[0])[0].device), *joined)
        except Exception as error:
            self._error = self._error or error


class PooledFunction(_Pooled):
    """A function's values for clients in blocks, and for all of them.

    A value per row is averaged, over a client's rows and over all. One number, or a tree, is the function's of a
    client's rows, and of all clients' rows one after the other.

    Args:
        metric: of the function (prediction `(N, ...)`, target `(N, ...)`).
        name: its name.

    Example:
        >>> rmse = PooledFunction(as_stacked(lambda prediction, target: (prediction - target).square().mean().sqrt()))
        >>> rmse.begin(clients=2)
        >>> rmse.update(torch.zeros(2, 1), torch.tensor([[1.0], [7.0]]), torch.ones(2, 1).bool())
        >>> score = rmse.score(rmse.end())
        >>> score.clients, score.overall
        (tensor([1., 7.], dtype=torch.float64), 5.0)
    """

    def __init__(self, metric: FunctionMetric, name: str = "metric") -> None:
        super().__init__(name)
        self._function, self.largest_is_best = metric.function, metric.largest_is_best
        self._parts: list[list[tuple[Tree, Tree]]] = []
        self._rows: dict[int, tuple[Tree, Tree]] = {}  # by position, of clients without a value per row
        self._sums: dict[int, float] = {}  # by position, of values per row

    def begin(self, clients: int) -> None:
        """Start with the next clients, this many."""
        self._parts = [[] for _ in range(clients)]

    def update(self, prediction: Tree, target: Tree, mask: Tensor) -> None:
        """Store rows of clients, `(K, N, ...)`; those in the mask `(K, N)` count."""
        for k, rows in self._of_rows(prediction, target, mask):
            self._parts[k].append(rows)

    def end(self) -> Tensor:
        """Store the values of these clients; return their positions `(K,)`.

        Raises:
            ValueError: batches of a client whose predictions cannot be put one after the other.
        """
        first = len(self._clients)
        for parts in self._parts:
            self._clients.append(self._client(len(self._clients), parts))
        self._parts = []
        return torch.arange(first, len(self._clients))

    def _client(self, place: int, parts: list[tuple[Tree, Tree]]) -> _Client:
        if not parts:
            return _Client(None, 0, True)
        rows = self._joined(parts)
        count = len(tree.leaves(rows[1])[0])
        finite = all(bool(leaf.isfinite().all()) for leaf in tree.leaves(rows[0]))
        self._rows[place] = rows
        try:
            value = self._function(*rows)
        except Exception as error:  # a client's rows may be insufficient; the others continue
            self._raised(error)
            return _Client(None, count, finite)
        values = self._checked(value, count)
        if values is not None:
            self._sums[place], value = float(values.sum()), values.mean()
            del self._rows[place]
        value = _in_float64(value)
        return _Client(value, count, finite or not _all_nan(value))

    def _joined(self, parts: list[tuple[Tree, Tree]]) -> tuple[Tree, Tree]:
        try:
            return parts[0] if len(parts) == 1 else tree.concatenate(parts)
        except RuntimeError as error:
            raise ValueError(
                f"Expected batches of one shape for the function of metric {self._name!r}, which is given all rows of "
                f"a client at once, but they cannot be put one after the other: {error}; fill them to one length"
            ) from error

    def _checked(self, value: Any, rows: int) -> Tensor | None:
        try:
            return values_per_row(value, rows)
        except (TypeError, ValueError) as error:
            raise type(error)(f"Metric {self._name!r}: {error}") from error

    def score(self, places: Tensor) -> Score:
        """Return the score of all clients, in the order of their places.

        Raises:
            ValueError: values per row of some clients, and of others not.
        """
        order = places.tolist()
        known = [place for place in order if self._clients[place].value is not None]
        per_row = [place for place in known if place in self._sums]
        if per_row and len(per_row) < len(known):
            raise ValueError(
                f"Expected metric {self._name!r} to give a value per row at every client, or at none, but got it at "
                f"{len(per_row)} of {len(known)}"
            )
        overall = None
        if per_row:
            overall = _in_float64(sum(self._sums[k] for k in per_row) / sum(self._clients[k].rows for k in per_row))
        elif self._rows:
            try:
                overall = _in_float64(self._function(*self._joined([self._rows[k] for k in order if k in self._rows])))
            except Exception as error:
                self._raised(error)
        return self._score(overall, places)


def any_metrics(metrics: Any, in_process: bool = True) -> dict[str, StackedMetric | PooledMetric | PooledFunction]:
    """Return metrics given in any form by name, as stacked metrics if sums determine them.

    Args:
        metrics: by name.
        in_process: whether the clients' rows are in this process; other processes send sums only.

    Raises:
        TypeError: not a metric; or, for clients elsewhere, one that sums do not determine.
    """
    named = named_metrics(metrics)
    return {name: _as_any(metric, name) if in_process else as_stacked(metric) for name, metric in named.items()}


def _as_any(metric: Any, name: str) -> StackedMetric | PooledMetric | PooledFunction:
    is_torchmetric = isinstance(metric, loaded("torchmetrics", "Metric"))
    if is_torchmetric and takes_shape_from_rows(metric):
        return PooledMetric(metric, name)
    try:
        stacked = as_stacked(metric)
    except TypeError:
        if not is_torchmetric:
            raise
        return PooledMetric(metric, name)
    return PooledFunction(stacked, name) if isinstance(stacked, FunctionMetric) else stacked


def _in_float64(value: Any) -> Any:
    """Return a value on the CPU in float64; a tensor of one number as `()`."""
    one = mapped(lambda leaf: leaf.detach().to("cpu", torch.float64), value)
    return one.reshape(()) if isinstance(one, Tensor) and one.numel() == 1 else one


def _all_nan(value: Any) -> bool:
    flags: list[bool] = []
    mapped(lambda leaf: flags.append(bool(leaf.isnan().all())), value)
    return bool(flags) and all(flags)


def _alike(overall: Any, values: Sequence[Any]) -> tuple[Any, Any]:
    """Convert (overall, clients) to one form: tensors `(K, ...)` of one shape, or lists; NaN for missing values."""
    known = [value for value in [overall, *values] if value is not None]
    if not all(isinstance(value, Tensor) for value in known):
        unknown = mapped(lambda leaf: torch.tensor(torch.nan, dtype=torch.float64), known[0])
        return unknown if overall is None else overall, [unknown if value is None else value for value in values]
    dimensions = max((value.ndim for value in known), default=0)
    full = lambda value: value.reshape((1,) * dimensions) if value.ndim == 0 else value  # of a client with one row
    shapes = {tuple(full(value).shape) for value in values if value is not None}
    shape = next(iter(shapes)) if len(shapes) == 1 else ()
    unknown = torch.full(shape, torch.nan, dtype=torch.float64)
    each = [unknown if value is None else full(value) for value in values]
    best = unknown if overall is None else full(overall)
    stacked = torch.stack(each) if len(shapes) < 2 else each
    return best if dimensions else float(best), stacked
