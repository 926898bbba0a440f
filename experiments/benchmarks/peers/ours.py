"""fedtorch: stacked clients under a Lightning Trainer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch

import fedtorch as ft
from experiments import common
from experiments.benchmarks import core
from experiments.benchmarks.peers import work
from fedtorch.federation.local_solvers.batches import Batches


def schedule(counts: np.ndarray, task: work.Task, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The cohorts and minibatches that a federation with seed 0 draws, for the others to follow: see `work.write`."""
    count = torch.from_numpy(counts)
    cohorts, orders = [], []
    for number in range(rounds):
        keys = ft.random.fold_in(ft.random.fold_in(ft.random.key(0), number), torch.arange(2))  # cohort, clients
        everybody = torch.arange(len(count))
        ids = everybody if task.cohort is None else ft.uniform_cohort(task.cohort, len(count))(keys[0])
        cohorts.append(ids)
        if task.batch_size is None:
            orders.append(torch.zeros(len(ids), 0, 0, dtype=torch.int64))
            continue
        positions = torch.arange(int(count.max())).expand(len(ids), -1)
        client_keys = ft.random.fold_in(keys[1], ids)
        batches = Batches(positions, count[ids], task.batch_size, None, task.steps, client_keys)
        order = torch.full((len(ids), task.steps, task.batch_size), -1)
        for t in range(task.steps):
            rows, size = batches[t].rows, batches[t].size
            real = torch.arange(rows.shape[1]) < size[:, None]
            order[:, t, : rows.shape[1]] = torch.where(real, rows, -1)
        orders.append(order)
    return torch.stack(cohorts).numpy(), torch.stack(orders).numpy()


def train(file: str, task: str, options: argparse.Namespace) -> work.Trained:
    """One round of warm-up, in which the solver looks at the module, then all rounds."""
    mine = work.load(file, task)
    data = ft.data.from_tensors(mine.clients)
    spec = mine.task
    with common.quiet():
        begin = work.clock()
        local = ft.gradient_descent(
            mine.model(),
            steps=spec.steps,
            batch_size=spec.batch_size,
            loss=spec.loss,
            optimizer=lambda parameters: spec.optimizer(parameters, lr=spec.lr),
            compile=options.compile,
        )
        population = ft.InProcess(data)

        def fit(rounds: int) -> ft.Federation:
            federation = ft.Federation(ft.fedavg(local), population, cohort=spec.cohort)
            core.trainer(rounds).fit(federation)
            return federation

        fit(1)
        start = work.clock()
        federation = fit(mine.rounds)
        seconds = work.clock() - start
    return work.Trained(federation.global_module(), start - begin, seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """One run."""
    work.command(
        "fedtorch", ft.__version__, train, argv, lambda parser: parser.add_argument("--compile", action="store_true")
    )


if __name__ == "__main__":
    main()
