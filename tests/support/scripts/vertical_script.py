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

from fedtorch import tree
from fedtorch.protocol._rank_link import RankLink
from fedtorch.protocol.halves import Receive, Traffic
from fedtorch.protocol.ranks import over_ranks
from fedtorch.vfl.nodes.iteration import exchange, party_half, server_half
from fedtorch.vfl.nodes.node import Iteration, PartyNode, ServerNode
from support import splits
from support.oracles.closed_forms import distance
from support.verticals import GUIDES, ROWS, nodes, noises, some_model, some_parameters

CASES = [
    (name, guide, shared)
    for name in ("augmented", "power")
    for guide in ("mean field", "amortised", "sums", "noiseless")
    for shared in (True, False)
    if shared or not (name == "power" and guide not in ("sums", "noiseless"))
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
    for iteration in iterations:
        traffic = exchange(server, parties, iteration, local_steps=local_steps)
        up, down = up + traffic.up, down + traffic.down
    expected = (server, *parties)[dist.get_rank()]
    here, others = nodes(model, family, q, data, shared)
    node = (here, *others)[dist.get_rank()]
    sent = run(node, iterations, local_steps)
    difference = abs(sent.up - up) + abs(sent.down - down) if dist.get_rank() == 0 else 0
    values = [tree.map(torch.detach, tuple(one.part.parameters())) for one in (node, expected)]
    return distance(*values), difference


def run(node: ServerNode | PartyNode, iterations: list[Iteration], local_steps: int = 1) -> Traffic:
    """This rank's half over the process group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    half = (
        server_half(node, iterations)
        if rank == 0
        else party_half(node, iterations, local_steps, accept_disclosure=True)
    )
    return over_ranks(half, rank, ranks)[1]


def compare_split(name: str) -> tuple[float, int]:
    """The same of a split network."""
    rank, rows = dist.get_rank(), splits.data()
    iterations = [Iteration(step=step) for step in range(3)]
    models = [splits.CASES[name]() for _ in range(2)]
    sides = [model.nodes(rows, splits.SGD) for model in models]
    traffic = [exchange(*sides[0], iteration) for iteration in iterations]
    server, parties = sides[1]
    sent = run((server, *parties)[rank], iterations)
    parts = [(model.server, *model.parties)[rank] for model in models]
    difference = abs(sent.up - sum(t.up for t in traffic)) + abs(sent.down - sum(t.down for t in traffic))
    return splits.distance(*parts), difference if rank == 0 else 0


def silence() -> str:
    """What the server says of a party that does not answer."""
    link = RankLink(0, 4, timedelta(seconds=5))
    link.streams.seconds = 0.5
    for stream in link.streams.sockets.values():
        stream.settimeout(0.5)
    try:
        link.receive(Receive(1, torch.zeros(3)))
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
        link = RankLink(dist.get_rank(), 4, timedelta(seconds=5))
        time.sleep(2)
        link.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
