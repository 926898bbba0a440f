"""FedLab: its standalone pipeline, in one process, with its trainer of one client after the other."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Iterator, Sequence

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators, SerializationTool
from torch import Tensor, nn

from experiments.benchmarks.peers import work


class Given:
    """A data set whose loaders are the given minibatches, each client's of its next round."""

    def __init__(self, mine: work.Work) -> None:
        self._mine, self._rounds = mine, [0] * len(mine.clients)

    def get_dataloader(self, client: int, batch_size: int) -> Iterator[work.Rows]:
        self._rounds[client] += 1
        return self._mine.batches(self._rounds[client] - 1, client)


class Weighted(SyncServerHandler):
    """FedAvg with rows as weights, which FedLab's aggregator takes and its handler leaves out."""

    rows: Sequence[int] = ()

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        mean = Aggregators.fedavg_aggregate([pack[0] for pack in buffer], self.rows)
        SerializationTool.deserialize_model(self._model, mean)


class Quiet(StandalonePipeline):
    """The pipeline without a message after every round."""

    def evaluate(self) -> None:
        pass


def rounds(mine: work.Work, count: int, handler: type[SyncServerHandler]) -> nn.Module:
    """Train a new model."""
    server = handler(mine.model(), count, 1.0)
    server.rows = [len(y) for _, y in mine.clients]
    trainer = SGDSerialClientTrainer(mine.model(), len(mine.clients))
    trainer.setup_dataset(Given(mine))
    trainer.setup_optim(1, mine.task.batch_size, mine.task.lr)
    trainer.criterion = mine.task.loss
    Quiet(server, trainer).main()
    return server.model


def train(file: str, task: str, options: argparse.Namespace) -> work.Trained:
    """One round of warm-up, then all rounds; FedLab knows SGD only."""
    mine = work.load(file, task)
    if mine.task.optimizer is not torch.optim.SGD:
        raise ValueError(f"Expected a task of SGD, which FedLab's trainer takes, but got {task}.")
    handler = SyncServerHandler if options.unweighted else Weighted
    watch = work.Stopwatch()
    rounds(mine, 1, handler)
    watch.warm()
    return watch.done(rounds(mine, mine.rounds, handler))


def main(argv: Sequence[str] | None = None) -> None:
    """One run."""
    work.command("FedLab", importlib.metadata.version("fedlab"), train, argv, weights)


def weights(parser: argparse.ArgumentParser) -> None:
    """FedLab's own mean, which is not weighted."""
    parser.add_argument("--unweighted", action="store_true", help="as its handler does: clients count the same")


if __name__ == "__main__":
    main()
