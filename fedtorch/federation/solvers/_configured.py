"""A module's own optimiser and schedule, run on stacked parameters.

One of torch's elementwise optimisers on a stack of parameters acts as independent optimisers; any other is made
separately for each client. The schedule is a table from the position (step or epoch) to the optimiser's
hyperparameters, so clients at one position share it.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fedtorch.expected import loaded
from fedtorch.federation.solvers.objective import TrainerStandIn
from fedtorch.optimisers import MakeOptimizer, TreeOptimizer, check_maker, options

_SPEED = {"params", "foreach", "fused", "capturable", "differentiable"}  # options that change no result
_WITHIN = {"_schedulers", "_milestones"}  # private attributes in which schedulers keep others


class StepRefused(TypeError):
    """An optimiser cannot take a client's step, or its state cannot be stored."""


class HasGroups(Protocol):
    """Object with groups of parameters and their hyperparameters: an optimiser, or several clients' optimisers."""

    param_groups: list[dict[str, Any]]


class Schedule:
    """Hyperparameters of each parameter group by position, found by stepping the schedulers once.

    Args:
        optimizer: the optimiser that the schedulers act on; it owns no gradients.
        schedulers: all of one interval.
        interval: "step" or "epoch".
        frequency: the schedulers step after this many epochs, or batches of an epoch, in Lightning's count.

    Attributes:
        changing: the hyperparameters that the schedulers have changed so far.
    """

    name: str | None = None  # under which Lightning logs its learning rates

    def __init__(self, optimizer: Optimizer, schedulers: list[LRScheduler], interval: str, frequency: int) -> None:
        self._optimizer, self._schedulers = optimizer, schedulers
        self._interval, self._frequency = interval, frequency
        self._table = [self._snapshot()]
        self.changing: set[str] = set()

    @property
    def by_epoch(self) -> bool:
        """Return whether it depends on where the epochs end, so that clients at one step may differ."""
        return self._interval == "epoch" or self._frequency > 1

    @property
    def by_step(self) -> bool:
        """Return whether it depends on the steps taken in earlier rounds."""
        return self._interval == "step"

    def apply(self, optimizer: HasGroups, position: int, per_epoch: int) -> None:
        """Give `optimizer` the hyperparameters of step `position`, of epochs of `per_epoch` steps.

        Several clients have the groups of one client after those of another.
        """
        epoch, within = divmod(position, per_epoch)
        index = epoch // self._frequency
        if self._interval == "step":
            index = epoch * (per_epoch // self._frequency) + within // self._frequency
        while len(self._table) <= index:
            self._advance()
        for group, row in zip(optimizer.param_groups, cycle(self._table[index])):
            group.update({name: row[name] for name in self.changing})

    def _advance(self) -> None:
        for scheduler in self._schedulers:
            try:
                with warnings.catch_warnings():  # the optimiser takes no steps here
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                    scheduler.step()
            except ValueError as error:  # a schedule with an end, such as OneCycleLR
                raise ValueError(
                    f"Expected a schedule as long as the run, but {type(scheduler).__name__} ends after "
                    f"{len(self._table) - 1} {self._interval}s: {error}; make it as long as self.trainer's "
                    "estimated_stepping_batches or max_epochs, and say rounds= to the local solver"
                ) from error
        self._table.append(self._snapshot())
        for first, last in zip(self._table[0], self._table[-1]):
            self.changing.update(name for name in first if first[name] != last[name])

    def _snapshot(self) -> list[dict[str, Any]]:
        return [options(group) for group in self._optimizer.param_groups]


class Configured(NamedTuple):
    """An optimiser of stacked parameters with its schedule."""

    optimizer: TreeOptimizer
    schedule: Schedule | None
    settings: dict[str, Any]  # of both as configured, see `optimizer_settings`


def configure(module: nn.Module, make: MakeOptimizer | None) -> Configured:
    """Build an optimiser of the module's parameters by `make`, or the LightningModule's `configure_optimizers`.

    Raises:
        TypeError: no optimiser, several, a scheduler that watches a metric, or several schedulers of different
            intervals.
    """
    if make is not None:
        check_maker(make)
        answer: Any = make(p for p in module.parameters() if p.requires_grad)
    elif isinstance(module, loaded("lightning.pytorch", "LightningModule")):
        answer = module.configure_optimizers()
    else:
        raise TypeError(
            f"Expected optimizer= for {type(module).__name__}, which is not a LightningModule; "
            "for example optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    optimizers, schedulers = _parse(answer)
    if len(optimizers) != 1:
        raise TypeError(
            f"Expected one optimiser, but {type(module).__name__} configures {len(optimizers)}; use ft.lightning_fit"
        )
    advice = "use reset='round'"
    optimizer = TreeOptimizer(optimizers[0], dict(module.named_parameters()), stacked=True, advice=advice)
    for setting in schedulers:
        _check_scheduler(setting)
    settings = {(s["interval"], s["frequency"]) for s in schedulers}
    if len(settings) > 1:
        raise TypeError(
            f"Expected schedulers of one interval and frequency, but got {sorted(settings)}; use ft.lightning_fit"
        )
    act_on = [setting["scheduler"] for setting in schedulers]
    described = optimizer_settings(optimizers, schedulers)
    schedule = Schedule(optimizer.original, act_on, *settings.pop()) if settings else None
    if schedule is not None:
        schedule.name = schedulers[0].get("name")
    return Configured(optimizer, schedule, described)


def optimizer_settings(optimizers: Sequence[Any], schedulers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments of optimisers and schedulers, by name: "optimizer", "optimizer.lr", "scheduler", ….

    Options in which several groups of parameters differ are a tuple, with one value for each group. Options that only
    affect speed are left out.
    """
    groups = [options(group) for optimizer in optimizers for group in optimizer.param_groups]
    names = dict.fromkeys(name for group in groups for name in group if name not in _SPEED)
    described: dict[str, Any] = {"optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers)}
    for name in names:
        values = tuple(_plain(group.get(name)) for group in groups)
        if values != (None,) * len(values):
            described[f"optimizer.{name}"] = values[0] if len(set(map(repr, values))) == 1 else values
    if schedulers:
        act_on = [{**setting, "scheduler": _said(setting["scheduler"])} for setting in schedulers]
        described["scheduler"] = act_on[0] if len(act_on) == 1 else act_on
    return described


def configured_settings(module: nn.Module) -> dict[str, Any]:
    """Return `optimizer_settings` of a LightningModule's configuration, also for several optimisers.

    If that needs the module's own Trainer, return the numbers and texts among the module's attributes and
    hyperparameters.
    """
    module = copy.deepcopy(module)
    try:
        module.trainer = TrainerStandIn()  # type: ignore[assignment]
        return optimizer_settings(*_parse(module.configure_optimizers()))  # type: ignore[operator]
    except Exception:  # any error: the module may need a Trainer, or results of `setup`
        usual, every = vars(loaded("lightning.pytorch", "LightningModule")()), {**vars(module), **dict(module.hparams)}  # type: ignore[arg-type]
        plain = {name: value for name, value in every.items() if isinstance(value, (int, float, str))}
        return {f"module.{n}": value for n, value in plain.items() if n not in usual and not n.startswith("_")}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value


def _said(value: Any) -> Any:
    """Return a scheduler's arguments, with those of nested schedulers."""
    if isinstance(value, (LRScheduler, ReduceLROnPlateau)):
        made = {n: _said(each) for n, each in vars(value).items() if n in _WITHIN or not n.startswith("_")}
        return {"class": type(value).__name__, **{n: v for n, v in made.items() if n != "optimizer"}}
    return [_said(each) for each in value] if isinstance(value, (list, tuple)) else value


def _check_scheduler(setting: Mapping[str, Any]) -> None:
    scheduler = setting.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau) or setting.get("reduce_on_plateau"):
        raise TypeError("ReduceLROnPlateau watches a metric and differs between clients; use ft.lightning_fit")
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"Expected a torch.optim.lr_scheduler.LRScheduler, but got {type(scheduler).__name__}")
    if setting["interval"] not in ("step", "epoch"):
        raise TypeError(f"Expected a scheduler's interval 'step' or 'epoch', but got {setting['interval']!r}")


def _parse(answer: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the forms that Lightning accepts -> (optimisers, scheduler settings)."""
    if answer is None:
        return [], []
    if isinstance(answer, Mapping):
        schedulers = [_scheduler(answer["lr_scheduler"])] if answer.get("lr_scheduler") is not None else []
        return [answer["optimizer"]], schedulers
    if isinstance(answer, (list, tuple)):
        if len(answer) == 2 and isinstance(answer[0], (list, tuple)):
            several = answer[1] if isinstance(answer[1], (list, tuple)) else [answer[1]]
            return list(answer[0]), [_scheduler(s) for s in several]
        parts = [_parse(part) for part in answer]
        return [o for part in parts for o in part[0]], [s for part in parts for s in part[1]]
    return [answer], []


def _scheduler(setting: Any) -> dict[str, Any]:
    setting = dict(setting) if isinstance(setting, Mapping) else {"scheduler": setting}
    return {"interval": "epoch", "frequency": 1, **setting}


def own_optimizer(
    module: nn.Module, make: MakeOptimizer | None, trainer: TrainerStandIn, values: Mapping[str, Tensor]
) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    """Return (an optimiser of one client alone, its parameters by name), made as a loop over clients makes it.

    Args:
        module: a template, whose optimiser `configure` accepts.
        make: from parameters to the optimiser; None uses the module's.
        trainer: stand-in for the module's trainer.
        values: of the trained parameters, by name; they are copied.
    """
    places = {name: p for name, p in module.named_parameters() if p.requires_grad}
    parameters = {name: nn.Parameter(values[name].detach().clone()) for name in places}
    if make is not None:
        answer: Any = make(p for p in parameters.values())
    else:  # a copy of the module that shares all other tensors
        shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        replaced = {id(place): parameters[name] for name, place in places.items()}
        copied = copy.deepcopy(module, {**shared, **replaced})
        copied.trainer = trainer  # type: ignore[assignment]
        answer = copied.configure_optimizers()  # type: ignore[operator]
    (optimizer,), _ = _parse(answer)
    TreeOptimizer(optimizer, parameters)  # raises for an optimiser of other tensors
    return optimizer, parameters


def check_steps(optimizer: Optimizer) -> None:
    """Raise TypeError for an optimiser whose steps need more than the dense gradients of its parameters."""
    name = type(optimizer).__name__
    if isinstance(optimizer, SparseAdam):
        raise TypeError(f"Expected an optimiser of dense gradients, but got {name}; use Adam or ft.lightning_fit")
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in arguments if each.default is each.empty and each.kind not in optional]
    if needed:
        raise TypeError(
            f"Expected an optimiser that needs no closure, but the step of {name} asks for {', '.join(needed)}; use "
            "ft.lightning_fit"
        )
