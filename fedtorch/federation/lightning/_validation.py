"""A LightningModule's own `validation_step`, run with each client's tensors on its validation rows.

What the module logs, numbers and torchmetrics alike, is kept per client: a metric starts anew with every client.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn

from fedtorch import functional, tree
from fedtorch.data import FederatedData
from fedtorch.federation.runs.run import Run
from fedtorch.metrics.scores import Score

_TOGETHER = 64  # clients whose tensors are asked for at once


def has_validation_step(module: nn.Module | None) -> bool:
    """Return whether a module has a `validation_step` of its own."""
    return (
        isinstance(module, L.LightningModule) and type(module).validation_step is not L.LightningModule.validation_step
    )


class OwnValidation:
    """The scores that a module's `validation_step` logs.

    Args:
        module: which has one; it is copied.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = copy.deepcopy(module).eval()
        self.module.log = self._log  # type: ignore[method-assign]
        self.module.log_dict = self._log_dict  # type: ignore[method-assign, assignment]
        self._logs: dict[str, Any] = {}
        takes = inspect.signature(module.validation_step).parameters.values()
        self._indexed = len(takes) > 1 or any(p.kind is p.VAR_POSITIONAL for p in takes)

    def __call__(self, run: Run, data: FederatedData) -> dict[str, Score]:
        """Return scores by the names under which the module logs; overall they are means over rows.

        Args:
            run: whose clients' tensors are taken.
            data: rows of the run's clients.
        """
        device, scores = run.population.device, []
        self.module.to(device)
        rows = data.to(device)
        for ids in torch.arange(len(data)).split(_TOGETHER):
            tensors = run.tensors(ids)
            scores += [
                self._client(tree.map(lambda x, i=i: x[i], tensors), rows[k]) for i, k in enumerate(ids.tolist())
            ]
        counts, names = data.counts.to("cpu", torch.float64), dict.fromkeys(name for each in scores for name in each)
        return {name: _score([each.get(name, torch.nan) for each in scores], counts) for name in names}

    def _client(self, tensors: dict[str, Tensor], rows: Any) -> dict[str, float]:
        """Return the values logged for one client's rows; none without rows."""
        if not len(tree.leaves(rows)[0]):
            return {}
        self._logs = {}
        metrics = [part for part in self.module.modules() if isinstance(part, torchmetrics.Metric)]
        for metric in metrics:
            metric.reset()
        swap = functional.Swap(self.module, list(tensors))
        with torch.no_grad(), torch.random.fork_rng(devices=[]), swap(list(tensors.values())):
            self.module.validation_step(*((rows, 0) if self._indexed else (rows,)))
            self.module.on_validation_epoch_end()
        return {name: float(_computed(value)) for name, value in self._logs.items()}

    def _log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        self._logs[name] = value

    def _log_dict(self, values: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        if isinstance(values, torchmetrics.MetricCollection):
            values = dict(values.items())
        self._logs.update(values)


def _computed(value: Any) -> Any:
    return value.compute() if isinstance(value, torchmetrics.Metric) else value


def _score(values: list[float], counts: Tensor) -> Score:
    """Return one score of clients' values, NaN of those that do not tell it."""
    clients = torch.tensor(values, dtype=torch.float64)
    known = ~clients.isnan()
    return Score(float((clients[known] * counts[known]).sum() / counts[known].sum()), clients)
