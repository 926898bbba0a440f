"""Peaks of memory in children of a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.benchmarks.parts import memory

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")


def test_a_child_tells_what_its_work_adds_and_not_what_was_there_before() -> None:
    of = lambda mebibytes: torch.ones(mebibytes, 2**20, dtype=torch.uint8)
    freed = [torch.ones(2**14) for _ in range(2000)]  # 125 MiB that this process has used before
    pin = torch.ones(2**14)
    del freed
    assert memory.added(lambda: of(1), lambda: of(50)) == pytest.approx(50, abs=3)
    assert memory.added(lambda: of(50), lambda: of(1)) < 5  # what the warm-up took and freed does not count
    del pin


def test_an_error_in_the_child_is_not_taken_for_no_memory(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise ValueError("no such work")

    with pytest.raises(RuntimeError, match="the child that measures memory to end well"):
        memory.added(lambda: None, fails)
    assert "no such work" in capfd.readouterr().err
