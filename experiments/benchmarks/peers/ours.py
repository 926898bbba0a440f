"""fedtorch: stacked clients, under a Lightning Trainer or, for the closed form, by the plain loop `ft.run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import fedtorch as ft
from experiments import common
from experiments.benchmarks import core
from experiments.benchmarks.peers import work
from experiments.benchmarks.peers.tasks import Task
from fedtorch.federation.runs.cohorts import uniform_cohort
from fedtorch.federation.solvers.batches import Batches


def schedule(counts: np.ndarray, task: Task, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The cohorts and minibatches that a federation with seed 0 draws, for the others to follow: see `work.write`."""
    count = torch.from_numpy(counts)
    cohorts, orders = [], []
    for number in range(rounds):
        keys = ft.random.fold_in(ft.random.fold_in(ft.random.key(0), number), torch.arange(2))  # cohort, clients
        everybody = torch.arange(len(count))
        asked = task.asked(len(count))
        drawn = None if asked is None else uniform_cohort(asked, len(count))(keys[0], 0)
        ids = everybody if drawn is None else drawn
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
    asked = mine.task.asked(len(mine.clients))
    with common.quiet():
        watch = work.Stopwatch()
        local = closed_form(mine) if options.closed_form else steps(mine, options)
        population = ft.InProcess(data)

        def fit(rounds: int) -> nn.Module:
            federation = ft.Federation(ft.fedavg(local), population, cohort=asked)
            core.trainer(rounds).fit(federation)
            return federation.global_module()

        def loop(rounds: int) -> nn.Module:
            run = ft.run(ft.fedavg(local), population, cohort=asked, rounds=rounds)
            module = mine.model()
            module.load_state_dict(run.server)
            return module

        train_rounds = loop if options.closed_form else fit
        train_rounds(1)
        watch.warm()
        return watch.done(train_rounds(mine.rounds))


def steps(mine: work.Work, options: argparse.Namespace) -> ft.LocalSolver:
    """The task's steps one after another, for any module, loss and optimiser."""
    spec = mine.task
    return ft.gradient_descent(
        mine.model(),
        steps=spec.steps,
        batch_size=spec.batch_size,
        loss=spec.loss,
        optimizer=lambda parameters: spec.optimizer(parameters, lr=spec.lr),
        compile=options.compile,
        batched=not options.one_by_one,
    )


def closed_form(mine: work.Work) -> ft.LocalSolver:
    """The same steps of the linear task at once, which full batches and squared errors allow."""
    linear = mine.model()
    assert isinstance(linear, nn.Linear)
    return ft.least_squares(linear, steps=mine.task.steps, lr=mine.task.lr)


def main(argv: Sequence[str] | None = None) -> None:
    """One run."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--compile", action="store_true")
        parser.add_argument("--one-by-one", action="store_true")
        parser.add_argument("--closed-form", action="store_true")

    work.command("fedtorch", ft.__version__, train, argv, options)


if __name__ == "__main__":
    main()
