"""Designs and formulas of a server's own making, which would tell names and values of single rows."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy
import pandas
import pytest
from support.loopback import Clock, Loopback

import fedtorch as ft
from fedtorch.data import Design
from fedtorch.data.agreement import site as answers
from fedtorch.data.formulas import encoding
from fedtorch.models import gaussian, hierarchical
from fedtorch.sites import Policy, Remote, SiteConfiguration, agree
from fedtorch.sites.rounds import sites as meeting


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "time", Clock)


def hosted(frame: pandas.DataFrame, client: str, policy: Policy) -> Any:
    regression = lambda design: ft.ep(hierarchical.regression(design))
    return Loopback({"a": SiteConfiguration.of_frame(frame, client, {"it": regression}, policy=policy)}, None)


def patients() -> pandas.DataFrame:
    """Rows of patients whose names are numbers that others know."""
    draws = numpy.random.default_rng(0)
    names = [f"B-{1000 + k}" for k in range(30) for _ in range(int(draws.integers(2, 6)))]
    frame = pandas.DataFrame({"patient": names, "age": draws.uniform(20, 80, len(names)).round(1)})
    return frame.assign(score=0.1 * frame["age"] + draws.normal(size=len(names)), number=range(len(names)))


def there(guess: str, policy: Policy) -> bool:
    """Whether a site that tells no names has a patient of this name, by a level that is declared."""
    host = hosted(patients(), "patient", policy)
    declared = {"levels": {"patient": ["rest", guess]}, "other": {"patient": "rest"}}
    design = agree(host, ["a"], "score ~ C(patient) + (1 | patient)", client="patient", **declared)  # type: ignore[arg-type]
    run = ft.Run(ft.ep(hierarchical.regression(design)), Remote(host, ["a"], "it", quorum=1.0, seconds=0.05))
    run.step(), run.step()
    return float(gaussian.unpack(run.server.total.site.precision)[1, 1]) > 1e-3


COLUMNS = ("score", "patient")


@pytest.mark.parametrize("person", [None, "patient"])
def test_levels_of_the_column_of_clients_would_tell_who_is_there(
    person: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site makes no rows by them, also where its policy names the column among those that may be read."""
    for columns in (None, COLUMNS):
        for guess in ("B-1007", "B-2000"):
            with pytest.raises(
                ValueError, match=r"column 'patient' says whose rows are whose.*also where Policy\(columns"
            ):
                there(guess, Policy(person=person, columns=columns))
    monkeypatch.setattr(answers.Disclosure, "check", lambda *asked: None)
    for guess, is_there in (("B-1007", True), ("B-2000", False)):
        assert there(guess, Policy(person=person, columns=COLUMNS)) == is_there


@pytest.mark.parametrize("number", ["B-1007", "B-2000"])
def test_levels_of_persons_are_no_levels_of_a_design(number: str) -> None:
    frame = patients().assign(ward="n")
    host = hosted(frame, "ward", Policy(person="patient", columns=("score", "patient")))
    declared = {"levels": {"patient": ["rest", number]}, "other": {"patient": "rest"}}
    with pytest.raises(ValueError, match="column 'patient' says whose rows are whose"):
        agree(host, ["a"], "score ~ C(patient) + (1 | ward)", client="ward", **declared)  # type: ignore[arg-type]


def test_terms_by_persons_have_no_advice_that_the_site_refuses() -> None:
    host = hosted(patients().assign(ward="n"), "ward", Policy(person="patient"))
    with pytest.raises(
        ValueError, match=r"by the column of clients, 'ward', .*leave it out, or, where it .* does not name"
    ):
        agree(host, ["a"], "score ~ age + (1 | patient)", client="ward")


@pytest.mark.parametrize(
    ("formula", "more"),
    [
        ("number ~ age + (1 | ward)", {}),
        ("score ~ number + (1 | ward)", {}),
        ("score ~ age:number + (1 | ward)", {}),
        ("score ~ age + offset(number) + (1 | ward)", {}),
        ("score ~ age + (1 | ward)", {"weights": "number"}),
        ("score ~ age + (1 | ward)", {"offset": "number"}),
        ("score ~ age + (1 | ward)", {"trials": "number"}),
    ],
)
def test_numbers_of_persons_are_read_in_no_part_of_a_formula(formula: str, more: dict[str, str]) -> None:
    frame = patients().assign(ward="n")
    with pytest.raises(ValueError, match="'a': the site's column 'number' says whose rows are whose"):
        agree(hosted(frame, "ward", Policy(person="number")), ["a"], formula, client="ward", **more)  # type: ignore[arg-type]


def visits() -> pandas.DataFrame:
    draws = numpy.random.default_rng(0)
    frame = pandas.DataFrame({"ward": "n", "age": draws.uniform(20, 80, 200).round(1)})
    frame.loc[7, "age"] = 97.3
    return frame.assign(score=0.1 * frame["age"] + draws.normal(size=200))


class Designs:
    """A site, and designs that are made of one that it has agreed on."""

    def __init__(self, formula: str) -> None:
        self.host = hosted(visits(), "ward", Policy())
        self.agreed = json.loads(agree(self.host, ["a"], formula, client="ward").to_json())

    def with_scale(self, part: str, name: str, **numbers: Any) -> str:
        """What a site says to other numbers of a scale: a reason, or nothing."""
        changed = json.loads(json.dumps(self.agreed))
        changed["encoding"][part][name] |= numbers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers that overflow
            answer = self.host.sites["a"]._frame._answers.answer({"step": "make", "design": json.dumps(changed)})
            if "refused" in answer:
                return str(answer["refused"])
            design = self.host.sites["a"]._frame._answers.agreed
            return str(self.host.sites["a"]._frame._take(design, answer).get("refused", ""))

    def largest(self, part: str, name: str, power: int) -> float:
        """The largest age, by the scale at which its power overflows."""
        low, high = 0.0, 200.0
        while high - low > 0.05:
            middle = (low + high) / 2
            sd = middle * 1.7976931348623157e308 ** (-1 / power)
            low, high = (middle, high) if self.with_scale(part, name, mean=0.0, sd=sd) else (low, middle)
        return high


SCALES = [
    ("standard", "age", "score ~ age + (1 | ward)", 1),
    ("polynomials", "poly(age, 4)", "score ~ poly(age, 4) + (1 | ward)", 4),
]


@pytest.mark.parametrize(("part", "name", "formula", "power"), SCALES)
def test_scales_at_which_rows_overflow_would_tell_the_largest_age(
    part: str, name: str, formula: str, power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_SMALLEST", 0.0), monkeypatch.setattr(encoding, "_LARGEST", float("inf"))
    monkeypatch.setattr(answers, "_check_sizes", lambda design: None)
    site = Designs(formula)
    if power > 1:
        site.agreed["encoding"]["standard"] = {}
        site.agreed["encoding"][part][name]["coefficients"] = numpy.eye(5)[1:].tolist()
    assert site.largest(part, name, power) == pytest.approx(97.3, abs=0.1)


@pytest.mark.parametrize(("part", "name", "formula", "power"), SCALES)
def test_scales_are_refused_before_a_row_is_looked_at(
    part: str, name: str, formula: str, power: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Designs(formula)
    monkeypatch.delattr(Design, "rows_of")
    for sd in (97.0, 98.0):
        sd *= 1.7976931348623157e308 ** (-1 / power)
        reason = site.with_scale(part, name, mean=0.0, sd=sd)
        assert "numbers that are 0 or from 1e-100 to 1e+100" in reason or "makes numbers of about 1e30" in reason
    for numbers in ({"mean": 1e101}, {"sd": 1e101}, {"sd": 1e-101}, {"mean": 1e-101}):
        assert "numbers that are 0 or from 1e-100 to 1e+100" in site.with_scale(part, name, **numbers)


def test_products_of_scales_are_refused_where_each_is_small_enough() -> None:
    site = Designs("score ~ age + scale(age) + (1 | ward)")
    assert site.with_scale("scales", "scale(age)", mean=0.0, sd=1e-90) == ""
    site.agreed["encoding"]["scales"]["scale(age)"]["sd"] = 1e-90
    site.agreed["encoding"]["standard"]["scale(age)"] = {"mean": 0.0, "sd": 1.0}
    assert "makes numbers of about 1e112 of the column 'scale(age)'" in site.with_scale(
        "standard", "scale(age)", sd=1e-20
    )
