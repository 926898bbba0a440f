"""The four lines: a classifier as one writes it for a Trainer, averaged. It stops by its accuracy on rows held out.

`--gpu` has ten thousand clients, of which a thousand are asked in a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.callbacks import EarlyStopping

import fedtorch as ft
from experiments.quickstart import LitClassifier
from experiments.trainers.training import Script, Size, Training, command

SIZES = {"smoke": Size(6, 20, 4), "cpu": Size(100, 40, 100), "gpu": Size(10_000, 40, 60)}


def make(size: Size, device: str) -> Training:
    """Clients with rows of ten classes, which a linear map of the inputs tells apart."""
    x = ft.random.normal(ft.random.key(0), (size.clients * size.rows, 64))
    y = (x @ ft.random.normal(ft.random.key(1), (64, 10))).argmax(1)
    data = ft.data.FederatedData((x, y), torch.full((size.clients,), size.rows))
    train, validation = data.split(0.75, seed=0)
    local = ft.gradient_descent(LitClassifier(size.rounds), epochs=1, batch_size=10)
    federation = ft.Federation(
        ft.fedavg(local),
        ft.InProcess(train, device=device),
        cohort=min(size.clients, 1000),
        validation=validation,
        metrics={"accuracy": ft.metrics.accuracy()},
    )
    return Training(federation, EarlyStopping("val_accuracy", min_delta=5e-3, patience=5, mode="max"))


def found(federation: ft.Federation) -> Mapping[str, float]:
    """The accuracy on rows that were held out."""
    return {"accuracy on rows held out": float(federation.history["val_accuracy"].iloc[-1])}


SCRIPT = Script("trainers.averaging", SIZES, make, found)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, cut off, go on; or measure on a device."""
    command(SCRIPT, __doc__, argv)


if __name__ == "__main__":
    main()
