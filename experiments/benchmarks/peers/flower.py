"""Flower: a simulation on its ray backend, one CPU per client, so as many actors as there are cores."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from collections.abc import Iterable, Sequence

from experiments.benchmarks.peers import work

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before the imports of both
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from flwr.simulation import run_simulation


class Cohorts(FedAvg):
    """FedAvg that tells each node which client of the round it is."""

    def __init__(self, mine: work.Work) -> None:
        super().__init__(fraction_evaluate=0.0)
        self._mine = mine

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        cohort = self._mine.cohorts[server_round - 1]
        nodes, _ = sample_nodes(grid, len(self._mine.clients), len(cohort))
        return [
            Message(
                RecordDict({"arrays": arrays, "config": ConfigRecord({"round": server_round - 1, "client": client})}),
                message_type=MessageType.TRAIN,
                dst_node_id=node,
            )
            for node, client in zip(nodes, cohort)
        ]


def client_app(file: str, task: str) -> ClientApp:
    """Load the model it is sent, train, and send it back."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config, mine = message.content["config"], work.load(file, task)
        model = mine.model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        mine.fit(model, mine.batches(config["round"], config["client"]))
        rows = len(mine.clients[config["client"]][1])
        reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": rows})})
        return Message(reply, reply_to=message)

    return app


def train(file: str, task: str, options: argparse.Namespace) -> work.Trained:
    """One round of warm-up, in which the actors import and load, then all rounds; clients share a GPU as told."""
    mine = work.load(file, task)
    app, done = ServerApp(), []
    watch = work.Stopwatch()

    @app.main()
    def server(grid: Grid, context: Context) -> None:
        Cohorts(mine).start(grid, ArrayRecord(mine.model().state_dict()), num_rounds=1)
        watch.warm()
        result = Cohorts(mine).start(grid, ArrayRecord(mine.model().state_dict()), num_rounds=mine.rounds)
        model = mine.model()
        model.load_state_dict(result.arrays.to_torch_state_dict())
        done.append(watch.done(model))

    run_simulation(
        server_app=app,
        client_app=client_app(file, task),
        num_supernodes=len(mine.clients),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": options.gpus}},
    )
    return done[0]


def main(argv: Sequence[str] | None = None) -> None:
    """One run."""
    work.command("Flower", importlib.metadata.version("flwr"), train, argv, gpus)


def gpus(parser: argparse.ArgumentParser) -> None:
    """What a client takes of a GPU, with `PEERS_DEVICE=cuda`."""
    parser.add_argument("--gpus", type=float, default=0.0, help="the share of a GPU that a client takes")


if __name__ == "__main__":
    main()
