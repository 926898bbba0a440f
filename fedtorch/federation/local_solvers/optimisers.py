"""A module's own optimiser and schedule, run on stacked parameters.

An elementwise optimiser on a stack of parameters is as many independent optimisers. The schedule is a table from the
position (step or epoch) to the optimiser's hyperparameters, so clients at one position share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["Configured", "Schedule", "configure", "load_state", "numbers", "probe", "rebind", "state_of", "zero_step"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Schedule:
    """Hyperparameters of each parameter group by position, found by stepping the schedulers once and kept.

    Args:
        optimizer: the optimiser that the schedulers act on; it owns no gradients.
        schedulers: all of one interval.
        interval: "step" or "epoch".
        frequency: the schedulers step after every so many epochs, or batches of an epoch, as Lightning counts them.
    """

    def __init__(self, optimizer: Optimizer, schedulers: list[LRScheduler], interval: str, frequency: int) -> None:
        self._optimizer, self._schedulers = optimizer, schedulers
        self._interval, self._frequency = interval, frequency
        self._table = [self._snapshot()]
        self._changing: set[str] = set()  # the hyperparameters that the schedulers have changed so far

    @property
    def by_epoch(self) -> bool:
        """Whether it depends on where the epochs end, so that clients at one step may differ."""
        return bool(self._schedulers) and (self._interval == "epoch" or self._frequency > 1)

    def apply(self, optimizer: Optimizer, position: int, per_epoch: int) -> None:
        """Gives `optimizer` the hyperparameters of step `position`, of epochs of `per_epoch` steps."""
        if not self._schedulers:
            return
        epoch, within = divmod(position, per_epoch)
        index = epoch // self._frequency
        if self._interval == "step":
            index = epoch * (per_epoch // self._frequency) + within // self._frequency
        while len(self._table) <= index:
            self._advance()
        for group, row in zip(optimizer.param_groups, self._table[index]):
            group.update({name: row[name] for name in self._changing})

    def _advance(self) -> None:
        self._optimizer.step()  # without gradients: nothing moves, but schedulers ask for it
        for scheduler in self._schedulers:
            scheduler.step()
        self._table.append(self._snapshot())
        for first, last in zip(self._table[0], self._table[-1]):
            self._changing.update(name for name in first if first[name] != last[name])

    def _snapshot(self) -> list[dict[str, Any]]:
        return [{name: _copied(group[name]) for name in _options(group)} for group in self._optimizer.param_groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value  # schedulers fill a tensor of a learning rate


class Configured(NamedTuple):
    """An optimiser with its schedule, and the names of the parameters in each group."""

    optimizer: Optimizer
    names: list[list[str]]
    schedule: Schedule


def configure(module: nn.Module, make: MakeOptimizer | None) -> Configured:
    """Asks `make`, or the LightningModule's `configure_optimizers`, for an optimiser on the module's parameters.

    Raises:
        TypeError: no optimiser, several, a scheduler that watches a metric, or several schedulers of different
            intervals.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    if make is not None:
        answer: Any = make(p for p in module.parameters() if p.requires_grad)
    elif isinstance(module, L.LightningModule):
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
    optimizer = optimizers[0]
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Expected a torch.optim.Optimizer, but got {type(optimizer).__name__}")
    groups = []
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise TypeError(
                f"Expected the optimiser to hold the module's parameters, but got others of shapes {unknown}"
            )
        groups.append([names[id(p)] for p in group["params"] if p.requires_grad])
    for setting in schedulers:
        _check_scheduler(setting)
    settings = {(s["interval"], s["frequency"]) for s in schedulers}
    if len(settings) > 1:
        raise TypeError(f"Expected schedulers of one interval and frequency, but got {sorted(settings)}")
    interval, frequency = settings.pop() if settings else ("epoch", 1)
    return Configured(optimizer, groups, Schedule(optimizer, [s["scheduler"] for s in schedulers], interval, frequency))


def _check_scheduler(setting: Mapping[str, Any]) -> None:
    scheduler = setting.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau) or setting.get("reduce_on_plateau"):
        raise TypeError("ReduceLROnPlateau watches a metric and differs between clients; use ft.lightning_fit")
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"Expected a torch.optim.lr_scheduler.LRScheduler, but got {type(scheduler).__name__}")
    if setting["interval"] not in ("step", "epoch"):
        raise TypeError(f"Expected a scheduler's interval 'step' or 'epoch', but got {setting['interval']!r}")


def _parse(answer: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """The forms that Lightning accepts -> (optimisers, scheduler settings)."""
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


def rebind(optimizer: Optimizer, groups: list[list[Tensor]]) -> Optimizer:
    """The same optimiser with the same hyperparameters on other tensors, in the state of its construction.

    Raises:
        TypeError: the constructor gives a parameter a state that is not one number everywhere.
    """
    clone = object.__new__(type(optimizer))
    clone.__dict__.update(vars(optimizer))
    clone.__dict__.pop("step", None)  # schedulers wrap it and bind it to the original
    clone.state = defaultdict(dict)
    clone.param_groups = []
    for group, tensors in zip(optimizer.param_groups, groups):
        clone.param_groups.append({"params": tensors, **{k: _copied(v) for k, v in _options(group).items()}})
        if _may_fuse(clone.param_groups[-1]):
            clone.param_groups[-1]["fused"] = True
        initial: dict[str, Any] = next((optimizer.state[p] for p in group["params"] if p in optimizer.state), {})
        for tensor in tensors if initial else ():
            clone.state[tensor] = {name: _fill(value, tensor, name, clone) for name, value in initial.items()}
    return clone


def _may_fuse(group: dict[str, Any]) -> bool:
    """Whether an optimiser with two moments can do with one pass over memory, and the user has not decided about it.

    Fused optimisers read memory in order, whatever the strides: parameters, and later their gradients, are contiguous.
    """
    undecided = group.get("fused", False) is None and group.get("foreach") is None
    plain = not group.get("differentiable") and not group.get("capturable")
    return "betas" in group and undecided and plain and all(p.is_contiguous() for p in group["params"])


def _fill(value: Any, tensor: Tensor, name: str, optimizer: Optimizer) -> Any:
    """A constructor's state (Adagrad's sums) for a tensor of another shape."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return _copied(value)
    if bool((value != value.flatten()[0]).any()):
        raise TypeError(
            f"{type(optimizer).__name__} starts with a state {name!r} that differs between elements; use "
            "ft.lightning_fit or another optimiser"
        )
    return value.flatten()[0].to(tensor.device, tensor.dtype).expand(tensor.shape).clone()


def zero_step(original: Optimizer, groups: list[list[Tensor]], advice: str) -> Optimizer:
    """`original` on other tensors after one step with gradients of zero, which shows the state that it keeps.

    Raises:
        TypeError: it needs a closure, or its step changes its settings, which are not saved; then `advice` follows.
    """
    name, optimizer = type(original).__name__, rebind(original, groups)
    before = [_options(group) for group in optimizer.param_groups]
    for tensor in (tensor for group in groups for tensor in group):
        tensor.grad = torch.zeros_like(tensor)
    try:
        optimizer.step()
    except TypeError as error:
        raise TypeError(f"Expected an optimiser that needs no closure, but got {name} ({error})") from error
    if [_options(group) for group in optimizer.param_groups] != before:
        raise TypeError(f"{name} keeps its state outside of the parameters; {advice}")
    return optimizer


def numbers(optimizer: Optimizer) -> dict[str, type]:
    """The parts of an optimiser's state that are one number for a whole parameter, and what holds it."""
    parts = [item for state in optimizer.state.values() for item in state.items() if item[1] is not None]
    return {part: type(value) for part, value in parts if not isinstance(value, Tensor) or value.ndim == 0}


def state_of(optimizer: Optimizer, tensor: Tensor) -> dict[str, Tensor]:
    """The optimiser's state of one parameter as tensors, by the optimiser's own names."""
    return {
        part: value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for part, value in optimizer.state.get(tensor, {}).items()
        if value is not None
    }


def load_state(optimizer: Optimizer, tensor: Tensor, saved: Mapping[str, Tensor], kinds: Mapping[str, Any]) -> None:
    """Puts a copy of what `state_of` gave back; `kinds` is from `numbers`."""
    for part, value in saved.items():
        kind = kinds.get(part, Tensor)
        optimizer.state[tensor][part] = value.clone() if issubclass(kind, Tensor) else kind(value)


def probe(configured: Configured) -> None:
    """Checks that two stacked rows are trained as two separate runs.

    Raises:
        TypeError: they are not (Adafactor, Muon, LBFGS), because the optimiser looks across rows, or it does not train
            the tensors in its `param_groups` (optimisers that wrap another one).
    """
    optimizer = configured.optimizer
    name = type(optimizer).__name__
    advice = f"{name} does not treat the rows of a stack independently; use ft.lightning_fit or another optimiser"
    start = torch.linspace(-1, 1, 2 * 4 * 3, dtype=torch.float64).reshape(2, 4, 3)
    try:
        together = _four_steps(optimizer, [start for _ in configured.names], slice(None))
        alone = [_four_steps(optimizer, [start[k] for _ in configured.names], k) for k in range(2)]
    except Exception as error:  # whatever an optimiser objects to
        raise TypeError(f"{advice} ({error})") from error
    for group, stacked in enumerate(together):
        separate = torch.stack([alone[k][group] for k in range(2)])
        if not torch.allclose(stacked, separate, rtol=1e-9, atol=1e-12):
            raise TypeError(advice)
        if torch.equal(stacked, start):
            raise TypeError(f"{name} does not train the tensors in its param_groups; use ft.lightning_fit")


def _four_steps(original: Optimizer, starts: list[Tensor], rows: int | slice) -> list[Tensor]:
    tensors = [start.clone() for start in starts]
    optimizer = rebind(original, [[tensor] for tensor in tensors])
    gradients = torch.sin(torch.arange(4 * 2 * 4 * 3, dtype=torch.float64)).reshape(4, 2, 4, 3)
    gradients = gradients * torch.tensor([1.0, 30.0]).reshape(1, 2, 1, 1)
    for group in optimizer.param_groups:
        if "lr" in group and group["lr"] == 0:  # a schedule's warm-up begins here
            group["lr"] = group["lr"] + 0.01
    for gradient in gradients:
        for tensor in tensors:
            tensor.grad = gradient[rows].clone()
        optimizer.step()
    return tensors
