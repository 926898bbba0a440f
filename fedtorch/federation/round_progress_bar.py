"""A Lightning `Trainer`'s progress bar over communication rounds."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from fedtorch.federation.progress import rounds_bar


class RoundProgressBar(ProgressBar):
    """One bar for all rounds, where Lightning's own starts a new one every epoch, that is, every round.

    Args:
        title: in front of the bar.

    Example:
        >>> import lightning as L, fedtorch as ft
        >>> trainer = L.Trainer(max_epochs=50, callbacks=ft.RoundProgressBar("FedAvg"), logger=False,
        ...                     enable_checkpointing=False, accelerator="cpu")
    """

    def __init__(self, title: str = "Rounds") -> None:
        super().__init__()
        self.title = title
        self._bar: Any = None
        self._enabled = True

    def enable(self) -> None:
        """Shows the bar."""
        self._enabled = True

    def disable(self) -> None:
        """Hides the bar, as Lightning does on all ranks but the first."""
        self._enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Opens the bar at the round that training starts from."""
        last = trainer.max_epochs if trainer.max_epochs not in (None, -1) else trainer.max_steps
        total = last if last and last > 0 else None
        self._bar = rounds_bar(self.title, total, initial=trainer.current_epoch, shown=self._enabled)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Moves on by one round."""
        values = self.get_metrics(trainer, pl_module)
        values.pop("v_num", None)
        shown = {name: f"{v:.3g}" for name, v in values.items() if isinstance(v, (int, float))}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Closes the bar."""
        self._bar.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()
