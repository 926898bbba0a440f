"""Evaluate a federation: scores of all rows, of each client, their mean and the worst, from summed statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.data import ClientData, FederatedData
from fedtorch.data.federated import described_rows
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.populations.clients import BLOCK_ROWS, SMALL_BLOCK
from fedtorch.federation.populations.population import Clients
from fedtorch.metrics.pooled import PooledMetric, any_metrics
from fedtorch.metrics.scores import Score, score_of
from fedtorch.metrics.stacked import StackedMetric
from fedtorch.tree import Tree

Split = Callable[[Tree], tuple[Tree, Any]]  # rows -> (inputs, targets)


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
    every = any_metrics(metrics)
    stacked = {name: metric for name, metric in every.items() if isinstance(metric, StackedMetric)}
    pooled = {name: metric for name, metric in every.items() if isinstance(metric, PooledMetric)}
    for metric in pooled.values() if not clients.in_process else ():
        raise metric.reason
    expected.kind(data, FederatedData, "FederatedData to evaluate on", "make it with ft.data.from_tensors([(x, y), …])")

    def sums(tensors: Tree, block: ClientData) -> Tree:
        for each in pooled.values():
            each.begin(len(block.mask))
        size = batch_size or max(block.mask.shape[1], 1)
        parts = [slice(start, start + size) for start in range(0, max(block.mask.shape[1], 1), size)]
        columns = lambda part: tree.map(lambda leaf: leaf[:, part], (block.batch, block.mask))
        first, *others = (sums_of(tensors, *columns(part)) for part in parts)
        places = {name: each.end().to(block.mask.device) for name, each in pooled.items()}
        return {**functools.reduce(tree.add, others, first), **places}

    def sums_of(tensors: Tree, rows: Tree, mask: Tensor) -> Tree:
        inputs, target = split(rows)
        try:
            prediction = predict(tensors, inputs)
        except (RuntimeError, IndexError, TypeError) as error:
            raise ValueError(
                f"Expected inputs that the clients' models take, but got {described_rows(inputs)}: {error}; pass rows "
                "like those of training, and split=lambda rows: (inputs, targets) if they have other fields"
            ) from error
        for each in pooled.values():
            each.update(prediction, target, mask)
        return {name: metric.update(prediction, target, mask) for name, metric in stacked.items()}

    with torch.inference_mode(False), torch.no_grad():
        told = clients.evaluate(outbox, data, sums)
        scores = {name: score_of(metric, told[name]) for name, metric in stacked.items()}
        scores.update({name: metric.score(told[name]) for name, metric in pooled.items()})
        return {name: scores[name] for name in every}


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


def check_same_clients(data: FederatedData, names: Sequence[str], kind: str = "validation") -> None:
    """Refuse rows of other clients, unless one (pooled) client is scored on all of them.

    Example:
        >>> import torch, fedtorch as ft
        >>> rows = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2))] * 2, names=["a", "b"])
        >>> check_same_clients(rows, ["a", "c"])
        Traceback (most recent call last):
        ValueError: Expected validation rows of the same clients, but client 1 is 'b' there and 'c' in the population
    """
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
