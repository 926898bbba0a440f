"""Flower's SecAgg+: clients' and the server's own work of one sum, in one process, without its network.

Run in an environment with `flwr` alone: `python flower_sums.py CLIENTS SIZE GONE SHARES THRESHOLD` prints JSON. The
workflow of the server and the mod of the clients are Flower's; a grid in between hands every message on at once, and
clients that drop out do not answer from the third stage on, when masked vectors are due.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterable
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before the imports

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.supercore.task_identity import TaskIdentity

MASKED = 2  # the stage before which clients drop out, counted from 0


class Proxy:
    """What the workflow knows of a client."""

    def __init__(self, node: int) -> None:
        self.node_id = self.cid = node


class Strategy:
    """Everybody takes part; the aggregate is kept."""

    def __init__(self, clients: int) -> None:
        self.clients, self.mean = clients, None

    def configure_fit(self, *arguments: Any) -> list[tuple[Proxy, FitIns]]:
        nothing = ndarrays_to_parameters([np.zeros(1, np.float32)])
        return [(Proxy(node), FitIns(nothing, {})) for node in range(1, self.clients + 1)]

    def aggregate_fit(self, round: int, results: list, failures: list) -> tuple[Any, dict]:
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return results[0][1].parameters, {}


class Managed:
    """A client manager, of which only a number is asked."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def num_available(self) -> int:
        return self.clients


class Grid:
    """Hands messages to the clients' mod, and counts what they take."""

    def __init__(self, values: np.ndarray, gone: set[int]) -> None:
        self.values, self.gone, self.stage, self.seconds = values, gone, 0, 0.0
        self.contexts = {node: Context(0, node, {}, RecordDict(), {}) for node in range(1, len(values) + 1)}

    def send_and_receive(self, messages: Iterable[Message], **more: Any) -> list[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            if self.stage < MASKED or node not in self.gone:
                message.content = copy.deepcopy(message.content)  # as a network would: the workflow shares some
                begun = time.perf_counter()
                replies.append(secaggplus_mod(message, self.contexts[node], self.train))
                self.seconds += time.perf_counter() - begun
        self.stage += 1
        return replies

    def train(self, message: Message, context: Context) -> Message:
        begun = time.perf_counter()
        parameters = ndarrays_to_parameters([self.values[context.node_id - 1]])
        content = compat.fitres_to_recorddict(FitRes(Status(Code.OK, ""), parameters, 1, {}), False)
        self.seconds -= time.perf_counter() - begun
        return Message(content, reply_to=message)


def main(clients: int, size: int, gone: int, shares: int, threshold: int) -> None:
    """Do one sum, check it, and print what it took."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    random.seed(0)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 0  # messages say it
    values = np.random.default_rng(0).standard_normal((clients, size)).astype(np.float32)
    strategy, grid = Strategy(clients), Grid(values, set(range(1, gone + 1)))
    state = RecordDict()
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    nothing = ndarrays_to_parameters([np.zeros(1, np.float32)])
    state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(nothing, True)
    context = LegacyContext(Context(0, 0, {}, state, {}), strategy=strategy, client_manager=Managed(clients))
    workflow = SecAggPlusWorkflow(shares, threshold, max_weight=1.0)
    begun = time.perf_counter()
    workflow(grid, context)
    seconds = time.perf_counter() - begun
    error = float(np.abs(strategy.mean - values[gone:].mean(0)).max())
    assert error < 1e-3, error
    version = importlib.metadata.version("flwr")
    print(json.dumps({"version": version, "clients": grid.seconds, "whole": seconds, "error": error}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
