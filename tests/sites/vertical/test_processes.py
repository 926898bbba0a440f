"""A server and three parties in four processes give the numbers and the bytes of one process."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from queue import Queue

import pytest
import torch
from support import splits, verticals
from support.oracles.closed_forms import ROUNDING, distance
from support.splits import CASES, SGD, N, data
from support.verticals import GUIDES, in_threads, nodes, noises, some_model, some_parameters

from fedtorch import random, tree
from fedtorch.protocol.halves import Half, Receive, Send
from fedtorch.protocol.ranks import over_ranks
from fedtorch.vfl.nodes.iteration import exchange, party_half, server_half
from fedtorch.vfl.nodes.node import Iteration

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("name", "guide"), [
    ("augmented", "amortised"), ("augmented", "noiseless"), ("power", "mean field"), ("power", "sums"),
])  # fmt: skip
@pytest.mark.parametrize("delayed", [False, True], ids=["", "idle parties"])
def test_both_sides_understand_each_other(name: str, guide: str, shared: bool, delayed: bool) -> None:
    """Server and parties in threads, with queues of encoded messages between them, give the numbers of one loop."""
    if name == "power" and guide == "mean field" and not shared:
        pytest.skip("the power model's parties need the response")
    model, data = some_model(name, "negative binomial")
    family = GUIDES[guide]()
    q = some_parameters(model, family, data)
    given = zip(noises(model, family, 12), [None, [True, False, True], [False, True, True]])
    iterations = [Iteration(noise, 0.05, None, active if delayed else None) for noise, active in given]
    expected, others = nodes(model, family, q, data, shared)
    for iteration in iterations:
        exchange(expected, others, iteration)
    server, parties = nodes(model, family, q, data, shared)
    in_threads(
        {0: server_half(server, iterations)}
        | {p.index: party_half(p, iterations, accept_disclosure=True) for p in parties}
    )
    for one, two in zip((server, *parties), (expected, *others)):
        values = [tree.map(torch.detach, tuple(node.part.parameters())) for node in (one, two)]
        assert distance(*values) < ROUNDING


def test_threads_that_look_for_a_queue_at_once_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Queue[bytes]):
        def __init__(self) -> None:
            time.sleep(0.02)  # in which the other thread looks for the same queue
            super().__init__()

    def says() -> Half:
        yield Send(1, torch.ones(1))

    def hears() -> Half:
        yield Receive(0, torch.zeros(1))

    monkeypatch.setattr(verticals, "Queue", Slow)
    in_threads({0: says(), 1: hears()}, patience=1.0)


@pytest.mark.parametrize("absent", [False, True], ids=["", "absent rows"])
@pytest.mark.parametrize("name", CASES)
def test_both_sides_of_a_split_network_understand_each_other(name: str, absent: bool) -> None:
    model, rows = CASES[name](), data()
    if absent:
        if "skip" in model.server.q.get("z", {}):
            pytest.skip("noise at the sum needs all parties")
        rows = rows._replace(present=random.bernoulli(random.key(3), 0.7, (N, 3)))
    here, other = copy.deepcopy(model), copy.deepcopy(model)
    iterations = [Iteration(), Iteration(step=1, rows=torch.tensor([5, 1, 9])), Iteration(step=2)]
    server, parties = model.nodes(rows, SGD)
    for iteration in iterations:
        exchange(server, parties, iteration, local_steps=2)
    server, parties = here.nodes(rows, SGD)
    in_threads(
        {0: server_half(server, iterations)}
        | {p.index: party_half(p, iterations, 2, accept_disclosure=True) for p in parties}
    )
    assert splits.distance(model, here) < ROUNDING
    assert splits.distance(model, other) > 1e-3


@pytest.mark.slow
def test_four_processes_equal_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--master-addr=127.0.0.1"]
    command += [f"--master-port={port}", str(TESTS / "support" / "scripts" / "vertical_script.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    for rank in range(4):
        findings = json.loads((tmp_path / f"findings-{rank}.json").read_text())
        assert len(findings) == 14 + len(CASES)
        wrong = {name: found for name, found in findings.items() if not (found[0] < ROUNDING and found[1] == 0)}
        assert not wrong
    assert "rank 1 to answer within 0.5 s" in (tmp_path / "silence.txt").read_text()


def test_without_a_process_group_it_is_refused() -> None:
    model, data = some_model("augmented", "bernoulli")
    family = GUIDES["sums"]()
    server, _ = nodes(model, family, some_parameters(model, family, data), data, False)
    iterations = [Iteration(noise, 0.1) for noise in noises(model, family, 12)]
    top, (bottom, *_) = CASES["plain"]().nodes(splits.data(), SGD)
    for half in (server_half(server, iterations), server_half(top, [Iteration()]), party_half(bottom, [Iteration()])):
        with pytest.raises(RuntimeError, match="Expected a process group"):
            over_ranks(half, 0, 4)
