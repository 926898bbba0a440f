"""The page of the zoo is what was measured, of the cases as they are, and of as many projects as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from zoo.case import WAYS
from zoo.cases import CASES
from zoo.results import PAGE, RESULTS, cell, counts, described, page

ROOT = Path(__file__).parents[2]
KEPT = json.loads(RESULTS.read_text())


def test_the_page_is_made_of_the_results():
    assert PAGE.read_text() == page(KEPT), "PYTHONPATH=tests python -m zoo.results --page writes it"
    assert KEPT["cases"] == [described(case) for case in CASES]


def test_the_zoo_is_large_and_equal_to_plain_loops_on_both_releases():
    number = counts(KEPT)
    assert number["projects"] >= 25
    assert number["unchanged"] >= 22
    assert number["stacked"] >= 12
    assert len(KEPT["releases"]) == 2
    for case in CASES:
        key = f"{case.distribution}: {case.name}"
        every = [each["results"][key] for each in KEPT["releases"].values() if key in each["results"]]
        assert every
        for result in every:
            assert all(isinstance(result[way], float) == (way in case.ways) for way in WAYS)
            assert all(value < 1e-5 for value in result.values() if isinstance(value, float))


def test_a_small_bert_is_three_times_as_fast_stacked_on_one_thread_and_on_two():
    ratios = {
        each["threads"]: each["ratio"] for each in KEPT["speed"] if (each["hidden"], each["rows"]) == (32, "8 each")
    }
    assert ratios.keys() == {1, 2}
    assert min(ratios.values()) >= 3


def test_the_largest_difference_of_the_releases_stands_in_the_table():
    results = {"a: b": {"stacked": 3e-9}}, {"a: b": {"stacked": 4e-8}}
    kept = {"releases": {str(i): {"results": each} for i, each in enumerate(results)}}
    assert cell(kept, {"package": "a", "name": "b"}, "stacked") == "4e-8"


@pytest.mark.parametrize("name", ["constraints-zoo.txt", "constraints-newest.txt"])
def test_all_packages_of_the_zoo_are_pinned(name):
    simple = lambda text: re.sub(r"[-_.]+", "-", text).lower()
    pinned = {simple(line.partition("==")[0]) for line in (ROOT / name).read_text().splitlines() if "==" in line}
    wanted = (Path(__file__).parent / "requirements.txt").read_text().split()
    assert {simple(each) for each in wanted} | {"torch", "lightning", "numpy"} <= pinned
    assert {simple(case.distribution) for case in CASES} <= pinned
