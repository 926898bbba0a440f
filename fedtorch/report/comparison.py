"""Training, validation and a baseline side by side.

A validation error is hard to judge without the training error (a large gap is overfitting) and a baseline (the error of
a prediction without inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import FederatedData
from fedtorch.federation.runs.evaluation import Split, Sums, inputs_and_targets
from fedtorch.metrics.scores import Score
from fedtorch.tree import Tree

Predictor = Callable[[Tree], Tensor]  # inputs (K, N, ...) -> predictions (K, N, ...)


class Scores(NamedTuple):
    """Scores of one model on one set of rows under one metric; see `Comparison`."""

    model: str
    rows: str
    metric: str
    score: Score


class Comparison(NamedTuple):
    """Scores of several models on several sets of rows; print it for a table."""

    lines: tuple[Scores, ...]

    def __str__(self) -> str:
        header = ("model", "rows", "metric", "overall", "mean client", "lowest client", "highest client")
        cells: list[tuple[str, ...]] = [header]
        for model, rows, metric, score in self.lines:
            values = (score.overall, score.mean(), score.worst(True), score.worst(False))
            cells.append((model, rows, metric, *(f"{value:.4f}" for value in values)))
        widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
        return "\n".join(
            "  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
            for line in cells
        )


def compare(
    models: Mapping[str, Any],
    data: Mapping[str, FederatedData],
    metrics: Mapping[str, Any],
    split: Split = inputs_and_targets,
) -> Comparison:
    """Return the scores of every model on every set of rows.

    Args:
        models: by name: a `Federation`, or a function inputs `(K, N, ...)` -> predictions, such as
            `baseline(training)`.
        data: by name, for example `{"training": training, "validation": validation}`.
        metrics: by name; see `ft.metrics`.
        split: rows -> (inputs, targets).

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=5, seed=0)
        >>> training, validation = data.split(0.8, seed=0)
        >>> federation = ft.Federation(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(training))
        >>> models = {"FedAvg": federation, "baseline": ft.report.baseline(training)}
        >>> error = {"mse": lambda prediction, target: (prediction.squeeze(-1) - target) ** 2}
        >>> print(ft.report.compare(models, {"training": training, "validation": validation}, error))
        model     rows        metric  ...
    """
    lines = []
    for name, model in models.items():
        for part, rows in data.items():
            scores = (
                model.evaluate(rows, metrics, split)
                if hasattr(model, "evaluate")
                else _evaluate_predictor(model, rows, metrics, split)
            )
            lines += [Scores(name, part, metric, score) for metric, score in scores.items()]
    return Comparison(tuple(lines))


def baseline(training: FederatedData, split: Split = inputs_and_targets) -> Predictor:
    """Return the best prediction that ignores the inputs, from the targets of all clients.

    Returns:
        inputs `(K, N, ...)` -> predictions: for integer targets the logarithms of the classes' frequencies
        `(K, N, classes)`, for others their mean `(K, N, 1)`.

    Example:
        >>> import torch, fedtorch as ft
        >>> targets = torch.tensor([1.0, 3.0]), torch.tensor([5.0])
        >>> data = ft.data.from_tensors([(torch.ones(len(y), 1), y) for y in targets])
        >>> ft.report.baseline(data)(torch.zeros(2, 1, 1)).flatten()
        tensor([3., 3.])
    """
    target = split(training.rows)[1]
    if target.is_floating_point():
        best = target.reshape(len(target), -1).mean(0)
    else:
        counts = torch.bincount(target, minlength=int(target.max()) + 1).to(torch.get_default_dtype())
        best = (counts / counts.sum()).clamp(min=1e-12).log()

    def predict(inputs: Tree) -> Tensor:
        leaf = tree.leaves(inputs)[0]
        return best.to(leaf.device).expand(*leaf.shape[:2], -1)

    return predict


def _evaluate_predictor(
    predictor: Predictor, data: FederatedData, metrics: Mapping[str, Any], split: Split
) -> dict[str, Score]:
    sums = Sums(lambda tensors, inputs: predictor(inputs), metrics, split)
    with torch.no_grad():
        blocks = data.buckets()
        order = torch.cat([ids for ids, _ in blocks]).argsort()
        every = tree.concatenate([sums.of_block({"ids": ids}, block) for ids, block in blocks])
        return sums.scores(tree.take(every, order))
