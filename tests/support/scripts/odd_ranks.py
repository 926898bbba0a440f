"""Two ranks as `torchrun` starts them, and ranks that differ, are too many, or get lost: all forked from this process.

Cases of as many ranks share a process group, as long as all ranks refuse. Writes findings as JSON.

Usage: odd_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedtorch as ft
from experiments.benchmarks.parts.forked import fork, warm
from fedtorch import tree
from support.forked import over_ranks
from support.oracles.closed_forms import linear, linear_clients, mean_squared_error
from support.scripts import distributed_script

SIZES = [3, 12, 5, 9]
SHORT = timedelta(seconds=1)


def made(sizes: list[int] = SIZES, timeout: timedelta = timedelta(seconds=20), **changes: Any) -> ft.Run:
    """A run over the ranks, which `changes` may make another one."""
    data = linear_clients(sizes, seed=changes.pop("data", 0))
    if "names" in changes:
        data = ft.data.from_tensors(list(data), changes.pop("names"))
    local = ft.gradient_descent(
        changes.pop("module", None) or linear(seed=changes.pop("start", 0)),
        steps=2,
        loss=mean_squared_error,
        optimizer=functools.partial(torch.optim.SGD, lr=changes.pop("rate", 0.05)),
    )
    population = ft.InProcess(data) if changes.pop("alone", False) else ft.Distributed(data, timeout=timeout)
    return ft.Run(ft.fedavg(local, mu=changes.pop("mu", 0.1)), population, **changes)


def numbers(run: ft.Run) -> list[float]:
    return torch.cat([leaf.flatten() for leaf in tree.leaves(run.server)]).tolist()


def few(clients: int) -> Callable[[int], Any]:
    """Two rounds, evaluation and everybody's tensors with so many clients."""

    def body(rank: int) -> Any:
        run = made(SIZES[:clients])
        list(run.rounds(2))
        score = run.evaluate(linear_clients(SIZES[:clients]), {"squared": squared})["squared"]
        return [*numbers(run), score.overall, float(run.tensors()["weight"].sum()), len(run.state_dict())]

    return body


def squared(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.squeeze(-1) - target).square()


def alone(clients: int) -> list[float]:
    """What `few` gives in one process."""
    run = made(SIZES[:clients], alone=True)
    list(run.rounds(2))
    score = run.evaluate(linear_clients(SIZES[:clients]), {"squared": squared})["squared"]
    return [*numbers(run), score.overall, float(run.tensors()["weight"].sum()), len(run.state_dict())]


def collectives(rank: int) -> Any:
    """Return how many collectives each of four rounds takes, whose cohorts leave a rank out now and then."""
    run, counts = made(cohort=1), []
    together, ranks = run.population.ranks._together, run.population.ranks
    for _ in range(4):
        calls: list[Any] = []
        ranks._together = lambda *given, calls=calls: (calls.append(given), together(*given))
        run.step()
        counts.append(len(calls))
    return counts


def odd(where: int, **changes: Callable[[], Any]) -> Callable[[int], Any]:
    """One round, on one rank of another run."""

    def body(rank: int) -> Any:
        made(**{name: change() for name, change in changes.items()} if rank == where else {}).step()
        return "not refused"

    return body


def other_layers(rank: int) -> Any:
    """The same parameters in a module that computes something else."""
    made(module=nn.Sequential(linear(), nn.Tanh() if rank == 2 else nn.Identity())).step()
    return "not refused"


def first_evaluates(rank: int) -> Any:
    """What meets first is an evaluation, as under a Trainer."""
    run = made(seed=int(rank == 1))
    run.evaluate(linear_clients(SIZES), {"squared": squared})
    return "not refused"


def other_rounds(rank: int) -> Any:
    """Ranks go on from different rounds."""
    run, one = made(), made()
    run.step()
    states = [run.state_dict()]
    run.step()
    states.append(run.state_dict())
    one.load_state_dict(states[rank == 1])
    one.step()
    return "not refused"


def lost(rank: int) -> Any:
    """Rank 1 is killed in its second round."""
    run = made()
    run.step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.step()
    return "not noticed"


def late(rank: int) -> Any:
    """Rank 2 takes longer than the others wait."""
    run = made(timeout=SHORT)
    run.step()
    if rank == 2:
        time.sleep(SHORT.total_seconds() + 3)
    run.step()
    return "not noticed"


def same(rank: int) -> Any:
    """Return what three rounds give."""
    run = made(cohort=3)
    list(run.rounds(3))
    return numbers(run)


def in_turn(**cases: Callable[[int], Any]) -> Callable[[int], Any]:
    """What each of several cases returns or raises, in one process group."""

    def body(rank: int) -> Any:
        findings: dict[str, Any] = {}
        for name, case in cases.items():
            try:
                findings[name] = case(rank)
            except ValueError as error:
                findings[name] = f"{type(error).__name__}: {error}"
        return findings

    return body


GROUPS: dict[str, tuple[int, Callable[[int], Any]]] = {
    "few": (4, in_turn(**{"one client": few(1), "two clients": few(2)})),
    "three": (
        3,
        in_turn(
            data=odd(1, data=lambda: 1),
            names=odd(0, names=lambda: ["a", "b", "c", "d"]),
            sizes=odd(2, sizes=lambda: [3, 12, 5, 10]),
            seed=odd(2, seed=lambda: 1),
            cohort=odd(1, cohort=lambda: 2),
            start=odd(0, start=lambda: 1),
            layers=other_layers,
            round=other_rounds,
        ),
    ),
    "two": (
        2,
        in_turn(
            **{
                "same": same,
                "collectives": collectives,
                "rate": odd(1, rate=lambda: 0.1),
                "evaluation first": first_evaluates,
            }
        ),
    ),
}


def torchrun(folder: Path, count: int) -> list[int]:
    """The process ids of ranks with the environment that `torchrun` gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_RUN_ID": "none"}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}

    def body(rank: int) -> None:
        os.environ.update({**address, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        distributed_script.main(folder)

    return [fork(functools.partial(body, rank)) for rank in range(count)]


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    warm()
    distributed_script.in_one_process()
    ended = [os.waitpid(pid, 0)[1] for pid in torchrun(folder, 2)]
    assert ended == [0, 0], "a rank of two has failed"
    findings: dict[str, Any] = {}
    for name, group in GROUPS.items():
        ranks = over_ranks(folder / name, *group)
        assert all(isinstance(rank, dict) for rank in ranks), ranks
        findings |= {case: [rank[case] for rank in ranks] for case in ranks[0]}
    for name, body in (("lost", lost), ("late", late)):
        findings[name] = over_ranks(folder / name, 3, body)
    findings["alone"] = [alone(1), alone(2)]
    (folder / "findings.json").write_text(json.dumps(findings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
