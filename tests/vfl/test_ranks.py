"""Messages between two processes that do not expect the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from fedtorch import wire
from fedtorch.vfl.protocol import Receive, Send
from fedtorch.vfl.ranks import Link

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
link = Link(rank, 2, timedelta(seconds=20))
if rank == 1:
    link.send(Send(0, {"first": torch.arange(4.0)}))
    link.send(Send(0, {}))
    try:
        link.send(Send(0, {"second": torch.zeros(size if size > 0 else 4)}))
        if size < 0:  # more than was announced, which ends a process that reads by gloo
            link.streams.write(0, bytes([255]) * 100_000)
    except RuntimeError:
        pass  # the other has gone
else:
    like = {"first": torch.zeros(4)}
    first = link.receive(Receive(1, like))["first"].tolist()
    print(first, link.receive(Receive(1, {})), link.received == wire.size(like))
    try:
        for _ in range(2):
            link.receive(Receive(1, {"second": torch.zeros(4)}))
    except wire.PayloadError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "field 'second': expected shape (4,), but got (3,)"),
        (500, "bytes"),
        (-1, "bytes, but got 18446744073709551615"),
    ],
)
def test_a_payload_of_another_length_is_refused(size: int, message: str, tmp_path: Path) -> None:
    """Also one that is longer than it was announced to be: over gloo it ends the receiver's process by an abort."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(size), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    try:
        found, errors = ranks[1].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[1].returncode == 0, errors[-2000:]
    first, second = found.strip().split("\n")
    assert first == "[0.0, 1.0, 2.0, 3.0] {} True"
    assert "rank 1" in second
    assert message in second
