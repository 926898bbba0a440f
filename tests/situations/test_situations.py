"""Every situation trains and evaluates as a plain loop in plain torch, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.forked import over_ranks

from situations import loop
from situations.case import FEDERATIONS, Case
from situations.cases import CASES, FIRST, REPEATED
from situations.cases.repeats import REPEATS
from situations.ways import FAST, LIKE_DEFAULT, PROMISES, RANKS, WAYS, Outcome, outcome

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),  # of torch.func.jvp
    # As errors these would end a stacked step, so that the slow rules of torch.vmap, which users have, were not tried.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def test_the_corpus_is_large_and_its_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES) >= 300


def test_those_that_repeat_a_kind_name_its_first_which_runs_in_the_fast_suite():
    names, first = {case.name for case in CASES}, {case.name for case in FIRST}
    assert set(REPEATS) <= first
    assert names >= REPEATED
    assert sum(map(len, REPEATS.values())) == len(REPEATED)
    assert len(first) >= 300


def test_at_most_a_quarter_may_be_refused_by_default():
    assert sum("default" in case.refused for case in CASES) <= len(CASES) / 4


@pytest.mark.parametrize("way", FAST)
@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_a_situation_equals_a_plain_loop(case: Case, way: str) -> None:
    result = outcome(case, "mixed", way)
    assert _right(case, result, way), result


@pytest.mark.slow
@pytest.mark.parametrize("federation", FEDERATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_situation_equals_a_plain_loop_or_is_refused_in_every_way(case: Case, federation: str) -> None:
    # In one test: to collect one for each way takes five seconds of every run of the suite.
    ways = [way for way in WAYS if way != "compile=True" or case.compiles]
    found = {way: outcome(case, federation, way) for way in ways}
    assert not {way: result for way, result in found.items() if not _right(case, result, way)}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.rowwise], ids=lambda case: case.name)
def test_rowwise_losses_are_means_over_rows(case: Case) -> None:
    (rows,) = loop.rows_of(case, (5,))
    (batch,) = loop.batches(rows, None)
    whole, single = loop.gradients(case, batch), [loop.gradients(case, row) for row in loop.batches(rows, 1)]
    for name, each in whole.items():
        mean = torch.stack([one[name] for one in single]).mean(0)
        scale = max(float(other.abs().max()) for other in whole.values() if other.numel())
        assert float((each - mean).abs().max()) <= 1e3 * case.tolerance * scale if each.numel() else True, name


@pytest.mark.slow
def test_a_sample_of_situations_equals_a_plain_loop_over_two_ranks(tmp_path: Path) -> None:
    sample = [case for case in CASES[::9] if case.size is None]

    def body(rank: int) -> dict[str, bool]:
        return {case.name: _right(case, outcome(case, "mixed", RANKS), RANKS) for case in sample}

    for found in over_ranks(tmp_path / "ranks", 2, body, longest=250.0):
        assert isinstance(found, dict), found
        assert not [name for name, right in found.items() if not right]


def _right(case: Case, result: Outcome, way: str) -> bool:
    """Return whether a case is equal to the loop, or refused where it may be: a promise may be, of any case."""
    expected = ".+" if way in PROMISES else case.refused.get("default" if way in LIKE_DEFAULT else way)
    return result.equal(case) or (expected is not None and re.search(expected, result.refusal) is not None)
