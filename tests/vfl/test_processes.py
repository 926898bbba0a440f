"""A server and two parties in three processes give the numbers and the bytes of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest
import torch
from closed_forms import ROUNDING, distance
from verticals import GUIDES, nodes, noises, some_model, some_parameters

from fedtorch import tree, wire
from fedtorch.tree import Tree
from fedtorch.vfl import processes
from fedtorch.vfl.iteration import exchange

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("name", "guide"), [
    ("augmented", "amortised"), ("augmented", "sums, joint"), ("power", "mean field"), ("power", "sums"),
    ("augmented", "sums, low rank, joint"),
])  # fmt: skip
def test_both_sides_understand_each_other(name: str, guide: str, shared: bool) -> None:
    """Server and parties in threads, with queues of encoded messages between them, give the numbers of one loop."""
    if name == "power" and guide == "mean field" and not shared:
        pytest.skip("the power model's parties need the response")
    model, data = some_model(name, "negative binomial")
    family = GUIDES[guide]()
    q = some_parameters(model, family, data)
    iterations = [(noise, 0.05, None) for noise in noises(model, family, 12)]
    expected, others = nodes(model, family, q, data, shared)
    for noise, rate, _ in iterations:
        exchange(expected, others, noise, rate)
    server, parties = nodes(model, family, q, data, shared)
    lines: defaultdict[tuple[int, int], Queue[bytes]] = defaultdict(Queue)

    def line(own: int) -> tuple[Callable[[Tree, int], None], Callable[[Tree, int], Tree]]:
        return (
            lambda message, to: lines[own, to].put(wire.encode(message)),
            lambda like, source: wire.decode(lines[source, own].get(timeout=60), like),
        )

    with ThreadPoolExecutor(len(parties)) as pool:
        running = [pool.submit(processes.run_party, party, iterations, *line(party.index)) for party in parties]
        processes.run_server(server, iterations, *line(0))
        for each in running:
            each.result()
    for one, two in zip((server, *parties), (expected, *others)):
        values = [tree.map(torch.detach, tuple(node.leaves)) for node in (one, two)]
        assert distance(*values) < ROUNDING


@pytest.mark.slow
def test_three_processes_equal_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--master-addr=127.0.0.1"]
    command += [f"--master-port={port}", str(TESTS / "vertical_script.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in range(3):
        findings = json.loads((tmp_path / f"findings-{rank}.json").read_text())
        assert len(findings) == 17
        wrong = {name: found for name, found in findings.items() if not (found[0] < ROUNDING and found[1] == 0)}
        assert not wrong


def test_without_a_process_group_it_is_refused() -> None:
    model, data = some_model("augmented", "bernoulli")
    family = GUIDES["sums"]()
    server, _ = nodes(model, family, some_parameters(model, family, data), data, False)
    with pytest.raises(RuntimeError, match="Expected a process group"):
        processes.run_node(server, [(noise, 0.1, None) for noise in noises(model, family, 12)])
