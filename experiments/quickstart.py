"""Quickstart: an ordinary LightningModule, federated over 100 clients with few digits each.

Four ways to train the same classifier on scikit-learn's digits, spread over 100 clients by a Dirichlet distribution
over labels: every client on its own, federated averaging, federated averaging with a personal last layer, and all rows
in one place as the reference. Nothing here is special to federation up to the function `main`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common


class LitClassifier(L.LightningModule):
    """A classifier as one writes it for a Lightning trainer: dropout, a metric, logging, a schedule."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(64, 10)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.accuracy)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs, eta_min=0.03),
        }


class Result(NamedTuple):
    """One way of training, done."""

    name: str
    scores: dict[str, ft.Score]
    megabytes: float
    seconds: float

    def figures(self) -> dict[str, float]:
        """What the table has of it."""
        accuracy = self.scores["accuracy"]
        return {
            "accuracy": accuracy.overall,
            "mean client accuracy": accuracy.mean(),
            "worst client accuracy": accuracy.worst(),
            "calibration error": self.scores["calibration"].overall,
            "megabytes": self.megabytes,
            "seconds": self.seconds,
        }


def train(name: str, federation: ft.Federation, rounds: int) -> float:
    """Runs the rounds with a progress bar; returns the seconds."""
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=ft.RoundProgressBar(f"{name:>15}"),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    return common.seconds(lambda: trainer.fit(federation))


def compare(clients: int, rounds: int, seed: int) -> list[Result]:
    """Trains the same module in four ways and scores each client's model on the client's own held-out rows.

    A client passes five times over its few rows in each round; pooled training needs one pass over all of them.
    """
    data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3, minimum=10), clients=clients, seed=seed)
    training, validation = data.split(0.7, seed=seed)

    def local(epochs: int) -> ft.LocalSolver:
        torch.manual_seed(seed)  # the module's initial weights
        return ft.gradient_descent(LitClassifier(rounds * epochs), epochs=epochs, batch_size=16, reset="never")

    ways = {
        "separate": (ft.separate(local(5)), training),
        "FedAvg": (ft.fedavg(local(5)), training),
        "personal layers": (ft.personal_layers(local(5), personal="head.*"), training),
        "pooled": (ft.pooled(local(1)), training.pool()),
    }
    metrics = {
        "accuracy": torchmetrics.classification.MulticlassAccuracy(10, average="micro"),
        "calibration": ft.metrics.calibration_error(),
    }
    results = []
    for name, (algorithm, rows) in ways.items():
        federation = ft.Federation(algorithm, ft.InProcess(rows), seed=seed)
        seconds = train(name, federation, rounds)
        scores = federation.evaluate(validation, metrics)
        results.append(Result(name, scores, (federation.run.bytes_up + federation.run.bytes_down) / 1e6, seconds))
    return results


def draw(results: Sequence[Result]) -> Figure:
    """Each client's accuracy, and the accuracy over all rows, one row per way of training."""
    figure, axes = common.subplots(figsize=(8, 3.6))
    shift = np.random.Generator(np.random.PCG64(0)).uniform(-0.22, 0.22, 10_000)
    for i, result in enumerate(results):
        score = result.scores["accuracy"]
        axes.scatter(score.clients, i + shift[: len(score.clients)], s=12, alpha=0.4, color=f"C{i}", linewidths=0)
        axes.plot([score.overall] * 2, [i - 0.36, i + 0.36], color=f"C{i}", linewidth=3)
        axes.text(1.02, i, f"{score.overall:.3f}", va="center", color=f"C{i}", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(results)), [result.name for result in results])
    axes.invert_yaxis()
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("accuracy on held-out rows: each dot a client, the bar all rows together")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Compares the four ways, prints a table and draws it."""
    options = common.arguments(__doc__).parse_args(argv)
    clients, rounds = (10, 1) if options.smoke else (100, 50)
    with common.quiet():
        runs = [compare(clients, rounds, seed) for seed in range(options.seeds)]
    rows, lines = [], []
    for repeated in zip(*runs):
        name = repeated[0].name
        found = common.over_seeds(name, [result.figures() for result in repeated])
        rows += found
        lines.append([name, *(f"{row.ours:.3f}" for row in found[:4]), *(f"{row.ours:.1f}" for row in found[4:])])
    title = f"Digits over {clients} clients, {rounds} rounds ({common.machine()})"
    columns = ["", "accuracy", "mean client", "worst client", "calibration error", "MB sent", "seconds"]
    common.show(title, columns, lines)
    common.finish("quickstart", rows, options, lambda: {"quickstart": draw(runs[0])})


if __name__ == "__main__":
    main()
