"""Levels, knots, means and scales that sites agree on, beside those of pooled rows."""

from __future__ import annotations

import json
import re
import warnings
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest

import fedtorch as ft
from fedtorch.data.agreement.disclosure import Disclosure
from fedtorch.data.agreement.histogram import bounds, histogram, quantiles
from fedtorch.data.agreement.server import Request, agreed, conversation
from fedtorch.data.agreement.site import Answers
from fedtorch.data.formulas.design import Design
from fedtorch.data.formulas.encoding import Encoding

FORMULA = "los ~ age + scale(log(crp)) + bs(sbp, 6) + poly(bmi, 3) + sex + stage"


def frame(rows: int, seed: int) -> pandas.DataFrame:
    """Return patients of one site."""
    draws = numpy.random.default_rng(seed)
    return pandas.DataFrame({
        "age": draws.normal(60 + seed, 10, rows),
        "crp": draws.lognormal(1.0, 1.0, rows),
        "sbp": draws.gamma(20.0, 6.0, rows) + seed,
        "bmi": draws.normal(27, 4, rows),
        "sex": draws.choice(["f", "m"], rows),
        "stage": draws.choice(["I", "II", "III"], rows),
        "los": draws.exponential(5.0, rows),
    })  # fmt: skip


FRAMES = {name: frame(rows, seed) for seed, (name, rows) in enumerate({"a": 300, "b": 200, "c": 500}.items())}
POOLED = pandas.concat(FRAMES.values(), ignore_index=True)


def sites(frames: dict[str, pandas.DataFrame], **policy: Any) -> dict[str, Answers]:
    return {name: Answers(each, Disclosure(**policy), name=name) for name, each in frames.items()}


def changed(site: str, **columns: Any) -> dict[str, pandas.DataFrame]:
    """Return the frames, one of them with other columns."""
    return {**FRAMES, site: FRAMES[site].assign(**columns)}


def question(formula: str, **more: Any) -> dict[str, Any]:
    return {"step": "describe", "formula": formula, "minimum": 10, "declared": [], "also": [], "offset": [], **more}


# -- beside pooled rows ------------------------------------------------------------------------------------------------


def near(found: Any, values: pandas.Series, part: float = 0.06) -> bool:
    """Return whether a mean and an sd are those of values, to a part of an sd, and round numbers of 1 % of it."""
    whole = [number / (10.0 ** numpy.floor(numpy.log10(found.sd / 100))) for number in found]
    assert numpy.abs(numpy.round(whole) - whole).max() < 1e-6
    return bool(numpy.abs(numpy.array(found) - (values.mean(), values.std())).max() < part * values.std())


def test_means_and_scales_are_near_those_of_pooled_rows_and_round() -> None:
    encoding = agreed(Request(FORMULA), sites(FRAMES)).encoding
    assert near(encoding.scales["scale(log(crp))"], numpy.log(POOLED["crp"]))
    assert near(encoding.standard["age"], POOLED["age"])
    assert near(encoding.response, POOLED["los"])


def test_of_columns_of_few_common_values_means_and_scales_are_exact_but_for_rounding() -> None:
    draws = numpy.random.default_rng(0)
    ill = {name: each.assign(ill=draws.choice(2, len(each), p=[0.7, 0.3])) for name, each in FRAMES.items()}
    assert near(
        agreed(Request("los ~ ill"), sites(ill)).encoding.standard["ill"], pandas.concat(ill.values())["ill"], 0.01
    )


@pytest.mark.parametrize("standardise", [True, False])
def test_the_scale_of_the_response_is_known_for_priors(standardise: bool) -> None:
    settings: dict[str, Any] = {"client": "site", "formula": "los ~ age + (1 | site)", "standardise": standardise}
    people = pandas.concat([each.assign(site=name) for name, each in FRAMES.items()], ignore_index=True)
    assert near(ft.data.from_frame(people, minimum=10, **settings).design.encoding.response, people["los"])
    assert ft.data.from_frame(people, **settings).design.encoding.response == pytest.approx(
        (people["los"].mean(), people["los"].std()), rel=1e-12
    )


def test_the_scale_of_a_response_with_offsets_is_of_the_response_alone() -> None:
    """A histogram of the difference would be another one of the same rows."""
    encoding = agreed(Request("los ~ age + offset(bmi)", offset="sbp"), sites(FRAMES)).encoding
    assert encoding.response is not None
    assert encoding.response.mean == pytest.approx((POOLED["los"] - POOLED["bmi"] - POOLED["sbp"]).mean(), abs=0.5)
    assert encoding.response.sd == pytest.approx(POOLED["los"].std(), rel=0.1)


def test_whole_numbers_held_as_objects_are_asked_about() -> None:
    """As in one process, at whichever site they are; names of text that look like numbers are meant as they are."""
    days = [i % 20 for i in range(300)]
    text = {name: each.assign(days=[str(i % 20) for i in range(len(each))]) for name, each in FRAMES.items()}
    objects = {**text, "a": text["a"].assign(days=[Decimal(day) for day in days])}
    with pytest.warns(UserWarning, match=r"20 levels that are whole numbers, held as objects at 'a':.*C\(days\)"):
        agreed(Request("los ~ days", minimum=10), sites(objects))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(agreed(Request("los ~ C(days)", minimum=10), sites(objects)).columns) == 20
        assert len(agreed(Request("los ~ days", minimum=10), sites(text)).columns) == 20
        numbers = {name: each.assign(days=pandas.to_numeric(each["days"])) for name, each in objects.items()}
        assert len(agreed(Request("los ~ days", minimum=10), sites(numbers)).columns) == 2


def test_levels_are_those_of_pooled_rows() -> None:
    encoding = agreed(Request(FORMULA), sites(FRAMES)).encoding
    assert encoding.levels["sex"].names == ("f", "m")
    assert encoding.levels["stage"].names == ("I", "II", "III")


def test_knots_are_quantiles_to_the_width_of_a_bin() -> None:
    design = agreed(Request(FORMULA), sites(FRAMES))
    spline, values = design.encoding.splines["bs(sbp, 6)"], POOLED["sbp"]
    exact = numpy.quantile(values, [0.25, 0.5, 0.75])
    parts = [histogram(each["sbp"].to_numpy(), 10) for each in FRAMES.values()]
    width = max(max(b - a for a, b in pairwise(part.ends[1:-1])) for part in parts if part)
    assert numpy.abs(numpy.array(spline.knots) - exact).max() < width < 2 * values.std()
    assert not {spline.lower, spline.upper} & {values.min(), values.max()}
    assert ((values < spline.lower) | (values > spline.upper)).mean() < 0.03


def test_polynomials_span_what_those_of_pooled_rows_span() -> None:
    design = agreed(Request("los ~ poly(bmi, 3)"), sites(FRAMES))
    x, y = design.rows(POOLED)
    z = (POOLED["bmi"].to_numpy() - 27) / 4
    exact = numpy.vander(z, 4)
    fitted = [each @ numpy.linalg.lstsq(each, y.numpy(), rcond=None)[0] for each in (x.numpy(), exact)]
    assert numpy.abs(fitted[0] - fitted[1]).max() < 1e-9
    assert numpy.linalg.cond(x.numpy()) < 4 < numpy.linalg.cond(exact)


def test_values_that_are_missing_are_left_out_of_the_sums_of_their_column_alone() -> None:
    holes = changed("b", age=FRAMES["b"]["age"].where(numpy.arange(200) % 4 > 0))
    design = agreed(Request("los ~ scale(age) + scale(bmi)"), sites(holes))
    ages = pandas.concat(holes.values())["age"]
    assert near(design.encoding.scales["scale(age)"], ages)
    assert near(design.encoding.scales["scale(bmi)"], POOLED["bmi"])
    whole = agreed(Request("los ~ scale(age) + scale(bmi)"), sites(FRAMES))
    assert design.encoding.scales["scale(bmi)"] == whole.encoding.scales["scale(bmi)"]


def test_the_order_of_the_sites_changes_no_bit() -> None:
    backwards = dict(reversed(FRAMES.items()))
    assert agreed(Request(FORMULA), sites(FRAMES)) == agreed(Request(FORMULA), sites(backwards))


def test_declared_bounds_are_the_outer_knots() -> None:
    spline = agreed(Request(FORMULA, bounds={"sbp": (60.0, 220.0)}), sites(FRAMES)).encoding.splines["bs(sbp, 6)"]
    assert (spline.lower, spline.upper) == (60.0, 220.0)


# -- levels that are rare ----------------------------------------------------------------------------------------------

RARE = changed("b", stage=["IV (Zoe)"] * 9 + ["I"] * 191)


def said(frames: dict[str, pandas.DataFrame], request: Request) -> list[Any]:
    """Return all that sites say, and what the server makes of it or why it does not."""
    brought, talk, every = sites(frames), conversation(request), list[Any]()
    asked = next(talk)
    try:
        while True:
            answers = {name: site.answer(asked) for name, site in brought.items()}
            every.append(answers)
            asked = talk.send(answers)
    except StopIteration as done:
        return [*every, done.value.to_json()]
    except ValueError as error:
        return [*every, str(error)]


def test_a_rare_level_is_refused_by_its_site_and_neither_its_name_nor_its_count_leaves_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every = said(RARE, Request("los ~ stage"))
    assert "site 'b'" in every[-1]
    assert "levels that are not among those agreed on" in every[-1]
    assert "other={'stage': 'other'}" in every[-1]
    assert "Zoe" not in json.dumps(every)
    assert "IV (Zoe)" in caplog.text  # in the site's own log
    fewer = changed("b", stage=["V"] + ["I"] * 199)
    assert said(fewer, Request("los ~ stage")) == every


def test_a_rare_level_counts_as_the_other_that_is_declared() -> None:
    every = said(RARE, Request("los ~ stage", other={"stage": "other"}))
    assert "Zoe" not in json.dumps(every)
    x, _ = agreed(Request("los ~ stage", other={"stage": "other"}), sites(RARE)).rows(RARE["b"])
    assert x.sum(0).tolist() == [200, 0, 0, 9]


def test_a_level_that_many_sites_have_rarely_is_not_told() -> None:
    rare = {name: each.assign(stage=["IV"] * 9 + ["I"] * (len(each) - 9)) for name, each in FRAMES.items()}
    every = said(rare, Request("los ~ stage", other={"stage": "other"}))
    assert "IV" not in json.dumps(every)


def test_a_factor_of_one_level_names_column_and_remedy() -> None:
    one = {name: each.assign(sex="f") for name, each in FRAMES.items()}
    with pytest.raises(ValueError, match=r"levels of 'sex' .* but got 'f'; leave the column out, or declare"):
        agreed(Request("los ~ sex"), sites(one))


def test_a_column_that_is_text_at_one_site_is_named() -> None:
    mixed = changed("b", age=FRAMES["b"]["age"].round().astype(str))
    with pytest.raises(ValueError, match="column 'age' of one kind at all sites, but 'b' has text, and "):
        agreed(Request("los ~ age"), sites(mixed))


# -- servers that ask for more -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (question("los ~ I(__import__('os').getpid())"), "Expected column names"),
        (question("los ~ C(sex, Treatment('f'))"), "Expected column names|to be|expected"),
        (question("los ~ age", minimum=1), "nothing of fewer than 10 rows, but was asked for 1"),
        (question("los ~ age", minimum=True), "minimum as int"),
        (question("los ~ hiv"), "no column 'hiv'"),
        (question("los ~ bs(sex, 4)"), "column of numbers"),
        ({"step": "dump"}, "one of the steps"),
        (["describe"], "one of the steps"),
        (question("los ~ age", also=[1]), "also as texts"),
        ({"step": "make", "design": "{}"}, "Expected a design"),
    ],
)
def test_what_is_no_formula_and_no_question_is_refused(asked: Any, why: str) -> None:
    (answer,) = [Answers(FRAMES["a"]).answer(asked)]
    assert answer.keys() == {"refused"}
    assert re.search(why, answer["refused"]), answer


def test_a_policy_names_the_columns_that_formulas_may_read() -> None:
    with pytest.raises(
        ValueError, match=r"from site 'a', 'b', 'c': the site's policy lets formulas read .* but not \['crp'\]"
    ):
        agreed(Request("los ~ age + log(crp)"), sites(FRAMES, columns=("los", "age")))
    agreed(Request("los ~ age"), sites(FRAMES, columns=("los", "age")))


def test_a_design_may_not_read_columns_past_the_policy() -> None:
    site = Answers(FRAMES["a"], Disclosure(columns=("los", "age")))
    design = Design("los ~ age", Encoding(), weights="crp")
    assert "not ['crp']" in site.answer({"step": "make", "design": design.to_json()})["refused"]


def test_declared_levels_change_nothing_of_an_answer_by_how_rare_a_level_is() -> None:
    levels = {"stage": ["I", "II", "III", "IV"]}
    answers = []
    for rare in (0, 3, 30):
        there = changed("b", stage=["IV"] * rare + ["I"] * (200 - rare))
        answers.append(said(there, Request("los ~ stage", levels=levels)))
    assert answers[0] == answers[1] == answers[2]


def test_a_site_makes_rows_by_so_many_designs_and_no_more() -> None:
    site = Answers(FRAMES["a"], Disclosure(designs=2))
    formulas = ["los ~ age", "los ~ bmi", "los ~ age", "los ~ sbp"]
    designs = [Design(formula, Encoding()).to_json() for formula in formulas]
    answers = [site.answer({"step": "make", "design": design}) for design in designs]
    assert answers[:3] == [{"rows": 300}] * 3
    assert "by 2 designs" in answers[3]["refused"]


def test_visits_of_one_patient_count_once_where_persons_count() -> None:
    """Of three visits each a site tells bins and levels as of one, and by rows it tells a level of four patients."""
    once = FRAMES["a"].assign(patient=range(300), stage=["IV"] * 4 + ["I", "II"] * 148)
    visits = pandas.concat([once] * 3, ignore_index=True)
    asked = question("los ~ age + bs(sbp, 5) + stage", also=["los"])
    of_once = Answers(once, Disclosure()).answer(asked)
    of_rows = Answers(visits, Disclosure()).answer(asked)
    of_persons = Answers(visits, Disclosure(person="patient")).answer(asked)
    assert of_once["levels"] == of_persons["levels"] == {"stage": ["I", "II"]}
    assert of_rows["levels"] == {"stage": ["I", "II", "IV"]}
    for column, (ends, counts, whole) in of_once["histograms"].items():
        assert of_persons["histograms"][column] == [ends, [3 * count for count in counts], whole]
        assert len(of_rows["histograms"][column][0]) > len(ends)
    few = Answers(visits, Disclosure(person="patient")).answer({**asked, "minimum": 9})
    assert few["refused"] == "the site tells nothing of fewer than 10 persons, but was asked for 9"


def test_each_bin_is_of_enough_persons_whoever_has_the_rows() -> None:
    draws = numpy.random.default_rng(0)
    frame = pandas.DataFrame({"x": draws.normal(size=900), "y": 0.0, "patient": draws.geometric(0.03, 900)})
    frame.loc[:40, "x"] = None  # of few patients, so that they count in the largest bin
    frame.loc[:40, "patient"] = 0
    site = Answers(frame, Disclosure(person="patient"))
    ends, counts, _ = site.answer(question("y ~ scale(x)"))["histograms"]["x"]
    assert sum(counts) == 900
    assert len(counts) > 4
    bins = pandas.cut(frame["x"], [-numpy.inf, *ends[1:-1], numpy.inf], right=False)
    assert frame.groupby(bins, observed=False)["patient"].nunique().min() >= 10


def test_what_a_site_has_told_it_tells_again_and_with_no_other_minimum(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [FRAMES["a"], FRAMES["a"].iloc[1:]]  # a patient has gone
    asked = question("los ~ scale(age) + bs(sbp, 5) + sex")
    first = Answers(frames[0], folder=tmp_path).answer(asked)
    assert "from other rows" not in caplog.text
    assert Answers(frames[1], folder=tmp_path).answer(asked) == first
    assert (
        "bins of 'age', computed from other rows than its present ones; if its frame has changed, delete" in caplog.text
    )
    finer = Answers(FRAMES["a"], folder=tmp_path).answer({**asked, "minimum": 11})
    assert "with a minimum of 10 rows, and answers with no other" in finer["refused"]


def test_a_site_hears_of_nothing_that_could_move_an_answer() -> None:
    """Bounds and other= stay at the server; whatever else a formula has, a column's answer is the same."""
    request = Request(FORMULA, bounds={"sbp": (119.0, 119.5)}, other={"stage": "x"}, levels={"sex": ["f", "m"]})
    assert set(next(conversation(request))) == {"step", "formula", "minimum", "declared", "also", "offset", "beside"}
    site = Answers(FRAMES["a"])
    alone, among = (
        site.answer(question(formula)) for formula in ("los ~ bs(sbp, 4)", "bmi ~ poly(sbp, 2) * bs(sbp, 9)")
    )
    assert alone["histograms"] == among["histograms"]


@pytest.mark.parametrize(
    ("first", "second"), [("stage", "C(stage)"), ("C(stage)", "stage"), ("C(stage)", "bs(stage, 4)")]
)
def test_a_column_is_told_as_numbers_or_by_its_levels(first: str, second: str) -> None:
    """Bins beside the names of common levels would count the rare ones."""
    site = Answers(FRAMES["a"].assign(stage=numpy.arange(300) % 5))
    also = {"also": ["stage"]}
    assert "refused" not in site.answer(question(f"los ~ {first}", **also))
    assert "'stage'" in site.answer(question(f"los ~ {second}", **also))["refused"]
    if second == "C(stage)":
        assert "refused" not in site.answer(question(f"los ~ {second}", declared=["stage"]))


def test_a_column_of_which_no_site_tells_enough_is_refused_with_what_to_declare() -> None:
    """60 of class 1, 37 of 2, 2 of 3 and one of 4: the classes, and the mean of them, are counts."""
    nyha = pandas.DataFrame(
        {"score": numpy.random.default_rng(0).normal(size=100), "nyha": [1] * 60 + [2] * 37 + [3, 3, 4]}
    )
    for formula in (
        "score ~ nyha",
        "score ~ scale(nyha) + scale(log(nyha))",
        "score ~ poly(nyha, 2)",
        "score ~ bs(nyha, 4)",
    ):
        with pytest.raises(ValueError, match=r"histogram of 'nyha', .* Declare .* scales=\{'nyha': \(2, 1\)\}"):
            agreed(Request(formula), sites({"a": nyha}))
    scales = {"nyha": (2, 1), "log(nyha)": (0.5, 0.5)}
    design = agreed(Request("score ~ scale(nyha) + scale(log(nyha))", scales=scales), sites({"a": nyha}))
    assert design.encoding.scales == {"scale(nyha)": (2.0, 1.0), "scale(log(nyha))": (0.5, 0.5)}
    settings: dict[str, Any] = {"client": "site", "formula": "score ~ nyha", "scales": {"nyha": (2, 1)}}
    data = ft.data.from_frame(nyha.assign(site="a"), minimum=10, **settings)
    assert data.design.encoding.standard["nyha"] == (2.0, 1.0)
    with pytest.raises(TypeError, match=r"\['scales'\] with a minimum"):
        ft.data.from_frame(nyha.assign(site="a"), **settings)


@pytest.mark.parametrize(
    ("scales", "why"),
    [
        ({"hiv": (0, 1)}, "scales= of .*but got"),
        ({"age": (60, 0)}, "positive sd of 'age'"),
        ({"age": (float("nan"), 1)}, "a mean"),
    ],
)
def test_scales_that_are_none_are_refused(scales: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        agreed(Request("los ~ age", scales=scales), sites(FRAMES))


@pytest.mark.parametrize(("missing", "told"), [(0, 300), (3, 300), (9, 300), (10, 290), (100, 200)])
def test_how_many_cells_are_missing_is_told_of_at_least_the_minimum(missing: int, told: int) -> None:
    holes = FRAMES["a"].assign(age=FRAMES["a"]["age"].where(numpy.arange(300) >= missing))
    assert sum(Answers(holes).answer(question("los ~ scale(age)"))["histograms"]["age"][1]) == told


def test_that_nothing_is_told_is_an_answer_which_no_smaller_minimum_changes() -> None:
    """The largest minimum with which a site tells bins would count the rows of its smallest bin."""
    site = Answers(FRAMES["a"])
    asked = question("los ~ scale(age)")
    for _ in range(2):
        assert site.answer({**asked, "minimum": 301})["histograms"] == {"age": None}
    assert "or that it tells none, with a minimum of 301 rows" in site.answer(asked)["refused"]


def test_that_nothing_is_told_stays_so_when_a_row_comes(tmp_path: Path) -> None:
    """Nine of a hundred are yes; bins from the next row on would tell that it is yes."""
    asked = question("los ~ scale(ill)")
    before, after = (FRAMES["a"].assign(ill=1.0 * (numpy.arange(300) < yes)) for yes in (9, 10))
    assert Answers(after).answer(asked)["histograms"]["ill"] is not None
    for frame in (before, after):
        assert Answers(frame, folder=tmp_path).answer(asked)["histograms"]["ill"] is None


def test_a_column_whose_name_is_that_of_a_logarithm_is_another() -> None:
    site = Answers(FRAMES["a"].assign(**{"log(crp)": 1.0 * numpy.arange(300)}))
    first, second = (site.answer(question(f"los ~ scale({name})")) for name in ("log(crp)", "`log(crp)`"))
    assert first["histograms"].keys() == {"crp"}
    assert second["histograms"].keys() == {"log(crp)"}


def test_the_logarithm_of_a_column_has_the_bins_of_the_column() -> None:
    """Bins of other ends would tell, beside the first, what lies between the two."""
    site = Answers(FRAMES["a"])
    asked = [site.answer(question(f"los ~ bs({quantity}, 5)")) for quantity in ("crp", "log(crp)")]
    assert asked[0]["histograms"] == asked[1]["histograms"] != {}


@pytest.mark.parametrize("shift", [0.0, 1e-9, 0.3])
def test_no_bin_has_fewer_rows_than_the_minimum(shift: float) -> None:
    values = numpy.concatenate([FRAMES["a"]["sbp"], [9000.0, -9000.0]]) + shift
    part = histogram(values, 10)
    assert part is not None
    assert min(part.counts) >= 10
    assert sum(part.counts) == 302
    assert not {part.ends[0], part.ends[-1]} & {values.min(), values.max()}


DRAWS: dict[str, Any] = {
    "normal": lambda draws, n: draws.normal(size=n),
    "lognormal": lambda draws, n: draws.lognormal(0.0, 2.0, n),
    "cauchy": lambda draws, n: draws.standard_cauchy(n),
    "years": lambda draws, n: draws.integers(2015, 2021, n).astype(float),
    "two values": lambda draws, n: draws.integers(0, 2, n).astype(float),
    "far from zero": lambda draws, n: 1e8 + draws.normal(size=n),
    "tiny": lambda draws, n: 1e-300 * draws.normal(size=n),
    "huge": lambda draws, n: 1e120 * draws.normal(size=n),
    "one value far away": lambda draws, n: numpy.r_[draws.normal(size=n - 1), 1e12],
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("rows", [10, 19, 20, 35, 400])
def test_whatever_the_values_bins_are_wide_enough_and_quantiles_within_them(name: str, rows: int) -> None:
    parts, every = list[Any](), list[numpy.ndarray]()
    for seed in range(3):
        values = DRAWS[name](numpy.random.default_rng(seed), rows)
        part = histogram(values, 10)
        if part is not None:
            assert min(part.counts) >= 10
            assert sum(part.counts) == rows
            assert all(low < high for low, high in pairwise(part.ends))
            parts.append(part), every.append(values)
    if parts:
        knots = quantiles(parts, [0.25, 0.5, 0.75])
        assert all(low < high for low, high in pairwise([bounds(parts)[0], *knots, bounds(parts)[1]]))
        below = [(numpy.concatenate(every) <= knot).mean() for knot in knots]
        most = max(max(part.counts) for part in parts) / rows
        assert numpy.abs(numpy.array(below) - [0.25, 0.5, 0.75]).max() <= most + 1e-9


def test_the_outer_ends_do_not_follow_the_smallest_and_the_largest_value() -> None:
    values = FRAMES["a"]["sbp"].to_numpy()
    spread = values.std()
    moved = numpy.where(values == values.max(), values.max() - 0.05 * spread, values)
    first, second = histogram(values, 10), histogram(moved, 10)
    assert first is not None
    assert second is not None
    assert first.ends == second.ends


@pytest.mark.parametrize("name", ["normal", "lognormal", "years", "two values", "one value far away"])
@pytest.mark.parametrize("minimum", [3, 10])
def test_a_histogram_is_the_same_where_nobody_has_a_value_that_few_rows_have(name: str, minimum: int) -> None:
    """A bin's rows might all have one other value, so that no value and no tail of few rows is sure to be there."""
    values = numpy.sort(DRAWS[name](numpy.random.default_rng(1), 90))
    part = histogram(values, minimum)
    assert part is not None
    shift = 0.5 if part.whole else 0.0
    places = numpy.searchsorted(numpy.array(part.ends[1:-1]) + shift, values, side="right")
    for place in range(len(part.counts)):
        within, one = values[places == place], list[float]()
        for value in numpy.unique(within):
            if len(one) < 2 and histogram(numpy.where(places == place, value, values), minimum) == part:
                one.append(value)
        assert len(one) == 2 or (within == one[0]).sum() >= minimum


def test_a_column_of_which_few_rows_differ_is_not_told() -> None:
    rare = changed("b", ill=[1.0] * 3 + [0.0] * 197)
    rare = {
        name: each if name == "b" else each.assign(ill=numpy.arange(len(each)) % 2.0) for name, each in rare.items()
    }
    every = said(rare, Request("los ~ scale(ill)"))
    assert [every[0][name]["histograms"]["ill"] is None for name in "abc"] == [False, True, False]


def test_a_small_site_tells_nothing_and_takes_part() -> None:
    small = {**FRAMES, "d": FRAMES["a"].iloc[:9]}
    every = said(small, Request(FORMULA))
    assert every[0]["d"] == {
        "text": ["sex", "stage"],
        "objects": [],
        "histograms": {"los": None, "age": None, "crp": None, "sbp": None, "bmi": None},
        "levels": {"sex": [], "stage": []},
    }
    assert every[1]["d"] == {"rows": 9}


@pytest.mark.parametrize(
    ("part", "entry"),
    [
        ("histograms", {"age": [[0.0, float("nan")], [20], False]}), ("histograms", {}), ("histograms", None),
        ("histograms", {"age": [[1.0, 0.0], [20], False]}), ("histograms", {"age": [[0.0, 1.0], [3], False]}),
        ("histograms", {"age": [[0.0, 1.0], [20]]}), ("histograms", {"age": [[0.0, 1.0], [20], 1]}),
        ("levels", {"sex": "f"}), ("text", None), ("objects", "sex"),
    ],
)  # fmt: skip
def test_a_site_that_says_something_else_is_named(part: str, entry: Any) -> None:
    talk = conversation(Request("los ~ scale(age) + bs(sbp, 4) + sex"))
    asked = next(talk)
    answers = {name: site.answer(asked) for name, site in sites(FRAMES).items()}
    answers["b"][part] = entry
    with pytest.raises(ValueError, match="from site 'b'"):
        talk.send(answers)


def test_a_design_is_in_the_order_in_which_sites_have_it() -> None:
    """Descriptions of models go through its parts in their order, and server and sites compare them."""
    design = agreed(Request("los ~ stage + sex", minimum=10), sites(FRAMES))
    assert repr(Design.from_json(design.to_json())) == repr(design)


def test_sites_that_refuse_for_one_reason_are_named_together() -> None:
    with pytest.raises(ValueError, match=r"from site 'a', 'b', 'c': the site has no column 'hiv'"):
        agreed(Request("los ~ hiv"), sites(FRAMES))
