"""Every situation trains and evaluates as a plain loop in plain torch, or is refused by name."""

from __future__ import annotations

import re

import pytest

from situations.case import FEDERATIONS, Case
from situations.cases import CASES
from situations.ways import FAST, WAYS, outcome


def test_the_corpus_is_large_and_its_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def test_at_most_a_quarter_may_be_refused_by_default():
    assert sum("default" in case.refused for case in CASES) <= len(CASES) / 4


@pytest.mark.parametrize("way", FAST)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_situation_equals_a_plain_loop(case: Case, way: str) -> None:
    _check(case, "mixed", way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("federation", FEDERATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_situation_equals_a_plain_loop_or_is_refused_in_every_way(case: Case, federation: str, way: str) -> None:
    _check(case, federation, way)


def _check(case: Case, federation: str, way: str) -> None:
    result = outcome(case, federation, way)
    refusal = case.refused.get(way)
    assert result.equal(case) or (refusal is not None and re.search(refusal, result.refusal)), result
