"""One client's fit in one round: a Trainer that continues from earlier rounds, and its callback.

The callback adds the quadratic term's gradient, and records losses and learning rates. Epochs, steps and schedules
continue from earlier rounds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from fedtorch.federation.algorithm import Quadratic
from fedtorch.federation.local_schedule import LocalOptimizer, mean_groups
from fedtorch.federation.solvers.loaded_batches import rows_in
from fedtorch.optimisers import options


class RoundTrainer(L.Trainer):
    """A Trainer of one client in one round.

    Attributes:
        rounds: number of rounds, for schedules that depend on the length of training; "each" for a schedule per round.
        configuring: whether the module is making its optimisers.
        asked: whether the module has read the length of training in doing so.
    """

    rounds: int | Literal["each"] | None = None
    configuring = asked = False

    @property
    def max_epochs(self) -> int | None:
        """Return the epochs until the end of this round, or of the run while the module makes its optimisers."""
        return self._until_the_end(super().max_epochs)

    @property
    def max_steps(self) -> int:
        """Return the steps until the end of this round, or of the run while the module makes its optimisers."""
        return self._until_the_end(super().max_steps)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Return the steps until the end of this round, or of the run while the module makes its optimisers."""
        configuring, self.configuring = self.configuring, False  # the property reads max_epochs and max_steps
        steps = super().estimated_stepping_batches
        self.configuring = configuring
        return self._until_the_end(steps)

    def _until_the_end(self, length: Any) -> Any:
        if not self.configuring:
            return length
        self.asked = True
        return length * self.rounds if isinstance(self.rounds, int) and length not in (None, -1) else length

    def configure(self, function: Callable[[], Any]) -> Any:
        """Call `configure_optimizers`; return its result.

        Raises:
            ValueError: it reads the length of training, and the number of rounds is unknown.
        """
        self.configuring = True
        try:
            made = function()
        finally:
            self.configuring = False
        if self.asked and self.rounds is None:
            raise ValueError(
                "Expected rounds=, for example lightning_fit(..., rounds=50), because configure_optimizers asks its "
                'trainer how long training is; rounds="each" makes a schedule that begins anew in every round'
            )
        return made


def catch_up(trainer: RoundTrainer, round: int, stated: int | None = None) -> None:
    """Advance a Trainer's counters to where a client starts in round `round`, even if it missed rounds.

    Args:
        trainer: the client's, before its fit starts.
        round: number of the federation's round.
        stated: batches of an epoch, if the loader has no length.
    """
    counted = trainer.num_training_batches
    batches = int(counted) if math.isfinite(counted) else stated or 1
    loop, every = trainer.fit_loop, trainer.accumulate_grad_batches
    per_epoch, limits = -(-batches // every), []
    if loop.max_epochs not in (None, -1):
        limits.append(per_epoch * int(loop.max_epochs or 0))
    if loop.max_steps != -1:
        limits.append(loop.max_steps)
    loop._resuming_from_checkpoint = True  # the first epoch iterates from its first batch, whatever its number
    begun = round * min(limits, default=0)
    epoch, within = divmod(begun, per_epoch)
    for config in trainer.lr_scheduler_configs:
        if not (config.reduce_on_plateau or (trainer.asked and trainer.rounds == "each")):
            _advance(config, epoch, within, batches, every)
    progress = loop.epoch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + epoch)
    if loop.max_epochs not in (None, -1):
        loop.max_epochs = int(loop.max_epochs or 0) + epoch
    inner = loop.epoch_loop
    inner.automatic_optimization.optim_progress.optimizer.step.total.completed += begun
    inner.manual_optimization.optim_step_progress.total.completed += begun
    if loop.max_steps != -1:
        inner.max_steps += begun


def _advance(config: LRSchedulerConfig, epoch: int, within: int, batches: int, every: int) -> None:
    """Step a scheduler as often as Lightning does in `epoch` epochs of so many batches and `within` further steps."""
    times = epoch // config.frequency
    if config.interval == "step":
        ends = [b for b in range(1, batches + 1) if b % every == 0 or b == batches]
        times = sum(epoch + (i < within) for i, b in enumerate(ends) if b % config.frequency == 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(times):
            config.scheduler.step()  # type: ignore[call-arg]


class Watch(L.Callback):
    """Adds the quadratic term's gradient in one client's fit; records losses, learning rates and exceptions.

    Args:
        quadratic: the client's quadratic term.
        round: number of the federation's round.
        examine: called with the module and each loss of the first batch, before its backward pass.
        stated: batches of an epoch, if the loader has no length.
        rates: learning rates of the parameter groups, instead of the schedulers'.

    Attributes:
        batches: number of batches so far.
        rows: number of rows in the first epoch.
        least: number of rows of the smallest batch.
        refusal: exception raised by this callback, because of the module or its settings.
    """

    def __init__(
        self,
        quadratic: Quadratic | None,
        round: int = 0,
        examine: Callable[[L.LightningModule, Tensor], None] | None = None,
        stated: int | None = None,
        rates: Sequence[float] | None = None,
    ) -> None:
        self.quadratic, self.round, self._examine = quadratic, round, examine
        self._stated, self._rates = stated, rates
        self.batches = self.rows = self.least = 0
        self._epoch: int | None = None  # number of the first epoch
        self.refusal: Exception | None = None
        self.losses: list[Tensor] = []
        self.rates = 0.0
        self.exception: BaseException | None = None
        self._names: dict[int, str] = {}
        self._gradients: list[tuple[Tensor, Tensor | None]] = []  # gradients without the quadratic term's

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Catch up with the federation's round, and prepare the optimisers."""
        assert isinstance(trainer, RoundTrainer)
        if self.round:
            catch_up(trainer, self.round, self._stated)
        if self._rates is not None:
            trainer.strategy.lr_scheduler_configs = []
            for group, rate in zip((g for o in trainer.optimizers for g in o.param_groups), self._rates):
                group["lr"] = rate
        for metric in pl_module.modules():
            if isinstance(metric, torchmetrics.Metric):  # its default would gather over the federation's ranks
                metric.distributed_available_fn = lambda: False
        self._names = {id(p): name for name, p in pl_module.named_parameters()}
        for optimizer in trainer.optimizers:
            line_search = any(group.get("line_search_fn") for group in optimizer.param_groups)
            if self.quadratic is not None and line_search:
                self.refusal = TypeError(
                    f"{type(optimizer).__name__}'s line search reads the value of the loss, but the algorithm's "
                    "quadratic term enters as a gradient only; use line_search_fn=None"
                )
                raise self.refusal
            optimizer.register_step_post_hook(self._after_step)
        if trainer.optimizers:
            trainer.optimizers[0].register_step_post_hook(self._count)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Call `examine` with the losses of the first batch."""
        if self._examine is not None:
            try:
                self._examine(pl_module, loss)
            except ValueError as error:
                self.refusal = error
                raise

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Add λx − h to the gradients of the optimiser's parameters."""
        self._gradients = []
        if self.quadratic is None:
            return
        with torch.no_grad():
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                name = self._names.get(id(p))
                if name is None or name not in self.quadratic.shift:
                    continue
                precision, shift = self.quadratic.precision_of(name), self.quadratic.shift[name]
                pull = precision.to(p.device, p.dtype) * p - shift.to(p.device, p.dtype)
                self._gradients.append((p, p.grad))
                p.grad = pull if p.grad is None else pull + p.grad

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Manual optimisation may reuse these gradients, and must not find the quadratic term's in them.
        for p, gradient in self._gradients:
            p.grad = gradient
        self._gradients = []

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.rates += float(optimizer.param_groups[0].get("lr", float("nan")))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss, which Lightning has divided by the number of accumulated batches."""
        self._examine = None
        self.batches += 1
        self._epoch = trainer.current_epoch if self._epoch is None else self._epoch
        rows = rows_in(batch)
        self.least = min(self.least or rows, rows)
        if trainer.current_epoch == self._epoch:
            self.rows += rows
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            value = loss.detach().reshape(())
            self.losses.append(value if scale == 1 else value * scale)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Record an exception that Lightning may swallow."""
        self.exception = exception


class Look(L.Callback):
    """Records a Trainer's optimisers where a client starts in a round, and ends the fit before its first batch.

    Args:
        round: number of the federation's round.

    Attributes:
        optimizers: the recorded ones.
    """

    def __init__(self, round: int) -> None:
        self._round = round
        self.optimizers: list[LocalOptimizer] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the optimisers, and end the fit."""
        assert isinstance(trainer, RoundTrainer)
        if self._round:
            catch_up(trainer, self._round)
        configs = {id(config.scheduler.optimizer): config for config in trainer.lr_scheduler_configs}
        for optimizer in trainer.optimizers:
            config = configs.get(id(optimizer))
            groups = [options(group) for group in optimizer.param_groups]
            name = None if config is None else config.name
            self.optimizers.append(LocalOptimizer(type(optimizer).__name__, name, config is not None, groups))
        trainer.should_stop = True


def look(begin: Callable[[Look, int], None], batches: Tensor, round: int) -> list[LocalOptimizer]:
    """Return the optimisers of clients with `batches` `(K,)` minibatches an epoch; settings are means over them.

    Args:
        begin: starts the fit of a client of this size with the callback.
        batches, round: see `LocalSchedule`.
    """
    sizes, clients = batches.unique(return_counts=True)
    seen = []
    for size in sizes.tolist():
        looking = Look(round)
        begin(looking, size)
        seen.append(looking.optimizers)
        if not any(optimizer.scheduled for optimizer in looking.optimizers):
            return looking.optimizers  # the same for every client
    means = [mean_groups([each[i].groups for each in seen], clients.tolist()) for i in range(len(seen[0]))]
    return [optimizer._replace(groups=groups) for optimizer, groups in zip(seen[0], means)]
