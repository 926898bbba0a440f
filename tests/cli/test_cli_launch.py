"""Ranks that begin anew after one of them has died, and then with another number of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.oracles.closed_forms import ROUNDING, distance
from support.scripts.launched_script import DATA, scaffold

import fedtorch as ft
from fedtorch import cli
from fedtorch.cli import _launch as launch

TESTS = Path(__file__).parents[1]


def started(
    folder: Path, *options: str, rounds: int, fatal: int = 0, pause: float = 0.0, log: str = "machine"
) -> subprocess.Popen[bytes]:
    """The command on a machine, over the script of these tests; what it says is in `folder/log`."""
    script = [
        str(TESTS / "support" / "scripts" / "launched_script.py"),
        str(folder),
        str(rounds),
        str(fatal),
        str(pause),
    ]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-m", "fedtorch.cli", "launch", "--restarts", "4", *options, *script]
    with (folder / log).open("ab") as said:
        return subprocess.Popen(whole, env=environment, stdout=said, stderr=said, start_new_session=True)


def ended_well(folder: Path, process: subprocess.Popen[bytes], log: str = "machine") -> None:
    assert process.wait(300) == 0, (folder / log).read_text()[-3000:]


def begun(folder: Path, rank: int = 0) -> list[tuple[int, int]]:
    """(the round, how many ranks) whenever a rank began."""
    file = folder / f"began-{rank}"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(line.split()[0]), int(line.split()[2])) for line in lines]


def kill(folder: Path, machine: subprocess.Popen[bytes]) -> None:
    """A machine is gone: its command, and the ranks that it has started, which would outlive that."""
    lines = [line.split() for file in folder.glob("began-*") for line in file.read_text().splitlines()]
    for process in [machine.pid, *(int(line[4]) for line in lines if int(line[6]) == machine.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    machine.wait()


def wait_for(folder: Path, what: Callable[[], object], seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends, [log.read_text()[-2000:] for log in folder.glob("machine*")]
        time.sleep(0.2)


def is_that_of_one_process(folder: Path) -> int:
    """Checks the last checkpoint; returns its round."""
    found = ft.Run(scaffold(), ft.InProcess(DATA), seed=3).load(folder / "run.safetensors")
    wanted = ft.run(scaffold(), ft.InProcess(DATA), rounds=found.number, seed=3)
    assert distance(found.server, wanted.server) < ROUNDING
    assert distance(found.tensors(), wanted.tensors()) < ROUNDING
    return found.number


def meeting(machines: str) -> list[str]:
    """The options of machines that meet at a free port here, one process each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ["--machines", machines, "--at", f"127.0.0.1:{port}"]


launches = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are killed by a signal")


@pytest.mark.parametrize(("options", "threads"), [([], "1"), (["--threads", "3"], "3")])
def test_ranks_have_the_threads_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: list[str], threads: str
) -> None:
    from torch.distributed import run

    monkeypatch.setattr(launch, "THREADS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv(launch.STORE, "")
    seen = []
    monkeypatch.setattr(run, "main", lambda given: seen.append(os.environ["OMP_NUM_THREADS"]))
    assert cli.main(["launch", *options, "train.py"]) == 0
    assert seen == [threads]


@pytest.mark.slow
@launches
def test_a_rank_that_dies_costs_no_committed_round(tmp_path: Path) -> None:
    ended_well(tmp_path, started(tmp_path, "--processes", "2", rounds=6, fatal=3))
    assert (tmp_path / "died").exists()
    assert begun(tmp_path, 0) == begun(tmp_path, 1) == [(0, 2), (3, 2)]
    for ranks in (1, 3):
        folder = tmp_path / f"{ranks} ranks"
        folder.mkdir()
        shutil.copy(tmp_path / "run.safetensors", folder)
        ended_well(folder, started(folder, "--processes", str(ranks), rounds=9))
        assert begun(folder, ranks - 1) == [(6, ranks)]
        assert is_that_of_one_process(folder) == 9


@pytest.mark.slow
@launches
def test_two_machines_of_which_a_rank_dies(tmp_path: Path) -> None:
    at = meeting("2")
    machines = [started(tmp_path, *at, rounds=6, fatal=3, log=f"machine {k}") for k in range(2)]
    for k, machine in enumerate(machines):
        ended_well(tmp_path, machine, f"machine {k}")
    assert begun(tmp_path, 0) == begun(tmp_path, 1) == [(0, 2), (3, 2)]
    assert is_that_of_one_process(tmp_path) == 6


@pytest.mark.slow
@launches
def test_a_machine_that_is_lost_and_one_that_comes_back(tmp_path: Path) -> None:
    """Torchrun waits half a minute for others before fewer machines than it could have go on."""
    at = meeting("1:2")
    run = lambda log: started(tmp_path, *at, rounds=10**6, pause=0.1, log=log)
    machines = [run("machine 0")]
    try:
        wait_for(tmp_path, lambda: _listens(at[-1]))
        machines.append(run("machine 1"))
        wait_for(tmp_path, (tmp_path / "run.safetensors").exists)
        kill(tmp_path, machines.pop())
        wait_for(tmp_path, lambda: len(begun(tmp_path)) == 2)
        machines.append(run("machine 1"))
        wait_for(tmp_path, lambda: len(begun(tmp_path)) == 3)
        (_, first), (lost, alone), (back, again) = begun(tmp_path)
        assert (first, alone, again) == (2, 1, 2)
        assert 0 < lost < back
        last = (tmp_path / "run.safetensors").stat().st_mtime_ns
        wait_for(tmp_path, lambda: (tmp_path / "run.safetensors").stat().st_mtime_ns > last)
    finally:
        for machine in machines:
            kill(tmp_path, machine)
    assert is_that_of_one_process(tmp_path) > back


def _listens(at: str) -> bool:
    host, port = at.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
        return True
    return False


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
