"""What processes that were killed leave behind; `experiments/benchmarks/kills.py` is the long form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from experiments.benchmarks.kills import POINTS, WORKS

ROOT = Path(__file__).parents[3]


def test_kills_lose_nothing(tmp_path: Path) -> None:
    """In a process of its own, because it forks."""
    file = tmp_path / "rows.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "experiments.benchmarks.kills", "--kills", "6", "--json", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [(row["setting"], row["metric"], row["ours"]) for row in json.loads(file.read_text())["rows"]]
    assert {name for name, metric, lost in rows if metric == "checkpoints or bits lost" and lost == 0} == WORKS.keys()
    assert sum(count for _, metric, count in rows if metric.startswith("kills, ")) == 6
    assert all(any(metric == f"kills, {point}" and count for _, metric, count in rows) for point in POINTS)
