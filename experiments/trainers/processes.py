"""Multi-output Gaussian processes under a Trainer: they stop when the bound of the marginal likelihood stands still.

Units share a latent process, smoothed by each in a way of its own. `--gpu` has ten thousand of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning.pytorch.callbacks import EarlyStopping

import fedtorch as ft
from experiments.fedmgp import models as fm
from experiments.trainers.training import Script, Size, Training, command

SIZES = {"smoke": Size(4, 20, 4), "cpu": Size(20, 50, 100), "gpu": Size(10_000, 50, 100)}


def make(size: Size, device: str) -> Training:
    """Units of noisy curves, scored at the curves without noise."""
    signals = fm.signals(size.clients, size.rows, (1.0, 10.0), seed=0)
    curves = fm.federated([signals.grid[::10]] * size.clients, list(signals.curves[:, ::10]))
    federation = ft.Federation(
        ft.fedmgp(fm.model(fm.inducing()), accept_disclosure=True),
        ft.InProcess(fm.federated(signals.x, signals.y), device=device),
        validation=curves,
        metrics={"error": ft.metrics.mean_squared_error()},
    )
    return Training(federation, EarlyStopping("train_loss", min_delta=0.01, patience=3))  # minus the bound, a row


def found(federation: ft.Federation) -> Mapping[str, float]:
    """The bound, a row, and the error of their curves, whose noise has a standard deviation of 0.1."""
    last = federation.history.iloc[-1]
    return {"minus the bound, a row": float(last["train_loss"]), "rmse of the curves": float(last["val_error"]) ** 0.5}


SCRIPT = Script("trainers.processes", SIZES, make, found)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, cut off, go on; or measure on a device."""
    command(SCRIPT, __doc__, argv)


if __name__ == "__main__":
    main()
