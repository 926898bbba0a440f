"""Every program compiles for a GPU without one, needs no memory for registers, and is among the cases."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedtorch as ft

LONGEST = "gibbs_sweeps.horseshoe"  # left to the slow one


@pytest.mark.parametrize("which", [("--few",), pytest.param((), marks=pytest.mark.slow)], ids=["few", "all"])
def test_programs_compile_without_spills(which) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "support.ahead_of_time", *which]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for line in found:
        print(f"{line['registers']:4d} registers  {line['case']}")  # noqa: T201 (a measurement)
    assert [line["case"] for line in found if line["spilled"]] == []
    compiled = {line["case"].partition("(")[0] for line in found}
    assert compiled == launched() - ({LONGEST} if which else set())


def launched() -> set[str]:
    """Return the programs that `fedtorch.programs` and `fedtorch.random` launch, by module and name."""
    files = [
        *(Path(ft.__path__[0]) / "programs").glob("*.py"),
        *(Path(ft.__path__[0]) / name for name in ("random/philox.py", "models/gibbs/gibbs_sweeps.py")),
    ]
    called = re.compile(r"(?<![.\w])programs\.([a-z]\w*)\b")
    return {f"{file.stem}.{name}" for file in files for name in called.findall(file.read_text())}
