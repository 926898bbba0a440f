"""Files are whole under their names, and stay there after a power cut."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedtorch import _files as files


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be opened there")
def test_the_name_is_forced_to_the_disk_after_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    synced, renamed = os.fsync, os.replace

    def fsync(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        synced(handle)

    def replace(source: object, target: object) -> None:
        done.append("name")
        renamed(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    files.replace(tmp_path / "spent", b"1.5")
    assert done == ["file", "name", "folder"]
    assert (tmp_path / "spent").read_bytes() == b"1.5"


def test_a_file_that_cannot_take_its_name_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        files.replace(tmp_path / "taken", b"")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
