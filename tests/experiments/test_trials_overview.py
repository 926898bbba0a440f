"""The overview of trials counts what is kept, lists every row, and has as many figures that agree as are wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import result_pages
from experiments.trials import overview

PAGE = Path(__file__).parents[2] / "docs" / "trials.md"
HOW = result_pages.Reading(smaller="error", reasons=(result_pages.Reason("^known", "why", True),))


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"ours": 1.0, "published": 0.9, "published_sd": 0.05, "sd": 0.001}, "two published sd"),
        ({"ours": 1.0, "published": 0.9, "published_sd": 0.04, "sd": 1.0}, "worse"),
        ({"ours": 1.0, "published": 0.9, "sd": 0.06}, "two sd of ours"),
        ({"ours": 0.9004, "published": 0.9, "decimals": 3}, "digits printed"),
        ({"ours": 0.8, "published": 0.9}, "better"),
        ({"ours": 0.8, "published": 0.9, "setting": "known"}, "with a reason"),
        ({"ours": 0.9, "published": 0.9, "setting": "known"}, "digits printed"),
    ],
)
def test_verdicts(row: dict, word: str) -> None:
    assert overview.verdict({"setting": "a", "metric": "error", **row}, HOW).word == word


def test_the_page_is_of_what_is_kept() -> None:
    of = overview.trials()
    text = PAGE.read_text()
    assert text == overview.page(of)
    every = [each for verdicts in of.values() for each in verdicts]
    rows = [line for line in text.splitlines() if line.endswith(tuple(f"| {word} |" for word in overview.RULES))]
    assert len(rows) == sum(each.word in overview.RULES for each in every)
    assert sum(each.word == overview.RULES[0] for each in every) >= overview.WANTED
