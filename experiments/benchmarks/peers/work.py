"""The work that every system gets: data, models, hyperparameters, cohorts and minibatches.

`write` puts the data, the first parameters, and who trains on which rows in which round into one file; `load` reads a
task from it. Both need NumPy and PyTorch only, so that every system imports this module in its own environment.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = os.environ.get("PEERS_DEVICE", "cpu")  # where clients are trained by hand
Rows = tuple[Tensor, Tensor]
Schedule = Callable[[np.ndarray, "Task", int], tuple[np.ndarray, np.ndarray]]


class Task(NamedTuple):
    """Model and hyperparameters."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]  # (output, target) -> mean
    optimizer: Callable[..., torch.optim.Optimizer]  # parameters and lr
    lr: float
    steps: int  # of a client in each round
    batch_size: int | None  # None: all rows
    cohort: int | None  # clients of a round, if there are as many; None: all

    def asked(self, clients: int) -> int | None:
        """How many of so many clients are asked in a round; None: all."""
        return self.cohort and min(self.cohort, clients)


class Size(NamedTuple):
    """How much of a task is run."""

    clients: int
    rounds: int


def linear() -> nn.Module:
    """A linear model of 8 features."""
    return nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))


def perceptron() -> nn.Module:
    """64-128-10."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutional() -> nn.Module:
    """Two convolutions and a linear layer on 1 × 28 × 28."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )


TASKS = {
    "linear": Task(linear, F.mse_loss, torch.optim.SGD, 0.05, 20, None, None),
    "perceptron": Task(perceptron, F.cross_entropy, torch.optim.Adam, 1e-3, 5, 10, None),
    "convolutional": Task(convolutional, F.cross_entropy, torch.optim.SGD, 0.1, 5, 10, 50),
}
FULL = {"linear": Size(100, 20), "perceptron": Size(100, 20), "convolutional": Size(1000, 10)}
SMOKE = {"linear": Size(5, 2), "perceptron": Size(20, 2), "convolutional": Size(8, 1)}


class Work:
    """A task's clients, and what they do in every round."""

    def __init__(self, file: Path, name: str) -> None:
        stored = np.load(file)
        found = {key.removeprefix(f"{name}."): stored[key] for key in stored.files if key.startswith(f"{name}.")}
        self.task = TASKS[name]
        x, y = _inputs(found["x"]), torch.from_numpy(found["y"])
        counts = found["counts"].tolist()
        self.clients: list[Rows] = list(zip(x.split(counts), y.split(counts)))
        self.evaluation: Rows = (_inputs(found["evaluation_x"]), torch.from_numpy(found["evaluation_y"]))
        self.cohorts: list[list[int]] = found["cohorts"].tolist()
        self.rounds = len(self.cohorts)
        self._initial = {k.removeprefix("initial."): torch.from_numpy(v) for k, v in found.items() if "initial." in k}
        self._order = torch.from_numpy(found["order"])  # (rounds, M, steps, batch), -1 where there is no row
        self._position = [{client: i for i, client in enumerate(cohort)} for cohort in self.cohorts]

    def model(self) -> nn.Module:
        """The model with the parameters that training starts from."""
        model = self.task.model()
        model.load_state_dict(self._initial)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new optimiser of the model's parameters."""
        return self.task.optimizer(model.parameters(), lr=self.task.lr)

    def batches(self, number: int, client: int) -> Iterator[Rows]:
        """The minibatches of `client` in round `number` (from 0)."""
        x, y = self.clients[client]
        if self.task.batch_size is None:
            for _ in range(self.task.steps):
                yield x, y
            return
        for rows in self._order[number, self._position[number][client]]:
            chosen = rows[rows >= 0]
            yield x[chosen], y[chosen]

    def fit(self, model: nn.Module, batches: Iterable[Rows]) -> None:
        """A client's training as one writes it by hand."""
        optimizer = self.optimizer(model.to(DEVICE))
        for x, y in batches:
            optimizer.zero_grad()
            self.task.loss(model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()
        model.to("cpu")

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        """Loss on the evaluation rows, and the accuracy of a classifier."""
        x, y = self.evaluation
        output = model(x)
        scores = {"loss": float(self.task.loss(output, y))}
        if not y.is_floating_point():
            scores["accuracy"] = float((output.argmax(-1) == y).double().mean())
        return scores


@functools.cache
def load(file: str, name: str) -> Work:
    """The task `name` of a file, read once by each process."""
    return Work(Path(file), name)


def write(file: Path, sizes: dict[str, Size], schedule: Schedule) -> None:
    """Writes all tasks.

    Args:
        file: where to.
        sizes: how many clients and rounds each task has.
        schedule: (counts, task, rounds) -> the cohorts `(rounds, M)` and the rows of every minibatch
            `(rounds, M, steps, batch)`, -1 where there is none.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, (clients, rounds) in sizes.items():
        task = TASKS[name]
        stored = _DATA[name](clients)
        stored["cohorts"], stored["order"] = schedule(stored["counts"], task, rounds)
        torch.manual_seed(0)
        stored.update({f"initial.{n}": p.detach().numpy() for n, p in task.model().state_dict().items()})
        arrays.update({f"{name}.{part}": value for part, value in stored.items()})
    np.savez(file, **arrays)  # type: ignore[arg-type]


def _linear_data(clients: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((clients * 40, 8)).astype(np.float32)
    y = x.sum(-1) + generator.standard_normal(len(x)).astype(np.float32)
    return {"x": x, "y": y, "counts": np.full(clients, 40), "evaluation_x": x, "evaluation_y": y}


def _digit_data(clients: int) -> dict[str, np.ndarray]:
    images, labels = _digits()
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = (images.reshape(-1, 64) / 16).astype(np.float32)[order], labels[order]
    counts = np.diff(np.arange(clients + 1) * len(y) // clients)  # 17 or 18
    return {"x": x, "y": y, "counts": counts, "evaluation_x": x, "evaluation_y": y}


def _image_data(clients: int) -> dict[str, np.ndarray]:
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


_DATA = {"linear": _linear_data, "perceptron": _digit_data, "convolutional": _image_data}


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits  # only where the file is written

    found = load_digits()
    return found.images, found.target.astype(np.int64)


def _inputs(stored: np.ndarray) -> Tensor:
    x = torch.from_numpy(stored)
    return x.float().div_(255) if x.dtype == torch.uint8 else x


class Trained(NamedTuple):
    """What a system hands back."""

    model: nn.Module
    startup: float  # seconds before the rounds that count: the system's start and one round of warm-up
    seconds: float  # of the rounds


Train = Callable[[str, str, argparse.Namespace], Trained]


def clock() -> float:
    """Seconds, comparable between calls."""
    return time.perf_counter()


def command(
    system: str,
    version: str,
    train: Train,
    argv: Sequence[str] | None = None,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """`program WORKFILE --task TASK --out FILE`: trains and writes seconds and scores."""
    parser = argparse.ArgumentParser(description=f"Runs a task of a work file in {system}.")
    parser.add_argument("file", help="written by work.write")
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the result, as JSON")
    if options is not None:
        options(parser)
    given = parser.parse_args(argv)
    trained = train(given.file, given.task, given)
    work = load(given.file, given.task)
    result = {"version": version, "startup": trained.startup, "seconds": trained.seconds, **work.scores(trained.model)}
    given.out.write_text(json.dumps(result))
