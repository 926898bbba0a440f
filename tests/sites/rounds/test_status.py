"""What a server says of its run while it goes on, and what of that outlives its process."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.loopback import Clock, Loopback
from support.oracles.closed_forms import linear_clients, sgd
from support.sites import offers

import fedtorch as ft
from fedtorch import _files as files, cli
from fedtorch.sites import Remote
from fedtorch.sites.rounds import sites as meeting, status
from fedtorch.trust import privacy

DATA = linear_clients([5, 2, 9, 4, 17, 6])
NAMES = list("abc")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)
    monkeypatch.setattr(status, "_EVERY", 0.0)


def private() -> ft.Algorithm:
    settings: dict[str, Any] = {"clip": 1.0, "noise": 2.0, "delta": 1e-3, "entropy": privacy.from_seed(1)}
    return ft.fedavg(sgd(0.1)) | privacy.client_level(**settings)


class Server:
    """One whose sites can be silenced, and whose status is read as it is written."""

    def __init__(self, folder: Path) -> None:
        self.file, self.host = folder / "run.safetensors", Loopback(offers(DATA, private), None)

    def remote(self) -> Remote:
        return Remote(self.host, NAMES, "it", quorum=0.5, seconds=5.0, checkpoint=self.file)

    def said(self) -> dict[str, Any]:
        return files.read_json(status.status_files(self.file)[0])


def test_sites_rounds_time_left_and_privacy_are_said_while_a_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, while_it_waits = Server(tmp_path), list[dict[str, Any]]()
    run = ft.Run(private(), made.remote())
    assert made.said()["state"] == "waiting for sites"
    rounds = run.rounds(4)
    next(rounds)
    said = made.said()
    assert (said["state"], said["rounds"], said["of"]) == ("running", 1, 4)
    assert said["left"] is None, "one end of a round is no pace"
    assert said["privacy"]["epsilon"] == run.last.report["epsilon"]
    assert {site["is"] for site in said["sites"].values()} == {"connected"}

    def silent(name: str, reply: bytes) -> bytes | None:
        while_it_waits.append(made.said())
        return None if name == "b" else reply

    made.host.after = silent
    next(rounds)
    assert while_it_waits[-1]["rounds"] == 1, "the round is not done"
    assert made.said()["sites"]["b"]["late"] == 1
    made.host.kill("c")
    made.host.after = lambda name, reply: reply
    with pytest.raises(RuntimeError, match="at least 2 of 3 sites"):
        next(rounds)
    assert cli.main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("run.safetensors: running, 2 of 4 rounds, about ")
    assert "privacy spent: epsilon " in lines[0]
    assert lines[1] == "  a: connected"
    assert lines[2].startswith("  b: connected, and works on an answer; late 2 times; last at 2")
    assert lines[3].startswith("  c: not connected; missing 1 times; last at ")
    assert lines[3].endswith(": it is not connected")


def test_troubles_outlive_the_server_s_process(tmp_path: Path) -> None:
    made = Server(tmp_path)
    run = ft.Run(private(), made.remote())
    made.host.after = lambda name, reply: None if name == "b" else reply
    run.step()
    run.save(made.file)
    before = made.said()["sites"]["b"]
    made.host.after = lambda name, reply: reply
    for name in NAMES:
        made.host.start(name)
    again = made.remote()
    assert again.troubles == {}
    run = ft.Run(private(), again).load(made.file)
    assert again.troubles == {"b": "it is late"}
    for _ in run.rounds(3):
        run.save(made.file)
    assert made.said()["sites"]["b"] == {**before, "is": "connected"}
    again.finish(run)
    assert cli.main(["status", str(made.file), "--watch"]) == 0, "which ends with the run"
    assert made.said()["state"] == "over"
    assert made.said()["left"] is None


def test_who_has_not_come_is_said_before_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Server(tmp_path)
    made.host.kill("b")
    made.host.frames = type(made.host.frames)(frame for frame in made.host.frames if frame[0] != "b")
    with pytest.raises(TimeoutError, match="no 'b': it did not connect"):
        made.remote()
    assert cli.main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "waiting for sites, 0 rounds; written" in said
    assert "  a: connected\n  b: not connected\n  c: connected\n" in said


def test_a_server_that_says_nothing_any_more_may_have_ended(tmp_path: Path) -> None:
    made = Server(tmp_path)
    next(ft.Run(private(), made.remote()).rounds(4))
    path, old = status.status_files(tmp_path)[0], datetime.now(UTC) - timedelta(minutes=10)
    content = files.read_json(path)
    assert "no word" not in status.in_words(path)
    files.write_json(path, {**content, "written": f"{old:%Y-%m-%dT%H:%M:%SZ}"})
    assert "no update for 10 min: check whether the server still runs" in status.in_words(path)
    files.write_json(path, {**content, "format": 0})
    with pytest.raises(ValueError, match=r"format 1 in .*, but got 0"):
        status.in_words(path)


def test_it_is_written_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_EVERY", 1000.0)
    made = status.Status(tmp_path / "run", lambda: {"number": next(numbers)})
    numbers = iter(range(9))
    for at_once in (False, False, True, False):
        made.write(at_once)
    assert files.read_json(tmp_path / "run.status.json")["number"] == 1
    status.Status(None, dict).write(at_once=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run.status.json"]


def test_what_a_site_says_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trouble = status.Trouble(other=1, why="no\x1b[1A", at="2026-11-30T14:01:40Z")
    said = {"state": "running", "rounds": 1, "of": 2, "left": None, "privacy": {}}
    sites = {"a": {"is": "connected", **trouble._asdict()}}
    status.Status(tmp_path / "run.safetensors", lambda: {**said, "sites": sites}).write()
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "no\\u001b[1A" in capsys.readouterr().out


def test_without_a_file_it_is_said_who_writes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedtorch.sites")
    made = Server(tmp_path)
    made.remote()
    assert "no status of this run" not in caplog.text
    Remote(Loopback(offers(DATA, private), None), NAMES, "it")
    assert "no status of this run is written, for `fedtorch status`; name its file" in caplog.text
    status.status_files(made.file)[0].unlink()
    (tmp_path / "run.safetensors.json").write_text(json.dumps({}))
    assert cli.main(["status", str(tmp_path)]) == 1
    assert "checkpoint=FILE), and without one it writes none" in capsys.readouterr().err
