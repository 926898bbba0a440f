"""Trains a federation with a checkpoint every round, and kills itself: at the end of a round, or inside one.

Usage: killed_training.py FOLDER ROUNDS KILL WHERE, where KILL is the round to die in (0: never), WHERE is "end" or
"within". Goes on from FOLDER/last.ckpt if that is there, and writes FOLDER/final.pt when it is done.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import fedtorch as ft
from support.small_federations import classes, everything, solver, trainer


class Kill(L.Callback):
    """Dies at the start of the epoch after the fatal round, or in the middle of it."""

    def __init__(self, fatal: int, where: str) -> None:
        self.fatal, self.where = fatal, where

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.where == "end" and self.fatal and trainer.current_epoch == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def dying(algorithm: ft.Algorithm, fatal: int) -> ft.Algorithm:
    """Dies in round `fatal` between the clients' work and their commit."""
    rounds = 0

    def server(state: Any, aggregate: Any, key: Any) -> Any:
        nonlocal rounds
        rounds += 1
        if rounds == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return algorithm.server(state, aggregate, key)

    return dataclasses.replace(algorithm, server=server)


def main(folder: Path, rounds: int, fatal: int, where: str) -> None:
    """Runs or resumes."""
    algorithm = ft.personal_layers(solver("adam", reset="never"), "head.*")
    if where == "within":
        algorithm = dying(algorithm, fatal)
    model = ft.Federation(algorithm, ft.InProcess(classes()), cohort=3, seed=7)
    callbacks = [ModelCheckpoint(folder, save_last=True, every_n_epochs=1), Kill(fatal, where)]
    outer = trainer(max_epochs=rounds, callbacks=callbacks, enable_checkpointing=True)
    last = folder / "last.ckpt"
    outer.fit(model, ckpt_path=last if last.exists() else None)
    torch.save(everything(model), folder / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
