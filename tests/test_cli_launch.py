"""Ranks that begin anew after one of them has died, and then with another number of them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.closed_forms import ROUNDING, distance
from support.launched_script import DATA, scaffold

import fedtorch as ft
from fedtorch import cli
from fedtorch.cli import launch

TESTS = Path(__file__).parent


def launched(
    folder: Path, processes: int, rounds: int, fatal: int, restarts: int = 2
) -> subprocess.CompletedProcess[str]:
    """The command, over the script of these tests."""
    script = [str(TESTS / "support" / "launched_script.py"), str(folder), str(rounds), str(fatal)]
    command = ["launch", "--processes", str(processes), "--restarts", "2", *script]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-m", "fedtorch.cli", *command]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are killed by a signal")
def test_a_rank_that_dies_costs_no_committed_round(tmp_path: Path) -> None:
    done = launched(tmp_path, processes=2, rounds=6, fatal=3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "died").exists()
    assert (tmp_path / "began-0").read_text() == (tmp_path / "began-1").read_text() == "0 of 2\n3 of 2\n"
    wanted = ft.run(scaffold(), ft.InProcess(DATA), rounds=9, seed=3)
    more = launched(tmp_path, processes=1, rounds=9, fatal=0)
    assert more.returncode == 0, more.stderr[-3000:]
    assert (tmp_path / "began-0").read_text().endswith("6 of 1\n")
    found = ft.Run(scaffold(), ft.InProcess(DATA), seed=3).load(tmp_path / "run.safetensors")
    assert found.number == 9
    assert distance(found.server, wanted.server) < ROUNDING
    assert distance(found.tensors(), wanted.tensors()) < ROUNDING


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    launch.add(parser.add_subparsers(required=True))
    return parser.parse_args(["launch", *given])


def test_what_torchrun_is_given() -> None:
    given = launch.torchrun_arguments(
        options("--processes", "8", "--machines", "2:4", "--at", "a:1", "train.py", "--lr", "1")
    )
    assert given[-3:] == ["train.py", "--lr", "1"]
    pairs = dict(zip(given[:-3:2], given[1:-3:2]))
    assert pairs == {
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "a:1",
        "--rdzv-id": "fedtorch",
        "--nproc-per-node": "8",
        "--nnodes": "2:4",
        "--max-restarts": "3",
    }


def test_machines_have_to_know_where_they_meet(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--machines", "2", "train.py"]) == 1
    assert "Expected --at HOST:PORT" in capsys.readouterr().err


def test_ranks_that_do_not_end_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def fails(given: list[str]) -> None:
        assert os.environ[launch.STORE] == "1"
        raise ChildFailedError("train.py", {1: ProcessFailure(1, 1234, 3, "")})

    monkeypatch.setenv(launch.STORE, "0")
    monkeypatch.setattr(run, "main", fails)
    assert cli.main(["launch", "train.py"]) == 1
    assert "rank 1 ended with exit code 3" in capsys.readouterr().err
