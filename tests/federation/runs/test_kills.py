"""What processes that were killed leave behind; `experiments/benchmarks/kills.py` is the long form."""

from __future__ import annotations

import json
from pathlib import Path

from support.processes import Process

from experiments.benchmarks.kills import POINTS, WORKS


def test_kills_lose_nothing(tmp_path: Path) -> None:
    """In a process of its own, because it forks."""
    file = tmp_path / "rows.json"
    process = Process(["-m", "experiments.benchmarks.kills", "--kills", "6", "--json", str(file)])
    said = process.communicate(timeout=250)
    assert process.returncode == 0, said[-5000:]
    rows = [(row["setting"], row["metric"], row["ours"]) for row in json.loads(file.read_text())["rows"]]
    assert {name for name, metric, lost in rows if metric == "checkpoints or bits lost" and lost == 0} == WORKS.keys()
    assert sum(count for _, metric, count in rows if metric.startswith("kills, ")) == 6
    assert all(any(metric == f"kills, {point}" and count for _, metric, count in rows) for point in POINTS)
