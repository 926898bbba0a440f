"""A server and two parties in three processes give the numbers and the bytes of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from closed_forms import ROUNDING
from verticals import GUIDES, nodes, noises, some_model, some_parameters

from fedtorch.vfl import processes

TESTS = Path(__file__).parent.parent


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
