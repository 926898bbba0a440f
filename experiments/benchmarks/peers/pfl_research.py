"""pfl-research: its simulated backend and FederatedAveraging, weighted by datapoints, in one process."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from experiments.benchmarks.peers import work


class Given(Dataset):
    """A user whose minibatches are given, instead of slices in order."""

    def __init__(self, mine: work.Work, number: int, client: int) -> None:
        super().__init__(mine.clients[client])
        self._given = mine.batches(number, client)

    def iter(self, batch_size: int | None) -> Iterator[work.Rows]:
        return self._given


class WithoutEvaluation(FederatedAveraging):
    """pfl evaluates every user before and after training in the first round; the other systems do not."""

    def get_next_central_contexts(self, *arguments: object, **more: object) -> tuple:
        contexts, model, metrics = super().get_next_central_contexts(*arguments, **more)
        if contexts is not None:
            contexts = tuple(dataclasses.replace(context, do_evaluation=False) for context in contexts)
        return contexts, model, metrics


class Module(nn.Module):
    """The model with the methods that pfl asks for."""

    def __init__(self, mine: work.Work) -> None:
        super().__init__()
        self.net, self._loss = mine.model(), mine.task.loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return self._loss(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict:
        return {}


def rounds(mine: work.Work, count: int) -> nn.Module:
    """Train a new model."""
    module = Module(mine)
    model = PyTorchModel(module, mine.task.optimizer, torch.optim.SGD(module.parameters(), lr=1.0))
    asked = ((number, client) for number in range(count) for client in mine.cohorts[number])
    data = FederatedDataset(lambda user: Given(mine, *user), lambda: next(asked))
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])
    WithoutEvaluation().run(
        NNAlgorithmParams(
            central_num_iterations=count,
            evaluation_frequency=count + 1,
            train_cohort_size=len(mine.cohorts[0]),
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=None,
            local_num_steps=mine.task.steps,
            local_learning_rate=mine.task.lr,
            local_batch_size=mine.task.batch_size,
        ),
        NNEvalHyperParams(local_batch_size=None),
    )
    return module.net


def train(file: str, task: str, options: argparse.Namespace) -> work.Trained:
    """One round of warm-up, then all rounds."""
    mine = work.load(file, task)
    watch = work.Stopwatch()
    rounds(mine, 1)
    watch.warm()
    return watch.done(rounds(mine, mine.rounds))


def main(argv: Sequence[str] | None = None) -> None:
    """One run."""
    work.command("pfl-research", importlib.metadata.version("pfl"), train, argv)


if __name__ == "__main__":
    main()
