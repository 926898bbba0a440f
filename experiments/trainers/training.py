"""What the scripts share: a Trainer with a logger and checkpoints, a training that goes on after a cut, measurements.

A script says what is trained, when it stops and what has come of it. Without `--gpu` it is trained to its end, then
anew to half of its rounds, and a third time from the checkpoint of the half: the table says how many tensors have other
bits than those of the training that nothing cut off.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import fedtorch as ft
from experiments import common

Trained = ft.Federation | ft.vfl.SplitNetwork


class Size(NamedTuple):
    """How much is trained."""

    clients: int
    rows: int  # of a client
    rounds: int  # at most


class Training(NamedTuple):
    """What a Trainer is given."""

    module: Trained
    stopping: L.Callback
    callbacks: tuple[L.Callback, ...] = ()
    train: ft.vfl.VerticalLoader | None = None  # of a module that is no federation
    validation: ft.vfl.VerticalLoader | None = None


class Script(NamedTuple):
    """What is trained, at which sizes, and what has come of it."""

    name: str
    sizes: Mapping[str, Size]  # "smoke", "cpu" and, where it is measured on a device, "gpu"
    make: Callable[[Size, str], Training]  # (size, device) -> anew each time, from the same seeds
    found: Callable[[Any], Mapping[str, float]]  # of such a module


def trainer(
    folder: Path, rounds: int, training: Training, accelerator: str | Accelerator = "cpu", saved: bool = True
) -> L.Trainer:
    """A Trainer that logs to `folder/log` and stops by itself; `folder/checkpoints/last.ckpt` is of the last round."""
    saving = [ModelCheckpoint(folder / "checkpoints", save_last=True)] if saved else []
    return L.Trainer(
        max_epochs=rounds,
        accelerator=accelerator,
        devices=1,
        logger=CSVLogger(folder, name="log"),
        callbacks=[*saving, training.stopping, *training.callbacks],
        enable_checkpointing=saved,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class Criterion(L.Callback):
    """Logs a number that is asked of the run every so many rounds, for `EarlyStopping`; in between it stays."""

    def __init__(self, name: str, of: Callable[[ft.Run], float], every: int = 1) -> None:
        self.name, self.of, self.every, self.last = name, of, every, float("nan")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if pl_module.run.number % self.every == 0:
            self.last = self.of(pl_module.run)
        pl_module.log(self.name, self.last)

    def state_dict(self) -> dict[str, float]:
        return {"last": self.last}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.last = state_dict["last"]


class CutOff(L.Callback):
    """Ends a training after so many rounds, as a kill between two rounds would."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or trainer.current_epoch + 1 >= self.rounds


def made(script: Script, size: Size, device: str) -> Training:
    """What a Trainer is given, of weights that begin alike."""
    L.seed_everything(0, verbose=False)
    return script.make(size, device)


def fitted(script: Script, size: Size, folder: Path, rounds: int, go_on: Path | None = None) -> Trained:
    """Train a module that is made anew for so many rounds, from a checkpoint where there is one."""
    training = made(script, size, "cpu")
    training = training._replace(callbacks=(*training.callbacks, CutOff(rounds)))
    trainer(folder, size.rounds, training).fit(training.module, training.train, training.validation, ckpt_path=go_on)
    return training.module


def state(module: Trained) -> dict[str, bytes]:
    """The bits of all that a checkpoint has of a module; seconds, which no two trainings share, are left out."""
    flat = {**module.state_dict(), **module.run.log.state_dict()}
    flat |= module.run.state_dict() if isinstance(module, ft.Federation) else {}
    plain = {name: value for name, value in flat.items() if isinstance(value, Tensor) and "seconds" not in name}
    return {name: value.cpu().contiguous().numpy().tobytes() for name, value in plain.items()}


def cut_off(script: Script, size: Size, folder: Path) -> dict[str, float]:
    """Train to the end, and once more from the checkpoint of a training that was cut off half-way."""
    began = time.perf_counter()
    whole = fitted(script, size, folder / "whole", size.rounds)
    seconds = time.perf_counter() - began
    rounds = whole.run.number
    fitted(script, size, folder / "again", max(1, rounds // 2))
    again = fitted(script, size, folder / "again", size.rounds, folder / "again" / "checkpoints" / "last.ckpt")
    bits, others = state(whole), state(again)
    with open(folder / "whole" / "log" / "version_0" / "metrics.csv", newline="") as file:
        logged = {name for row in csv.DictReader(file) for name, value in row.items() if value}
    return {
        "rounds": rounds,
        "stopped by its criterion": float(rounds < size.rounds),
        "columns in metrics.csv": len(logged),
        "tensors in its checkpoint": len(bits),
        "of these other bits after going on": sum(others.get(name) != value for name, value in bits.items()),
        **script.found(whole),
        "seconds": seconds,
    }


class Clock(L.Callback):
    """Seconds of each round, after all that the device was asked for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = self._now(pl_module.device)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds.append(self._now(pl_module.device) - self._began)

    def _now(self, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def on_device(script: Script, size: Size, device: str, folder: Path) -> dict[str, float]:
    """Train once on a device, and measure rounds with their validation; files of a checkpoint are not written."""
    clock, training = Clock(), made(script, size, device)
    timed = training._replace(callbacks=(*training.callbacks, clock))
    fit = trainer(folder, size.rounds, timed, "gpu" if device == "cuda" else "cpu", saved=False).fit
    fit(training.module, training.train, training.validation)
    first, *later = clock.seconds
    peak = {"largest memory, MB": torch.cuda.max_memory_allocated() / 1e6} if device == "cuda" else {}
    return {
        "clients": size.clients,
        "rounds": training.module.run.number,
        "first round, seconds": first,
        "later rounds, seconds": statistics.median(later or [first]),
        **peak,
        **script.found(training.module),
    }


def command(script: Script, about: str | None, argv: Sequence[str] | None) -> None:
    """Train by the options, and print what has come of it."""
    parser = common.arguments(about)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and checkpoints here")
    if "gpu" in script.sizes:
        parser.add_argument("--gpu", action="store_true", help="measure a larger training on a CUDA device")
    options = parser.parse_args(argv)
    gpu = getattr(options, "gpu", False)
    size = script.sizes["smoke" if options.smoke else "gpu" if gpu else "cpu"]
    device = "cuda" if gpu and torch.cuda.is_available() else "cpu"
    if gpu and device == "cpu" and not options.smoke:
        sys.stderr.write(
            f"No CUDA device: nothing has been measured. On one this trains {size.clients} clients of {size.rows} rows "
            f"for up to {size.rounds} rounds by L.Trainer(accelerator='gpu'), and measures seconds of the first and of "
            "later rounds, the largest memory, and how good the model is; --smoke shows that it runs.\n"
        )
        common.finish(script.name, [], options)
        return
    with common.quiet(), TemporaryDirectory() as folder:
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists")  # it is gone on from
        keep = options.keep or Path(folder)
        found = on_device(script, size, device, keep) if gpu else cut_off(script, size, keep)
    rows = [common.Row(device if gpu else "a Trainer", metric, value) for metric, value in found.items()]
    common.show_rows(f"{script.name} ({common.machine()})", rows, ".4g")
    common.finish(script.name, rows, options)
