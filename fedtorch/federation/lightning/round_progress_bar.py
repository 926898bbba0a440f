"""A Lightning `Trainer`'s progress over communication rounds."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from fedtorch.progress import Progress, Told


class RoundProgressBar(ProgressBar):
    """One bar for all rounds, where Lightning's own starts a new one every epoch, that is, every round.

    A `Federation` uses it in place of Lightning's own. In a log it prints a line now and then, see `fedtorch.progress`.

    Args:
        title: text in front of the bar.

    Example:
        >>> import lightning as L, fedtorch as ft
        >>> trainer = L.Trainer(max_epochs=50, callbacks=ft.RoundProgressBar("FedAvg"), logger=False,
        ...                     enable_checkpointing=False, accelerator="cpu")
    """

    def __init__(self, title: str = "Rounds") -> None:
        super().__init__()
        self.title = title
        self._open = ExitStack()
        self._enabled = True

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def disable(self) -> None:
        """Hide the bar, as Lightning does on all ranks but the first."""
        self._enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar at the round that training starts from."""
        last = trainer.max_epochs if trainer.max_epochs not in (None, -1) else trainer.max_steps
        total = last if last and last > 0 else None
        shown = Progress(self.title, total, initial=trainer.current_epoch, shown=self._enabled, always=True)
        self._bar = self._open.enter_context(shown)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move on by one round."""
        self._bar.update(tell=partial(self._told, trainer, pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        self._open.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the bar on the screen."""
        self._open.close()

    def _told(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Told:
        values: dict[str, Any] = self.get_metrics(trainer, pl_module)
        values.pop("v_num", None)
        return {name: f"{value:.3g}" for name, value in values.items() if isinstance(value, (int, float))}
