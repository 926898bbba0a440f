"""Every promise of the page of guarantees names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "guarantees.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)*)`")
BULLET = re.compile(r"^- .*(?:\n(?:  .*)?(?=\n|$))*", re.MULTILINE)


def bullets(text: str) -> list[str]:
    return [found.group().strip() for found in BULLET.finditer(text)]


def missing(bullet: str) -> list[str]:
    """What a promise lacks: any test, or one that it names."""
    named = [(file, names.split("::")[1:]) for file, names in TEST.findall(bullet)]
    if not named:
        return ["no test"]
    return ["::".join([file, *names]) for file, names in named if not has(ROOT / file, names)]


def has(file: Path, names: list[str]) -> bool:
    """Whether a file has a test of this name, or a class with tests, or any tests where no name is given."""
    if not file.exists():
        return False
    body = ast.parse(file.read_text()).body
    for name in names:
        found = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name]
        if not found:
            return False
        body = found[0].body if isinstance(found[0], ast.ClassDef) else found
    return any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in body)


@pytest.mark.parametrize("bullet", bullets(PAGE.read_text()), ids=lambda text: text[2:40])
def test_a_promise_names_tests_that_are_there(bullet: str) -> None:
    assert missing(bullet) == []


def test_the_page_is_of_promises_alone() -> None:
    """Above its table no paragraph stands beside the bullets that no test would be asked of."""
    promised = PAGE.read_text().partition("## What holds at which scale")[0].partition("\n## ")[2]
    assert len(bullets(promised)) == promised.count("\n- ") > 10
    assert [line for line in BULLET.sub("", promised).splitlines() if line and not line.startswith("#")][1:] == []


@pytest.mark.parametrize(
    ("bullet", "lacks"),
    [
        ("- **Fast.** It is.", ["no test"]),
        ("- **Fast.** `tests/test_gone.py::test_it`", ["tests/test_gone.py::test_it"]),
        ("- **Fast.** `tests/test_guarantees.py::test_gone`", ["tests/test_guarantees.py::test_gone"]),
        ("- **Fast.** `tests/test_guarantees.py::has`", ["tests/test_guarantees.py::has"]),
        ("- **Fast.** `tests/test_guarantees.py`, `tests/test_guarantees.py::test_the_page_is_of_promises_alone`", []),
    ],
)
def test_what_is_missing_is_found(bullet: str, lacks: list[str]) -> None:
    assert missing(bullet) == lacks
