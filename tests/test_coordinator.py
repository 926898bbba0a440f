"""The page of the coordinator: every part that was asked for is there under a name that imports."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "explanation" / "coordinator.md").read_text()
TABLE = re.findall(r"^\| ([^|`]+) \| (`[^|]+`) \|", TEXT.partition("## Where each part is")[2], re.MULTILINE)
ASKED = {
    "local linear heads",
    "variational latent Gaussian processes",
    "amortised z-encoders",
    "hierarchical Bayesian split networks",
    "a module that federates Lightning's training loops",
    "CUDA kernels",
    "message-passing coordinator",
    "GTV minimisation over a graph",
    "federated averaging",
    "expectation propagation",
    "Lightning scripts",
}


def imported(name: str) -> Any:
    """Return what a dotted name leads to: the longest module that it begins with, and attributes of it."""
    parts = re.sub(r"^ft\b", "fedtorch", name).split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def test_every_part_that_was_asked_for_is_in_the_table() -> None:
    assert {part for part, _ in TABLE} >= ASKED


@pytest.mark.parametrize(("part", "names"), TABLE)
def test_every_name_of_the_table_is_there(part: str, names: str) -> None:
    for name in re.findall(r"`([^`]+)`", names):
        assert (ROOT / name).is_dir() if "/" in name else imported(name) is not None


def test_a_name_that_is_not_there_is_found() -> None:
    with pytest.raises(AttributeError):
        imported("ft.vfl.perceptrons")


def test_the_lines_of_the_page_are_nine() -> None:
    cell = re.findall(r"```\{code-cell\} python\n(.*?)```", TEXT, re.DOTALL)[1]
    assert "nine lines" in TEXT
    assert len(cell.strip().splitlines()) == 9
    assert re.findall(r"ft\.run\(ft\.(\w+)", cell) == ["fedavg", "gtv", "ep"]
