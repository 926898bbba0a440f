"""The page of the corpus is what was measured, of the cases as they are, and without a silent difference."""

from __future__ import annotations

import json

import pytest

from situations.cases import CASES
from situations.results import DIFFERENT, PAGE, RESULTS, Results, counts, page
from situations.ways import WAYS

MEASURE = "PYTHONPATH=tests python -m situations.results measures them"


@pytest.fixture(scope="module")
def kept() -> Results:
    assert RESULTS.exists(), MEASURE
    return json.loads(RESULTS.read_text())


def test_the_page_is_made_of_the_results(kept: Results) -> None:
    assert list(kept) == [case.name for case in CASES], MEASURE
    assert PAGE.read_text() == page(kept), "PYTHONPATH=tests python -m situations.results --page writes it"


def test_no_situation_differs_silently(kept: Results) -> None:
    assert {way: counts(kept, way)[DIFFERENT] for way in WAYS} == dict.fromkeys(WAYS, 0)


def test_at_most_a_quarter_is_refused_by_default(kept: Results) -> None:
    assert counts(kept, "default")["refused"] <= len(kept) / 4
