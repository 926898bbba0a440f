"""Explain why a Trainer has stopped before its number of epochs."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, Timer

from fedtorch.federation.budget import exhausted


def stopped_early(trainer: L.Trainer, done: int, unit: str = "rounds") -> str:
    """Return why a Trainer has stopped after this number of rounds or epochs, "" if it has done all.

    Example:
        >>> import lightning as L, torch, fedtorch as ft
        >>> from lightning.pytorch.callbacks import EarlyStopping
        >>> data = ft.data.partition(ft.data.diabetes(), ft.data.iid(), clients=5, seed=0)
        >>> federation = ft.Federation(ft.fedavg(ft.least_squares(torch.nn.Linear(10, 1))), ft.InProcess(data))
        >>> trainer = L.Trainer(max_epochs=9, callbacks=EarlyStopping("train_loss", patience=2, min_delta=1e9),
        ...                     logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
        >>> trainer.fit(federation)
        >>> stopped_early(trainer, federation.round)
        'stopped after 3 of 9 rounds by EarlyStopping: Monitored metric train_loss did not improve in the last ...'
        >>> federation.run.ended == stopped_early(trainer, federation.round)
        True
    """
    planned = trainer.max_epochs
    if not trainer.should_stop or (planned not in (None, -1) and done >= planned):
        return ""
    many = f"{done} {unit}" if planned in (None, -1) else f"{done} of {planned} {unit}"
    return f"stopped after {many}{_by(trainer)}"


def _by(trainer: L.Trainer) -> str:
    """Return the cause of the stop, if it is known."""
    run = getattr(trainer.lightning_module, "run", None)
    if run is not None and exhausted(run.algorithm.budget):
        return " when its budget was spent"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return f" by {type(callback).__name__}: {callback.stopping_reason_message.split(' Signaling ')[0]}"
        if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None and left <= 0:
            return f" by {type(callback).__name__}: its time is over"
    return ""
