"""A Trainer that begins where the federation's clock stands: epochs, steps and schedules go on from earlier rounds."""

from __future__ import annotations

import warnings

import lightning as L
from lightning.pytorch.utilities.types import LRSchedulerConfig


class RoundTrainer(L.Trainer):
    """A Trainer of one client in one round.

    Attributes:
        configuring: whether the module is making its optimisers.
        spans_round: whether it has then asked how long training is, so that its schedule is one of a round.
    """

    configuring = spans_round = False

    @property
    def max_epochs(self) -> int | None:
        """Epochs until the end of this round."""
        self.spans_round |= self.configuring
        return super().max_epochs

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Steps until the end of this round."""
        self.spans_round |= self.configuring
        return super().estimated_stepping_batches


def catch_up(trainer: RoundTrainer, round: int) -> None:
    """Takes a Trainer that is about to begin to where a client begins in round `round`, also if it has been away."""
    loop, batches, every = trainer.fit_loop, int(trainer.num_training_batches), trainer.accumulate_grad_batches
    per_epoch, limits = -(-batches // every), []
    if loop.max_epochs not in (None, -1):
        limits.append(per_epoch * int(loop.max_epochs or 0))
    if loop.max_steps != -1:
        limits.append(loop.max_steps)
    begun = round * min(limits, default=0)
    epoch, within = divmod(begun, per_epoch)
    for config in trainer.lr_scheduler_configs:
        if not (config.reduce_on_plateau or trainer.spans_round):
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
    """Steps a scheduler as often as Lightning would have in `epoch` epochs of so many batches and `within` steps."""
    times = epoch // config.frequency
    if config.interval == "step":
        ends = [b for b in range(1, batches + 1) if b % every == 0 or b == batches]
        times = sum(epoch + (i < within) for i, b in enumerate(ends) if b % config.frequency == 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(times):
            config.scheduler.step()  # type: ignore[call-arg]
