"""Clients with loaders of their own: what a round costs over a plain loop over the same loaders, and its memory.

Ratios are medians over repetitions in which both sides run one after the other in the same process, by processor time.
Memory is the highest of a process that trains a cohort of 10 clients on a million rows of 100 kB in a sparse file.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure

_ROW = 25_000  # numbers of float32, 100 kB
_SILENT: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Classifier(L.LightningModule):
    """Layers with cross-entropy and Adam."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def perceptron() -> Classifier:
    """64-128-10, whose step takes about as long as reading its batch."""
    return Classifier(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutions() -> Classifier:
    """Two convolutions on images of 28 × 28, as of MNIST."""
    first, second = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5)
    pool = partial(nn.MaxPool2d, 2)
    return Classifier(first, nn.ReLU(), pool(), second, nn.ReLU(), pool(), nn.Flatten(), nn.Linear(512, 10))


def loaders(clients: int, rows: int, *shape: int) -> dict[str, DataLoader]:
    """Loaders that shuffle, of batches of 32."""
    x = ft.random.normal(ft.random.key(0), (clients, rows, *shape))
    y = torch.arange(rows) % 10
    return {f"{k}": DataLoader(TensorDataset(x[k], y), batch_size=32, shuffle=True) for k in range(clients)}


def plain_loop(module: Classifier, given: dict[str, DataLoader], rounds: int) -> None:
    """FedAvg as one writes it by hand in PyTorch."""
    server = {name: p.detach().clone() for name, p in module.named_parameters()}
    for _ in range(rounds):
        total = {name: torch.zeros_like(p) for name, p in server.items()}
        for loader in given.values():
            module.load_state_dict(server)
            optimizer, losses = module.configure_optimizers(), []
            for t, batch in enumerate(loader):
                optimizer.zero_grad()
                loss = module.training_step(batch, t)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            for name, p in module.named_parameters():
                total[name] += p.detach() / len(given)
        server = total


def plain_trainers(module: Classifier, given: dict[str, DataLoader], rounds: int) -> None:
    """FedAvg with a Trainer of each client, by hand."""
    server = {name: p.detach().clone() for name, p in module.named_parameters()}
    for _ in range(rounds):
        total = {name: torch.zeros_like(p) for name, p in server.items()}
        for loader in given.values():
            module.load_state_dict(server)
            L.Trainer(max_epochs=1, **_SILENT).fit(module, loader)
            for name, p in module.named_parameters():
                total[name] += p.detach() / len(given)
        server = total


def against(
    name: str, make: Callable[[], Classifier], given: dict[str, DataLoader], rounds: int, repeat: int
) -> list[common.Row]:
    """Rounds on loaders against both loops by hand, in pairs."""
    population = ft.InProcess(ft.data.from_loaders(given))
    stepping = ft.gradient_descent(make(), epochs=1, batched=False)
    fitting = ft.lightning_fit(make(), max_epochs=1)
    federated = lambda local: ft.run(ft.fedavg(local), population, rounds=rounds, progress=False)
    ways: dict[str, Callable[[], object]] = {
        "plain loop": lambda: plain_loop(make(), given, rounds),
        "gradient_descent": lambda: federated(stepping),
        "plain Trainers": lambda: plain_trainers(make(), given, rounds),
        "lightning_fit": lambda: federated(fitting),
    }
    times = measure.interleaved(ways, repeat, clock=time.process_time)
    pairs = {"gradient_descent": "plain loop", "lightning_fit": "plain Trainers"}
    seconds = [common.Row(name, f"{way}, s", value) for way, value in measure.medians(times).items()]
    return seconds + [
        common.Row(name, f"{ours} / {plain} (target at most 1.1)", measure.ratio(times[ours], times[plain]))
        for ours, plain in pairs.items()
    ]


class Stored(Dataset):
    """Rows of a file, each read when it is asked for."""

    def __init__(self, file: Path, first: int, count: int) -> None:
        self.file, self.first, self.count = file, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        x = numpy.fromfile(self.file, numpy.float32, _ROW, offset=(self.first + row) * _ROW * 4)
        return torch.from_numpy(x), row % 10


def memory(clients: int, rows: int) -> list[common.Row]:
    """Return the highest memory of a process after a round of a cohort of 10, and how much that was before it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        with file.open("wb") as opened:
            os.truncate(opened.fileno(), clients * rows * _ROW * 4)  # sparse: what is not written reads as zeros
        given = {f"{k}": DataLoader(Stored(file, k * rows, rows), batch_size=32, shuffle=True) for k in range(clients)}
        local = ft.gradient_descent(Classifier(nn.Linear(_ROW, 10)), epochs=1, batched=False)
        run = ft.Run(ft.fedavg(local), ft.InProcess(ft.data.from_loaders(given)), cohort=10)
        before = peak()
        run.step()
    setting = f"{clients * rows:.0e} rows of 100 kB, cohort of 10"
    return [
        common.Row(setting, "data, GB", clients * rows * _ROW * 4 / 1e9),
        common.Row(setting, "highest memory before the round, GB", before),
        common.Row(setting, "highest memory (target below 1), GB", peak()),
    ]


def peak() -> float:
    """Return the highest memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def parts(small: bool) -> measure.Parts:
    """Return the parts by name."""
    rows, repeat = (64, 1) if small else (1600, 11)
    return {
        "perceptron": lambda: against("perceptron", perceptron, loaders(4, rows, 64), 1, repeat),
        "convolutions": lambda: against("convolutions", convolutions, loaders(4, min(rows, 640), 1, 28, 28), 1, repeat),
        "memory": lambda: memory(20 if small else 1000, 40 if small else 1000),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    measure.run("loaders", __doc__, parts, argv, own_processes=True)


if __name__ == "__main__":
    main()
