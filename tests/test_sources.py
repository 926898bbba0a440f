"""The page about the sources: each of their items is shown by a script, a page or a test, or says why it is not done.

A name in backticks is a script whose run is kept, a test, a name of the package, or code. What stands in quotes after a
script is found in that script or on its page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from experiments import result_pages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "sources.md"
ITEMS = {
    "Federated data analytics: a study on linear models": 22,
    "Federated learning for sparse Bayesian models": 15,
    "Federated learning: from theory to practice": 71,
    "Federated multi-output Gaussian processes": 24,
    "Scalable vertical federated learning": 24,
}
BEYOND = {"fedlin.school", "fedmgp.conformal", "fedmgp.joining"}  # further data, and intervals that no source has
NOT_DONE = "not done: "
SCRIPT = re.compile(r'`(\w+(?:\.\w+)?)`((?:,? "[^"]+")*)')
LINK, TEST = re.compile(r"\]\(([^)#]+)"), re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


class Item(NamedTuple):
    """A row of the table."""

    source: str
    section: str
    what: str
    where: str


def items() -> list[Item]:
    """The rows of the page's tables, by source."""
    found = []
    for part in PAGE.read_text().partition("## Where each item is\n")[2].split("\n### ")[1:]:
        source, rows = part.splitlines()[0], [line for line in part.splitlines() if line.startswith("| ")][2:]
        found += [Item(source, *row.strip("| ").split(" | ")) for row in rows]
    return found


def test_the_table_has_all_items_once() -> None:
    found = items()
    assert {source: sum(item.source == source for item in found) for source in ITEMS} == ITEMS
    assert len(set(found)) == sum(ITEMS.values())


def scripts(where: str) -> dict[Path, list[str]]:
    """Scripts that a text names, and what it quotes of each."""
    found = {}
    for name, quotes in SCRIPT.findall(where):
        path = ROOT / "experiments" / f"{name.replace('.', '/')}.py"
        if path.exists():
            found[path] = re.findall(r'"([^"]+)"', quotes)
    return found


def kept(script: Path) -> Path:
    """The page of a script's runs."""
    name = script.relative_to(ROOT / "experiments").with_suffix("").as_posix()
    return result_pages.RESULTS / f"{name.replace('/', '_')}.md"


def shown(item: Item) -> list[Path]:
    """Where an item is shown: pages of results, other pages, tests."""
    results = [kept(script) for script in scripts(item.where)]
    pages = [(PAGE.parent / link).resolve() for link in LINK.findall(item.where)]
    return [
        path for path in (*results, *pages, *(ROOT / test for test, _ in TEST.findall(item.where))) if path.exists()
    ]


@pytest.mark.parametrize("source", ITEMS)
def test_an_item_is_shown_or_refused_with_a_reason(source: str) -> None:
    wrong = [item for item in items() if item.source == source and not shown(item) and NOT_DONE not in item.where]
    assert wrong == []
    reasons = [item.where.partition(NOT_DONE)[2] for item in items() if item.where.startswith(NOT_DONE)]
    assert all(len(reason.split()) > 4 for reason in reasons)


def test_quoted_figures_are_in_scripts_or_pages() -> None:
    wrong, quoted = [], 0
    for item in items():
        quotes = [(script, quote) for script, given in scripts(item.where).items() for quote in given]
        for script, quote in quotes:
            page = kept(script).read_text() if kept(script).exists() else ""
            wrong += [f"{script.stem}: {quote}"] if quote not in script.read_text() + page else []
            quoted += 1
    assert wrong == []
    assert quoted > 60


def test_tests_that_are_named_are_there() -> None:
    found = [test for item in items() for test in TEST.findall(item.where)]
    wrong = [path for path, name in found if f"def {name}" not in (ROOT / path).read_text()]
    assert wrong == []
    assert len(found) > 15


def test_every_experiment_of_the_sources_is_named() -> None:
    """But for those that go beyond them."""
    named = {
        script.relative_to(ROOT / "experiments").with_suffix("") for item in items() for script in scripts(item.where)
    }
    lines = (ROOT / "docs" / "experiments.md").read_text().splitlines()
    authors = ("| Yue", "| Kidd", "| Jung", "| Chung", "| Hassan")
    listed = {name for line in lines if line.startswith(authors) for name in re.findall(r"`([\w.]+)`", line)}
    assert listed - {path.as_posix().replace("/", ".") for path in named} == BEYOND
