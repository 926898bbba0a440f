"""Validation, tests and predictions of a federation: which rows, and how they are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from fedtorch import expected, tree
from fedtorch.data import BadClients, FederatedData, FederatedLoaders
from fedtorch.federation.lightning._trainer_settings import check_loader, limit_of
from fedtorch.federation.runs.evaluation import Evaluable, Split, check_same_clients, inputs_and_targets
from fedtorch.federation.runs.own_steps import STAGES, has_step
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.scored import client_batches, predictor_of
from fedtorch.federation.solvers.batches import limited
from fedtorch.metrics.pooled import any_metrics
from fedtorch.metrics.scores import Score

_LOADERS = {"validation": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}
_PREFIXES = {"validation": "val", "test": "test"}


class Evaluation:
    """Scores a run's clients and predicts with them, for a Trainer.

    Args:
        run: the clients' run.
        rows: by stage: "validation", "test", "predict".
        metrics: by name; none for the module's own steps.
        split: rows -> (inputs, targets), for metrics.
        batch_size: rows of a client that are evaluated at once; None for all.

    Raises:
        ValueError: rows of other clients, or no metric for them.
    """

    def __init__(
        self,
        run: Run,
        rows: Mapping[str, Evaluable | None],
        metrics: Mapping[str, Any] | None,
        split: Split,
        batch_size: int | None,
    ) -> None:
        if metrics:
            any_metrics(metrics)  # raises if there is no metric
        self._run, self._metrics, self._split, self._batch_size = run, metrics or None, split, batch_size
        self._built = {stage: data for stage, data in rows.items() if data is not None}
        self._given: dict[str, Evaluable] = {}
        self._predict: Callable[..., list[Any]] | None = None
        # by stage: all rows, the limit, the rows within it
        self._limited: dict[str, tuple[Evaluable, float, Evaluable]] = {}
        for stage, data in self._built.items():
            self._check(stage, data)
        if "validation" in self._built:
            self._check_step("validation")
        if batch_size is not None and any(isinstance(data, FederatedLoaders) for data in self._built.values()):
            raise ValueError(
                f"Expected no evaluation_batch_size= for clients with loaders, which have theirs, but got {batch_size}"
            )
        if metrics and not self._built:
            raise ValueError("Expected validation= and metrics= together, but got only metrics=, and no test= either")

    def _check(self, stage: str, data: Evaluable) -> None:
        check_same_clients(data, self._run.population.names, stage)

    def _check_step(self, stage: str) -> None:
        if stage in _PREFIXES and self._metrics is None and not has_step(self._run.algorithm.module, stage):
            raise ValueError(
                f"Expected {stage}= and metrics= together, but got only one of them, and a module that has no "
                f"{stage}_step"
            )

    def attach(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Use the rows passed to `Trainer.validate`, `test` or `predict` in place of loaders.

        Raises:
            ValueError: there are no rows, or none that can be scored.
        """
        stages = {TrainerFn.VALIDATING: "validation", TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}
        self._given, self._predict = {}, None
        stage = stages.get(trainer.state.fn)  # type: ignore[arg-type]
        if stage is None:
            self._check_limit("validation", trainer)
            return
        loop: Any = {"validation": trainer.validate_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}[
            stage
        ]
        source = loop._data_source
        if isinstance(source.instance, (FederatedData, FederatedLoaders)):
            self._check(stage, source.instance)
            self._given[stage] = source.instance
            source.instance, source.name = module, _LOADERS[stage]
        elif not source.is_module():
            check_loader(source.instance, None, {"predict": "prediction"}.get(stage, stage))
        elif not self.has(stage):
            verb = trainer.state.fn.value  # type: ignore[union-attr]
            stage_name = "validation" if stage == "validation" else "test"
            raise ValueError(
                f"Expected rows for trainer.{verb}, but got none; pass trainer.{verb}(federation, data) with "
                f"FederatedData of the same clients, or ft.Federation(…, {stage_name}=data)"
            )
        self._check_step(stage)
        self._check_limit(stage, trainer)

    def _check_limit(self, stage: str, trainer: L.Trainer) -> None:
        if stage in _PREFIXES and self.has(stage):
            self._within(stage, limit_of(trainer, _PREFIXES[stage]))

    def has(self, stage: str) -> bool:
        """Return whether the stage has rows."""
        return stage in self._given or stage in self._built

    def rows(self, stage: str) -> Evaluable:
        """Return the rows of a stage: the Trainer's, or those of construction."""
        return self._given.get(stage) or self._built[stage]

    def scores(self, stage: str, trainer: Any) -> dict[str, Score]:
        """Return scores by the names under which they are logged."""
        options = {} if self._metrics is not None else {"stage": STAGES[stage], "trainer": trainer}
        rows = self._within(stage, limit_of(trainer, _PREFIXES[stage]))
        scores = self._run.evaluate(rows, self._metrics, self._split, batch_size=self._batch_size, **options)
        return {name if options else f"{_PREFIXES[stage]}_{name}": score for name, score in scores.items()}

    def _within(self, stage: str, limit: float | None) -> Evaluable:
        """Return the rows within a limit of batches, always the same object, so that its blocks stay cached."""
        rows = self.rows(stage)
        if limit is None:
            return rows
        if self._limited.get(stage, ())[:2] != (rows, limit):
            self._limited[stage] = rows, limit, first_batches(rows, self._batch_size, limit)
        return self._limited[stage][2]

    def predictions(self, client: int, trainer: Any) -> list[Any]:
        """Return the outputs of a client's batches."""
        if self._predict is None:
            split = None if self._split is inputs_and_targets else self._split  # rows of other forms are all inputs
            self._predict = predictor_of(self._run, split, trainer)
        (batches,) = client_batches(self._run, self.rows("predict"), False, self._batch_size, [client])
        return self._predict(batches)


def values_of(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return the logged values of scores: over all rows, and the clients' mean, minimum and maximum.

    `<name>_undefined` counts the clients that have rows on which the metric is not defined, as an area under the ROC
    curve is not on rows of one class. Scores of several numbers, such as a confusion matrix, are not logged.
    """
    values: dict[str, float] = {}
    numbers = {name: score for name, score in scores.items() if score.is_number}
    for name, score in numbers.items():
        values[name] = score.overall
        values[f"{name}_mean"] = score.mean()
        values[f"{name}_min"] = score.worst(largest_is_best=True)
        values[f"{name}_max"] = score.worst(largest_is_best=False)
        values[f"{name}_undefined"] = float(score.count_undefined())
    return values


def first_batches(data: Evaluable, batch_size: int | None, limit: float) -> Evaluable:
    """Return the first batches of each client: at most `limit`, or this share of them for a float.

    Args:
        data: of clients with rows, or with loaders.
        batch_size: rows per batch.
        limit: number or share of batches.

    Raises:
        ValueError: a share leaves none of some client's, or all rows are one batch.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([torch.arange(5.0), torch.arange(3.0)])
        >>> [rows.tolist() for rows in first_batches(data, batch_size=2, limit=1)]
        [[0.0, 1.0], [0.0, 1.0]]
    """
    if isinstance(data, FederatedLoaders):
        return FirstOfLoaders(**{f.name: getattr(data, f.name) for f in fields(data) if f.init}, limit=limit)
    if batch_size is None:
        raise ValueError(
            f"Expected ft.Federation(…, evaluation_batch_size=) for a limit of {limit} batches, but got none: a "
            "client's rows are one batch"
        )
    try:
        taken = limited((data.counts + batch_size - 1) // batch_size, limit)
    except BadClients as error:
        raise ValueError(f"Client {data.names[error.rows[0]]!r}: {error}") from error
    counts = (taken * batch_size).minimum(data.counts)
    within = torch.arange(int(data.counts.sum())) - data.starts.repeat_interleave(data.counts)
    positions = (within < counts.repeat_interleave(data.counts)).nonzero()[:, 0]
    return replace(data, rows=tree.map(lambda leaf: leaf[positions.to(leaf.device)], data.rows), counts=counts)


@dataclass(frozen=True, eq=False, repr=False)
class FirstOfLoaders(FederatedLoaders):
    """Clients with loaders, of which the first batches are read.

    Args:
        limit: see `first_batches`.
    """

    limit: float = 1.0

    def batches(self, client: int | str, seed: int) -> Iterator[Any]:
        """Iterate over the first batches of a client's loader; see `FederatedLoaders.batches`."""
        number = expected.client_number(client, self.names)
        most = int(limited(torch.tensor([self.steps(number)]), self.limit))
        with closing(super().batches(client, seed)) as every:  # type: ignore[type-var]
            yield from islice(every, most)
