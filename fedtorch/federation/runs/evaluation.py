"""Evaluate a federation: scores of all rows, of each client, their mean and the worst, from summed statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch._devices import every_generator, generators, restored
from fedtorch.data import ClientData, FederatedData
from fedtorch.data.federated import described_rows
from fedtorch.expected import loaded
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.populations.clients import BLOCK_ROWS, SMALL_BLOCK
from fedtorch.federation.populations.population import Clients
from fedtorch.federation.solvers.prediction import shared_sizes
from fedtorch.tree import Tree

if TYPE_CHECKING:
    from fedtorch.data import FederatedLoaders
    from fedtorch.metrics.scores import Score

    Evaluable = FederatedData | FederatedLoaders  # data for scores of clients
else:
    Evaluable = Any
T = TypeVar("T")
Split = Callable[[Tree], tuple[Tree, Any]]  # rows -> (inputs, targets)


class ClientBatches(NamedTuple):
    """A client in evaluation, batch by batch.

    Attributes:
        number: index of the client.
        name: name of the client.
        seed: seed of its module's random draws.
        tensors: tensors that it predicts with.
        batches: `(batch, its number of rows)`.
    """

    number: int
    name: str
    seed: int
    tensors: dict[str, Tensor]
    batches: Iterable[tuple[Any, int]]


def inputs_and_targets(rows: Tree) -> tuple[Tree, Tensor]:
    """Return `(x, y)` rows unchanged.

    Raises:
        TypeError: rows of another form; pass your own function as `split`.
    """
    if isinstance(rows, tuple) and len(rows) == 2:
        return rows[0], rows[1]
    got = sorted(rows) if isinstance(rows, dict) else type(rows).__name__
    raise TypeError(f"Expected rows (inputs, targets), but got {got}; pass split=lambda rows: (inputs, targets)")


def evaluate(
    clients: Clients | Newcomers,
    outbox: Tree,
    predict: Callable[[Tree, Tree], Tree],
    data: FederatedData,
    metrics: Mapping[str, Any],
    split: Split = inputs_and_targets,
    batch_size: int | None = None,
) -> dict[str, Score]:
    """Return scores of every client's model on its own rows of `data`.

    Args:
        clients: bound to an algorithm in a population; or newcomers outside any.
        outbox: the server's broadcast.
        predict: (tensors `(K, ...)`, inputs `(K, N, ...)`) -> predictions `(K, N, ...)`.
        data: rows of the same clients, or of any clients if the population is one pooled client.
        metrics: by name: a `torchmetrics.Metric`, a `MetricCollection`, a `metrics.StackedMetric`, a loss such as
            `torch.nn.functional.mse_loss`, or a function of a client's (prediction `(N, ...)`, target `(N, ...)`) that
            returns one number, or a value per row `(N,)`.
        split: rows -> (inputs, targets).
        batch_size: rows of a client in one prediction batch; default: all of them.

    Raises:
        ValueError: no metrics.
        TypeError: clients are in other processes, which send only sums, and a metric's states are not sums.
    """
    expected.kind(data, FederatedData, "FederatedData to evaluate on", "make it with ft.data.from_tensors([(x, y), …])")
    sums = Sums(predict, metrics, split, batch_size, clients.in_process)
    with _evaluating():
        return sums.scores(clients.evaluate(outbox, data, sums.of_block))


def evaluate_batches(
    clients: Iterable[ClientBatches],
    predict: Callable[[Tree, Tree], Tree],
    metrics: Mapping[str, Any],
    split: Split = inputs_and_targets,
) -> dict[str, Score]:
    """Return scores of clients whose rows come in batches, one client after the other; see `evaluate`."""
    sums = Sums(predict, metrics, split)
    with _evaluating():
        return sums.scores(tree.concatenate([sums.of_batches(client) for client in clients]))


@contextmanager
def _evaluating() -> Iterator[None]:
    """Compute without gradients, with fixed random draws for metrics such as bootstraps, and restore the generators."""
    with torch.inference_mode(False), torch.no_grad(), restored(every_generator(), seed=0):
        yield


class ClientSums(NamedTuple):
    """A metric's sums of clients' rows.

    Attributes:
        sums: leaves `(K, ...)`.
        raised: `(K,)` how often the metric has raised an error; the sums are then without these rows.
    """

    sums: Tree
    raised: Tensor


class Sums:
    """Sums that make up the metrics of clients' predictions, and their scores.

    Args:
        predict, metrics, split, batch_size: as of `evaluate`.
        in_process: whether all clients are here; other processes send sums only.

    Raises:
        TypeError: metrics that sums do not make up, of clients elsewhere.
    """

    def __init__(
        self,
        predict: Callable[[Tree, Tree], Tree],
        metrics: Mapping[str, Any],
        split: Split,
        batch_size: int | None = None,
        in_process: bool = True,
    ) -> None:
        from fedtorch.metrics.pooled import any_metrics
        from fedtorch.metrics.stacked import StackedMetric

        self._predict, self._split, self._batch_size = predict, split, batch_size
        self._every = any_metrics(metrics, in_process)
        self._stacked = {name: metric for name, metric in self._every.items() if isinstance(metric, StackedMetric)}
        self._pooled = {name: metric for name, metric in self._every.items() if not isinstance(metric, StackedMetric)}
        self._errors: dict[str, Exception] = {}  # the first that each metric has raised of a client's rows

    def of_block(self, tensors: Tree, block: ClientData) -> Tree:
        """Return the sums of a block of clients, `(K, ...)`, that are predicted with others of as many rows."""
        order, parts = [], []
        for places, count in shared_sizes(self._predict, block.mask.sum(1), block.mask.shape[1]):
            rows = places.to(block.mask.device)
            part = tree.take((block.batch, block.mask), rows)
            parts.append(self._of_parts(tree.take(tensors, rows), len(rows), self._columns(part, count)))
            order.append(places)
        return tree.take(tree.concatenate(parts), torch.cat(order).argsort().to(block.mask.device))

    def _columns(self, block: tuple[Tree, Tensor], count: int) -> Iterator[tuple[Tree, Tensor]]:
        """Yield the first `count` rows of clients in batches; without rows one row of zeros, outside the mask."""
        if block[1].shape[1] == 0:
            block = tree.map(lambda leaf: leaf.new_zeros(len(leaf), 1, *leaf.shape[2:]), block)
        size = self._batch_size or max(count, 1)
        for start in range(0, max(count, 1), size):
            part = slice(start, min(start + size, max(count, 1)))
            yield tree.map(lambda leaf, part=part: leaf[:, part].contiguous(), block)

    def of_batches(self, client: ClientBatches) -> Tree:
        """Return the sums of one client, `(1, ...)`.

        Raises:
            TypeError: batches that are not of tensors.
        """
        device = tree.leaves(client.tensors)[0].device

        def parts() -> Iterator[tuple[Tree, Tensor]]:
            for batch, _ in client.batches:
                rows = tuple(batch) if isinstance(batch, list) else batch
                try:
                    tree.leaves(rows)
                except TypeError as error:
                    raise TypeError(
                        f"Expected batches of tensors for metrics=, but client {client.name!r} has others: {error}; "
                        "log the metrics in the module's validation_step instead, and leave out metrics="
                    ) from error
                block = tree.map(lambda leaf: leaf.to(device)[None], rows)
                yield block, torch.ones(1, tree.leaves(block)[0].shape[1], dtype=torch.bool, device=device)

        return self._of_parts(tree.map(lambda leaf: leaf[None], client.tensors), 1, parts())

    def _of_parts(self, tensors: Tree, clients: int, parts: Iterable[tuple[Tree, Tensor]]) -> Tree:
        for each in self._pooled.values():
            each.begin(clients)
        device = tree.leaves(tensors)[0].device
        with restored(generators(device)):  # others draw the same without them
            parts_of_metrics = (self._of_rows(tensors, rows, mask) for rows, mask in self._of_one_memory(parts))
            total = functools.reduce(tree.add, parts_of_metrics)
        places = {name: each.end().to(device) for name, each in self._pooled.items()}
        return {**total, **places}

    def _of_one_memory(self, parts: Iterable[T]) -> Iterator[T]:
        """Yield the batches of clients; refuse a second one of a module that writes in its buffers."""
        for number, part in enumerate(parts):
            writes = sorted(getattr(self._predict, "writes", ()))
            if number and writes:
                raise ValueError(
                    "Expected a module that keeps nothing from batch to batch of its evaluation, where each begins "
                    f"anew, but it writes in {', '.join(writes)}; evaluate rows without batch_size= and without "
                    "loaders, or loop over the batches with run.client_module(client)"
                )
            yield part

    def _of_rows(self, tensors: Tree, rows: Tree, mask: Tensor) -> Tree:
        inputs, target = self._split(rows)
        try:
            prediction = self._predict(tensors, inputs)
        except (RuntimeError, IndexError, TypeError) as error:
            raise ValueError(
                f"Expected inputs that the clients' models take, but got {described_rows(inputs)}: {error}; pass rows "
                "like those of training, and split=lambda rows: (inputs, targets) if they have other fields"
            ) from error
        for each in self._pooled.values():
            each.update(prediction, target, mask)
        return {name: self._of_metric(name, prediction, target, mask) for name in self._stacked}

    def _of_metric(self, name: str, prediction: Tree, target: Tree, mask: Tensor) -> ClientSums:
        """Return a metric's sums; if it raises an error, those of each client separately.

        Raises:
            ValueError: predictions and targets that the metric does not accept for any rows.
            TypeError: the metric is not one that sums make up.
        """
        metric, nothing = self._stacked[name], torch.zeros(len(mask), device=mask.device)
        try:
            return ClientSums(metric.update(prediction, target, mask), nothing)
        except TypeError as error:
            raise TypeError(f"Metric {name!r}: {error}") from error
        except Exception as error:
            self._errors.setdefault(name, error)
            none = tree.map(lambda leaf: leaf[:0], (prediction, target, mask))
            try:
                empty = metric.update(*none)
            except Exception:
                raise ValueError(f"Metric {name!r}: {error}") from error
        if len(mask) == 1:
            return ClientSums(tree.map(lambda leaf: leaf.new_zeros(1, *leaf.shape[1:]), empty), nothing + 1)
        one = lambda k: tree.map(lambda leaf: leaf[k : k + 1], (prediction, target, mask))
        return tree.concatenate([self._of_metric(name, *one(k)) for k in range(len(mask))])

    def scores(self, totals: Tree) -> dict[str, Score]:
        """Return the scores of all clients' sums.

        Raises:
            ValueError: a metric has raised an error for every client.
        """
        scores = {name: self._score(name, totals[name]) for name in self._stacked}
        scores.update({name: metric.score(totals[name]) for name, metric in self._pooled.items()})
        return {name: scores[name] for name in self._every}

    def _score(self, name: str, totals: ClientSums) -> Score:
        from fedtorch.metrics.scores import score_of

        raised = totals.raised > 0
        score, error = score_of(self._stacked[name], totals.sums, raised), self._errors.get(name)
        if error is not None and bool(raised.any()) and bool(score.clients.isnan().all()):
            raise ValueError(
                f"Expected metric {name!r} to have a value for the rows of a client, but it raises "
                f"{type(error).__name__} for every client: {error}"
            ) from error
        return score


class Newcomers:
    """Clients of a star that are new to a run: in the initial state, with the common broadcast as inbox.

    Args:
        algorithm: the clients' algorithm.
        state: one client's initial state.
        clients: number of the run's clients.
        device: device for their tensors.
    """

    in_process = True

    def __init__(self, algorithm: Algorithm, state: Tree, clients: int, device: torch.device) -> None:
        self.algorithm, self.state, self.clients, self.device = algorithm, tree.to(state, device), clients, device

    def evaluate(self, outbox: Tree, data: FederatedData, function: Callable[[Tree, ClientData], Tree]) -> Tree:
        """Return `function(tensors each client predicts with, its data)`, `(K, ...)` in the order of `data`."""
        order, parts = [], []
        for ids, block in data.to(self.device).buckets(small=SMALL_BLOCK):
            for rows in torch.arange(len(ids)).split(max(1, BLOCK_ROWS // max(1, block.mask.shape[1]))):
                parts.append(function(self.tensors(outbox, rows), tree.take(block, rows.to(self.device))))
                order.append(ids[rows])
        return tree.take(tree.concatenate(parts), torch.cat(order).argsort().to(self.device))

    def tensors(self, outbox: Tree, ids: Tensor) -> Tree:
        """Return the tensors that this many of them predict with, `(M, ...)`.

        Raises:
            ValueError: clients have inboxes of their own: on a graph, or by private rows.
        """
        inbox = self.algorithm.exchange.scatter(outbox, slice(self.clients, self.clients + len(ids)))
        if any(len(leaf) != len(ids) for leaf in tree.leaves(inbox)):
            raise ValueError(
                "Expected an algorithm whose server sends all clients the same, but got one that has a row for each "
                "(a graph, or private rows), in which new clients have no model"
            )
        return self.algorithm.model(inbox, tree.expand(self.state, len(ids)))


def check_same_clients(data: Evaluable, names: Sequence[str], kind: str = "validation") -> None:
    """Refuse rows of other clients, unless one (pooled) client is scored on all of them.

    Example:
        >>> import torch, fedtorch as ft
        >>> rows = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2))] * 2, names=["a", "b"])
        >>> check_same_clients(rows, ["a", "c"])
        Traceback (most recent call last):
        ValueError: Expected validation rows of the same clients, but client 1 is 'b' there and 'c' in the population
    """
    if not isinstance(data, loaded("fedtorch.data.loaders", "FederatedLoaders")):
        expected.kind(data, FederatedData, f"{kind}= as FederatedData", "split the clients' own with data.split")
    if len(names) == 1:
        return
    if len(data) != len(names):
        raise ValueError(
            f"Expected {kind} rows of the population's {len(names)} clients, but got {len(data)}; split "
            "the rows of the same clients with data.split"
        )
    for number, (theirs, ours) in enumerate(zip(data.names, names)):
        if theirs != ours:
            raise ValueError(
                f"Expected {kind} rows of the same clients, but client {number} is {theirs!r} there and {ours!r} "
                "in the population"
            )
