"""Every experiment of docs/experiments.md runs by its command, as a user types it, with its data and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = {"mixed_models.brms", "trials.byzfl"}
HOW = re.compile(r"Put it as|pip install|git clone|--\w+ with its folder|FEDTORCH_DATA_DIR")  # data are got so


def named() -> list[str]:
    """The experiments of the page, by the names of their modules."""
    page = (ROOT / "docs" / "experiments.md").read_text()
    words = re.findall(r"`([a-z_0-9.]+)`", page)
    return sorted({word for word in words if (ROOT / "experiments" / f"{word.replace('.', '/')}.py").is_file()})


def ended(name: str, tmp_path: Path, data: str | None) -> None:
    """Run the command; it ends well, or says how what it lacks is to be had."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "FEDTORCH_CACHE": str(tmp_path)}
    nowhere = "http://127.0.0.1:9"  # so that nothing is downloaded
    environment |= {"http_proxy": nowhere, "https_proxy": nowhere, "FEDTORCH_DATA_DIR": data or str(tmp_path)}
    command = [sys.executable, "-m", f"experiments.{name}", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        last = done.stderr.strip().rpartition("Error: ")[2][-2000:]
        assert HOW.search(last), f"{name} ended with {done.returncode}: {done.stderr[-2000:]}"
        assert data is None or "FEDTORCH_DATA_DIR" not in last


def test_the_page_has_experiments() -> None:
    assert len(named()) > 60
    assert set(named()) >= QUICK


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in named()]
)
@pytest.mark.timeout(1000)
def test_an_experiment_runs_without_data(name: str, tmp_path: Path) -> None:
    ended(name, tmp_path, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", named())
@pytest.mark.timeout(1000)
def test_an_experiment_runs_with_its_data(name: str, tmp_path: Path) -> None:
    if (data := os.environ.get("FEDTORCH_DATA_DIR")) is None:
        pytest.skip("needs FEDTORCH_DATA_DIR")
    ended(name, tmp_path, data)
