"""What every system trains: models, hyperparameters and data.

Needs NumPy and PyTorch only, so that every system imports this module in its own environment; scikit-learn where the
data are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Arrays = dict[str, np.ndarray]
SEEDS = 10  # of the softmax regressions


class Size(NamedTuple):
    """How much of a task is run."""

    clients: int
    rounds: int


class Task(NamedTuple):
    """Model, hyperparameters and data."""

    description: str  # of the module and a client's work in a round
    model: Callable[[], nn.Module]
    data: Callable[[int], Arrays]  # clients -> x, y, rows of each client, and rows for evaluation
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy  # (output, target) -> mean
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam  # parameters and lr
    lr: float = 1e-3
    steps: int = 5  # of a client in each round
    batch_size: int | None = 10  # None: all rows
    cohort: int | None = None  # clients of a round, if there are as many; None: all
    full: Size = Size(50, 10)
    smoke: Size = Size(8, 1)
    random: bool = False  # every system draws its own random numbers, so that results differ

    def asked(self, clients: int) -> int | None:
        """How many of so many clients are asked in a round; None: all."""
        return self.cohort and min(self.cohort, clients)


class Recurrent(nn.Module):
    """A recurrent layer over the lines of an image, and a linear layer on its last output."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Attention(nn.Module):
    """A Transformer encoder layer (32 wide, 4 heads, 64 hidden units, no dropout) over the 8 lines of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


def perceptron(dropout: float | None = None) -> nn.Module:
    """64-128-10, with dropout of its hidden units if it is given."""
    between = [nn.ReLU()] if dropout is None else [nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(nn.Linear(64, 128), *between, nn.Linear(128, 10))


class Softmaxes(nn.Module):
    """Softmax regressions, 64 inputs and 10 classes, beside each other: x `(n, count, 64)`, logits `(n, 10, count)`."""

    def __init__(self, count: int = SEEDS) -> None:
        super().__init__()
        layers = [nn.Linear(64, 10) for _ in range(count)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nsf,scf->ncs", x, self.weight) + self.bias.mT


def convolutional(size: int) -> nn.Module:
    """Two convolutions and a linear layer on 1 × size × size."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (size // 4) ** 2, 10)),
    )


def _linear_data(clients: int) -> Arrays:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((clients * 40, 8)).astype(np.float32)
    y = x.sum(-1, keepdims=True) + generator.standard_normal((len(x), 1)).astype(np.float32)
    return {"x": x, "y": y, "counts": np.full(clients, 40), "evaluation_x": x, "evaluation_y": y}


def _digit_data(clients: int, *shape: int) -> Arrays:
    images, labels = _digits()
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = (images.reshape(-1, *shape) / 16).astype(np.float32)[order], labels[order]
    counts = np.diff(np.arange(clients + 1) * len(y) // clients)  # 17 or 18 of 100 clients, 35 or 36 of 50
    return {"x": x, "y": y, "counts": counts, "evaluation_x": x, "evaluation_y": y}


def _seeds_data(clients: int) -> Arrays:
    """Digits in another order for each of the seeds; clients of 1, 2, … parts of 1500 rows, the others to evaluate."""
    images, labels = _digits()
    orders = np.stack([np.random.default_rng(seed).permutation(len(labels)) for seed in range(SEEDS)], 1)
    x, y = (images.reshape(-1, 64) / 16).astype(np.float32)[orders], labels[orders]
    parts = np.cumsum([0, *range(1, clients + 1)])
    counts = np.diff(parts * 1500 // parts[-1])
    return {"x": x[:1500], "y": y[:1500], "counts": counts, "evaluation_x": x[1500:], "evaluation_y": y[1500:]}


def _sum_over_seeds(output: Tensor, target: Tensor) -> Tensor:
    return SEEDS * F.cross_entropy(output, target)


def _image_data(clients: int) -> Arrays:
    """Digits drawn with replacement, enlarged to 28 × 28, shifted, with noise; the evaluation rows without noise."""
    images, labels = _digits()
    large = F.interpolate(torch.tensor(images, dtype=torch.float32)[:, None] / 16, size=(28, 28), mode="bilinear")
    pixels = (large.numpy() * 191).astype(np.uint8)
    generator = np.random.default_rng(0)
    chosen = generator.integers(len(labels), size=clients * 50)
    shifted = np.roll(pixels[chosen].reshape(clients, 50, 1, 28, 28), generator.integers(-2, 3, 2), (-2, -1))
    x = shifted.reshape(-1, 1, 28, 28) + generator.integers(0, 64, (clients * 50, 1, 28, 28), dtype=np.uint8)
    counts = np.full(clients, 50)
    return {"x": x, "y": labels[chosen], "counts": counts, "evaluation_x": pixels, "evaluation_y": labels}


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits  # only where the file is written

    loaded = load_digits()
    return loaded.images, loaded.target.astype(np.int64)


def _flat(clients: int) -> Arrays:
    return _digit_data(clients, 64)


def _lines(clients: int) -> Arrays:
    return _digit_data(clients, 8, 8)


TASKS = {
    "linear": Task(
        "linear layer of 8 features, 20 full-batch SGD steps of 40 rows",
        lambda: nn.Linear(8, 1),
        _linear_data,
        F.mse_loss,
        torch.optim.SGD,
        0.05,
        20,
        None,
        full=Size(100, 20),
        smoke=Size(5, 2),
    ),
    "perceptron": Task(
        "64-128-10 on digits, 5 Adam steps of 10 rows", perceptron, _flat, full=Size(100, 20), smoke=Size(20, 2)
    ),
    "dropout": Task("64-128-10 with dropout 0.5, 5 Adam steps of 10 rows", lambda: perceptron(0.5), _flat, random=True),
    "gru": Task(
        "GRU 8-32 over 8 lines of a digit, 5 Adam steps of 10 rows",
        lambda: Recurrent(nn.GRU(8, 32, batch_first=True)),
        _lines,
    ),
    "lstm": Task(
        "LSTM 8-32 over 8 lines of a digit, 5 Adam steps of 10 rows",
        lambda: Recurrent(nn.LSTM(8, 32, batch_first=True)),
        _lines,
    ),
    "transformer": Task(
        "Transformer layer (32 wide, 4 heads) over 8 lines of a digit, 5 Adam steps of 10 rows", Attention, _lines
    ),
    "small convolutional": Task(
        "two convolutions on 8 × 8 digits, 5 Adam steps of 10 rows",
        lambda: convolutional(8),
        lambda clients: _digit_data(clients, 1, 8, 8),
    ),
    "convolutional": Task(
        "two convolutions on digits enlarged to 28 × 28, cohort 50, one epoch of 50 images by 10, SGD 0.1",
        lambda: convolutional(28),
        _image_data,
        optimizer=torch.optim.SGD,
        lr=0.1,
        cohort=50,
        full=Size(1000, 10),
    ),
}
TRIALS = {  # of `experiments.trials.peers`, not timed
    "softmax": Task(
        f"softmax regressions of digits from {SEEDS} seeds beside each other, 20 SGD steps of 10 rows",
        Softmaxes,
        _seeds_data,
        _sum_over_seeds,
        torch.optim.SGD,
        0.1,
        20,
        full=Size(10, 20),
        smoke=Size(4, 2),
    ),
}
