"""A LightningModule's own `validation_step`, `test_step` and `predict_step`, for every client of a federation.

Each client is evaluated as a `lightning.Trainer` would evaluate its module on its batches: with the client's tensors,
fresh metrics and the hooks around the steps. Over all clients, logged numbers are reduced over all batches, and metrics
are those of all rows together (see `metrics.joined`). For a module with its own hooks the result is the log of one
epoch over the batches of all clients, each batch with its client's tensors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtorch import functional, tree
from fedtorch._devices import generators, restored
from fedtorch.expected import loaded
from fedtorch.federation.runs.evaluation import ClientBatches
from fedtorch.federation.solvers.objective import reduction_named, takes_index
from fedtorch.federation.solvers.training_metrics import Reduction
from fedtorch.metrics.joined import JoinedStates, metrics_in, value_at_client, value_of
from fedtorch.metrics.scores import Score

_HOOKS = ("model_eval", "start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STAGES = {"validation": "validate", "test": "test", "predict": "predict"}  # names used by `setup`
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, type)
_FIXED = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, nn.Module, Tensor, *_FUNCTIONS)
_OF_MODULES = set(vars(nn.Module()))


class _Epoch(NamedTuple):
    """Result of a client's evaluation."""

    rows: int
    values: dict[str, float]
    entries: dict[str, Logged]
    broken: set[str]  # names of metrics whose states are not finite


def has_step(module: nn.Module | None, stage: str) -> bool:
    """Return whether a module is a LightningModule with its own step for `validation`, `test` or `predict`."""
    base, name = loaded("lightning.pytorch", "LightningModule"), f"{stage}_step"
    return isinstance(module, base) and getattr(type(module), name) is not getattr(base, name)


class AloneTrainer:
    """Stand-in for a Trainer when a run is evaluated without one.

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
        module: has the steps; it is copied.
        stage: "validation", "test" or "predict".
        device: device of the evaluation.
        trainer: the module's `trainer` during evaluation.
    """

    def __init__(self, module: nn.Module, stage: str, device: torch.device, trainer: Any) -> None:
        self._stage, self._device, self._trainer = stage, device, trainer
        template: Any = copy.deepcopy(module)
        template.trainer = trainer
        template.setup(STAGES[stage])
        template.trainer = None
        for _, metric in metrics_in(template):
            metric.reset()
            metric.distributed_available_fn = lambda: False  # clients' metrics are not synchronised over ranks
        self._template = template.to(device).eval()
        self._working = WorkingCopy(self._template, trainer)
        self._logs = StepLogs(self._working.module)
        base = loaded("lightning.pytorch", "LightningModule")
        overridden = lambda name: getattr(type(module), name, None) is not getattr(base, name, None)
        self._hooks = {name for name in _HOOKS if overridden(f"on_{stage}_{name}")}
        self._moves = device.type != "cpu" or any(map(overridden, _TRANSFERS))
        self._indexed = takes_index(getattr(template, f"{stage}_step"))

    def scores(self, clients: Callable[[], Iterable[ClientBatches]]) -> dict[str, Score]:
        """Return the logs of each client and of all, by name.

        Args:
            clients: starts an iteration over them; used twice for a module with hooks.
        """
        joined, epochs = JoinedMetrics(self._working.module), []
        with self._quiet():
            for client in clients():
                with self._client(client) as module:
                    epochs.append(self._epoch(module, client, joined))
            whole = self._over_all(clients()) if self._hooks and any(epoch.rows for epoch in epochs) else None
            return self._scored(epochs, joined, whole)

    def outputs(self, client: ClientBatches) -> list[Any]:
        """Return the step's output for each batch of a client, on the CPU."""
        from lightning.fabric.utilities import move_data_to_device

        with self._quiet(), self._client(client) as module:
            every = [move_data_to_device(output, "cpu") for output, _ in self._steps(module, client.batches)]
            self._hook(module, "epoch_end")
            self._hook(module, "end")
            return every

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Disable gradients, and restore torch's generators."""
        with torch.inference_mode(False), torch.no_grad(), restored(generators(self._device)):
            yield

    @contextmanager
    def _client(self, client: ClientBatches) -> Iterator[Any]:
        """Yield the module with a client's tensors; errors name the client."""
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
        """Return the logs of one epoch over all clients' batches; the module ends with the clients' mean tensors."""
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
            with swap([mean.to(buffer.dtype) for mean, buffer in zip(means.values(), swap.current())]):
                self._hook(self._working.module, "epoch_end")
                values = self._logs.values(value_of)
                self._hook(self._working.module, "end")
        return values

    def _steps(self, module: Any, batches: Any) -> Iterator[tuple[Any, int]]:
        """Yield (output, rows) of every batch; hooks before the first batch are called if there is one."""
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
        """Call a hook if the module overrides it; Lightning's defaults need a Trainer, or do nothing."""
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
        module: contains them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._metrics = module, dict(metrics_in(module))
        self._states = {name: JoinedStates() for name in self._metrics}

    def add(self) -> None:
        """Merge the metrics' states after a client's steps."""
        for name, metric in metrics_in(self._module):
            self._states[name].add(metric)

    def knows(self, name: str) -> bool:
        """Return whether a metric's states, or those of a metric in it, have been merged."""
        return any(states.updates for each, states in self._states.items() if f"{each}.".startswith(f"{name}."))

    def value(self, name: str) -> float:
        """Return the value over all rows of a metric, or of a wrapper of metrics."""
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


@dataclass
class Logged:
    """Entries logged under a name.

    Attributes:
        reduction: reduction over batches.
        metric: the name of the module's metric that was logged; None for numbers.
        numbers: values of the batches.
        rows: numbers of rows of these batches.
    """

    reduction: Reduction
    metric: str | None = None
    numbers: list[Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def reduced(self) -> Tensor:
        """Return the number of all batches, in float64."""
        if len(self.numbers) == 1:
            return self.numbers[0].to("cpu", torch.float64)
        numbers = torch.stack([number.to("cpu", torch.float64) for number in self.numbers])
        return self.reduction.of(numbers[:, None], torch.tensor(self.rows)[:, None])[0]


class StepLogs:
    """Takes the place of `self.log` and `self.log_dict` of a module, and of LightningModules in it.

    Args:
        module: logs the values.

    Attributes:
        entries: logged values, by name.
        rows: number of rows in the current batch; 0 in hooks without one.
    """

    def __init__(self, module: nn.Module) -> None:
        self.entries: dict[str, Logged] = {}
        self.rows = 0
        metric = loaded("torchmetrics", "Metric")
        self._metrics = {id(part): name for name, part in module.named_modules() if isinstance(part, metric)}
        self._module = module
        for part in module.modules():
            if isinstance(part, loaded("lightning.pytorch", "LightningModule")):
                part.log, part.log_dict = self.log, self.log_dict

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Record a number, or a metric of the module.

        Raises:
            TypeError: neither a number nor a metric.
        """
        reduction = Reduction(reduction_named(name, reduce_fx), weighted=True)
        if on_step and on_epoch is False:
            reduction = Reduction("last")
        rows = (batch_size or self.rows) if self.rows else 1
        self._add(name, value, reduction, rows)
        if on_step and on_epoch:
            self._add(f"{name}_epoch", value, reduction, rows)

    def log_dict(self, values: Any, *arguments: Any, **options: Any) -> None:
        """Record several values."""
        collection = loaded("torchmetrics", "MetricCollection")
        pairs = values.items(keep_base=False, copy_state=False) if isinstance(values, collection) else values.items()
        for name, value in pairs:
            self.log(name, value, *arguments, **options)

    def _add(self, name: str, value: Any, reduction: Reduction, rows: int) -> None:
        if isinstance(value, loaded("torchmetrics", "Metric")) and id(value) in self._metrics:
            self.entries.setdefault(name, Logged(reduction, self._metrics[id(value)]))
            return
        value = torch.as_tensor(value) if isinstance(value, (int, float)) else value
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"Expected self.log({name!r}, …) of one number or a torchmetrics metric of the module, but got {got}"
            )
        entry = self.entries.setdefault(name, Logged(reduction))
        entry.numbers.append(value.detach().reshape(()))
        entry.rows.append(rows)

    def values(self, of_metric: Callable[[Any], float] = value_at_client) -> dict[str, float]:
        """Return the final values, with metrics in their present state."""
        return {name: self._value(entry, of_metric) for name, entry in self.entries.items()}

    def _value(self, entry: Logged, of_metric: Callable[[Any], float]) -> float:
        if entry.metric is None:
            return float(entry.reduced())
        return of_metric(self._module.get_submodule(entry.metric))


def over_batches(entries: Iterable[Logged]) -> float:
    """Return the number of all batches of several clients, as if one had logged it.

    Example:
        >>> of = lambda number, rows: Logged(Reduction("mean", True), None, [torch.tensor(number)], [rows])
        >>> over_batches([of(1.0, 3), of(5.0, 1)])
        2.0
    """
    every = list(entries)
    numbers, rows = [n for each in every for n in each.numbers], [n for each in every for n in each.rows]
    return float(Logged(every[0].reduction, None, numbers, rows).reduced())


class WorkingCopy:
    """A copy of a module that takes other tensors, and is reset for each client.

    Copying a module with its metrics for every client costs more than a small client's evaluation. Instead, everything
    that steps change is restored: attributes, buffers, and the states of metrics.

    Args:
        template: the unchanged original.
        trainer: the copy's `trainer`.

    Attributes:
        module: the copy.

    Example:
        >>> class Counting(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight, self.seen = nn.Parameter(torch.zeros(1)), []
        ...     def forward(self, x):
        ...         self.seen.append(x)
        ...         return self.weight * x
        >>> working = WorkingCopy(Counting(), trainer=None)
        >>> with working.holding({"weight": torch.tensor([2.0])}) as module:
        ...     module(3.0), module.seen
        (tensor([6.]), [3.0])
        >>> working.module.seen
        []
    """

    def __init__(self, template: nn.Module, trainer: Any) -> None:
        self.module: Any = functional.with_tensors(template, functional.buffers(template))  # shares its parameters
        self.module.trainer = trainer
        self._trainer = trainer
        self._swap: functional.Swap | None = None
        metric, collection = loaded("torchmetrics", "Metric"), loaded("torchmetrics", "MetricCollection")
        parts = list(self.module.modules())
        self._metrics = [part for part in parts if isinstance(part, (metric, collection))]
        inside = {id(part) for each in self._metrics for part in each.modules()}
        self._parts = [part for part in parts if id(part) not in inside]

    def _remember(self, names: list[str]) -> functional.Swap:
        """Record the module's state before any step."""
        now = [{name: vars(part)[name] for name in vars(part).keys() - _OF_MODULES} for part in self._parts]
        tensors = [value for each in now for value in each.values() if isinstance(value, Tensor)]
        watched = [*self.module.buffers(), *tensors]
        self._watched = [(tensor, tensor.detach().clone(), tensor._version) for tensor in watched]
        # Other attributes may change inside: they are copied, but for these.
        memo = {id(each): each for each in [*self.module.modules(), *self.module.parameters(), *watched, self._trainer]}
        self._kept: dict[int, Any] = memo
        changing = [{name: value for name, value in each.items() if not isinstance(value, _FIXED)} for each in now]
        self._attributes, self._changing = now, copy.deepcopy(changing, dict(memo))
        return functional.Swap(self.module, names)

    @contextmanager
    def holding(self, tensors: dict[str, Tensor]) -> Iterator[Any]:
        """Yield the module with these tensors; restore it afterwards."""
        with self.anew(list(tensors)) as swap, swap(list(tensors.values())):
            yield self.module

    @contextmanager
    def anew(self, names: Sequence[str] = ()) -> Iterator[functional.Swap]:
        """Yield a function that puts tensors into the module, in the order of the first names; restore it after."""
        if self._swap is None:
            self._swap = self._remember(list(names))
        try:
            yield self._swap
        finally:
            self._restore()

    def _restore(self) -> None:
        for metric in self._metrics:
            metric.reset()
        for number, (tensor, before, version) in enumerate(self._watched):
            if tensor._version != version:
                tensor.copy_(before)
                self._watched[number] = (tensor, before, tensor._version)
        fresh = copy.deepcopy(self._changing, dict(self._kept))
        for part, old, again in zip(self._parts, self._attributes, fresh):
            attributes: dict[str, Any] = part.__dict__
            for name in attributes.keys() - old.keys() - _OF_MODULES:
                del attributes[name]
            attributes.update(old)
            attributes.update(again)
