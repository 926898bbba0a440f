"""Quickstart: an ordinary LightningModule, federated over 50 cameras with 25 pictures of digits each.

Every camera adds a background of its own to what it sees, as sensors do: what a digit looks like is common to all, the
background is not. The same classifier is trained in seven ways on scikit-learn's digits: some share too little, some
too much, and a line on each says why it ends where it does. Nothing is special to federation up to the class `Way`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common
from fedtorch.trust import privacy

EPSILON = 8.0  # of the private row, for whole cameras


class Background(nn.Module):
    """Takes a background away, as many numbers as pixels."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(pixels))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.level


class LitClassifier(L.LightningModule):
    """A classifier as one writes it for a Lightning trainer: dropout, a metric, logging, a schedule."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.background = Background(64)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(64, 10)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.background(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.accuracy)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs, eta_min=0.02),
        }


def standard_error(score: ft.Score) -> float:
    """That of the mean over cameras, which have as many pictures each."""
    return float(score.clients.std()) / len(score.clients) ** 0.5


class Way(NamedTuple):
    """One way of training, and why it ends where it does."""

    name: str
    why: str
    algorithm: ft.Algorithm
    data: ft.data.FederatedData


class Result(NamedTuple):
    """One way of training, done."""

    name: str
    why: str
    scores: dict[str, ft.Score]
    training: float | None  # accuracy in the last round's steps, as the module logs it; None where nothing is published
    epsilon: float | None  # of whole cameras; None promises nothing
    megabytes: float
    seconds: float

    def figures(self) -> dict[str, float]:
        """What the table has of it."""
        accuracy = self.scores["accuracy"]
        epsilon = {} if self.epsilon is None else {"epsilon": self.epsilon}
        training = {} if self.training is None else {"training accuracy": self.training}
        return {
            "accuracy": accuracy.overall,
            "standard error over cameras": standard_error(accuracy),
            **training,
            "worst camera": accuracy.worst(),
            "calibration error": self.scores["calibration"].overall,
            **epsilon,
            "megabytes": self.megabytes,
            "seconds": self.seconds,
        }


def photographed(cameras: int, seed: int) -> ft.data.FederatedData:
    """The digits dealt out to cameras, to whose pictures each adds its background of independent normal pixels."""
    generator = torch.Generator().manual_seed(seed)
    dealt = ft.data.partition(ft.data.digits(), ft.data.iid(), clients=cameras, seed=seed)
    return ft.data.from_tensors([(x + 0.7 * torch.randn(64, generator=generator), y) for x, y in dealt])


def ways_of_training(data: ft.data.FederatedData, rounds: int, seed: int) -> list[Way]:
    """The same module in seven ways.

    A camera passes five times over its few pictures in each round; pooled training needs one pass over all of them.
    """

    def local(epochs: int = 5) -> ft.LocalSolver:
        torch.manual_seed(seed)  # the module's initial weights
        module = LitClassifier(rounds * epochs)
        return ft.gradient_descent(module, epochs=epochs, batch_size=16, reset="never", clip=1.0)

    personal = ft.personal_layers(local(), personal="background.*")
    delta = 0.5 / len(data)
    noise = privacy.noise_for(epsilon=EPSILON, rounds=rounds, delta=delta)
    private = personal | privacy.client_level(clip=1.0, noise=noise, delta=delta, budget=EPSILON)
    return [
        Way("separate", "25 pictures are too few to learn ten digits from", ft.separate(local()), data),
        Way("FedAvg", "one model for all cannot know whose background it sees", ft.fedavg(local()), data),
        Way(
            "personal last layer",
            "the wrong layer: digits look alike to all cameras, and each learns to name them alone",
            ft.personal_layers(local(), personal="head.*"),
            data,
        ),
        Way(
            "Ditto",
            "a whole model for each camera, drawn to a shared one: nobody has to know what differs",
            ft.ditto(local(), strength=0.3),
            data,
        ),
        Way("personal background", "shares all but what differs: 64 numbers stay with their camera", personal, data),
        Way(
            f"the same, ε = {EPSILON:g}",
            f"hides what a camera tells: much noise on a mean of {len(data)}, little on one of thousands",
            private,
            data,
        ),
        Way(
            "pooled",
            "the reference: all pictures in one place, no federation",
            ft.pooled(local(1)),
            data.pool(),
        ),
    ]


def train(way: Way, rounds: int, seed: int) -> tuple[ft.Federation, float]:
    """Run the rounds with a progress bar; return the federation and the seconds."""
    federation = ft.Federation(way.algorithm, ft.InProcess(way.data), seed=seed)
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=ft.RoundProgressBar(f"{way.name:>19}"),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    return federation, common.seconds(lambda: trainer.fit(federation))


def compare(cameras: int, rounds: int, seed: int) -> list[Result]:
    """Train in all ways and score each camera's model on the camera's own held-out pictures."""
    training, validation = photographed(cameras, seed).split(0.7, seed=seed)
    metrics = {
        "accuracy": torchmetrics.classification.MulticlassAccuracy(10, average="micro"),
        "calibration": ft.metrics.calibration_error(),
    }
    results = []
    for way in ways_of_training(training, rounds, seed):
        federation, seconds = train(way, rounds, seed)
        run = federation.run
        scores = federation.evaluate(validation, metrics)
        last = run.history.iloc[-1]
        logged = float(last["train_accuracy"]) if "train_accuracy" in last else None  # `self.log` of the module
        epsilon = float(last["epsilon"]) if "epsilon" in last else None
        megabytes = (run.bytes_up + run.bytes_down) / 1e6
        results.append(Result(way.name, way.why, scores, logged, epsilon, megabytes, seconds))
    return results


def draw(results: Sequence[Result]) -> Figure:
    """Each camera's accuracy on its held-out pictures, and that over all of them; one row per way."""
    figure, axes = common.subplots(figsize=(7, 0.42 * len(results) + 0.8))
    shift = np.random.Generator(np.random.PCG64(0)).uniform(-0.2, 0.2, 10_000)
    for i, result in enumerate(results):
        score = result.scores["accuracy"]
        axes.scatter(score.clients, i + shift[: len(score.clients)], s=12, alpha=0.3, color="0.45", linewidths=0)
        axes.plot([score.overall] * 2, [i - 0.32, i + 0.32], color=f"C{i}", linewidth=4)
        axes.text(1.03, i, f"{score.overall:.2f}", va="center", color=f"C{i}", transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(results)), [result.name for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("accuracy on held-out pictures: each dot a camera, the bar all of them")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the ways, print a table with a line on each, and draw it."""
    options = common.arguments(__doc__).parse_args(argv)
    cameras, rounds = (10, 1) if options.smoke else (50, 40)
    with common.quiet():
        runs = [compare(cameras, rounds, seed) for seed in range(options.seeds)]
    rows, lines = [], []
    for repeated in zip(*runs):
        name = repeated[0].name
        found = common.over_seeds(name, [result.figures() for result in repeated])
        rows += found
        ours = {row.metric: row.ours for row in found}
        accuracy = f"{ours['accuracy']:.3f} ± {ours['standard error over cameras']:.3f}"
        precise = [common.number(ours[metric]) for metric in ("worst camera", "calibration error")]
        rough = [common.number(ours.get(metric), form=".1f") for metric in ("epsilon", "megabytes", "seconds")]
        lines.append([name, accuracy, *precise, *rough])
    title = f"Digits through {cameras} cameras, {rounds} rounds ({common.machine()})"
    common.show(title, ["", "accuracy", "worst camera", "calibration error", "epsilon", "MB sent", "seconds"], lines)
    sys.stderr.write("\n" + "".join(f"{result.name:<21}{result.why}\n" for result in runs[0]))
    common.finish("quickstart", rows, options, lambda: {"quickstart": draw(runs[0])})


if __name__ == "__main__":
    main()
