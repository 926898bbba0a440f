"""What a server and three parties compute in four processes; started by torchrun, writes findings as JSON.

Usage: vertical_script.py FOLDER. A finding is the largest distance of this rank's parameters from those of one process
(or the largest of the bytes' differences).
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fedtorch import tree
from fedtorch.vfl import processes, split
from fedtorch.vfl.iteration import Iteration, exchange
from fedtorch.vfl.line import Line
from support import splits
from support.closed_forms import distance
from support.verticals import GUIDES, ROWS, nodes, noises, some_model, some_parameters

CASES = [
    (name, guide, shared)
    for name in ("augmented", "power")
    for guide in ("mean field", "amortised", "sums", "sums, joint", "amortised, joint")
    for shared in (True, False)
    if shared or not (name == "power" and not guide.startswith("sums"))
]


def compare(name: str, guide: str, shared: bool, local_steps: int) -> tuple[float, int]:
    """Parameters and bytes of this rank, beside those of all nodes in one process."""
    model, data = some_model(name, "negative binomial")
    family = GUIDES[guide]()
    q = some_parameters(model, family, data)
    given = zip(noises(model, family, ROWS), [None, [True, False, True], [False, True, True]])
    iterations = [Iteration(noise, 0.05, None, active) for noise, active in given]
    server, parties = nodes(model, family, q, data, shared)
    up = down = 0
    for noise, rate, rows, active in iterations:
        traffic = exchange(server, parties, noise, rate, rows=rows, local_steps=local_steps, active=active)
        up, down = up + traffic.up, down + traffic.down
    expected = (server, *parties)[dist.get_rank()]
    here, others = nodes(model, family, q, data, shared)
    node = (here, *others)[dist.get_rank()]
    sent = processes.run_node(node, iterations, local_steps=local_steps)
    difference = abs(sent.up - up) + abs(sent.down - down) if dist.get_rank() == 0 else 0
    values = [tree.map(torch.detach, tuple(one.leaves)) for one in (node, expected)]
    return distance(*values), difference


def compare_split(name: str) -> tuple[float, int]:
    """The same of a split network."""
    rank, rows = dist.get_rank(), splits.data()
    steps: list[tuple[int, Tensor | None]] = [(step, None) for step in range(3)]
    models = [splits.CASES[name]() for _ in range(2)]
    sides = [split.nodes.nodes(model, rows, splits.SGD) for model in models]
    traffic = [split.nodes.exchange(*sides[0], step, rows=chosen) for step, chosen in steps]
    server, parties = sides[1]
    sent = split.processes.run_node((server, *parties)[rank], steps)
    parts = [(model.server, *model.parties)[rank] for model in models]
    difference = abs(sent.up - sum(t.up for t in traffic)) + abs(sent.down - sum(t.down for t in traffic))
    return splits.distance(*parts), difference if rank == 0 else 0


def silence() -> str:
    """What the server says of a party that does not answer."""
    line = Line(0, 4, timedelta(seconds=0.5))
    try:
        line.receive(torch.zeros(3), 1)
    except RuntimeError as error:
        return str(error)
    return "an answer"


def main(folder: Path) -> None:
    """Writes this rank's findings."""
    dist.init_process_group("gloo")
    found = {str(case): compare(*case, local_steps=1 + i % 2) for i, case in enumerate(CASES)}
    found |= {name: compare_split(name) for name in splits.CASES}
    (folder / f"findings-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "silence.txt").write_text(silence())
    else:
        time.sleep(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
