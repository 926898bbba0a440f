"""The page of what the pretended device counts. As a program it writes the table of waits anew, or rows that are named.

The tables of operations in float64 and of CUDA's branches are written by hand; tests hold all three against what is
counted.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from test_conformance import ROUNDS as COUNT

from fedtorch import tree
from support import pretended_device
from support.device_cases import ROUNDS
from support.oracles.closed_forms import distance, numbers_in
from support.pretended_device import NAME

PATH = Path(__file__).parents[2] / "docs" / "explanation" / "devices.md"
REFERENCES = (
    "programs/",
    "models/gibbs/gibbs_sweeps.py",
    "random/philox.py",
)  # Triton's programs, which do not wait, run in their place
_HEADINGS = {"waits": "## Waits", "doubles": "## Float64", "cuda": "## What it cannot show"}


class Page:
    """The page's tables: rows by the first column, and the files in float64."""

    def __init__(self) -> None:
        text = PATH.read_text()
        self.waits, doubles, self.cuda = (_rows(text, heading) for heading in _HEADINGS.values())
        self.doubles = [place for places in doubles for place in re.findall(r"[\w/.]+", places)]


def _rows(text: str, heading: str) -> dict[str, str]:
    section = text.partition(f"{heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return {row.split(" | ")[0].strip("| `"): row for row in rows}


def row(name: str, waits: dict[str, int]) -> str:
    """The row of the table of waits: how many a round, and in which files."""
    files: Counter[str] = Counter()
    for line, count in waits.items():
        files[line.partition(":")[0]] += count
    places = ", ".join(f"`{file}` {count}" for file, count in sorted(files.items()))
    return f"| {name} | {sum(files.values())} | {places} |"


def looked_at(name: str) -> dict[str, Any]:
    """What rounds are on the device.

    Returns:
        apart: how far models are from those on the CPU.
        waits: of a later round, by line of the package.
        doubles: of a later round of numbers in float32, operations in float64 by line of the package.
    """
    warnings.simplefilter("ignore")
    with pretended_device.pretended() as seen:
        run = ROUNDS[name].run(NAME)
        for _ in range(COUNT):
            seen.clear()
            run.step()
        waits = pretended_device.by_text(seen.waits)
        found = tree.to(run.tensors(), "cpu")
    near = ROUNDS[name].run("cpu")
    for _ in range(COUNT):
        near.step()
    with numbers_in(torch.float32), pretended_device.pretended() as seen:
        run = ROUNDS[name].run(NAME)
        run.step()
        seen.clear()
        run.step()
        doubles = pretended_device.by_text(seen.doubles)
    waits = {line: count for line, count in waits.items() if not line.startswith(REFERENCES)}
    return {"apart": distance(found, near.tensors()), "waits": waits, "doubles": doubles}


def names_cuda(node: ast.AST) -> bool:
    """Whether code asks for CUDA: by `is_cuda`, `torch.cuda`, or its name, which may be among those of accelerators."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or (node.attr == "cuda" and ast.unparse(node) == "torch.cuda")
    return (isinstance(node, ast.Name) and node.id == "is_cuda") or (
        isinstance(node, ast.Constant) and node.value == "cuda"
    )


def _write(names: list[str]) -> None:
    """Write the table of waits, of these rounds anew; others stay, or stay away."""
    kept = {name: line for name, line in Page().waits.items() if name in ROUNDS and name not in names}
    found = {name: row(name, looked_at(name)["waits"]) for name in names}
    rows = {name: {**kept, **found}[name] for name in ROUNDS if name in kept or name in found}
    table = "\n".join(["| what runs | waits | where |", "| --- | --- | --- |", *rows.values(), ""])
    head, heading, rest = PATH.read_text().partition(f"{_HEADINGS['waits']}\n")
    PATH.write_text(head + heading + re.sub(r"(^\|.*\n)+", lambda _: table, rest, count=1, flags=re.MULTILINE))


if __name__ == "__main__":
    pretended_device.register()
    _write(sys.argv[1:] or list(ROUNDS))
