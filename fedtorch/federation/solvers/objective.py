"""A module's training loss as a function of its tensors, which can be evaluated for many clients at once.

The user's module is copied; the copy is not a registered child of anything. A LightningModule runs unmodified: its
`self.log` is collected, the calls of its torchmetrics are recorded (see `training_metrics`), and a stand-in trainer
answers those trainer attributes that have a value per client. Everything that cannot run stacked raises an error that
names it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from fedtorch import expected, functional, tree
from fedtorch.expected import loaded
from fedtorch.federation.solvers.host_state import refuse_global_store
from fedtorch.federation.solvers.python_state import NUMBER_OPERATIONS, refuse_stand_in
from fedtorch.federation.solvers.training_metrics import (
    MetricRecorder,
    MetricValue,
    Reduction,
    StepCalls,
    refuse_hidden_metrics,
    replace_metrics,
)
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import lightning as L

    from fedtorch.federation.solvers.plain_layers import RowwiseLoss

Loss = Callable[[Any, Any], Tensor]  # (output, target) -> the mean loss of a batch

_TRAINING_HOOKS = (
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_fit_end",
    "on_fit_start",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "setup",
    "teardown",
    "transfer_batch_to_device",
)


class AnswersDiffer(NotImplementedError):
    """A module reads a trainer attribute whose value differs between the clients of one step."""


class TrainerStandIn:
    """Stand-in for one client's Trainer; attributes that it does not have raise an error with their name.

    `asked` collects the attributes that the module has read, because clients whose values differ cannot share a step.
    Values that are the same for every client (one device, no callbacks, fitting) are not collected.

    Example:
        >>> trainer = TrainerStandIn()
        >>> trainer.answers["global_step"] = 3
        >>> trainer.global_step, trainer.asked
        (3, {'global_step'})
        >>> trainer.logger
        Traceback (most recent call last):
        NotImplementedError: Expected the module to ask its trainer only for ..., but it asked for 'trainer.logger'; ...
    """

    DIFFERS: ClassVar[object] = object()  # marks a value that differs between the clients of a step
    _ANSWERS = ("current_epoch", "estimated_stepping_batches", "global_step", "max_epochs", "training")
    _ALIKE: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(("num_devices", "num_nodes", "world_size", "accumulate_grad_batches"), 1),
        **dict.fromkeys(("global_rank", "local_rank", "node_rank"), 0),
        **dict.fromkeys(("evaluating", "predicting", "sanity_checking", "testing", "validating"), False),
        "is_global_zero": True,
        "callbacks": (),
    }

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.answers: dict[str, Any] = {"training": True}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._ALIKE:
            return self._ALIKE[name]
        if name == "state":
            return _fitting()
        if name not in self._ANSWERS:
            raise NotImplementedError(
                f"Expected the module to ask its trainer only for {', '.join(self._ANSWERS)}, but it asked for "
                f"'trainer.{name}'; a stacked client has no trainer of its own, use ft.lightning_fit"
            )
        self.asked.add(name)
        if self.answers.get(name) is self.DIFFERS:
            raise self.differs(name)
        if self.answers.get(name) is None and name in ("estimated_stepping_batches", "max_epochs"):
            raise NotImplementedError(
                f"Expected rounds=, for example gradient_descent(..., rounds=50), because the module asks for "
                f"'trainer.{name}', which counts all rounds"
            )
        return self.answers.get(name)

    @staticmethod
    def differs(name: str) -> AnswersDiffer:
        """Return the error for a trainer attribute whose value differs between the clients of one step."""
        return AnswersDiffer(f"'trainer.{name}' differs between the clients of a stacked step; use ft.lightning_fit")

    def batch_index(self, step: int) -> Any:
        """Return the index of a batch in its epoch; if clients differ, a stand-in that raises when it is used."""
        index = self.answers.get("batch_idx", step)
        return DifferingIndex(self) if index is self.DIFFERS else index


class DifferingIndex:
    """Stand-in for a batch index that differs between clients; any use raises AnswersDiffer.

    Args:
        trainer: records that the index was used.
    """

    def __init__(self, trainer: TrainerStandIn) -> None:
        self._trainer = trainer

    def _raise(self, *_: Any, **__: Any) -> Any:
        self._trainer.asked.add("batch_idx")
        raise self._trainer.differs("batch_idx")

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand_in = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return stand_in._raise()


for _operation in NUMBER_OPERATIONS:
    setattr(DifferingIndex, _operation, DifferingIndex._raise)


@functools.cache
def _fitting() -> Any:
    """Build the state of a Trainer that is fitting."""
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

    return TrainerState(status=TrainerStatus.RUNNING, fn=TrainerFn.FITTING, stage=RunningStage.TRAINING)


def training_copy(module: nn.Module, ignore_hooks: Sequence[str] = ()) -> nn.Module:
    """Deep copy a module for stacked training: metrics replaced, hooks checked.

    Args:
        module: the user's.
        ignore_hooks: names of overridden hooks that do not affect training.

    Raises:
        TypeError: not a module, or a LightningModule that overrides hooks of the training loop, optimises manually or
            has no `training_step`; the message names the obstacle.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected an nn.Module or a LightningModule, but got {type(module).__name__}")
    if isinstance(module, loaded("lightning.pytorch", "LightningModule")):
        _refuse_unsupported(module, ignore_hooks)
    refuse_global_store(module)
    functional.refuse_shared_memory(module)
    trainable = with_recorders(functional.copied(module))
    refuse_hidden_metrics(trainable)
    return trainable


def with_recorders(module: nn.Module) -> nn.Module:
    """Copy a module that has passed `training_copy`'s checks, with its metrics replaced by recorders."""
    replace_metrics(module)
    for part in module.modules():
        if type(part).train is not nn.Module.train:  # a part that stays in evaluation mode overrides `train`
            part.train(part.training)
    return module


def refuse_own_loaders(module: L.LightningModule, ignore_hooks: Sequence[str], names: Sequence[str]) -> None:
    """Raise TypeError for a module's own loaders, which the federation would never call.

    Args:
        module: an instance or class that may define loaders.
        ignore_hooks: names of loaders to ignore.
        names: of the loader methods.
    """
    cls, base = type(module), loaded("lightning.pytorch", "LightningModule")
    defined = [name for name in names if getattr(cls, name) is not getattr(base, name) or name in vars(module)]
    refused = [name for name in defined if name not in ignore_hooks]
    if refused:
        raise TypeError(
            f"{cls.__name__} has {' and '.join(refused)}, which no client's training calls, for clients have rows of "
            "their own: make them of loaders by ft.data.from_loaders({name: loader}) or ft.data.from_datamodules, for "
            f"validation too, and pass ignore_hooks={refused} to leave the module's alone"
        )


def _refuse_unsupported(module: L.LightningModule, ignore_hooks: Sequence[str]) -> None:
    cls, base = type(module), loaded("lightning.pytorch", "LightningModule")
    if cls.training_step is base.training_step:
        raise TypeError(f"Expected {cls.__name__} to define training_step, but it does not")
    if not module.automatic_optimization:
        raise TypeError(f"{cls.__name__} optimises manually (automatic_optimization=False); use ft.lightning_fit")
    refuse_own_loaders(module, ignore_hooks, ("train_dataloader", "val_dataloader"))
    overridden = [
        name
        for name in _TRAINING_HOOKS
        if getattr(cls, name, None) is not getattr(base, name, None) or name in vars(module)
    ]
    refused = sorted(set(overridden) - set(ignore_hooks))
    if refused:
        raise TypeError(
            f"{cls.__name__} overrides {', '.join(refused)}, which gradient_descent does not call for stacked clients; "
            f"use ft.lightning_fit, or ignore_hooks={refused} if training does not depend on them"
        )


def _output(module: nn.Module, inputs: Any) -> Any:
    positional, named = functional.arguments(module, inputs)
    return module(*positional, **named)


class Objective(nn.Module):
    """The loss of a batch as a module: `forward(batch, weights, index)` -> (loss, logs).

    Args:
        module: from `training_copy`.
        loss: (output, target) -> mean loss, for a plain `nn.Module` and batches `(input, target)`.

    Attributes:
        supervised: whether batches have to be `(input, target)`.
        loss: the loss of a plain `nn.Module`.
        metrics: recorded calls of the module's metrics, which it may log.
        reductions: by logged name, the reduction over a client's steps.
        recorded: tensor arguments of the metrics in the last step.
        rows: losses of single rows, for modules of a known type; None for others.
    """

    supervised = False
    rows: RowwiseLoss | None = None

    def __init__(self, module: nn.Module, loss: Loss | None = None) -> None:
        super().__init__()
        self.module = module
        vars(self)["loss"] = loss  # not a submodule, even if the loss is a module
        self.trainer = TrainerStandIn()
        self._batch: Any = None  # current batch
        self._logs: dict[str, Tensor] = {}
        self.metrics = StepCalls(module)
        self.reductions: dict[str, Reduction] = {}
        self.recorded: Sequence[Tensor] = ()
        if isinstance(module, loaded("lightning.pytorch", "LightningModule")):
            if loss is not None:
                raise TypeError("Expected loss=None for a LightningModule, whose training_step returns the loss")
            module.trainer = self.trainer
            module.log = self._log
            module.log_dict = self._log_dict
            self._step: Callable[..., Any] = module.training_step
            indexed = takes_index(module.training_step)
            self._call = (lambda b, i: self._step(b, i)) if indexed else (lambda b, i: self._step(b))
        elif loss is None:
            raise TypeError(
                f"Expected loss= for {type(module).__name__}, which is not a LightningModule; "
                "for example loss=torch.nn.functional.cross_entropy"
            )
        else:
            expected.function(loss, "loss= as a function of (output, target)", "such as torch.nn.functional.mse_loss")
            self.supervised = True
            self._call = lambda batch, index: loss(_output(module, batch[0]), batch[1])

    def forward(self, batch: Tree, weights: Tensor | None, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a client's batch `(B, ...)`; with weights `(B,)` the weighted sum of examples' losses."""
        if weights is None:
            loss, logs, recorded = self._one(batch, index)
            vars(self)["recorded"] = recorded
            return loss, logs

        if self.rows is not None:
            each, self.recorded = self.rows.of_rows(_output(self.module, batch[0]), batch[1]), ()
            return torch.where(weights > 0, weights.to(each.dtype) * each, 0.0).sum(), {}

        def example(row: Tree) -> tuple[Tensor, dict[str, Tensor], Sequence[Tensor]]:
            return self._one(tree.map(lambda leaf: leaf[None], row), index)

        losses, logs, recorded = vmap(example, randomness="different")(batch)
        weights = weights.to(losses.dtype)
        self.recorded = self.metrics.of_rows(recorded, weights) if self.metrics.recorders else ()
        # Padding is dropped instead of weighted by zero: an infinite loss on a padded row must not become NaN.
        average = lambda values: torch.where(weights > 0, weights * values, 0.0).sum()
        return average(losses), {name: average(value) for name, value in logs.items()}

    def _one(self, batch: Tree, index: int) -> tuple[Tensor, dict[str, Tensor], Sequence[Tensor]]:
        attributes = vars(self)  # setting an attribute of a module takes as long as a small operation
        self._logs.clear()
        attributes["_batch"] = batch
        if self.metrics.recorders:
            self.metrics.begin()
        output = self._call(batch, index if isinstance(index, Tensor) else self.trainer.batch_index(index))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            refuse_stand_in(loss)
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            skips = "; a step that returns None to skip its batch is taken by ft.lightning_fit" if loss is None else ""
            raise TypeError(f"Expected {type(self.module).__name__} to return a scalar loss, but got {got}{skips}")
        logs, attributes["_batch"] = dict(self._logs), None
        self._logs.clear()
        return loss if loss.ndim == 0 else loss.reshape(()), logs, self.metrics.end() if self.metrics.recorders else ()

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        **options: Any,
    ) -> None:
        forked = on_step is not False and bool(on_epoch)  # in a training step, logs are per step by default
        whole = isinstance(value, MetricRecorder) or (isinstance(value, MetricValue) and value.call is None)
        reduction = Reduction("mean" if whole else reduction_named(name, reduce_fx), weighted=bool(on_epoch))
        size = options.get("batch_size")
        if on_epoch and size is not None and not whole:
            lengths = {len(leaf) for leaf in tree_leaves(self._batch) if isinstance(leaf, Tensor) and leaf.ndim}
            if lengths and size not in lengths:
                raise TypeError(
                    f"Expected self.log({name!r}, …, on_epoch=True) to count the rows of a batch of {min(lengths)}, "
                    f"but got batch_size={size}; leave it away, or use ft.lightning_fit"
                )
        if self.metrics.log(name, value, reduction, forked):
            return
        if isinstance(value, (int, float)):
            value = torch.tensor(float(value))
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"Expected self.log({name!r}, …) of one number or a torchmetrics metric of the module, but got {got}"
            )
        self._add_log(name, value, reduction)
        if forked:
            self._add_log(f"{name}_step", value, Reduction("last"))
            self._add_log(f"{name}_epoch", value, reduction)

    def _add_log(self, name: str, value: Tensor, reduction: Reduction) -> None:
        self._logs[name], self.reductions[name] = value.detach().reshape(()), reduction

    def _log_dict(self, values: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            self._log(name, value, *args, **kwargs)


def takes_index(step: Callable[..., Any]) -> bool:
    """Return whether a step function takes the batch index besides the batch."""
    accepts = inspect.signature(step).parameters.values()
    positional = [p for p in accepts if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in accepts)


def reduction_named(name: str, reduce_fx: Any) -> str:
    """Return the reduction (mean, sum, min or max) named by `self.log`'s `reduce_fx`."""
    given = getattr(reduce_fx, "__name__", str(reduce_fx))
    known = {"mean": "mean", "sum": "sum", "min": "min", "max": "max", "amin": "min", "amax": "max"}
    if given not in known:
        raise TypeError(
            f"Expected reduce_fx of self.log({name!r}, …) to be mean, sum, min or max for stacked clients, but got "
            f"{given}; use ft.lightning_fit, or log a torchmetrics metric"
        )
    return known[given]
