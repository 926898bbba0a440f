"""What ranks do, started by torchrun: rounds of work of several sizes, what they meet for, the same work without
meeting, and collectives alone.

`python -m experiments.benchmarks.parts.scaling_ranks FILE CLIENTS,CLIENTS,...` on every rank; rank 0 writes seconds as
JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.benchmarks import core
from fedtorch import tree

ROWS, STEPS = 40, 5
SUMS = (1, 1_000_000)  # numbers in a sum
APART = "a process of several that do not meet"
ROOT = Path(__file__).parents[3]


def linear_data(clients: int) -> ft.data.FederatedData:
    """Clients of a linear model of 8 features, 40 rows each."""
    key = ft.random.key(0)
    x = ft.random.normal(key, (clients * ROWS, 8))
    y = x.sum(-1) + ft.random.normal(ft.random.fold_in(key, 1), (clients * ROWS,))
    return ft.data.FederatedData((x, y), torch.full((clients,), ROWS))


class Branching(core.Linear):
    """The same with a branch in its step, so that its steps are those of any module."""

    def training_step(self, batch: core.Client, batch_idx: int) -> Tensor:
        output = self.layer(batch[0])
        return F.mse_loss(output.squeeze(-1) if output.ndim > 1 else output, batch[1])


WAYS: dict[str, dict[str, Any]] = {"by a program": {}, "stacked": {"module": Branching}}


def linear_run(
    population: ft.InProcess | ft.Distributed,
    compile: bool = False,
    cohort: int | None = None,
    module: type[core.Linear] = core.Linear,
) -> ft.Run:
    """FedAvg of it, five full-batch steps a round."""
    torch.manual_seed(0)
    algorithm = ft.fedavg(ft.gradient_descent(module(), steps=STEPS, compile=compile))
    return ft.Run(algorithm, population, cohort=cohort)


def least_round(run: ft.Run, count: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the quickest of so many rounds, after two of warm-up; other programs are in the others."""
    return min([common.seconds(run.step, clock) for _ in range(count + 2)][2:])


def work(clients: Sequence[int]) -> dict[str, float]:
    """Seconds of a round for so many clients, and of sums of so many numbers."""
    found = {}
    for count, (way, settings) in itertools.product(clients, WAYS.items()):
        population = ft.Distributed(linear_data(count))
        run, title = linear_run(population, **settings), titled(count, way)
        rounds = 150 if count <= 1000 else 15
        found[title] = least_round(run, rounds)
        found |= {f"{title}, {name}": value for name, value in meetings(run, population.ranks, rounds).items()}
        if population.world_size > 1:
            found[f"{title}, {APART}"] = apart(population, rounds, **settings)
    ranks = ft.Distributed(linear_data(2)).ranks
    for numbers in SUMS:
        value = torch.ones(numbers, dtype=torch.float64)
        found[f"sum of {numbers}"] = min(common.seconds(partial(ranks.sum, value)) for _ in range(100))
    return found


def titled(clients: int, way: str = "by a program") -> str:
    """What findings call the rounds of so many clients."""
    return f"{clients} clients, {way}"


def apart(population: ft.Distributed, rounds: int, **settings: Any) -> float:
    """Seconds of a round of processes that do not meet, each with its share of the clients, at the same time.

    What the machine gives several processes at best; of the slowest process.
    """
    alone = linear_run(ft.InProcess(linear_data(len(population.data) // population.world_size)), **settings)
    alone.step()
    population.ranks.sum(torch.zeros(1))
    return max(population.ranks.texts(least_round(alone, rounds)))


def meetings(run: ft.Run, ranks: Any, rounds: int) -> dict[str, float]:
    """Of a round on this rank: mean processor time and number of collectives, their bytes, and in the median seconds.

    A collective's seconds are those of waiting for the others, too.
    """
    calls: list[list[tuple[float, int]]] = []
    together = ranks._together

    def noted(collective: Callable[..., object], *tensors: Any) -> None:
        seconds = common.seconds(lambda: together(collective, *tensors))
        calls[-1].append((seconds, tree.nbytes(tensors[-1])))

    def steps() -> None:
        for _ in range(rounds):
            calls.append([])
            run.step()

    ranks._together = noted
    processor = common.seconds(steps, time.process_time)
    ranks._together = together
    each = [(sum(seconds for seconds, _ in mine), sum(size for _, size in mine)) for mine in calls]
    return {
        "processor time": processor / rounds,
        "in collectives": statistics.median(seconds for seconds, _ in each),
        "collectives": sum(map(len, calls)) / rounds,
        "bytes": sum(size for _, size in each) / rounds,
    }


def launched(processes: int, clients: Sequence[int], threads: int = 1) -> dict[str, float]:
    """What so many ranks on this machine take."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "experiments.benchmarks.parts.scaling_ranks", str(file), ",".join(map(str, clients))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, timeout=1200,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"Expected {processes} ranks to end well, but got:\n{done.stdout[-3000:]}")
        return json.loads(file.read_text())


def least(repeat: int, clients: Sequence[int], processes: Sequence[int] = (1, 2)) -> dict[int, dict[str, float]]:
    """By number of processes, which take turns; the quickest of all repetitions."""
    found = [{count: launched(count, clients) for count in processes} for _ in range(repeat)]
    return {count: {name: min(each[count][name] for each in found) for name in found[0][count]} for count in processes}


def main(argv: Sequence[str]) -> None:
    """What a rank does."""
    file, clients = argv
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with common.quiet():
        found = work([int(count) for count in clients.split(",")])
    if int(os.environ["RANK"]) == 0:
        Path(file).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
