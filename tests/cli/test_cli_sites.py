"""The commands for sites and their servers: what they say, and what they refuse."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fedtorch as ft
from fedtorch import cli, sites
from fedtorch.cli._launch import THREADS
from fedtorch.sites import AuditRecord, Roster, serve
from fedtorch.sites.identity import identity

pytest.importorskip("grpc")


@pytest.fixture
def server(tmp_path: Path) -> str:
    assert cli.main(["authority", str(tmp_path / "authority"), "--server", str(tmp_path / "server")]) == 0
    return str(tmp_path / "server")


@pytest.fixture
def authority(server: str) -> str:
    return str(Path(server).parent / "authority")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says that fails."""
    capsys.readouterr()
    assert cli.main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_an_authority_says_its_fingerprint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, server = tmp_path / "authority", tmp_path / "server"
    assert cli.main(["authority", str(folder), "--server", str(server)]) == 0
    print_of, end = identity.fingerprint((folder / "authority.pem").read_bytes()), identity.read(server).ends
    said = capsys.readouterr().out
    assert said.startswith(f"authority {print_of} in ")
    assert f"its certificate ends on {end:%Y-%m-%d}" in said
    assert "has one; keep it" in refused(capsys, "authority", str(folder), "--server", str(tmp_path / "other"))
    assert "has one; choose another" in refused(capsys, "authority", str(tmp_path / "new"), "--server", str(server))


def test_the_authority_s_key_is_not_where_the_server_runs(
    server: str, authority: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.name for path in Path(server).iterdir()} == {"key.pem", "certificate.pem", "authority.pem"}
    assert (Path(authority) / "authority.key.pem").exists()
    assert "Expected two folders" in refused(capsys, "authority", server, "--server", server)


def test_a_server_s_certificate_is_renewed_under_the_same_authority(
    server: str, authority: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = identity.read(server)
    assert cli.main(["authority", authority, "--server", server, "--renew", "--lifetime", "30"]) == 0
    after = identity.read(server)
    assert after.authority == before.authority
    assert after.ends < before.ends
    after.check_server()
    assert "its key is not there" in refused(capsys, "authority", server + "2", "--server", server, "--renew")


def test_who_is_revoked_stays_so(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Expected one of [], but got 'a'" in refused(capsys, "revoke", "a", "--server", server)
    roster = Roster(Path(server) / "roster.json")
    roster.add("a", "0" * 64)
    assert cli.main(["revoke", "a", "--server", server, "--why", "stolen"]) == 0
    assert roster.sites["a"].revoked == "stolen"


def test_a_memory_of_sums_is_begun_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = str(tmp_path / "states")
    assert cli.main(["states", states, "--begin-sums"]) == 0
    assert "has a new record of the sums" in capsys.readouterr().out
    file = tmp_path / "states" / "sums.jsonl"
    before = file.read_bytes()
    assert "keep it, or move it away" in refused(capsys, "states", states, "--begin-sums")
    assert cli.main(["states", states, "--clean", "0"]) == 0
    assert file.read_bytes() == before


def test_what_cannot_be_done_is_said_in_a_line(
    authority: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Expected a name of 1 to 63" in refused(capsys, "invite", "../a", "--authority", authority, "--at", "h:1")
    assert "Expected a complete token" in refused(capsys, "enrol", "hello", "--identity", str(tmp_path / "a"))
    here = str(tmp_path / "a")
    join = ["join", "h:1", "--identity", here, "--data"]
    assert "make one with `fedtorch enrol`" in refused(capsys, *join, "my_data.py")
    identity.make_site(authority, "a").save(here)
    assert "my_data.py is not there" in refused(capsys, *join, "my_data.py")
    file = tmp_path / "my_data.py"
    file.write_text("data = 3")
    assert "to define algorithms" in refused(capsys, *join, str(file))
    file.write_text("data, algorithms = 3, {}")
    assert "Expected data as FederatedData" in refused(capsys, *join, str(file))


def test_a_site_has_the_threads_that_were_asked_for(
    authority: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, file, given = str(tmp_path / "a"), tmp_path / "my_data.py", []
    identity.make_site(authority, "a").save(here)
    file.write_text(
        "import fedtorch as ft, torch\n"
        "data, algorithms = ft.data.from_tensors([(torch.ones(9, 1),)]), {'a': ft.fedavg}\n"
    )
    monkeypatch.setattr(torch, "set_num_threads", given.append)

    def unreachable(*arguments: object, **settings: object) -> None:
        raise OSError("nobody is there")

    monkeypatch.setattr(sites, "join", unreachable)
    for more in ([], ["--threads", "3"]):
        assert "nobody is there" in refused(capsys, "join", "h:1", "--identity", here, "--data", str(file), *more)
    assert given == [int(THREADS), 3]


def test_what_a_file_lets_a_server_have_is_said_without_a_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "patients.csv").write_text("ward,age,sex,death\n" + "a,50,f,1\na,,m,0\n" * 8 + "b,61,f,0\n" * 4)
    file = tmp_path / "my_data.py"
    file.write_text(
        f"""
import fedtorch as ft
from fedtorch.models import hierarchical
from fedtorch.sites import Policy

frame, client = {str(tmp_path / "patients.csv")!r}, "ward"
missing = "impute"

def regression(design, family="logistic"):
    return ft.ep(hierarchical.regression(design, family))

algorithms = {{"regression": regression}}
policy = Policy(minimum=10, columns=("age", "death"), after_fit=("margins",), rounds=200)
"""
    )
    assert cli.main(["join", "--check", "--data", str(file)]) == 0
    said = capsys.readouterr().out
    for line in (
        "Clients: 2 of 20 rows in all (a 16, b 4)",
        "    age: float64, 8 of 20 cells missing, imputed",
        "    death: int64, complete",
        "Columns that no formula reads: ward, sex",
        "Algorithms: regression(design, family='logistic')",
        "Behind each number that leaves: at least 10 rows",
        "Before a run: clients' pseudonyms, and their mean row count",
        "After a fit: sums over its rows of changes of the mean response",
        "    exactly, of at least so many rows: only for a server that is trusted not to compose questions",
        "Rounds in all: 200",
        "Noise that is accounted for: none",
    ):
        assert line in said, said
    assert "61" not in said, "no value of a row"
    file.write_text(file.read_text().replace("minimum=10", "minimum=1"))
    assert cli.main(["join", "--check", "--data", str(file)]) == 0
    said = capsys.readouterr().out
    assert "a number may come from a single row" in said
    assert "Before a run: clients' names and row counts" in said
    assert "Expected HOST:PORT" in refused(capsys, "join", "--data", str(file))
    assert "Expected --data FILE with --check" in refused(capsys, "join", "--check", "--half", "half.py")


def test_who_is_to_be_asked_needs_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    ask = ["join", "h:1", "--identity", str(tmp_path), "--ask"]
    assert "Expected a terminal with --ask, where somebody" in refused(capsys, *ask, "--data", "my_data.py")
    assert "Expected --data FILE with --ask, but got --half" in refused(capsys, *ask, "--half", "half.py")


def test_a_site_joins_after_a_yes_on_the_terminal(
    server: str,
    authority: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my_data.py").write_text(
        """
import torch, fedtorch as ft

data = ft.data.from_tensors([(torch.randn(20, 2), torch.ones(20))], names=["ward 7"])
algorithms = {"averaging": lambda: ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))}
"""
    )
    made, roster = identity.make_site(authority, "a"), Roster(Path(server) / "roster.json")
    made.save(tmp_path / "a")
    roster.add("a", identity.fingerprint(made.certificate))
    host = serve("127.0.0.1:0", identity.read(server), roster)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda prompt: "yes")
    command = ["join", f"127.0.0.1:{host.port}", "--identity", str(tmp_path / "a"), "--ask", "--timeout", "20"]
    arguments = ([*command, "--data", str(tmp_path / "my_data.py")],)
    site = threading.Thread(target=cli.main, args=arguments, daemon=True)
    site.start()
    sites = ft.Remote(host, ["a"], "averaging", timeout=30.0)
    run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), sites, rounds=1)
    sites.finish(run)
    site.join(30.0)
    host.close()
    said = capsys.readouterr().out
    assert f"Run {run.clients.run}\nAlgorithm: averaging()\nClients: client 0 of 1\nWhat leaves this site" in said
    assert said.endswith(f"run {run.clients.run} is over\n")
    events = list(AuditRecord.entries(tmp_path / "a" / "states" / "record.jsonl"))
    (entry,) = [each for each in events if each["event"] == "consent"]
    assert entry["answer"] == "yes"
