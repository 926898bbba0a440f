"""Server and sites as processes of their own over gRPC, by the commands that people use, with kills."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.formulas.enrolled import NAMES, Place
from support.oracles.closed_forms import ROUNDING, distance
from support.processes import TESTS, Process
from support.scripts.my_data import DATA, scaffold
from support.scripts.my_secrets import carry, envelopes, masked

import fedtorch as ft
from experiments.benchmarks import remote as benchmark
from fedtorch import checkpoint, cli, tree
from fedtorch.sites import AuditRecord, Remote
from fedtorch.sites.identity import identity, key_directory

pytest.importorskip("grpc")


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Place]:
    made = Place(tmp_path, capsys)
    yield made
    for site in made.sites.values():
        site.kill()
        site.communicate()


def test_sites_as_processes_of_which_one_is_killed(place: Place) -> None:
    host = place.serve()
    for name in NAMES:
        place.join(name, host.port)
    record = AuditRecord(place.folder / "server.jsonl", identity.read(place.folder / "server"))
    more: dict[str, Any] = {"quorum": 1.0, "seconds": 60.0, "agreed": place.roster.rows, "record": record}
    sites = Remote(host, NAMES, "scaffold", {"rate": 0.05}, **more)
    run = ft.Run(scaffold(0.05), sites, seed=3)
    for _ in range(3):
        run.step()
    place.kill("b")
    place.join("b", host.port)
    for _ in range(3):
        run.step()
    sites.finish(run)
    wanted = ft.run(scaffold(0.05), ft.InProcess(DATA), rounds=6, seed=3)
    assert distance(run.server, wanted.server) < ROUNDING
    assert distance(place.models(), wanted.tensors()) < ROUNDING
    records = [str(record.path), *(str(place.folder / name / "states" / "record.jsonl") for name in NAMES)]
    authority = place.folder / "server" / "authority.pem"
    assert cli.main(["record", "verify", *records, "--certificate", str(authority)]) == 0
    host.close()


@pytest.mark.slow
@pytest.mark.parametrize(("make", "setting"), [(masked, {"rate": 0.05}), (envelopes, {"alpha": 0.3})])
def test_messages_that_the_server_cannot_read_over_grpc(place: Place, make: Any, setting: dict[str, float]) -> None:
    """Sums under masks and sealed envelopes between processes, one of which is killed between rounds."""
    host, rows = place.serve(), DATA.rows
    for name in NAMES:
        place.join(name, host.port, "my_secrets.py")
    roster = key_directory.sign_roster(place.folder / "authority", place.roster)
    name, more = make.__name__, {"quorum": 1.0, "seconds": 60.0, "roster": roster, "rotate": 2, "rows": rows}
    sites = Remote(host, NAMES, name, setting, carry=carry[name], **more)
    one = ft.InProcess(DATA, carry=carry[name])
    run, wanted = (ft.Run(make(**setting), clients, seed=3) for clients in (sites, one))
    for k in range(5):
        if k == 3:
            place.kill("b")
            place.join("b", host.port, "my_secrets.py")
        run.step(), wanted.step()
    sites.finish(run)
    assert distance(place.models(), wanted.tensors()) < 1e-7  # on the grid of 2⁻³⁰
    assert distance(run.server, wanted.server) < 1e-7 or make is envelopes
    host.close()


@pytest.mark.slow
def test_the_benchmark_of_sites(tmp_path: Path) -> None:
    benchmark.main(["--smoke", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    found = {(row["setting"], row["metric"]): row["ours"] for row in rows}
    assert found["2 sites in processes of their own and 4 in one", "largest difference from one process"] < ROUNDING
    assert found["FedAvg, three sites, 40 rounds", "bytes down a round"] > 0
    assert found["messages of a vertical iteration, three parties, 1000 rows each way", "bytes up"] > 3 * 8000


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_the_processes_of_a_benchmark_end_with_it(by: signal.Signals) -> None:
    """Also where it has no time to end them."""
    code = (
        "import time\nfrom experiments.benchmarks import remote\n"
        "with remote.serving([['1'], ['2']]) as served:\n    print(*served[2], flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=TESTS.parent) as started:
        assert started.stdout is not None
        numbers = [int(number) for number in started.stdout.readline().split()]
        assert len(numbers) == 2
        assert all(map(runs, numbers))
        started.send_signal(by)
    ends = time.monotonic() + 20.0
    while any(map(runs, numbers)):
        assert time.monotonic() < ends
        time.sleep(0.05)


def runs(number: int) -> bool:
    """Whether a process is there, and not only its end for its parent to hear."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_processes_that_are_killed_at_random(place: Place) -> None:
    killed_at_random(place, kills=20, rounds=3000)


def killed_at_random(place: Place, kills: int, rounds: int) -> None:
    """Server and sites, while they work; every round that was saved stays, and the end is that of one process."""
    dice = random.Random(5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = [str(TESTS / "support" / "scripts" / "server_script.py"), str(place.folder), str(port), str(rounds)]
    server = Process(script)
    for name in NAMES:
        place.join(name, port)
    saved = 0
    for _ in range(kills):
        time.sleep(dice.uniform(4.0, 9.0))
        if server.returncode is not None:
            break
        victim = dice.choice(["server", *NAMES])
        if victim == "server":
            server.kill()
            server.communicate()
            file = place.folder / "run.safetensors"
            number = int(checkpoint.read(file)["number"]) if file.exists() else 0
            assert number >= saved
            saved = number
            server = Process(script)
        else:
            place.kill(victim)
            place.join(victim, port)
    said = server.communicate(timeout=600)
    assert server.returncode == 0, said[-3000:]
    wanted = ft.run(scaffold(0.05), ft.InProcess(DATA), rounds=rounds, seed=3)
    flat = checkpoint.read(place.folder / "run.safetensors")
    assert int(flat["number"]) == rounds
    assert distance(tree.unflatten(flat, wanted.server, "server"), wanted.server) < 1e-8  # sums in another order
    assert distance(place.models(), wanted.tensors()) < 1e-8
