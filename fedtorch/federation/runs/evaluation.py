"""Evaluate a federation: scores of all rows, of each client, their mean and the worst, from summed statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.data import ClientData, FederatedData, FederatedLoaders
from fedtorch.data.federated import described_rows
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.populations.clients import BLOCK_ROWS, SMALL_BLOCK
from fedtorch.federation.populations.population import Clients
from fedtorch.metrics.pooled import PooledMetric, any_metrics
from fedtorch.metrics.scores import Score, score_of
from fedtorch.metrics.stacked import StackedMetric
from fedtorch.tree import Tree

Evaluable = FederatedData | FederatedLoaders  # what clients are scored on
Split = Callable[[Tree], tuple[Tree, Any]]  # rows -> (inputs, targets)


class ClientBatches(NamedTuple):
    """A client as it is evaluated batch by batch.

    Attributes:
        number: of the client.
        name: of the client.
        seed: of what its module draws.
        tensors: that it predicts with.
        batches: `(batch, its number of rows)`.
    """

    number: int
    name: str
    seed: int
    tensors: dict[str, Tensor]
    batches: Iterable[tuple[Any, int]]


def inputs_and_targets(rows: Tree) -> tuple[Tree, Tensor]:
    """Return `(x, y)` rows as they are.

    Raises:
        TypeError: the rows are something else; pass a function of your own as `split`.
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
        clients: of a population, bound to an algorithm; or such as are in none.
        outbox: what the server sends out.
        predict: (tensors `(K, ...)`, inputs `(K, N, ...)`) -> predictions `(K, N, ...)`.
        data: rows of the same clients, or of any clients if the population is one pooled client.
        metrics: by name: a `torchmetrics.Metric`, a `MetricCollection`, a `metrics.StackedMetric`, a loss such as
            `torch.nn.functional.mse_loss`, or a function (prediction, target) -> per-example values.
        split: rows -> (inputs, targets).
        batch_size: rows of a client that are predicted at once; default: all of them.

    Raises:
        ValueError: no metrics.
        TypeError: clients are in other processes, and a metric's states are not sums, which alone they tell.
    """
    expected.kind(data, FederatedData, "FederatedData to evaluate on", "make it with ft.data.from_tensors([(x, y), …])")
    sums = Sums(predict, metrics, split, batch_size)
    sums.check_place(clients)
    with torch.inference_mode(False), torch.no_grad():
        return sums.scores(clients.evaluate(outbox, data, sums.of_block))


def evaluate_batches(
    clients: Iterable[ClientBatches],
    predict: Callable[[Tree, Tree], Tree],
    metrics: Mapping[str, Any],
    split: Split = inputs_and_targets,
) -> dict[str, Score]:
    """Return scores of clients whose rows come in batches, one client after the other; see `evaluate`."""
    sums = Sums(predict, metrics, split, None)
    with torch.inference_mode(False), torch.no_grad():
        return sums.scores(tree.concatenate([sums.of_batches(client) for client in clients]))


class Sums:
    """Sums that make up the metrics of clients' predictions, and their scores.

    Args:
        predict, metrics, split, batch_size: as of `evaluate`.
    """

    def __init__(
        self, predict: Callable[[Tree, Tree], Tree], metrics: Mapping[str, Any], split: Split, batch_size: int | None
    ) -> None:
        self._predict, self._split, self._batch_size = predict, split, batch_size
        self._every = any_metrics(metrics)
        self._stacked = {name: metric for name, metric in self._every.items() if isinstance(metric, StackedMetric)}
        self._pooled = {name: metric for name, metric in self._every.items() if isinstance(metric, PooledMetric)}

    def check_place(self, clients: Clients | Newcomers) -> None:
        """Refuse metrics that keep examples, where clients are in other processes and tell sums alone."""
        for metric in self._pooled.values() if not clients.in_process else ():
            raise metric.reason

    def of_block(self, tensors: Tree, block: ClientData) -> Tree:
        """Return the sums of a block of clients, `(K, ...)`."""
        size = self._batch_size or max(block.mask.shape[1], 1)
        parts = [slice(start, start + size) for start in range(0, max(block.mask.shape[1], 1), size)]
        columns = (tree.map(lambda leaf, part=part: leaf[:, part], (block.batch, block.mask)) for part in parts)
        return self._of_parts(tensors, len(block.mask), columns)

    def of_batches(self, client: ClientBatches) -> Tree:
        """Return the sums of one client, `(1, ...)`.

        Raises:
            TypeError: batches of something else than tensors.
        """
        device = tree.leaves(client.tensors)[0].device

        def parts() -> Iterator[tuple[Tree, Tensor]]:
            for batch, _ in client.batches:
                rows = tuple(batch) if isinstance(batch, list) else batch
                try:
                    tree.leaves(rows)
                except TypeError as error:
                    raise TypeError(
                        f"Expected batches of tensors for metrics=, but client {client.name!r} has others: {error}; or "
                        "log the metrics in the module's validation_step, and leave metrics= away"
                    ) from error
                block = tree.map(lambda leaf: leaf.to(device)[None], rows)
                yield block, torch.ones(1, tree.leaves(block)[0].shape[1], dtype=torch.bool, device=device)

        return self._of_parts(tree.map(lambda leaf: leaf[None], client.tensors), 1, parts())

    def _of_parts(self, tensors: Tree, clients: int, parts: Iterable[tuple[Tree, Tensor]]) -> Tree:
        for each in self._pooled.values():
            each.begin(clients)
        total = functools.reduce(tree.add, (self._of_rows(tensors, rows, mask) for rows, mask in parts))
        places = {name: each.end().to(tree.leaves(tensors)[0].device) for name, each in self._pooled.items()}
        return {**total, **places}

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
        return {name: metric.update(prediction, target, mask) for name, metric in self._stacked.items()}

    def scores(self, told: Tree) -> dict[str, Score]:
        """Return the scores of all clients' sums."""
        scores = {name: score_of(metric, told[name]) for name, metric in self._stacked.items()}
        scores.update({name: metric.score(told[name]) for name, metric in self._pooled.items()})
        return {name: scores[name] for name in self._every}


class Newcomers:
    """Clients of a star that no run has seen: in the initial state, they hear what everybody hears.

    Args:
        algorithm: what they compute.
        state: one client's initial state.
        clients: how many have been seen.
        device: where they run.
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
        """Return the tensors that so many of them predict with, `(M, ...)`.

        Raises:
            ValueError: what a client hears is its own: on a graph, or by private rows.
        """
        inbox = self.algorithm.exchange.scatter(outbox, slice(self.clients, self.clients + len(ids)))
        if any(len(leaf) != len(ids) for leaf in tree.leaves(inbox)):
            raise ValueError(
                "Expected an algorithm in which all clients hear the same, but got one that has a row for each "
                "(a graph, or private rows), where clients that have not been seen have no model"
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
    if not isinstance(data, FederatedLoaders):
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
