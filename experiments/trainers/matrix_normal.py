"""HM1, a matrix-normal prior with a learnt correlation, under a Trainer: it stops by the error on rows held out.

Coefficients of all devices come from two that they mix; a device alone has about as many rows as coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.callbacks import EarlyStopping

import fedtorch as ft
from experiments.trainers.training import Script, Size, Training, command
from fedtorch.models.matrix_normal import inverse_wishart

FEATURES = 6
SIZES = {"smoke": Size(5, 16, 4), "cpu": Size(40, 16, 200)}


def make(size: Size, device: str) -> Training:
    """Devices of related coefficients, half of their rows held out."""
    keys = ft.random.fold_in(ft.random.key(0), torch.arange(4))
    drawn = lambda key, *shape: ft.random.normal(keys[key], shape, torch.float64)
    theta = drawn(0, size.clients, 2) @ drawn(1, 2, FEATURES)
    x = drawn(2, size.clients, size.rows, FEATURES)
    y = (x @ theta[..., None])[..., 0] + drawn(3, size.clients, size.rows)
    data = ft.data.FederatedData((x.flatten(0, 1), y.flatten()), torch.full((size.clients,), size.rows))
    train, validation = data.split(0.5, seed=0)
    head = ft.least_squares(ft.LinearHead(FEATURES, intercept=False, dtype=torch.float64))
    federation = ft.Federation(
        ft.matrix_normal(head, covariance=inverse_wishart(scale=0.1)),
        ft.InProcess(train, device=device),
        validation=validation,
        metrics={"error": ft.metrics.mean_squared_error()},
    )
    return Training(federation, EarlyStopping("val_error", min_delta=1e-3, patience=3))


def found(federation: ft.Federation) -> Mapping[str, float]:
    """The error at rows that were held out, whose noise has variance 1, beside that of the first round."""
    error = federation.history["val_error"]
    return {"squared error of rows held out": float(error.iloc[-1]), "of the first round": float(error.iloc[0])}


SCRIPT = Script("trainers.matrix_normal", SIZES, make, found)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, cut off, go on."""
    command(SCRIPT, __doc__, argv)


if __name__ == "__main__":
    main()
