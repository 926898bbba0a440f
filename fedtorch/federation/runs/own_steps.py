"""A LightningModule's own `validation_step`, `test_step` and `predict_step`, for every client of a federation.

Each client is evaluated as a `lightning.Trainer` would evaluate its module on its batches: with the client's tensors,
fresh metrics and the hooks around the steps. Over all clients, numbers that steps log are reduced over all batches, and
metrics are those of all rows together (see `metrics.joined`). Of a module with hooks of its own it is what one epoch
over the batches of all clients logs, each batch taken with its client's tensors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import tree
from fedtorch._devices import generators, restored
from fedtorch.expected import loaded
from fedtorch.federation.runs.evaluation import ClientBatches
from fedtorch.federation.runs.step_logs import Logged, StepLogs, over_batches, takes_index
from fedtorch.federation.runs.working_copy import WorkingCopy
from fedtorch.metrics.joined import JoinedStates, metrics_in, value_of
from fedtorch.metrics.scores import Score

_HOOKS = ("model_eval", "start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STAGES = {"validation": "validate", "test": "test", "predict": "predict"}  # as `setup` calls them


class _Epoch(NamedTuple):
    """What a client's evaluation came to."""

    rows: int
    values: dict[str, float]
    entries: dict[str, Logged]
    broken: set[str]  # names of metrics whose states are not finite


def has_step(module: nn.Module | None, stage: str) -> bool:
    """Return whether a module is a LightningModule with a step of its own for `validation`, `test` or `predict`."""
    base, name = loaded("lightning.pytorch", "LightningModule"), f"{stage}_step"
    return isinstance(module, base) and getattr(type(module), name) is not getattr(base, name)


class AloneTrainer:
    """Answers what a module may ask its trainer where a run is evaluated without one.

    Example:
        >>> trainer = AloneTrainer(3)
        >>> trainer.current_epoch, trainer.logger, hasattr(trainer, "strategy")
        (3, None, False)
    """

    sanity_checking = training = False
    logger, datamodule = None, None
    is_global_zero, global_rank, local_rank, world_size, num_devices = True, 0, 0, 1, 1

    def __init__(self, rounds: int) -> None:
        self.current_epoch = self.global_step = rounds
        self.loggers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Expected the module to ask only for what a run without a Trainer has, but it asked for 'trainer.{name}'; "
            "evaluate with trainer.validate(federation, data)"
        )


class OwnSteps:
    """Evaluates clients by a module's own steps.

    Args:
        module: which has them; it is copied.
        stage: "validation", "test" or "predict".
        device: where the clients are evaluated.
        trainer: what the module is told that its trainer is.
    """

    def __init__(self, module: nn.Module, stage: str, device: torch.device, trainer: Any) -> None:
        self._stage, self._device, self._trainer = stage, device, trainer
        template: Any = copy.deepcopy(module)
        template.trainer = trainer
        template.setup(STAGES[stage])
        template.trainer = None
        for _, metric in metrics_in(template):
            metric.reset()
            metric.distributed_available_fn = lambda: False  # clients' metrics never meet over ranks
        self._template = template.to(device).eval()
        self._working = WorkingCopy(self._template, trainer)
        self._logs = StepLogs(self._working.module)
        base = loaded("lightning.pytorch", "LightningModule")
        overridden = lambda name: getattr(type(module), name, None) is not getattr(base, name, None)
        self._hooks = {name for name in _HOOKS if overridden(f"on_{stage}_{name}")}
        self._moves = device.type != "cpu" or any(map(overridden, _TRANSFERS))
        self._indexed = takes_index(getattr(template, f"{stage}_step"))

    def scores(self, clients: Callable[[], Iterable[ClientBatches]]) -> dict[str, Score]:
        """Return what is logged of each client and over all, by name.

        Args:
            clients: begins to go through them; of a module with hooks twice.
        """
        joined, epochs = JoinedMetrics(self._working.module), []
        with self._quiet():
            for client in clients():
                with self._client(client) as module:
                    epochs.append(self._epoch(module, client, joined))
            whole = self._over_all(clients()) if self._hooks and any(epoch.rows for epoch in epochs) else None
            return self._scored(epochs, joined, whole)

    def outputs(self, client: ClientBatches) -> list[Any]:
        """Return what the step returns for each batch of a client, on the CPU."""
        from lightning.fabric.utilities import move_data_to_device

        with self._quiet(), self._client(client) as module:
            every = [move_data_to_device(output, "cpu") for output, _ in self._steps(module, client.batches)]
            self._hook(module, "epoch_end")
            self._hook(module, "end")
            return every

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Record no gradients, and leave torch's generators as they are."""
        with torch.inference_mode(False), torch.no_grad(), restored(generators(self._device)):
            yield

    @contextmanager
    def _client(self, client: ClientBatches) -> Iterator[Any]:
        """Give the module with a client's tensors, and say in errors whose evaluation fails."""
        self._seeded(client.seed)
        self._logs.entries = {}
        try:
            with self._working.holding(client.tensors) as module:
                yield module
        except Exception as error:
            error.add_note(f"in {self._stage}_step of client {client.name!r}, or the hooks around it")
            raise
        finally:
            self._logs.rows = 0

    def _seeded(self, seed: int) -> None:
        for generator in generators(self._device):
            generator.manual_seed(seed)

    def _epoch(self, module: Any, client: ClientBatches, joined: JoinedMetrics) -> _Epoch:
        rows = sum(size for _, size in self._steps(module, client.batches))
        if not rows:
            return _Epoch(0, {}, {}, set())
        if not self._hooks:
            joined.add()
        self._hook(module, "epoch_end")
        values = self._logs.values()
        broken = {name for name, entry in self._logs.entries.items() if _is_broken(module, entry, values[name])}
        self._hook(module, "end")
        return _Epoch(rows, values, self._logs.entries, broken)

    def _over_all(self, clients: Iterable[ClientBatches]) -> dict[str, float]:
        """Return what one epoch over all clients' batches logs; at its end the module has the clients' mean tensors."""
        self._logs.entries = {}
        means: dict[str, Tensor] = {}
        with self._working.anew() as swap:

            def batches() -> Iterator[tuple[Any, int]]:
                total = 0
                for client in clients:
                    self._seeded(client.seed)
                    seen = 0
                    with swap(list(client.tensors.values())):
                        for batch, rows in client.batches:
                            seen += rows
                            yield batch, rows
                    total += seen
                    if seen:
                        means.update(_moved(means or client.tensors, client.tensors, seen / total))

            for _ in self._steps(self._working.module, batches()):
                pass
            with swap([mean.to(own.dtype) for mean, own in zip(means.values(), swap.current())]):
                self._hook(self._working.module, "epoch_end")
                values = self._logs.values(value_of)
                self._hook(self._working.module, "end")
        return values

    def _steps(self, module: Any, batches: Any) -> Iterator[tuple[Any, int]]:
        """Yield (output, rows) of every batch; the hooks before the first run where there is one."""
        step = getattr(module, f"{self._stage}_step")
        for index, (batch, rows) in enumerate(batches):
            if index == 0:
                for name in ("model_eval", "start", "epoch_start"):
                    self._hook(module, name)
            self._logs.rows = rows
            if self._moves:
                batch = module.on_before_batch_transfer(batch, 0)
                batch = module.on_after_batch_transfer(module.transfer_batch_to_device(batch, self._device, 0), 0)
            self._hook(module, "batch_start", batch, index)
            output = step(batch, index) if self._indexed else step(batch)
            self._hook(module, "batch_end", output, batch, index)
            self._logs.rows = 0
            yield output, rows

    def _hook(self, module: Any, name: str, *arguments: Any) -> None:
        """Call a hook that the module overrides; Lightning's own ask a Trainer, or do nothing."""
        if name in self._hooks:
            getattr(module, f"on_{self._stage}_{name}")(*arguments)

    def _scored(self, epochs: list[_Epoch], joined: JoinedMetrics, whole: dict[str, float] | None) -> dict[str, Score]:
        names = {name: entry for epoch in epochs for name, entry in epoch.entries.items()}
        scores = {}
        for name, entry in names.items():
            clients = torch.tensor([epoch.values.get(name, torch.nan) for epoch in epochs], dtype=torch.float64)
            logged = [epoch.entries[name] for epoch in epochs if name in epoch.entries]
            best = None if entry.metric is None else self._template.get_submodule(entry.metric).higher_is_better
            if whole is not None and name in whole:
                overall = whole[name]
            elif entry.metric is None:
                overall = over_batches(logged)
            else:
                overall = joined.value(entry.metric) if joined.knows(entry.metric) else _mean(epochs, name)
            logging = torch.tensor([name in epoch.entries for epoch in epochs])
            unknown = clients.isnan() & logging
            broken = torch.tensor([entry.metric is None or name in epoch.broken for epoch in epochs])
            scores[name] = Score(overall, clients, best, unknown & broken, unknown & ~broken)
        return scores


class JoinedMetrics:
    """The metrics of a module that has evaluated clients in turn, as of all their rows.

    Args:
        module: has them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._metrics = module, dict(metrics_in(module))
        self._states = {name: JoinedStates() for name in self._metrics}

    def add(self) -> None:
        """Take in the metrics after a client's steps."""
        for name, metric in metrics_in(self._module):
            self._states[name].add(metric)

    def knows(self, name: str) -> bool:
        """Return whether a metric's states, or those of a metric in it, have been joined."""
        return any(states.updates for each, states in self._states.items() if f"{each}.".startswith(f"{name}."))

    def value(self, name: str) -> float:
        """Return the value of a metric, or of a wrapper of metrics, that has seen all rows."""
        whole: Any = copy.deepcopy(self._module.get_submodule(name))
        for inside, metric in list(metrics_in(whole)):
            metric.reset()
            self._states[".".join(filter(None, (name, inside)))].write(metric)
        return value_of(whole)


def _moved(means: dict[str, Tensor], tensors: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return weighted means, in float64, moved to a client's tensors by its share; others than numbers are its own."""
    numbers = {n: x for n, x in tensors.items() if x.is_floating_point() or x.is_complex()}
    wide = tree.wide({n: (means[n], x) for n, x in numbers.items()})
    return {n: wide[n][0] + share * (wide[n][1] - wide[n][0]) if n in wide else x for n, x in tensors.items()}


def _is_broken(module: nn.Module, entry: Logged, value: float) -> bool:
    """Return whether a logged metric is NaN because its inputs were."""
    if entry.metric is None or not math.isnan(value):
        return False
    states = [
        getattr(part, name) for _, part in metrics_in(module.get_submodule(entry.metric)) for name in part._defaults
    ]
    leaves = [leaf for state in states for leaf in (state if isinstance(state, list) else [state])]
    return not all(bool(leaf.isfinite().all()) for leaf in leaves)


def _mean(epochs: list[_Epoch], name: str) -> float:
    """Return the mean of clients' values, weighted by their rows."""
    known = [(epoch.rows, epoch.values[name]) for epoch in epochs if name in epoch.values]
    return sum(rows * value for rows, value in known) / sum(rows for rows, _ in known)
