"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedtorch.cli import main
from fedtorch.data import catalogue, data_sets
from fedtorch.data.catalogue import DataSet, File

SHA256 = "87428fc522803d31065e7bce3cf03fe475096631e5e07bbd7a0fde60c4cf25c7"  # of "a\n"


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a set of two files, one of them missing, and no network."""
    files = (File("a.csv", (SHA256,), 2, "http://127.0.0.1:1/a.csv"), File("b.csv", (SHA256,), 2, note="in a zip"))
    one = DataSet("one", "a small set", "2 sites", "CC0", "https://page", "Author (2000)", "folder", files[:1])
    monkeypatch.setattr(catalogue, "DATA_SETS", (one, one._replace(name="two", files=files)))
    monkeypatch.setenv("FEDTORCH_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("FEDTORCH_CACHE", str(tmp_path / "cache"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.csv").write_bytes(b"a\n")
    return tmp_path / "folder" / "a.csv"


def test_list_names_every_data_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FEDTORCH_DATA_DIR", raising=False)
    monkeypatch.setenv("FEDTORCH_CACHE", str(tmp_path))
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", *(data_set.name for data_set in data_sets())]
    for name, how in (("digits", "in scikit-learn"), ("mnist", "download"), ("battery", "by hand")):
        assert any(line.split(maxsplit=1)[0] == name and how in line for line in lines)


def test_list_says_what_is_at_hand(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "at hand" in lines[1]
    assert "by hand" in lines[2]
    given.unlink()
    assert main(["data", "list"]) == 0
    assert "download" in capsys.readouterr().out


def test_get_prints_where_a_data_set_is_and_comes_from(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "one"]) == 0
    printed = capsys.readouterr().out
    for part in ("a small set", "2 sites", "CC0", "https://page", "Author (2000)", str(given), SHA256, "verified"):
        assert part in printed


@pytest.mark.parametrize("content", [b"b\n", b"a"])
def test_get_refuses_a_damaged_file(content: bytes, given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given.write_bytes(content)
    assert main(["data", "get", "one"]) == 1
    printed = capsys.readouterr()
    assert "verified" not in printed.out
    assert f"Expected {given} with 2 bytes and sha256 {SHA256}" in printed.err


def test_get_goes_on_after_a_missing_file(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "two", "one"]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("verified") == 2
    assert "Put it as folder/b.csv into a folder" in printed.err
    given.unlink()
    assert main(["data", "get", "one"]) == 1
    assert "Expected to download folder/a.csv from http://127.0.0.1:1/a.csv" in capsys.readouterr().err


def test_licences_of_all_or_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "licences"]) == 0
    printed = capsys.readouterr().out
    for data_set in data_sets():
        for part in (data_set.name, data_set.licence, data_set.page, data_set.citation):
            assert part, data_set.name
            assert part in printed
    assert main(["data", "licences", "school", "mnist"]) == 0
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines() if not line.startswith(" ")] == ["school", "mnist"]
    assert main(["data", "licences", "nothing"]) == 2


def test_get_of_an_embedded_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "digits"]) == 0
    assert "ships inside scikit-learn" in capsys.readouterr().out


def test_wrong_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "nothing"]) == 2
    assert "Expected a data set in ['battery'" in capsys.readouterr().err
    for arguments in ([], ["data"], ["data", "get"], ["models"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_help_of_every_command_comes_without_torch() -> None:
    """In one process, for it takes long to begin."""
    commands = [
        [],
        ["fit"],
        ["validate"],
        ["data"],
        ["data", "get"],
        ["data", "licences"],
        ["record", "verify"],
        ["experiments", "run"],
    ]
    commands += [["launch"], *([name] for name in ("authority", "invite", "admit", "revoke", "enrol", "join"))]
    script = f"""
import sys
from fedtorch.cli import main
for command in {commands}:
    try:
        code = main([*command, "--help"])
    except SystemExit as done:
        code = done.code
    assert code == 0
assert not {{"torch", "lightning", "pandas", "jsonargparse"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: fedtorch") == len(commands)
    for key in ("algorithm", "cohort", "on_bad_message", "trainer", "seed_everything", "--print_config"):
        assert done.stdout.count(f"\n    {key}: ") == 2, key


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fedtorch.cli", "data", "get", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 2
    assert "but got 'nothing'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("fitt --config run.yaml", "fit"),
        ("data lsit", "list"),
        ("join server:1 --data my_data.py --staates folder", "--states"),
        ("enrol token --identiy folder", "--identity"),
        ("launch --procesess 4 train.py --anything", "--processes"),
        ("report folder --oout page.html", "--out"),
    ],
)
def test_misspelt_commands_and_options_are_asked_about(
    arguments: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")
