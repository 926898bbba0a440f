"""What a server and two parties compute in three processes; started by torchrun, writes findings as JSON.

Usage: vertical_script.py FOLDER. A finding is the largest distance of this rank's parameters from those of one process
(or the largest of the bytes' differences).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from closed_forms import distance
from verticals import GUIDES, nodes, noises, some_model, some_parameters

from fedtorch import tree
from fedtorch.vfl import processes
from fedtorch.vfl.iteration import exchange

WIDTHS, ROWS = [2, 3], 12
CASES = [
    (name, guide, shared)
    for name in ("augmented", "power")
    for guide in ("mean field", "amortised", "sums", "sums, joint", "amortised, joint")
    for shared in (True, False)
    if shared or not (name == "power" and not guide.startswith("sums"))
]


def compare(name: str, guide: str, shared: bool, local_steps: int) -> tuple[float, int]:
    """Parameters and bytes of this rank, beside those of all nodes in one process."""
    model, data = some_model(name, "negative binomial", WIDTHS)
    family = GUIDES[guide]()
    q = some_parameters(model, family, data)
    iterations = [(noise, 0.05, None) for noise in noises(model, family, ROWS)]
    server, parties = nodes(model, family, q, data, shared)
    up = down = 0
    for noise, rate, _ in iterations:
        traffic = exchange(server, parties, noise, rate, local_steps=local_steps)
        up, down = up + traffic.up, down + traffic.down
    expected = (server, *parties)[dist.get_rank()]
    here, others = nodes(model, family, q, data, shared)
    node = (here, *others)[dist.get_rank()]
    sent = processes.run_node(node, iterations, local_steps=local_steps)
    difference = abs(sent.up - up) + abs(sent.down - down) if dist.get_rank() == 0 else 0
    values = [tree.map(torch.detach, tuple(one.leaves)) for one in (node, expected)]
    return distance(*values), difference


def main(folder: Path) -> None:
    """Writes this rank's findings."""
    dist.init_process_group("gloo")
    found = {str(case): compare(*case, local_steps=1 + i % 2) for i, case in enumerate(CASES)}
    (folder / f"findings-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
