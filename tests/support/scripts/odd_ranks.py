"""Ranks that differ, are too many, or get lost; each case is forked from this process. Writes findings as JSON.

Usage: odd_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedtorch as ft
from experiments.benchmarks.parts.forked import warm
from fedtorch import tree
from support.forked import over_ranks
from support.oracles.closed_forms import linear, linear_clients, mean_squared_error

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


CASES: dict[str, tuple[int, Callable[[int], Any]]] = {
    "one client": (4, few(1)),
    "two clients": (4, few(2)),
    "data": (3, odd(1, data=lambda: 1)),
    "names": (3, odd(0, names=lambda: ["a", "b", "c", "d"])),
    "sizes": (3, odd(2, sizes=lambda: [3, 12, 5, 10])),
    "seed": (3, odd(2, seed=lambda: 1)),
    "cohort": (3, odd(1, cohort=lambda: 2)),
    "rate": (2, odd(1, rate=lambda: 0.1)),
    "start": (3, odd(0, start=lambda: 1)),
    "layers": (3, other_layers),
    "evaluation first": (2, first_evaluates),
    "round": (3, other_rounds),
    "lost": (3, lost),
    "late": (3, late),
}


def main(folder: Path) -> None:
    warm()
    found: dict[str, Any] = {name: over_ranks(folder / name, *case) for name, case in CASES.items()}
    found["alone"] = [alone(1), alone(2)]
    (folder / "findings.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
