"""The changes that `python -m support.mutations` makes are changes, of programs that can be compiled."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support import mutations


def test_each_is_another_program_and_has_a_name_of_its_own() -> None:
    chosen = mutations.chosen()
    assert len({each.name for each in chosen}) == len(chosen) == mutations.EACH * len(mutations.CORE)
    for each in chosen:
        text = (mutations.ROOT / "fedtorch" / each.file).read_text()
        assert ast.dump(ast.parse(each.applied(text))) != ast.dump(ast.parse(text)), each.name
    for tests in mutations.CORE.values():
        assert all((mutations.ROOT / "tests" / each).exists() for each in tests.split())


def test_detected_mutations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that the test near it sees, and one that it does not see."""
    (tmp_path / "fedtorch").mkdir()
    (tmp_path / "fedtorch" / "small.py").write_text("def twice(x):\n    return 2 * x\n\n\ndef other():\n    return 1\n")
    (tmp_path / "tests").mkdir()
    near = "import small\n\n\ndef test_twice():\n    assert small.twice(4) == 8\n"
    (tmp_path / "tests" / "test_small.py").write_text(
        "import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'fedtorch'))\n" + near
    )
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "CORE", {"small.py": "test_small.py"})
    monkeypatch.setattr(
        mutations, "copied", lambda folder: mutations.shutil.copytree(tmp_path, folder, dirs_exist_ok=True)
    )
    noticed = mutations.tried(mutations.mutations("small.py"))
    assert {name.partition(":")[2]: found for name, found in noticed.items()} == {
        "twice: 2 * x -> (2 / x) (1)": True,
        "twice: 2 -> 3 (1)": True,
        "other: 1 -> 2 (1)": False,
    }
    assert mutations.lost({"a": True, "b": True, "c": False}, {"a": False, "b": True, "c": False}) == ["a"]
