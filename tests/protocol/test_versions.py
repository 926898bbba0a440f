"""What a node keeps of its runs, and what of it may be deleted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from fedtorch import cli
from fedtorch.protocol.versions import FIRST, Versions, alone_in, clean, runs

OVER, PENDING, RECENT = "a" * 32, "b" * 32, "c" * 32


def state(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([value])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that ended and one that did not, five days ago, and one that has just ended."""
    for run in (OVER, PENDING, RECENT):
        made = Versions(tmp_path / run)
        made.put(3, state(1.0))
        if run != PENDING:
            made.finish()
        if run != RECENT:
            for path in (*(tmp_path / run).iterdir(), tmp_path / run):
                os.utime(path, (time.time() - 5 * 86_400,) * 2)
    (tmp_path / "rounds.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_versions_outlive_a_process(tmp_path: Path) -> None:
    made = Versions(tmp_path / OVER)
    made.put(FIRST, state(0.0)), made.put(4, state(4.0)), made.put(9, state(9.0))
    again = Versions(tmp_path / OVER)
    assert (made.numbers, again.numbers) == ({FIRST, 4, 9}, {FIRST, 4, 9})
    assert again.get(9)["x"].item() == 9.0
    again.retain({9})
    assert (again.numbers, again.get(4)) == ({FIRST, 9}, None)


def test_a_run_that_goes_on_after_its_end_is_pending(tmp_path: Path) -> None:
    """A server may go back to a checkpoint before the end."""
    Versions(tmp_path / OVER).finish()
    made = Versions(tmp_path / OVER)
    made.put(FIRST, state(0.0))
    assert made.over
    assert [kept.over for kept in runs(tmp_path)] == [True]
    made.put(5, state(5.0))
    assert not made.over
    assert [kept.over for kept in runs(tmp_path)] == [False]


def test_what_is_kept(folder: Path) -> None:
    found = {kept.run: kept for kept in runs(folder)}
    assert {run: kept.over for run, kept in found.items()} == {OVER: True, PENDING: False, RECENT: True}
    assert found[OVER].days == pytest.approx(5.0, abs=0.1)
    assert found[RECENT].bytes > 50
    assert runs(folder / "nothing") == []


def test_only_runs_that_are_over_are_cleaned(folder: Path) -> None:
    assert [kept.run for kept in clean(folder, 2.0)] == [OVER]
    assert clean(folder, 2.0) == []
    assert [kept.run for kept in clean(folder, 0.0)] == [RECENT]
    assert Versions(folder / PENDING).numbers == {FIRST, 3}
    assert (folder / "rounds.json").exists()
    assert (folder / "notes").exists()
    with pytest.raises(ValueError, match=r"Expected runs in .*, but got \['eeee"):
        clean(folder, 2.0, ["e" * 32])
    assert [kept.run for kept in clean(folder, 2.0, [PENDING])] == [PENDING]


def test_nothing_is_cleaned_under_a_node_that_takes_part(folder: Path) -> None:
    with alone_in(folder), pytest.raises(FileExistsError, match="that no other process uses"):
        clean(folder, 0.0)
    assert len(runs(folder)) == 3


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["states", str(folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said] == [[OVER, "over"], [PENDING, "pending"], [RECENT, "over"]]
    assert cli.main(["states", str(folder), "--clean", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"deleted {OVER}"
    assert cli.main(["states", str(folder), "--abandon", PENDING]) == 0
    assert [kept.run for kept in runs(folder)] == [RECENT]
