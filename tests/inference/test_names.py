"""Names that a column and the package both give stand for one quantity each, wherever they come from."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.algorithms.maximum_likelihood import maximised
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse
from fedtorch.models.gibbs.logistic import logistic_regression
from fedtorch.models.hierarchical.hyperpriors import log_normal
from fedtorch.models.linear import LinearHead

SLOPE = 0.5


def _rows() -> tuple[Tensor, Tensor, Tensor]:
    """Return x (12, 20), deviations of clients in the response, and noise of sd 2."""
    x = ft.random.normal(ft.random.key(0), (12, 20), torch.float64)
    level = ft.random.normal(ft.random.key(1), (12, 1), torch.float64)
    noise = 2 * ft.random.normal(ft.random.key(2), (12, 20), torch.float64)
    return x, SLOPE * x + level + noise, level


def _frame(column: str) -> pd.DataFrame:
    x, y, _ = _rows()
    site = [f"s{k}" for k in range(12) for _ in range(20)]
    return pd.DataFrame({"site": site, column: x.flatten().numpy(), "y": y.flatten().numpy()})


def _by_formula(column: str, likelihood: bool) -> ft.Run:
    data = ft.data.from_frame(_frame(column), client="site", formula=f"y ~ `{column}` + (1 | site)", standardise=False)
    model = hierarchical.regression(data.design)
    algorithm = ft.maximum_likelihood(model) if likelihood else ft.ep(model)
    until = maximised() if likelihood else ft.federation.algorithms.ep.settled()
    return ft.run(algorithm, ft.InProcess(data), rounds=60, until=until, progress=False)


@pytest.mark.parametrize("column", ["sigma", "sd(Intercept)", "sd(sigma)"])
@pytest.mark.parametrize("likelihood", [False, True])
@pytest.mark.filterwarnings("ignore:Not converged", "ignore:Expected a likelihood that is curved")
def test_a_column_called_as_the_package_calls_its_own_is_one_row(column: str, likelihood: bool) -> None:
    run, plain = _by_formula(column, likelihood), _by_formula("dose", likelihood)
    table, expected = run.summary(), plain.summary()
    assert table.index.is_unique
    assert len(table) == len(expected) == 4
    assert table.loc[column, "estimate"] == pytest.approx(expected.loc["dose", "estimate"])
    assert ft.inference.contrasts(run, column)["estimate"].item() == pytest.approx(table.loc[column, "estimate"])
    own = {"sigma": "sigma", "sd(Intercept)": "sd(Intercept)"}.get(column)
    if own:
        assert table.loc[f"{own} (model)", "estimate"] == pytest.approx(expected.loc[own, "estimate"])
        assert ft.inference.contrasts(run, f"2*{own} (model)")["estimate"].item() == pytest.approx(
            2 * expected.loc[own, "estimate"]
        )


def test_names_of_tensors_are_kept_apart_too() -> None:
    x, y, _ = _rows()
    stack = torch.stack([torch.ones_like(x), x], -1)
    data = ft.data.from_tensors(list(zip(stack, y)))
    data = replace(data, features=("one", "sigma"))
    model = hierarchical.linear(hierarchical.normal(2, random=[0]), noise=log_normal(0.0, 2.0))
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=40, progress=False)
    table = run.summary()
    assert list(table.index) == ["one", "sigma", "sd(one)", "sigma (model)"]
    assert table.loc["sigma", "estimate"] == pytest.approx(SLOPE, abs=0.5)
    assert table.loc["sigma (model)", "estimate"] == pytest.approx(2, abs=0.3)
    drawn = ft.inference.to_inferencedata(run, draws=50).posterior
    assert set(drawn.data_vars) == {"beta", "sd", "sigma", "theta"}
    assert float(drawn["sigma"].mean()) == pytest.approx(2, abs=0.3)


def test_draws_keep_the_intercept_of_sites_apart() -> None:
    x, y, _ = _rows()
    data = replace(ft.data.from_tensors(list(zip(x[..., None], (y > 0).double()))), features=("Intercept",))
    sampler = ft.Sampler(burn_in=2, sites=True)
    algorithm = ft.gibbs(logistic_regression(), sparse.hierarchy(), sweeps=1, chains=2)
    run = ft.run(algorithm, ft.InProcess(data), torch.zeros(1), rounds=8, record=sampler, progress=False)
    assert list(ft.inference.ranef(run, total=True).loc["0"].index) == ["Intercept (model)", "Intercept"]
    rows = pd.DataFrame({"Intercept": [0.0, 1.0]})
    assert len(ft.inference.predict(run, rows, site="0")) == 2


def test_related_devices_keep_the_intercept_of_their_own_apart() -> None:
    x, y, _ = _rows()
    data = replace(ft.data.from_tensors(list(zip(x[..., None], y))), features=("Intercept",))
    head = LinearHead(1, intercept=True, dtype=torch.float64)
    run = ft.run(ft.matrix_normal(ft.least_squares(head, steps=20)), ft.InProcess(data), rounds=5, progress=False)
    assert run.summary().index.is_unique
    assert "Intercept (model)" in run.summary().index


def test_columns_with_gaps_keep_their_names() -> None:
    frame = _frame("response").assign(response=lambda f: f["response"].where(f.index % 7 != 0))
    data = ft.data.from_frame(frame, client="site", formula="y ~ response", missing="impute")
    run = ft.run(ft.normal_em(columns=data.design), ft.InProcess(data), rounds=5, progress=False)
    assert list(run.summary().index[:2]) == ["mean(response)", "mean(y)"]


@pytest.mark.parametrize("formula", ["y ~ `Intercept`", "y ~ 0 + `Intercept`", "y ~ a*b + `a:b`", "y ~ g + `g[T.v]`"])
def test_columns_called_as_other_coefficients_are_refused(formula: str) -> None:
    frame = pd.DataFrame(
        {name: [0.0, 1.0, 3.0, 7.0] for name in ("y", "Intercept", "a", "b", "a:b", "g[T.v]")} | {"g": list("uvuv")}
    )
    with pytest.raises(ValueError, match=r"a different name for each coefficient.*rename the column"):
        ft.data.from_frame(frame.assign(site="s"), client="site", formula=formula)


def test_columns_called_as_thresholds_are_refused() -> None:
    frame = pd.DataFrame({"site": list("aabb"), "y": [1, 2, 3, 1], "1|2": [0.0, 1.0, 2.0, 5.0]})
    data = ft.data.from_frame(frame, client="site", formula="y ~ `1|2`", levels={"y": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"thresholds \['1\|2', '2\|3'\], but got \['1\|2'\]; rename"):
        hierarchical.regression(data.design, "cumulative")


def test_names_given_twice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['age'\] twice"):
        hierarchical.normal(2, names=["age", "age"])
    with pytest.raises(ValueError, match=r"\['age'\] twice"):
        ft.data.FederatedData((torch.ones(1, 2), torch.ones(1)), torch.tensor([1]), features=("age", "age"))


def test_a_site_called_new_is_not_the_site_of_rows_without_one() -> None:
    frame = _frame("dose").replace({"site": {"s0": "new"}})
    data = ft.data.from_frame(frame, client="site", formula="y ~ dose + (1 | site)")
    run = ft.run(ft.ep(hierarchical.regression(data.design)), ft.InProcess(data), rounds=30, progress=False)
    rows = frame[:1].drop(columns="site")
    found = ft.inference.predict(run, rows)
    assert not found["known"].any()
    assert found["sd"].item() > ft.inference.predict(run, rows, site="new")["sd"].item()
