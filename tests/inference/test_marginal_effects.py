"""Average marginal effects beside statsmodels' with flat priors, and of variables in formulas."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch

import fedtorch as ft
from fedtorch.federation.algorithms.ep import settled
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import generalised

NAMES = ("Intercept", "dose", "male")


def frame(rows: int = 400) -> pd.DataFrame:
    random = np.random.default_rng(0)
    made = pd.DataFrame({"dose": random.normal(size=rows), "male": random.integers(0, 2, rows), "Intercept": 1.0})
    eta = 0.3 + 0.8 * made["dose"] - 1.0 * made["male"]
    made["y"] = (random.uniform(size=rows) < 1 / (1 + np.exp(-eta))).astype(float)
    made["count"] = random.poisson(np.exp(0.5 * eta)).astype(float)
    return made.assign(ward=random.integers(0, 3, rows).astype(str))


def fitted(rows: pd.DataFrame, family: str, response: str) -> ft.Run:
    parts = [part for _, part in rows.groupby("ward")]
    data = ft.data.from_tensors(
        [tuple(torch.tensor(part[c].to_numpy(np.float64)) for c in (list(NAMES), response)) for part in parts],
        names=["0", "1", "2"],
    )
    model = getattr(generalised, family)(hierarchical.normal(3, random=[], sd=100.0, names=NAMES))
    return ft.run(ft.ep(model), ft.InProcess(data), rounds=30, until=settled(1e-4), progress=False)


@pytest.mark.parametrize(("family", "response"), [("logistic", "y"), ("poisson", "count")])
def test_effects_are_those_of_statsmodels(family: str, response: str) -> None:
    rows = frame()
    kind = sm.Logit if family == "logistic" else sm.Poisson
    fit = kind(rows[response], rows[list(NAMES)]).fit(disp=0)
    theirs = fit.get_margeff(at="overall", dummy=True)
    table = ft.inference.marginal_effects(fitted(rows, family, response))
    assert list(table.index) == ["dose", "male"]
    np.testing.assert_allclose(table["estimate"], theirs.margeff, atol=0.05 * theirs.margeff_se.max())
    np.testing.assert_allclose(table["sd"], theirs.margeff_se, rtol=0.04)


def test_a_variable_that_is_not_there_is_refused() -> None:
    run = fitted(frame(60), "logistic", "y")
    assert list(ft.inference.marginal_effects(run, variables=["male"]).index) == ["male"]
    with pytest.raises(ValueError, match=r"but got \['weight'\]"):
        ft.inference.marginal_effects(run, variables=["weight"])
    with pytest.raises(ValueError, match="Expected rows of the run's sites"):
        ft.inference.marginal_effects(run, torch.randn(3, 3, dtype=torch.float64))


def test_effects_of_a_formula_are_those_of_its_variables() -> None:
    """Of a linear model they are sums of coefficients."""
    random = np.random.default_rng(1)
    rows = pd.DataFrame({"age": random.normal(50, 10, 240), "sex": random.choice(["f", "m"], 240)})
    rows["ward"] = np.repeat(["A", "B", "C"], 80)
    rows["y"] = 2 + 0.1 * rows["age"] * (1 + (rows["sex"] == "m")) + random.normal(0, 0.1, 240)
    data = ft.data.from_frame(rows, client="ward", formula="y ~ age * sex + (1 | ward)")
    assert data.design is not None
    hierarchy = hierarchical.normal(4, random=[0], sd=100.0, names=data.design.columns)
    run = ft.run(ft.ep(hierarchical.linear(hierarchy)), ft.InProcess(data), rounds=40, until=settled(), progress=False)
    table = ft.inference.marginal_effects(run, rows)
    assert list(table.index) == ["age", "sex: m - f"]
    share = (rows["sex"] == "m").mean()
    assert table.loc["age", "estimate"] == pytest.approx(0.1 * (1 + share), abs=0.01)
    assert table.loc["sex: m - f", "estimate"] == pytest.approx(0.1 * rows["age"].mean(), abs=0.1)
    summary = run.summary()
    assert summary.loc["age", "estimate"] == pytest.approx(0.1, abs=0.01), "in the units of the frame"
    age = ft.inference.contrasts(run, {"age": 1.0, "age:sex[T.m]": share})
    assert table.loc["age", "estimate"] == pytest.approx(float(age["estimate"].iloc[0]), abs=1e-3)
    more = ft.inference.predict(run, rows.iloc[[0, 100]].assign(ward=["A", "Z"]))
    assert list(more["known"]) == [True, False]
    np.testing.assert_allclose(more["estimate"].iloc[0], rows["y"].iloc[0], atol=1.0)
    with pytest.raises(ValueError, match="Expected a frame of rows to average over"):
        ft.inference.marginal_effects(run)
    totals = ft.inference.ranef(run, total=True)
    assert totals.loc[("A", "age"), "estimate"] == pytest.approx(summary.loc["age", "estimate"], abs=1e-3)
    back = ft.inference.adapted(run, rows.iloc[:5].assign(ward="D"), site="D")
    like = ft.inference.ranef(back, total=True).loc[("D", "age"), "estimate"]
    assert like == pytest.approx(summary.loc["age", "estimate"], abs=1e-3), "in the units of the frame"
    assert back.names == data.design.columns


def test_of_a_boolean_variable_of_a_formula_it_is_the_difference_from_false() -> None:
    rows = frame().assign(male=lambda made: made["male"] == 1)
    data = ft.data.from_frame(rows, client="ward", formula="count ~ dose + male + (1 | ward)")
    model = hierarchical.regression(data.design, "poisson", sd=100.0)
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=30, until=settled(), progress=False)
    table = ft.inference.marginal_effects(run, rows)
    theirs = sm.Poisson(rows["count"], rows[list(NAMES)].astype(float)).fit(disp=0).get_margeff(dummy=True)
    np.testing.assert_allclose(table["estimate"], theirs.margeff, atol=0.1 * theirs.margeff_se.max())
    men = ft.inference.marginal_effects(run, rows[rows["male"]], variables=["male"])
    ratio = np.exp(run.summary().loc["male", "estimate"])
    fitted = ft.inference.predict(run, rows[rows["male"]])["estimate"].mean()
    assert men["estimate"].iloc[0] == pytest.approx(fitted * (1 - 1 / ratio), rel=0.03)


def test_steps_of_a_derivative_beyond_the_knots_are_not_warned_of() -> None:
    rows = frame(60)
    data = ft.data.from_frame(rows, client="ward", formula="count ~ bs(dose, 4) + (1 | ward)")
    run = ft.run(ft.ep(hierarchical.regression(data.design, "poisson")), ft.InProcess(data), rounds=10, progress=False)
    assert list(ft.inference.marginal_effects(run, rows).index) == ["dose"]  # warnings are errors
    with pytest.warns(UserWarning, match="1 of bs"):
        ft.inference.marginal_effects(run, rows.assign(dose=rows["dose"].where(rows.index > 0, 99.0)))
