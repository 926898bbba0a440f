"""GTV minimisation over a graph under a Trainer: it stops when neighbours no longer help on rows held out.

Nodes stand in a circle, each joined to the four after it; the coefficients of one half are minus those of the other. A
node's own rows are fewer than its coefficients. `--gpu` has a million edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from lightning.pytorch.callbacks import EarlyStopping

import fedtorch as ft
from experiments.trainers.training import Script, Size, Training, command

FEATURES, REACH = 8, 4
SIZES = {"smoke": Size(12, 6, 6), "cpu": Size(200, 6, 100), "gpu": Size(250_000, 6, 100)}


def make(size: Size, device: str) -> Training:
    """Nodes of a circle, half of their rows held out."""
    nodes, rows = size.clients, 2 * size.rows
    x = ft.random.normal(ft.random.key(0), (nodes, rows, FEATURES))
    sign = torch.where(torch.arange(nodes) < nodes // 2, 1.0, -1.0)
    y = sign[:, None] * x.sum(2) + 0.1 * ft.random.normal(ft.random.key(1), (nodes, rows))
    data = ft.data.FederatedData((x.flatten(0, 1), y.flatten()), torch.full((nodes,), rows))
    train, validation = data.split(0.5, seed=0)
    start = torch.arange(nodes)
    network = ft.Network(torch.cat([torch.stack([start, (start + step) % nodes], 1) for step in range(1, REACH + 1)]))
    local = ft.gradient_descent(torch.nn.Linear(FEATURES, 1, bias=False), steps=5, loss=loss, optimizer=descent)
    federation = ft.Federation(
        ft.gtv(local, network, alpha=0.1),
        ft.InProcess(train, device=device),
        validation=validation,
        metrics={"error": ft.metrics.mean_squared_error()},
    )
    return Training(federation, EarlyStopping("val_error", min_delta=1e-3, patience=3))


def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return (output[:, 0] - y).square().mean()


def descent(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Gradient steps, which clients take from where they are."""
    return torch.optim.SGD(parameters, lr=0.05)


def found(federation: ft.Federation) -> Mapping[str, float]:
    """The error at rows that were held out, of variance FEATURES."""
    return {"squared error of rows held out": float(federation.history["val_error"].iloc[-1])}


SCRIPT = Script("trainers.networks", SIZES, make, found)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, cut off, go on; or measure on a device."""
    command(SCRIPT, __doc__, argv)


if __name__ == "__main__":
    main()
