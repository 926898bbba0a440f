"""Messages between two processes that do not expect the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from fedtorch import wire
from fedtorch.protocol._rank_link import RankLink
from fedtorch.protocol.halves import Receive, Send

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
link = RankLink(rank, 2, timedelta(seconds=20))
if rank == 1:
    link.send(Send(0, {"first": torch.arange(4.0)}))
    link.send(Send(0, {}))
    for size in (3, 4, 500):
        try:
            link.send(Send(0, {"second": torch.zeros(size)}))
            if size == 4:
                link.streams.write(0, bytes([255]) * 8)  # beyond what was announced
        except RuntimeError:
            pass  # the other has gone
else:
    like = {"first": torch.zeros(4)}
    first = link.receive(Receive(1, like))["first"].tolist()
    print(first, link.receive(Receive(1, {})), link.received == wire.size(like))
    for _ in range(4):
        try:
            print(link.receive(Receive(1, {"second": torch.zeros(4)}))["second"].tolist())
        except wire.PayloadError as error:
            print(error)
"""


def test_payloads_of_another_length_are_refused(tmp_path: Path) -> None:
    """Over gloo, one that is longer than it was announced to be ends the receiver's process by an abort."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")],
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
    first, short, good, beyond, long = found.strip().split("\n")
    assert first == "[0.0, 1.0, 2.0, 3.0] {} True"
    assert "rank 1" in short
    assert "field 'second': expected shape (4,), but got (3,)" in short
    assert good == "[0.0, 0.0, 0.0, 0.0]"
    assert "rank 1: expected" in beyond
    assert f"bytes, but got {2**64 - 1}" in beyond
    assert "rank 1" in long
    assert "bytes" in long
