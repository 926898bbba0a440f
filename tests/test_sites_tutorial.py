"""The page on other organisations: its commands for the server's side, a site's file and the server run as printed."""

from __future__ import annotations

import re
import shlex
import socket
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

import fedtorch as ft
from fedtorch import cli
from fedtorch.sites import Roster, connect, join
from fedtorch.sites.enrolment import EnrolmentServer, Token, enrol
from fedtorch.sites.identity import identity
from fedtorch.sites.rounds.configuration import read_configuration

PAGE = Path(__file__).parent.parent / "docs" / "tutorials" / "from_laptop_to_sites.md"
NAMES = ("ward 7", "ward 8", "ward 9")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands(page: str) -> list[list[str]]:
    lines = re.findall(r"^\$ fedtorch (.*)$", page, flags=re.MULTILINE)
    return [shlex.split(line.removesuffix("&")) for line in lines]


def block(page: str, contains: str) -> str:
    (found,) = (text for text in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if contains in text)
    return found


def patients(path: Path, site: int) -> None:
    """Rows of three clients of a site."""
    rows = [f"{site}{k},{age},{120 + 3 * k + age % 7},{age * 0.1 + k}" for k in range(3) for age in range(30, 42)]
    path.write_text("ward,age,sbp,score\n" + "\n".join(rows))


def test_the_pages_lines_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("pandas")
    page, port = PAGE.read_text(), free_port()
    monkeypatch.chdir(tmp_path)
    every = {command[0]: command for command in commands(page)}
    assert cli.main(every["authority"]) == 0
    enrolling = EnrolmentServer("authority", "127.0.0.1:0", Roster("server/roster.json"))
    threads, ended = [], {}
    for site, name in enumerate(NAMES):
        capsys.readouterr()
        invite = [name if part == "ward 7" else part for part in every["invite"]]
        assert cli.main([part.replace("server.example:8443", f"127.0.0.1:{enrolling.port}") for part in invite]) == 0
        me = enrol(Token.read(capsys.readouterr().out), tmp_path / name)
        patients(tmp_path / name / "patients.csv", site)
        text = block(page, "policy = Policy(minimum=10, rounds").replace(
            '"patients.csv"', f'"{tmp_path / name / "patients.csv"}"'
        )
        (tmp_path / name / "my_data.py").write_text(text)
        configuration, dial = (
            read_configuration(tmp_path / name / "my_data.py"),
            partial(connect, f"127.0.0.1:{port}", me),
        )
        take_part = lambda name=name, configuration=configuration, dial=dial, me=me: ended.setdefault(
            name, join(dial, configuration, tmp_path / name / "states", identity=me, timeout=30.0)
        )
        threads.append(threading.Thread(target=take_part, daemon=True))
    enrolling.close()
    assert not (tmp_path / "server" / "authority.key.pem").exists()
    for thread in threads:
        thread.start()
    server = block(page, "with serve(").replace("0.0.0.0:9443", f"127.0.0.1:{port}")
    names: dict[str, object] = {}
    exec(compile(server, "server.py", "exec"), names)
    for thread in threads:
        thread.join(20.0)
    assert set(ended) == set(NAMES)
    run = names["run"]
    assert isinstance(run, ft.Run)
    assert run.number == 50
    assert torch.isfinite(run.global_module().weight).all()
    assert all(session.over for session in ended.values())
    assert identity.read("server").name == identity.SERVER


def test_no_port_of_the_page_needs_root() -> None:
    ports = [int(port) for port in re.findall(r"(?:0\.0\.0\.0|server\.example):(\d+)", PAGE.read_text())]
    assert len(ports) > 3
    assert min(ports) >= 1024
