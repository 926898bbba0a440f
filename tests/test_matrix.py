"""Which interpreters `make test-matrix` tries, what it says of others, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.scripts import matrix


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions for which environments are asked; nothing is made."""
    versions: list[str] = []

    def one(name: str, version: str, wanted: list[str], arguments: str) -> matrix.Outcome:
        versions.append(version)
        return matrix.Outcome(name, "passed", True, 1.0)

    monkeypatch.setattr(matrix, "one", one)
    return versions


def broken(folder: Path) -> str:
    """An interpreter that is there and does not run, as a shim of a version that is not chosen."""
    file = folder / "python3.99"
    file.write_text("#!/bin/sh\nexit 127\n")
    file.chmod(0o755)
    return str(file)


def test_who_is_missing_is_named_and_left_out(tried: list[str], tmp_path: Path, capsys) -> None:
    pythons = f"python9.9 {broken(tmp_path)} {sys.executable}"
    assert matrix.main(["--pythons", pythons]) == 0
    assert tried == ["{}.{}".format(*sys.version_info)]
    said = capsys.readouterr().out
    assert "python9.9: not found" in said
    assert "python3.99: not found" in said
    assert matrix.main(["--pythons", pythons, "--asked-for"]) == 1


def test_none_at_all_is_an_error(tried: list[str]) -> None:
    assert matrix.main(["--pythons", "python9.9 python9.8"]) == 1
    assert tried == []


def test_a_suite_that_fails_and_an_environment_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(matrix, "environment", lambda python, version: matrix.ENVIRONMENTS / version / "bin" / "python")
    monkeypatch.setattr(matrix, "install", lambda python, wanted: None)
    monkeypatch.setattr(matrix, "installed", lambda python: {"torch": "2.99.0+cpu", "numpy": "2.4.6"})
    asked = []

    def suite(command: list[str], **_: object) -> subprocess.CompletedProcess:
        asked.append(command)
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(matrix, "version", lambda name: "3.12")
    monkeypatch.setattr(matrix.subprocess, "run", suite)
    assert matrix.main(["--pythons", "python3.12", "--pytest-args", "tests/test_tree.py -x"]) == 1
    assert asked[0][:3] == ["make", "--no-print-directory", "suite"]
    assert f"BIN={matrix.ENVIRONMENTS / '3.12' / 'bin'}" in asked[0]
    assert "PYTEST_ARGS=tests/test_tree.py -x" in asked[0]
    assert "failed" in capsys.readouterr().out.splitlines()[-1]

    def refused(python: Path, wanted: list[str]) -> None:
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(matrix, "install", refused)
    assert matrix.main(["--pythons", "python3.12"]) == 1
    assert "not tried" in capsys.readouterr().out.splitlines()[-1]
    assert len(asked) == 1


def test_what_is_newer_than_the_constraints() -> None:
    constraints = "torch==2.13.0\ntriton>=3.6\nlazy_loader==0.6\nnumpy==2.4.6\n"
    found = {"torch": "2.13.0+cpu", "lazy-loader": "0.7", "numpy": "2.5.0", "pip": "26.0"}
    assert matrix.newer(found, constraints) == ["lazy-loader 0.7 (0.6)", "numpy 2.5.0 (2.4.6)"]
