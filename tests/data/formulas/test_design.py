"""Rows of a design are those of formulaic, names included; designs survive JSON, and go back to the columns' units."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Any

import numpy
import pandas
import pytest
import torch
from support.formulas.people import PEOPLE, design

import fedtorch as ft
from fedtorch.data.formulas.encoding import Levels

formulaic = pytest.importorskip("formulaic")


@pytest.mark.parametrize(
    "right",
    [
        "1",
        "0 + age",
        "age + sex",
        "sex + age + age:sex",
        "age * sex",
        "age:sex",
        "0 + sex",
        "0 + sex + drug",
        "sex:drug",
        "0 + sex:drug",
        "sex + sex:drug",
        "sex*drug*age",
        "sex + age:sex:drug",
        "C(stage)",
        "C(stage)*smoker",
        "smoker:age + sex",
        "bs(sbp, 4)",
        "bs(sbp, df=7)*sex",
        "age:bs(sbp, 3)",
        "poly(age, 3)",
        "poly(age, 1):sex",
        "scale(age) + center(sbp)",
        "log(sbp):age",
        "scale(log(sbp)) + bs(log(sbp), 5) + poly(log(days), 2)",
        "(age + sbp):sex + drug",
        "days - 1 + sex",
    ],
)
def test_columns_are_those_of_formulaic(right: str) -> None:
    wanted = formulaic.model_matrix(right, PEOPLE)
    made = design(f"y ~ {right}", standardise=False)
    assert made.columns == tuple(wanted.columns.str.replace("df=", "").str.replace("degree=", ""))
    x, y = made.rows(PEOPLE)
    torch.testing.assert_close(x, torch.tensor(wanted.to_numpy(dtype=float)), rtol=1e-9, atol=1e-9)
    assert y.tolist() == PEOPLE["y"].tolist()


def test_rows_are_standardised_and_go_back() -> None:
    data = ft.data.from_frame(PEOPLE, client="site", formula="y ~ age * sex + bs(sbp, 4) + (1 | site)")
    x, y = data.rows
    torch.testing.assert_close(x[:, 1:].mean(0), torch.zeros(x.shape[1] - 1).double())
    torch.testing.assert_close(x[:, 1:].std(0), torch.ones(x.shape[1] - 1).double())
    assert data.features == data.design.columns
    raw = ft.data.from_frame(PEOPLE, client="site", formula=data.design.formula, standardise=False).rows[0]
    fitted, wanted = (torch.linalg.lstsq(rows, y[:, None]).solution[:, 0] for rows in (x, raw))
    inverse, covariance = (torch.linalg.inv(rows.mT @ rows) for rows in (x, raw))
    mean, spread = data.design.original(fitted, inverse)
    torch.testing.assert_close(mean, wanted, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(spread, covariance, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("formula", "centred"),
    [
        ("y ~ age + sbp + (1 + age | site)", ["age", "sbp"]),
        ("y ~ age + sbp + (1 + age || site)", ["sbp"]),
        ("y ~ age + sbp + (0 + age | site)", ["sbp"]),
        ("y ~ age + sbp + (1 | site)", ["age", "sbp"]),
        ("y ~ 0 + age + sbp + (0 + age + sbp | site)", []),
        ("y ~ 0 + age + sbp", []),
        ("y ~ age + sbp", ["age", "sbp"]),
    ],
)
def test_a_mean_is_taken_out_only_where_the_model_stays_the_same(formula: str, centred: list[str]) -> None:
    made = design(formula)
    assert [name for name, scale in made.encoding.standard.items() if scale.mean] == centred
    assert set(made.encoding.standard) == {"age", "sbp"}
    assert [name for name in ("age", "sbp") if name not in made.encoding.centres] == centred
    assert all(
        value == pytest.approx(PEOPLE[name].mean() / PEOPLE[name].std())
        for name, value in made.encoding.centres.items()
    )
    assert ft.data.Design.from_json(made.to_json()) == made
    between = torch.zeros(len(made.columns), len(made.columns), dtype=torch.float64)
    for j in made.random:
        for k in made.random:
            between[j, k] = 2.0 if j == k else 0.5 * made.correlated
    _, back = made.original(torch.zeros(len(made.columns)).double(), between)
    fixed = [j for j in range(len(made.columns)) if j not in made.random]
    assert not back[fixed].any()  # coefficients that were the same everywhere still are
    apart = back[made.random, :][:, made.random]
    assert made.correlated or torch.equal(apart, torch.diag(apart.diagonal()))


def test_a_column_far_from_0_whose_mean_cannot_be_taken_out_is_named() -> None:
    years = PEOPLE.assign(year=2000 + PEOPLE["stage"])
    with pytest.warns(UserWarning, match=r"means of .'year'. more than 30 sds.*center\(…\), or \(… \| site\)"):
        ft.data.from_frame(years, client="site", formula="y ~ year + (1 + year || site)")
    for right in ("center(year) + (center(year) || site)", "year + (year | site)", "year + (1 | site)"):
        ft.data.from_frame(years, client="site", formula=f"y ~ {right}")  # without a warning


def test_design_survives_json_and_other_rows_use_its_encoding() -> None:
    made = design("y ~ age*C(stage) + bs(sbp, 4) + poly(days, 2) + scale(age) + (1 + age | site)", offset="days")
    again = ft.data.Design.from_json(made.to_json())
    assert again == made
    assert hash(again) == hash(made)
    assert again.columns == made.columns
    some = PEOPLE.iloc[[3, 30]]
    for old, new in zip(made.rows(PEOPLE), again.rows(some)):
        if isinstance(old, dict):
            old, new = old["offset"], new["offset"]
        torch.testing.assert_close(new, old[[3, 30]])
    later = ft.data.from_frame(some, client="site", design=again)
    assert later.design == made
    torch.testing.assert_close(later.rows[0], made.rows(some)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop("group"), "Expected a design with"),
        (lambda parts: parts.update(formula=3), "Expected a design with"),
        (lambda parts: parts.update(offset=["a"]), "Expected a design with"),
        (lambda parts: parts.update(formula="y ~ I(x)"), r"the function I\(…\)"),
        (lambda parts: parts["encoding"].pop("levels"), "Expected an encoding with levels of 'stage'"),
        (lambda parts: parts["encoding"].update(code="x"), "its parts in the encoding"),
        (lambda parts: parts["encoding"].update(splines={}), r"Expected an encoding with numbers for bs\(sbp, 4\)"),
        (lambda parts: parts["encoding"]["levels"].update(sbp={"names": ["1", "2"], "other": None}), "numbers for bs"),
        (lambda parts: parts["encoding"]["splines"]["bs(sbp, 4)"].update(knots=[]), "4 columns for bs.*got 3"),
        (lambda parts: parts["encoding"]["standard"].update(weight={"mean": 0, "sd": 1}), "got some of .'weight'"),
    ],
)
def test_a_damaged_design_is_refused(change: Any, message: str) -> None:
    parts = json.loads(design("y ~ C(stage) + bs(sbp, 4)").to_json())
    change(parts)
    with pytest.raises(ValueError, match=message):
        ft.data.Design.from_json(json.dumps(parts))
    with pytest.raises(ValueError, match="Expected a design as JSON"):
        ft.data.Design.from_json("{" * 10_000)


def test_offset_weights_and_trials_are_a_third_field() -> None:
    assert len(design("y ~ age").rows(PEOPLE)) == 2
    made = design("days | trials(30) ~ age + offset(log(sbp)) + offset(age)", weights="stage", offset="days")
    _, y, extra = made.rows(PEOPLE)
    assert y.tolist() == PEOPLE["days"].tolist()
    wanted = numpy.log(PEOPLE["sbp"]) + PEOPLE["age"] + PEOPLE["days"]
    numpy.testing.assert_allclose(extra["offset"].numpy(), wanted)
    assert extra["weight"].tolist() == PEOPLE["stage"].tolist()
    assert set(extra["trials"].tolist()) == {30.0}
    by_column = design("stage ~ age", trials="days").rows(PEOPLE)[2]
    assert by_column["trials"].tolist() == PEOPLE["days"].tolist()
    x, extra = made.rows(PEOPLE.drop(columns=["stage"]), response=False)
    assert x.shape == (60, 2)
    assert sorted(extra) == ["offset", "trials"]
    with pytest.raises(ValueError, match=r"Expected trials once, but got trials\(30\) and trials='stage'"):
        dataclasses.replace(made, trials="stage")


def test_a_response_of_two_levels_is_0_or_1() -> None:
    made = design("sex ~ age")
    assert made.encoding.response is None
    assert made.rows(PEOPLE)[1].tolist() == (PEOPLE["sex"] == "male").astype(float).tolist()
    assert design("smoker ~ age").rows(PEOPLE)[1].tolist() == PEOPLE["smoker"].astype(float).tolist()
    swapped = design("sex ~ age", levels={"sex": ["male", "female"]})
    assert swapped.rows(PEOPLE)[1].tolist() == (PEOPLE["sex"] == "female").astype(float).tolist()
    with pytest.raises(ValueError, match="numbers or of two levels, but got 3 levels of 'drug'"):
        design("drug ~ age")
    with pytest.raises(ValueError, match=r"Expected responses .'female', 'male'., but got 'both' in column 'sex'"):
        made.rows(PEOPLE.assign(sex="both"))


def test_declared_levels_and_their_other() -> None:
    made = design("y ~ C(stage)", levels={"stage": [10, 2, 1, 3]}, standardise=False)
    assert made.columns == ("Intercept", "C(stage)[T.2]", "C(stage)[T.1]", "C(stage)[T.3]")
    other = design("y ~ sex", levels={"sex": Levels(("female", "else"), "else")}, standardise=False)
    assert other.rows(PEOPLE)[0][:, 1].tolist() == (PEOPLE["sex"] == "male").astype(float).tolist()
    text = design("y ~ stage", levels={"stage": [1, 2, 10]})
    assert text.columns == ("Intercept", "stage[T.2]", "stage[T.10]")  # declared, so a factor
    with pytest.raises(ValueError, match=r"levels of factors of the formula, but got some of \['site'\]"):
        design("y ~ sex", levels={"site": ["north"]})
    with pytest.raises(TypeError, match="levels of 'sex' as a list, the reference first, but got 'ab'"):
        design("y ~ sex", levels={"sex": "ab"})


def test_prediction_names_unseen_levels_and_warns_beyond_knots() -> None:
    made = design("y ~ drug + bs(sbp, 4)")
    with pytest.raises(ValueError, match=r"levels 'c', 'a', 'b' in column 'drug' of client 'west', but got 'd'"):
        made.rows(PEOPLE.assign(site="west", drug=["d"] * 60), response=False)
    beyond = PEOPLE.assign(sbp=[1e4] + [150.0] * 59)
    with pytest.warns(UserWarning, match=r"as the bound of their spline: 1 of bs\(sbp, 4\) beyond"):
        x, _ = made.rows(beyond, response=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at, _ = made.rows(PEOPLE.assign(sbp=PEOPLE["sbp"].max()), response=False)
    torch.testing.assert_close(x[0, 3:], at[0, 3:])


@pytest.mark.parametrize(
    ("formula", "change", "error", "message"),
    [
        ("y ~ weight", {}, ValueError, "one column 'weight'.*got none; the frame has"),
        ("y ~ age", {"age": [numpy.nan] + [1.0] * 59}, ValueError, "got 1 in column 'age', at first of client 'south'"),
        ("y ~ sex", {"sex": [None] * 2 + ["a", "b"] * 29}, ValueError, "got 2 in column 'sex'.*missing=\"drop\""),
        ("y ~ age", {"y": [numpy.nan] + [1.0] * 59}, ValueError, "got 1 in column 'y'"),
        ("y ~ age", {"age": [numpy.inf] + [1.0] * 59}, ValueError, "finite numbers, but got .*inf.* 'age' of client"),
        ("y ~ log(age)", {"age": [0.0] + [1.0] * 59}, ValueError, r"positive numbers for log\(age\), but got .*0.0"),
        ("y ~ sex", {"sex": "male"}, ValueError, "two levels in the factor 'sex', but got 'male'; leave it out"),
        ("y ~ C(age)", {"age": 3}, ValueError, "two levels in the factor 'age'"),
        ("y ~ log(sex)", {}, ValueError, r"numbers in log\(sex\), but got 'sex', which is a factor"),
        ("y ~ bs(sex, 4)", {}, ValueError, r"numbers in bs\(sex, 4\)"),
        ("y ~ bs(age, 5)", {"age": [1.0, 2.0] * 30}, ValueError, r"4 different knots for bs\(age, 5\)"),
        ("y ~ poly(age, 2)", {"age": [1.0, 2.0] * 30}, ValueError, r"more than 2 different values for poly\(age, 2\)"),
        ("y ~ scale(age)", {"age": 7.0}, ValueError, "'age' with the same value 7 in all rows"),
        ("y ~ age:sex", {"age": 7.0}, ValueError, "'age' with the same value 7 in all rows"),
        ("y ~ age + y", {}, ValueError, "terms without the response 'y', but got y"),
        ("y ~ age:C(y)", {}, ValueError, r"terms without the response 'y', but got C\(y\)"),
        (
            "y ~ age",
            {"age": pandas.date_range("2020", periods=60)},
            TypeError,
            "whole numbers in the factor 'age', but",
        ),
        ("y ~ age", {"site": [None] + ["a"] * 59}, ValueError, "got 1 in column 'site'"),
        ("y ~ sex:stage", {"stage": [str(i) for i in range(60)]}, None, ""),
        ("y ~ C(a)*C(b)", {"a": range(60), "b": range(60)}, ValueError, "at most 2000 columns"),
    ],
)
def test_bad_columns_are_named(formula: str, change: dict[str, Any], error: Any, message: str) -> None:
    frame = PEOPLE.assign(**change)
    if error is None:
        assert len(ft.data.from_frame(frame, client="site", formula=formula).design.columns) == 120
        return
    with pytest.raises(error, match=message):
        ft.data.from_frame(frame, client="site", formula=formula)


def test_a_site_whose_column_is_of_another_kind_is_named() -> None:
    made = design("y ~ age")
    with pytest.raises(TypeError, match="numbers in column 'age' of client 'east', but got"):
        made.rows(PEOPLE.drop(columns="site").assign(age="old"), site="east")
    twice = pandas.concat([PEOPLE, PEOPLE["age"]], axis=1)
    with pytest.raises(ValueError, match="one column 'age', but got several"):
        made.rows(twice)
