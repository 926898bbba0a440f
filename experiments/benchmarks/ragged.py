"""Clients of unequal size: rounds of FedAvg of a perceptron beside a plain loop.

50 clients of 3 to 200 rows, their numbers drawn from a Pareto law, a perceptron 64-128-10 with ReLU, Adam, one epoch a
round, float32, one thread. All ways take turns in one process, round by round; figures are ratios of processor time,
medians over rounds.

The *mean* is torch's cross-entropy, of which it is known by type that a batch's loss is the mean of its rows' losses.
The *same, written by hand* is unknown by type: by default its clients share the steps in which their batches have the
same shapes, with `rowwise=True` all of them. With *class weights* no padded step would be right, and `rowwise=True` is
refused.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtorch as ft
from experiments import common
from experiments.benchmarks.parts import measure

CLIENTS, FEWEST, MOST = 50, 3, 200
LOOP = "plain loop"
WIDE = True  # a line of a table for each setting, a column for each figure
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "rowwise=True": {"rowwise": True},
    "batched=False": {"batched": False},
}
TARGETS = {  # times as fast as the loop, by default and with rowwise=True
    "mean, batches of 10": (None, 2.5),
    "mean, all rows": (None, 3.2),
    "class weights, batches of 10": (1.3, None),
    "class weights, all rows": (1.7, None),
}


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    """The same mean of rows' losses."""
    return F.cross_entropy(output, target)


def losses() -> dict[str, Any]:
    """By name."""
    weights = torch.ones(10)
    weights[3] = 4.0
    weighted = nn.CrossEntropyLoss(weights)
    return {"mean": F.cross_entropy, "the same, written by hand": by_hand, "class weights": weighted}


def clients(count: int) -> list[tuple[Tensor, Tensor]]:
    """Rows of clients whose numbers follow a Pareto law of index 1.5."""
    generator = torch.Generator().manual_seed(0)
    drawn = 20 * (torch.rand(count, generator=generator, dtype=torch.float64).pow(-1 / 1.5) - 1)
    sizes = drawn.long().clamp(FEWEST, MOST).tolist()
    draw = functools.partial(torch.randn, generator=generator)
    return [(draw(size, 64), torch.randint(10, (size,), generator=generator)) for size in sizes]


def adam(parameters: Any) -> torch.optim.Optimizer:
    """With torch's defaults."""
    return torch.optim.Adam(parameters, lr=1e-3)


def loop(net: nn.Module, rows: Sequence[tuple[Tensor, Tensor]], loss: Any, size: int | None) -> None:
    """One epoch of every client, as anybody would write it."""
    for x, y in rows:
        module = copy.deepcopy(net)
        optimizer = adam(module.parameters())
        for own, target in zip(x.split(size or len(x)), y.split(size or len(y))):
            optimizer.zero_grad()
            loss(module(own), target).backward()
            optimizer.step()


def rows_of(name: str, size: int | None, count: int, repeat: int) -> list[common.Row]:
    """How many times as fast as the loop each way is with one loss."""
    torch.manual_seed(0)
    net, loss, rows = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), losses()[name], clients(count)
    data = ft.data.from_tensors(rows)
    ways: dict[str, Callable[[], object]] = {LOOP: functools.partial(loop, net, rows, loss, size)}
    for way, settings in WAYS.items():
        if name == "class weights" and "rowwise" in settings:
            continue
        local = ft.gradient_descent(net, epochs=1, batch_size=size, loss=loss, optimizer=adam, **settings)
        run = ft.Run(ft.fedavg(local), ft.InProcess(data))
        run.step()
        ways[way] = run.step
    times = measure.interleaved(ways, repeat, warm=1, clock=time.process_time)
    setting = f"{name}, {'all rows' if size is None else f'batches of {size}'}"
    found = [common.Row(setting, f"{LOOP}, ms", 1e3 * measure.medians(times)[LOOP])]
    found += [common.Row(setting, way, measure.ratio(times[LOOP], times[way])) for way in times if way != LOOP]
    goals = TARGETS.get(setting, (None, None))
    return found + [common.Row(setting, f"{way}, to reach", goal) for way, goal in zip(WAYS, goals) if goal is not None]


def parts(small: bool) -> measure.Parts:
    """The table."""
    count, repeat = (6, 1) if small else (CLIENTS, 15)
    every = [(name, size) for name in losses() for size in (10, None)]
    return {
        "Clients of unequal size, × a plain loop": lambda: [
            row for name, size in every for row in rows_of(name, size, count, repeat)
        ]
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the table."""
    torch.set_num_threads(1)
    measure.run("ragged", __doc__, parts, argv)


if __name__ == "__main__":
    main()
