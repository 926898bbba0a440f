"""Every program compiles for GPUs without one, as operations start it, and needs no more than such a GPU has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from support.programs import launched

SHARED = {80: 163 * 2**10, 90: 227 * 2**10}  # bytes that a block may have
REGISTERS, THREADS, PROGRAMS = 2**16, 2**10, 2**31 - 1  # of a block, and of a grid
SPILLED = {  # bytes, with which the assembler makes room for a third block
    ("gaussian, torch.float32, 10000 clients of 256 x 32", 80): 8,
    ("bernoulli, torch.float64, 10000 clients of 5000 x 128", 80): 48,
}

which = pytest.mark.parametrize("which", [("--few",), pytest.param((), marks=pytest.mark.slow)], ids=["few", "all"])


@cache
def needed(*which: str) -> list[dict[str, Any]]:
    """What launches need, of one call of every program or of all calls."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "support.ahead_of_time", *which]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@which
def test_every_program_compiles(which) -> None:
    found = {(line["kernel"], line["architecture"]) for line in needed(*which)}
    assert found == {(kernel, architecture) for kernel in launched() for architecture in ([90] if which else SHARED)}


@which
def test_registers_need_no_memory(which) -> None:
    for line in needed(*which):
        print(f"{line['registers']:4d} registers, sm_{line['architecture']}  {line['kernel']}, {line['case']}")  # noqa: T201
    spilled = {(line["case"], line["architecture"]): line["spilled"] for line in needed(*which) if line["spilled"]}
    assert spilled == ({} if which else SPILLED)


@which
def test_launches_are_within_what_a_device_has(which) -> None:
    for line in needed(*which):
        assert line["shared"] <= SHARED[line["architecture"]], line
        assert 32 * -(-line["registers"] // 8) * 8 * line["threads"] // 32 <= REGISTERS, line
        assert line["threads"] <= THREADS, line
        assert 1 <= line["programs"] <= PROGRAMS, line


@which
def test_programs_are_given_whole_tensors(which) -> None:
    """They find an element by the sizes alone, so that an argument has no strides of its own."""
    assert [line for line in needed(*which) if line["strided"]] == []
