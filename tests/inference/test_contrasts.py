"""Contrasts: their text is data, their numbers those of statsmodels where priors are flat."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.inference._combinations import linear, written
from fedtorch.models import hierarchical

NAMES = ["age", "sex[T.male]", "bs(sbp, 4)[1]", "age:sex[T.male]", "sd(age)", "0", "(Intercept)", "a-b"]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("age - 2*sex[T.male]", {"age": 1.0, "sex[T.male]": -2.0}),
        ("-age*3 + .5e1 * age:sex[T.male]", {"age": -3.0, "age:sex[T.male]": 5.0}),
        ("(age + bs(sbp, 4)[1]) / 2", {"age": 0.5, "bs(sbp, 4)[1]": 0.5}),
        ("2*(age - (sd(age) - `0`))", {"age": 2.0, "sd(age)": -2.0, "0": 2.0}),
        ("(Intercept)+a-b-age", {"(Intercept)": 1.0, "a-b": 1.0, "age": -1.0}),
        ("60 * age + 1 - 1", {"age": 60.0}),
    ],
)
def test_text_becomes_weights(text: str, weights: dict[str, float]) -> None:
    assert linear(text, NAMES) == weights


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age - weight", "Expected a name or a number at character 7"),
        ("age * sex[T.male]", "a product of a coefficient with a number"),
        ("1 / age", "a product of a coefficient with a number"),
        ("age / 0", "a divisor other than 0"),
        ("age + 1", "but got a constant"),
        ("(age", "a closing parenthesis"),
        ("age)", "the end"),
        ("age age", "a name or a number"),
        ("__import__('os').getpid()", "a name or a number"),
        ("age.real", "a name or a number"),
        ("(" * 100 + "age" + ")" * 100, "a name or a number"),
        ("", "a name or a number"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear(text, NAMES)


def test_weights_are_written_as_they_are_read() -> None:
    weights = {"age": -1.0, "sex[T.male]": 2.5, "a-b": -1.0}
    assert linear(written(weights), NAMES) == weights


@pytest.fixture(scope="module")
def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(300, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(300, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64) + 0.5 * noise


@pytest.fixture(scope="module")
def run(rows: tuple[Tensor, Tensor]) -> ft.Run:
    names = ("age", "sex[T.male]", "dose")
    data = ft.data.partition(rows, ft.data.iid(), clients=5, seed=0)
    flat = hierarchical.normal(3, random=[], sd=1e4, names=names)
    fit = sm.OLS(rows[1].numpy(), rows[0].numpy()).fit()
    model = hierarchical.linear(flat, noise=float(fit.scale))
    return ft.run(ft.ep(model), ft.InProcess(data), rounds=5, progress=False)


def test_contrasts_are_those_of_least_squares(run: ft.Run, rows: tuple[Tensor, Tensor]) -> None:
    fit = sm.OLS(rows[1].numpy(), rows[0].numpy()).fit()
    table = ft.inference.contrasts(run, "age - 2*sex[T.male]", {"dose": 3, "age": 0.5}, {"third": "dose/3"}, level=0.9)
    test = fit.t_test(np.array([[1, -2, 0], [0.5, 0, 3], [0, 0, 1 / 3]]), use_t=False)
    assert list(table.index) == ["age - 2*sex[T.male]", "3*dose + 0.5*age", "third"]
    np.testing.assert_allclose(table["estimate"], test.effect, rtol=1e-6)
    np.testing.assert_allclose(table["sd"], test.sd, rtol=1e-6)
    np.testing.assert_allclose(table[["low", "high"]], test.conf_int(alpha=0.1), rtol=1e-6)
    p = np.where(test.effect > 0, 1 - test.pvalue / 2, test.pvalue / 2)
    np.testing.assert_allclose(table["p_positive"], p, atol=1e-8)


def test_what_is_no_combination_is_refused(run: ft.Run) -> None:
    with pytest.raises(ValueError, match=r"Expected names of .*, but got \['weight'\]"):
        ft.inference.contrasts(run, {"weight": 1.0})
    with pytest.raises(ValueError, match="Expected a combination, but got none"):
        ft.inference.contrasts(run)


def test_a_run_without_a_posterior_says_what_it_has(rows: tuple[Tensor, Tensor]) -> None:
    data = ft.data.from_tensors([rows])
    run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(3, 1).double())), ft.InProcess(data), rounds=1)
    with pytest.raises(TypeError, match=r"but got one of fedavg; it has .*run.global_module\(\)"):
        ft.inference.contrasts(run, "age")


def test_pooled_runs_are_refused_with_what_to_do() -> None:
    fits = [(torch.tensor([slope]), torch.tensor([[0.04]])) for slope in (0.9, 1.0, 1.2)]
    with pytest.raises(
        TypeError, match="Expected a run, but got a Pooled; for pooled runs, take the contrasts of each"
    ):
        ft.inference.contrasts(ft.inference.pooled(fits, names=["slope"]), "slope")
