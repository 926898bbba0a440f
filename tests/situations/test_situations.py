"""Every situation trains and evaluates as a plain loop in plain torch, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.forked import over_ranks

from situations.case import FEDERATIONS, Case
from situations.cases import CASES
from situations.ways import FAST, LIKE_DEFAULT, PROMISES, RANKS, WAYS, Outcome, outcome


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


@pytest.mark.slow
def test_a_sample_of_situations_equals_a_plain_loop_over_two_ranks(tmp_path: Path) -> None:
    sample = [case for case in CASES[::9] if case.size is None]

    def body(rank: int) -> dict[str, bool]:
        return {case.name: _right(case, outcome(case, "mixed", RANKS), RANKS) for case in sample}

    for found in over_ranks(tmp_path / "ranks", 2, body, longest=250.0):
        assert isinstance(found, dict), found
        assert not [name for name, right in found.items() if not right]


def _check(case: Case, federation: str, way: str) -> None:
    if way == "compile=True" and not case.compiles:
        pytest.skip("steps differ from each other, so that nobody would promise that they do not")
    result = outcome(case, federation, way)
    assert _right(case, result, way), result


def _right(case: Case, result: Outcome, way: str) -> bool:
    """Return whether a case is equal to the loop, or refused where it may be: a promise may be, of any case."""
    expected = ".+" if way in PROMISES else case.refused.get("default" if way in LIKE_DEFAULT else way)
    return result.equal(case) or (expected is not None and re.search(expected, result.refusal) is not None)
