"""The report of a federation, or of a vertical fit, that a Lightning `Trainer` trains."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L

from fedtorch import expected
from fedtorch.federation.lightning.stopping import stopped_early
from fedtorch.federation.runs.run import Run
from fedtorch.networks import Network
from fedtorch.report.folder import write
from fedtorch.vfl.fit.run import VerticalRun


class Report(L.Callback):
    """Callback that writes the report of a `Federation` or `vfl.SplitNetwork` when training ends, also by an error.

    Args:
        folder: of the report, see `ft.report`; default: the logger's folder, without a logger the Trainer's
            `default_root_dir`.
        title: of the page; default: the algorithm's name.
        network: to draw, with its positions; default: that of the algorithm, if it has one.
        every: seconds between two versions of the page during training, which an open browser then reloads; None
            writes the page at the end alone.

    Attributes:
        page: path of the page, None before it is written.

    Raises:
        TypeError: the Trainer trains a module that is no `Federation` or `vfl.SplitNetwork`.

    Example:
        >>> import lightning as L, fedtorch as ft
        >>> trainer = L.Trainer(max_epochs=50, callbacks=ft.Report("out"), accelerator="cpu", logger=False,
        ...                     enable_checkpointing=False, enable_progress_bar=False)
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        title: str = "",
        network: Network | None = None,
        every: float | None = None,
    ) -> None:
        if every is not None:
            expected.positive(every=every)
        self.folder, self.title, self.network, self.every = folder, title, network, every
        self._next = 0.0
        self.page: Path | None = None
        self._place: Path | str | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Choose the folder, the same on all ranks; raise TypeError for a module that has no report."""
        if not isinstance(getattr(pl_module, "run", None), (Run, VerticalRun)):
            raise TypeError(f"Expected a Federation or a SplitNetwork to report on, but got {type(pl_module).__name__}")
        self._place = self.folder or trainer.log_dir or trainer.default_root_dir

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the present report, if `every` seconds have passed."""
        if self.every is None:
            return
        if trainer.strategy.broadcast(time.monotonic() >= self._next):  # the first rank decides, because all take part
            self._write(pl_module, "")
            self._next = time.monotonic() + self.every

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the report, with the reason if training has stopped early."""
        run = pl_module.run
        done = (run.number, "rounds") if isinstance(run, Run) else (trainer.current_epoch, "epochs")
        self._write(pl_module, stopped_early(trainer, *done))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write the report so far, with the error that ended training."""
        self._write(pl_module, f"ended by {type(exception).__name__}: {exception}")

    def _write(self, module: Any, ended: str) -> None:
        if self._place is None:  # the error came before `setup`, when there was no run to report on
            return
        scores = getattr(module, "scores", None)
        self.page = write(module.run, self._place, title=self.title, ended=ended, scores=scores, network=self.network)
