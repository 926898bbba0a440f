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

import fedtorch as ft
from fedtorch.data.formulas.encoding import Levels

formulaic = pytest.importorskip("formulaic")


def people(rows: int = 60) -> pandas.DataFrame:
    draw = numpy.random.default_rng(1)
    return pandas.DataFrame(
        {
            "site": draw.choice(["north", "south", "west"], rows),
            "age": draw.normal(60, 12, rows),
            "sbp": draw.gamma(30, 4, rows),
            "sex": draw.choice(["female", "male"], rows),
            "stage": draw.choice([1, 2, 10], rows),
            "drug": pandas.Categorical(draw.choice(["b", "a", "c"], rows), categories=["c", "a", "b"]),
            "smoker": draw.random(rows) < 0.4,
            "days": draw.integers(1, 30, rows),
            "y": draw.normal(size=rows),
        }
    )


PEOPLE = people()


def design(formula: str, **settings: Any) -> ft.data.Design:
    made = ft.data.from_frame(PEOPLE, client="site", formula=formula, **settings).design
    assert made is not None
    return made


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


def test_frames_of_others_are_read() -> None:
    class Other:
        """What polars offers, without being of pandas."""

        def __dataframe__(self, *args: Any, **settings: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return PEOPLE[["site", "age", "sex", "y"]].__dataframe__(*args, **settings)

    class Third:
        """What some offer beside it."""

        def to_pandas(self) -> pandas.DataFrame:
            return PEOPLE

    same = ft.data.from_frame(PEOPLE, client="site", formula="y ~ age + sex")
    data = ft.data.from_frame(Other(), client="site", formula="y ~ age + sex")
    assert data.design == same.design
    assert torch.equal(data.rows[0], same.rows[0])
    assert ft.data.from_frame(Third(), client="site", formula="y ~ age + sex").design == same.design
    with pytest.raises(TypeError, match="offers __dataframe__, but got dict"):
        ft.data.from_frame({"y": [1]}, client="site", formula="y ~ 1")


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
    between = torch.zeros(len(made.columns), len(made.columns), dtype=torch.float64)
    for j in made.random:
        for k in made.random:
            between[j, k] = 2.0 if j == k else 0.5 * made.correlated
    _, back = made.original(torch.zeros(len(made.columns)).double(), between)
    fixed = [j for j in range(len(made.columns)) if j not in made.random]
    assert not back[fixed].any()  # coefficients that were the same everywhere still are
    apart = back[made.random, :][:, made.random]
    assert made.correlated or torch.equal(apart, torch.diag(apart.diagonal()))


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


def test_dropping_is_asked_for() -> None:
    holes = PEOPLE.assign(age=PEOPLE["age"].where(PEOPLE["age"] > 50), sbp=numpy.nan)
    data = ft.data.from_frame(holes, client="site", formula="y ~ age", missing="drop")
    assert int(data.counts.sum()) == int((PEOPLE["age"] > 50).sum())
    again = ft.data.from_frame(holes, client="site", design=data.design, missing="drop")
    assert torch.equal(again.rows[0], data.rows[0])
    with pytest.raises(ValueError, match=r"missing= as one of .'refuse', 'drop'., but got 'mean'"):
        ft.data.from_frame(holes, client="site", formula="y ~ age", missing="mean")
    x, _ = data.design.rows(holes, missing=True)
    assert int(x.isnan().sum()) == int((PEOPLE["age"] <= 50).sum())


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(TypeError, match="a formula, or features and target, but got neither"):
        ft.data.from_frame(PEOPLE, client="site")
    with pytest.raises(TypeError, match=r"Expected \['weights'\] with a formula"):
        ft.data.from_frame(PEOPLE, client="site", features=["age"], target="y", weights="days")
    with pytest.raises(TypeError, match="one of a formula, a design, and features"):
        ft.data.from_frame(PEOPLE, client="site", features=["age"], target="y", formula="y ~ age")
    with pytest.raises(TypeError, match=r"numeric or boolean features.*formula="):
        ft.data.from_frame(PEOPLE, client="site", features=["sex"], target="y")


def test_data_keep_their_design_as_long_as_x_is_the_same() -> None:
    data = ft.data.from_frame(PEOPLE, client="site", formula="y ~ age + sex", weights="days")
    training, validation = data.split(0.5, seed=0)
    for other in (training, validation, data.select([1]), data.pool(), data.to(dtype=torch.float32)):
        assert other.design is data.design
        assert other.features == data.design.columns
    assert data.map(lambda rows: (rows[0], rows[1] * 2)).design is data.design
    changed = data.map(lambda rows: (rows[0] * 2, rows[1]))
    assert changed.design is None
    assert changed.features == ()
    with pytest.raises(ValueError, match="Expected the 3 columns of the design in x, but got"):
        dataclasses.replace(data, rows=data.rows[0][:, :2], features=())


def test_a_file_of_rows_keeps_the_design(tmp_path: Any) -> None:
    for settings in ({}, {"weights": "days", "offset": "age"}):
        data = ft.data.from_frame(PEOPLE, client="site", formula="y ~ age + bs(sbp, 4)", **settings)
        data.to_file(tmp_path / "rows.safetensors")
        again = ft.data.FederatedData.from_file(tmp_path / "rows.safetensors")
        assert again.design == data.design
        assert again.names == data.names
        for old, new in zip(ft.tree.leaves(data.rows), ft.tree.leaves(again.rows)):
            assert torch.equal(old, new)
