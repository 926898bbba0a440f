"""The work that every system gets: the data of a task, first parameters, cohorts and minibatches.

`write` puts the data, the first parameters, and who trains on which rows in which round into one file; `load` reads a
task from it. Both need NumPy and PyTorch only, so that every system imports this module in its own environment.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from experiments.benchmarks.peers.tasks import TASKS, TRIALS, Size, Task

DEVICE = os.environ.get("PEERS_DEVICE", "cpu")  # where clients are trained by hand
EVERY = TASKS | TRIALS
Rows = tuple[Tensor, Tensor]
Schedule = Callable[[np.ndarray, "Task", int], tuple[np.ndarray, np.ndarray]]


class Work:
    """A task's clients, and what they do in every round."""

    def __init__(self, file: Path, name: str) -> None:
        stored = np.load(file)
        found = {key.removeprefix(f"{name}."): stored[key] for key in stored.files if key.startswith(f"{name}.")}
        self.task = EVERY[name]
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
            scores["accuracy"] = float((output.argmax(1) == y).double().mean())
        return scores


@functools.cache
def load(file: str, name: str) -> Work:
    """The task `name` of a file, read once by each process."""
    return Work(Path(file), name)


def write(file: Path, sizes: dict[str, Size], schedule: Schedule) -> None:
    """Write all tasks.

    Args:
        file: where to.
        sizes: how many clients and rounds each task has.
        schedule: (counts, task, rounds) -> the cohorts `(rounds, M)` and the rows of every minibatch
            `(rounds, M, steps, batch)`, -1 where there is none.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, (clients, rounds) in sizes.items():
        task = EVERY[name]
        stored = task.data(clients)
        stored["cohorts"], stored["order"] = schedule(stored["counts"], task, rounds)
        torch.manual_seed(0)
        stored.update({f"initial.{n}": p.detach().numpy() for n, p in task.model().state_dict().items()})
        arrays.update({f"{name}.{part}": value for part, value in stored.items()})
    np.savez(file, **arrays)  # type: ignore[arg-type]


def _inputs(stored: np.ndarray) -> Tensor:
    x = torch.from_numpy(stored)
    return x.float().div_(255) if x.dtype == torch.uint8 else x


class Trained(NamedTuple):
    """A trained model and how long it took."""

    model: nn.Module
    startup: float  # seconds before the rounds that count: the system's start and one round of warm-up
    seconds: float  # of the rounds
    processor: float  # seconds of this process's processors in the rounds
    megabytes: float  # by which the rounds, warm-up included, raised the process's peak of memory


class Stopwatch:
    """Measures a warm-up and the rounds after it: `start`, `warm`, then `done`."""

    def __init__(self) -> None:
        self._memory = _peak_megabytes()
        self._begin = time.perf_counter()

    def warm(self) -> None:
        """Note that the rounds begin."""
        self._start, self._processor = time.perf_counter(), time.process_time()

    def done(self, model: nn.Module) -> Trained:
        """Return the trained model with the figures."""
        seconds, processor = time.perf_counter() - self._start, time.process_time() - self._processor
        return Trained(model, self._start - self._begin, seconds, processor, _peak_megabytes() - self._memory)


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


Train = Callable[[str, str, argparse.Namespace], Trained]


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
    parser.add_argument("--task", choices=sorted(EVERY), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the result, as JSON")
    parser.add_argument("--parameters", type=Path, help="the model's parameters, as NumPy's .npz")
    if options is not None:
        options(parser)
    parser.add_argument("--threads", type=int, default=1, help="of this process (default 1)")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    model, *times = train(given.file, given.task, given)
    figures = dict(zip(Trained._fields[1:], times))
    result = {"version": version, **figures, **load(given.file, given.task).scores(model)}
    given.out.write_text(json.dumps(result))
    if given.parameters is not None:
        np.savez(given.parameters, **{name: leaf.numpy(force=True) for name, leaf in model.state_dict().items()})
