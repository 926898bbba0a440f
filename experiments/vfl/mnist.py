"""Halves of handwritten digits: split networks with convolutional bottoms at two parties that see half an image each.

MNIST, the first training and test images; the left half at one party, the right at the other, the labels at the server.
Each bottom has two convolutions and ten linear outputs. Beside the sum at the cut layer a concatenation with a top
network, hierarchical Bayes networks (ρ = 1 and 0.1, the last layer random), each half alone, and the same convolutions
on whole images in one place. Adam at 1e-3, batches of 100; seeds are elements of one stack that train at once, and
show other starts, not other images.

The source has no images, and nothing is published of these settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedtorch as ft
from experiments import common, result_pages
from fedtorch import vfl
from fedtorch.vfl.model import likelihoods

CLASSES, BATCH = 10, 100
WHOLE, LEFT, RIGHT = "whole images in one place", "left half alone", "right half alone"
READING = result_pages.Reading(larger="accuracy|log score")


class Size(NamedTuple):
    """How much is computed."""

    train: int
    test: int
    epochs: int


def bottom(width: int, outputs: int = CLASSES) -> nn.Sequential:
    """Two convolutions of images `(n, 1, 28, width)`, and a linear layer."""
    layers = nn.Sequential()
    for name, layer in {
        "first": nn.Conv2d(1, 8, 5, stride=2, padding=2),
        "relu0": nn.ReLU(),
        "second": nn.Conv2d(8, 16, 3, stride=2, padding=1),
        "relu1": nn.ReLU(),
        "flat": nn.Flatten(-3),
        "last": nn.Linear(16 * 7 * -(-width // 4), outputs),
    }.items():
        layers.add_module(name, layer)
    return layers


def images(size: Size) -> dict[str, tuple[vfl.VerticalData, vfl.VerticalData]]:
    """Training and test rows: of both halves, of whole images, and of each half alone."""
    found: dict[str, list[vfl.VerticalData]] = {}
    for train, count in ((True, size.train), (False, size.test)):
        x, y = ft.data.mnist(train)
        x, y = x[:count, None], y[:count].float()
        halves = x.split(14, -1)
        for name, parts in {"halves": halves, WHOLE: (x,), LEFT: halves[:1], RIGHT: halves[1:]}.items():
            found.setdefault(name, []).append(vfl.VerticalData(tuple(part.contiguous() for part in parts), y))
    return {name: (train, test) for name, (train, test) in found.items()}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # by name: whose images, and arguments of the network
    "split network, sum": ("halves", {}),
    "split network, concatenation and a top": (
        "halves", {"combine": vfl.concatenated, "top": vfl.mlp(2 * CLASSES, [32], CLASSES)}
    ),
    "hierarchical Bayes, ρ = 1": ("halves", {"bayes": vfl.HierarchicalBayes(rho=1.0)}),
    "hierarchical Bayes, ρ = 0.1": ("halves", {"bayes": vfl.HierarchicalBayes(rho=0.1)}),
    LEFT: (LEFT, {}),
    RIGHT: (RIGHT, {}),
    WHOLE: (WHOLE, {}),
}  # fmt: skip


def fitted(
    train: vfl.VerticalData, test: vfl.VerticalData, seeds: int, epochs: int, arguments: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Accuracy and mean log score on test images, of each seed."""
    widths = [part.shape[-1] for part in train.features]
    network = vfl.SplitNetwork(
        [bottom(width) for width in widths],
        likelihoods.categorical(CLASSES),
        seed=ft.random.fold_in(ft.random.key(0), torch.arange(seeds)).tolist(),
        row_dims=[3] * len(widths),
        **arguments,
    )
    quiet: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    loader = vfl.VerticalLoader(train, batch_size=BATCH, row_dims=[3] * len(widths))
    with common.quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(validation_step|num_workers).*")
        L.Trainer(max_epochs=epochs, accelerator="cpu", **quiet).fit(network, loader)
    network.eval()
    right: list[Tensor] = []
    scores: list[Tensor] = []
    for rows in torch.arange(len(test.response)).split(250):
        part = vfl.VerticalData(tuple(x[rows] for x in test.features), test.response[rows])
        right.append((network.predict(part.features, draws=16).argmax(1) == part.response).double())
        scores.append(network.log_score(part, draws=16).double())
    of_seeds = lambda values: torch.cat(values, -1).mean(-1).tolist()
    return {"accuracy": of_seeds(right), "log score": of_seeds(scores)}


def draw(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """A dot a seed for each model."""
    figure, axes = common.subplots(1, 2, figsize=(10, 2.8), sharey=True)
    for axis, metric in zip(axes, ("accuracy", "log score")):
        for place, figures in enumerate(found.values()):
            axis.plot(figures[metric], [place] * len(figures[metric]), "o", color="C0", alpha=0.6)
        axis.set_yticks(range(len(found)), list(found))
        axis.set_xlabel(f"{metric} on test images")
        axis.invert_yaxis() if axis is axes[0] else None
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Train all networks, print their scores and draw them."""
    parser = common.arguments(__doc__)
    options = parser.parse_args(argv)
    size = Size(200, 100, 1) if options.smoke else Size(5000, 2000, 8)
    data = images(size)
    found = {
        name: fitted(*data[whose], options.seeds, size.epochs, arguments) for name, (whose, arguments) in MODELS.items()
    }
    rows = [common.row(name, metric, values) for name, scores in found.items() for metric, values in scores.items()]
    common.show_rows(f"{size.train} images to train, {size.test} to test", rows)
    common.finish("vfl.mnist", rows, options, lambda: {"vfl_mnist": draw(found)})


if __name__ == "__main__":
    main()
