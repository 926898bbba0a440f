"""FedAvg as one writes it by hand in PyTorch: every client in turn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from experiments.benchmarks.peers import work


def rounds(model: nn.Module, mine: work.Work, count: int) -> None:
    """Train `model` in place."""
    server = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(count):
        cohort = mine.cohorts[number]
        rows = sum(len(mine.clients[client][1]) for client in cohort)
        total = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
        for client in cohort:
            model.load_state_dict(server)
            mine.fit(model, mine.batches(number, client))
            for name, tensor in model.state_dict().items():
                total[name] += tensor * (len(mine.clients[client][1]) / rows)
        server = total
    model.load_state_dict(server)


def train(file: str, task: str, options: argparse.Namespace) -> work.Trained:
    """One round of warm-up, then all rounds."""
    mine = work.load(file, task)
    watch = work.Stopwatch()
    rounds(mine.model(), mine, 1)
    model = mine.model()
    watch.warm()
    rounds(model, mine, mine.rounds)
    return watch.done(model)


def main(argv: Sequence[str] | None = None) -> None:
    """One run."""
    work.command("a plain PyTorch loop", torch.__version__, train, argv)


if __name__ == "__main__":
    main()
