"""The summary of expectation propagation beside closed forms and statsmodels' mixed models."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
import torch

import fedtorch as ft
from fedtorch.federation.algorithms.ep import correction, posterior, settled
from fedtorch.federation.algorithms.ep.correction import corrected
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import hyperpriors

NAMES = ("Intercept", "age", "dose")
MEAN, SD = torch.tensor([2.0, 1.0, -0.5]), torch.tensor([1.0, 0.6, 0.0])


def sites(count: int, rows: int) -> ft.data.FederatedData:
    """Sites whose intercept and slope of age differ, with correlation ½."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(count, 3, generator=generator)
    z[:, 1] = 0.5 * z[:, 0] + 0.75**0.5 * z[:, 1]
    made = []
    for k in range(count):
        x = torch.cat([torch.ones(rows, 1), torch.randn(rows, 2, generator=generator)], 1).double()
        noise = torch.randn(rows, generator=generator)
        made.append((x, x @ (MEAN + SD * z[k]).double() + 0.5 * noise.double()))
    return ft.data.from_tensors(made, names=[f"site {k}" for k in range(count)])


@pytest.fixture(scope="module")
def data() -> ft.data.FederatedData:
    return sites(40, 12)


@pytest.fixture(scope="module")
def run(data: ft.data.FederatedData) -> ft.Run:
    flat = hyperpriors.log_normal(0.0, 10.0)
    hierarchy = hierarchical.normal(3, random=[0, 1], correlated=True, sd=100.0, variance=flat, names=NAMES)
    model = hierarchical.linear(hierarchy, noise=flat)
    return ft.run(ft.ep(model), ft.InProcess(data), rounds=60, until=settled(), progress=False)


def test_coefficients_sds_and_correlations_have_names(run: ft.Run) -> None:
    summary = run.summary()
    assert list(summary.index) == [*NAMES, "sd(Intercept)", "sd(age)", "cor(Intercept, age)", "sigma"]
    assert list(summary["n"]) == [480, 480, 480, 40, 40, 40, 480]
    assert summary.attrs["level"] == 0.95


def test_coefficients_are_those_of_q(run: ft.Run) -> None:
    q, summary = posterior(run), run.summary(level=0.9)
    mean, sd = q.mean[:3].numpy(), q.stddev[:3].numpy()
    np.testing.assert_allclose(summary["estimate"][:3], mean, rtol=1e-12)
    np.testing.assert_allclose(summary["sd"][:3], sd, rtol=1e-12)
    np.testing.assert_allclose(summary["high"][:3], mean + 1.6448536269514722 * sd, rtol=1e-12)


def test_the_noise_is_log_normal(run: ft.Run) -> None:
    q, sigma = posterior(run), run.summary().loc["sigma"]
    mean, sd = float(q.mean[-1]), float(q.stddev[-1])
    assert sigma["estimate"] == pytest.approx(np.exp(mean / 2 + sd**2 / 8), rel=1e-6)
    assert sigma["low"] == pytest.approx(np.exp(mean / 2 - 1.96 * sd / 2), rel=1e-4)


def test_numbers_are_those_of_restricted_maximum_likelihood(run: ft.Run, data: ft.data.FederatedData) -> None:
    frames = [pd.DataFrame(x.numpy(), columns=list(NAMES)).assign(y=y.numpy(), site=k) for k, (x, y) in enumerate(data)]
    fit = smf.mixedlm("y ~ age + dose", pd.concat(frames), groups="site", re_formula="~age").fit()
    summary = run.summary()
    np.testing.assert_allclose(summary["estimate"][:3], fit.fe_params, atol=0.05 * float(fit.bse_fe.max()))
    np.testing.assert_allclose(summary["sd"][:3], fit.bse_fe, rtol=0.1)
    covariance = np.asarray(fit.cov_re)
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(summary["estimate"][3:5], sd, rtol=0.06)
    assert summary.loc["cor(Intercept, age)", "estimate"] == pytest.approx(covariance[0, 1] / sd.prod(), abs=0.05)
    assert summary.loc["sigma", "estimate"] == pytest.approx(fit.scale**0.5, rel=0.02)


def test_the_corrected_posterior_is_an_option(run: ft.Run) -> None:
    given = corrected(run, points=2048)
    summary = run.summary(given=given)
    np.testing.assert_allclose(summary["estimate"][:3], given.posterior.mean[:3].numpy(), rtol=1e-9)
    assert (summary["sd"][:2] > run.summary()["sd"][:2]).all(), "longer tails than those of q"


def test_columns_name_what_the_model_only_numbers() -> None:
    made = sites(4, 5)
    named = ft.data.FederatedData(made.rows, made.counts, made.names, features=NAMES)
    model = hierarchical.linear(hierarchical.normal(3, random=[]), noise=0.25)
    run = ft.run(ft.ep(model), ft.InProcess(named), rounds=3, progress=False)
    assert list(run.summary(tolerance=torch.inf).index) == list(NAMES)


def test_no_names_are_no_hindrance() -> None:
    model = hierarchical.shrinkage.penalised(hierarchical.shrinkage.ridge(3))
    run = ft.run(ft.ep(model), ft.InProcess(sites(4, 8)), rounds=20, progress=False)
    assert list(run.summary(tolerance=torch.inf).index) == ["log l2", "log noise"]


@pytest.mark.parametrize("size", [2, 5, 6, 8, 12])
@pytest.mark.parametrize("points", [8192, 32768])
def test_nodes_of_a_correction_know_all_covariances(size: int, points: int) -> None:
    """Of a standard normal, within two standard errors of so many effective nodes; not only variances."""
    white = correction._proposed(size, points)
    weights = torch.softmax(-0.5 * white.square().sum(1) - correction._log_mixture(white), 0)
    away = white - weights @ white
    error = ((away * weights[:, None]).mT @ away - torch.eye(size, dtype=torch.float64)).abs().max()
    assert float(error) < 2 * float(weights.square().sum().sqrt())


def test_one_row_per_client_is_named_as_the_cause() -> None:
    """Of N(0, τ² + σ²) only the sum is known, and steps wander along it: no number of rounds ends them."""
    generator = np.random.default_rng(101)
    x = generator.normal(size=60)
    y = 0.3 + 0.7 * x + 0.8 * generator.normal(size=60) + 0.5 * generator.normal(size=60)
    frame = pd.DataFrame({"site": [f"s{k:02d}" for k in range(60)], "x": x, "y": y})
    data = ft.data.from_frame(frame, client="site", formula="y ~ x + (1 | site)")
    run = ft.run(ft.ep(hierarchical.regression(data.design, "gaussian")), ft.InProcess(data), rounds=30)
    with pytest.warns(RuntimeWarning, match=r"one of each, so that sd\(Intercept\) and sigma are not told apart"):
        run.summary()


def test_uninformative_rows_leave_coefficients_unchanged() -> None:
    """Rules of few nodes over six coefficients seem to widen what a client's rows leave as it was."""
    generator = np.random.default_rng(0)
    frame = pd.DataFrame({"d": generator.choice(["d0", "d1"], 400), "e": generator.choice(["e0", "e1", "e2"], 400)})
    frame["site"], frame["y"] = np.repeat(list("abcdefgh"), 50), (generator.random(400) < 0.4).astype(float)
    frame = frame[~((frame["d"] == "d1") & (frame["e"] == "e2"))]
    frame["other"] = ((frame["d"] == "d1") & (frame["e"] == "e1")).astype(float)
    found = []
    for formula in ("y ~ d * e", "y ~ d + e + other"):
        data = ft.data.from_frame(frame, client="site", formula=formula)
        algorithm = ft.ep(hierarchical.regression(data.design, "logistic"))
        run = ft.run(algorithm, ft.InProcess(data), rounds=40, until=settled())
        assert float(run.last.info["failed"].sum()) == 0
        found.append(posterior(run))
    np.testing.assert_allclose(found[0].mean[:5], found[1].mean, atol=0.02)
    np.testing.assert_allclose(found[0].stddev[:5], found[1].stddev, rtol=0.03)
    np.testing.assert_allclose(found[0].stddev[5], 2.5, rtol=1e-6)
