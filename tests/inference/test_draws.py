"""Posteriors for ArviZ, and what a sampler has recorded of the sites."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedtorch as ft
from fedtorch.federation.algorithms.ep import devices, settled
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import logistic, sparse

NAMES = ("age", "dose")


def data(binary: bool = False) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(0)
    made = []
    for k in range(4):
        x = torch.randn(40, 2, generator=generator).double()
        y = x @ torch.tensor([1.0 + k / 4, -0.5]).double() + 0.5 * torch.randn(40, generator=generator).double()
        made.append((x, (y > 0).double() if binary else y))
    named = ft.data.from_tensors(made, names=list("ABCD"))
    return ft.data.FederatedData(named.rows, named.counts, named.names, features=NAMES)


@pytest.fixture(scope="module")
def sampled() -> tuple[ft.Run, ft.Sampler]:
    sampler = ft.Sampler(burn_in=20, sites=True)
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2)
    start = torch.zeros(2, dtype=torch.float64)
    return ft.run(algorithm, ft.InProcess(data()), start, rounds=60, record=sampler, progress=False), sampler


def test_expectation_propagation_has_named_draws() -> None:
    hierarchy = hierarchical.normal(2, random=["age"], names=NAMES)
    run = ft.run(ft.ep(hierarchical.linear(hierarchy)), ft.InProcess(data()), rounds=30, until=settled())
    posterior = ft.inference.to_inferencedata(run, draws=1000).posterior
    summary = run.summary()
    assert dict(posterior.sizes) == {"chain": 4, "draw": 1000, "coefficient": 2, "random": 1, "site": 4}
    beta = posterior.beta.mean(("chain", "draw"))
    np.testing.assert_allclose(beta, summary["estimate"][:2], atol=0.1 * summary["sd"].max())
    sd = posterior["sd"].sel(random="age")
    assert float(sd.mean()) == pytest.approx(summary.loc["sd(age)", "estimate"], rel=0.1)
    assert float(posterior.sigma.mean()) == pytest.approx(summary.loc["sigma", "estimate"], rel=0.01)
    theta = posterior.theta.sel(site="C").mean(("chain", "draw")).to_numpy()
    np.testing.assert_allclose(theta, devices(run).marginals().mean[2].numpy(), atol=0.02)
    again = ft.inference.to_inferencedata(run, draws=1000).posterior
    assert bool((again.theta == posterior.theta).all()), "the same run, the same draws"


def test_the_summary_of_draws_is_arvizs(sampled: tuple[ft.Run, ft.Sampler]) -> None:
    run, sampler = sampled
    theirs = sampler.summary().loc[["theta[0]", "theta[1]"]]
    ours = run.summary()
    assert list(ours.index) == list(NAMES)
    for mine, name in (("estimate", "mean"), ("sd", "sd"), ("r_hat", "r_hat"), ("ess", "ess_bulk")):
        np.testing.assert_allclose(ours[mine], theirs[name], rtol=1e-9)
    draws = sampler.draws()["theta"].flatten(0, 1).numpy()
    np.testing.assert_allclose(ours["low"], np.quantile(draws, 0.025, axis=0, method="hazen"), rtol=1e-9)


def test_effects_of_sites_are_those_of_their_draws(sampled: tuple[ft.Run, ft.Sampler]) -> None:
    run, sampler = sampled
    draws = sampler.draws()
    total, shared = draws["sites.theta"], draws["theta"]
    assert total.shape == (2, 40, 4, 2)
    table = ft.inference.ranef(run, total=True)
    np.testing.assert_allclose(table["estimate"], total.mean((0, 1)).flatten().numpy(), rtol=1e-12)
    deviations = ft.inference.ranef(run)
    away = (total - shared[:, :, None]).flatten(0, 1).flatten(1)
    np.testing.assert_allclose(deviations["sd"], away.std(0).numpy(), rtol=1e-12)
    assert deviations.index[0] == ("A", "age")
    assert {"r_hat", "ess"} < set(table.columns)


def test_predictions_of_draws_have_the_noise_of_the_site(sampled: tuple[ft.Run, ft.Sampler]) -> None:
    run, sampler = sampled
    x = torch.tensor([[1.0, 1.0]]).double()
    row = ft.inference.predict(run, x, interval=0.95, site="B").iloc[0]
    draws = sampler.draws()
    eta = draws["sites.theta"][:, :, 1].flatten(0, 1) @ x[0]
    assert row["estimate"] == pytest.approx(float(eta.mean()), rel=1e-9)
    assert row["low"] == pytest.approx(float(eta.quantile(0.025)), abs=0.3 * float(eta.std()))
    variance = float((1 / draws["sites.noise"][:, :, 1]).mean() + eta.var())
    assert row["new_high"] - row["estimate"] == pytest.approx(1.96 * variance**0.5, rel=0.1)
    other = ft.inference.predict(run, x).iloc[0]
    assert not other["known"]
    assert other["high"] - other["low"] > row["high"] - row["low"]
    with pytest.raises(TypeError, match="by which coefficients of another site are known"):
        ft.inference.adapted(run, (x, eta[:1]))


def test_draws_have_the_names_of_columns_and_sites(sampled: tuple[ft.Run, ft.Sampler]) -> None:
    posterior: Any = ft.inference.to_inferencedata(sampled[0]).posterior
    assert posterior["sites.theta"].sel(site="C", coefficient="dose").shape == (2, 40)
    assert posterior["theta"].sel(coefficient="age").shape == (2, 40)


def test_intercepts_of_sites_are_predicted_with() -> None:
    sampler = ft.Sampler(burn_in=5, sites=True)
    algorithm = ft.gibbs(logistic.logistic_regression(), sparse.hierarchy(), sweeps=1, chains=2)
    start = torch.zeros(2, dtype=torch.float64)
    run = ft.run(algorithm, ft.InProcess(data(binary=True)), start, rounds=15, record=sampler, progress=False)
    assert list(ft.inference.ranef(run, total=True).loc["A"].index) == ["Intercept", *NAMES]
    x = torch.tensor([[0.5, -1.0]]).double()
    draws = sampler.draws()
    eta = draws["sites.intercept"][..., 3] + draws["sites.theta"][..., 3, :] @ x[0]
    estimate = ft.inference.predict(run, x, site="D")["estimate"].item()
    assert estimate == pytest.approx(float(eta.sigmoid().mean()), rel=1e-9)
    assert list(ft.inference.marginal_effects(run).index) == list(NAMES)


def test_sampler_without_sites_names_the_remedy() -> None:
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=1, chains=2)
    start = torch.zeros(2, dtype=torch.float64)
    run = ft.run(algorithm, ft.InProcess(data()), start, rounds=10, record=ft.Sampler(), progress=False)
    with pytest.raises(TypeError, match="sites=True"):
        ft.inference.ranef(run)
    bare = ft.run(algorithm, ft.InProcess(data()), start, rounds=2, progress=False)
    with pytest.raises(TypeError, match=r"record=ft.Sampler\(burn_in=100\)"):
        bare.summary()


def test_sampler_with_sites_resumes_from_a_file(tmp_path: Any) -> None:
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=1, chains=2)
    start = torch.zeros(2, dtype=torch.float64)
    population = ft.InProcess(data())
    whole = ft.Sampler(burn_in=2, sites=True)
    ft.run(algorithm, population, start, rounds=8, record=whole, progress=False)
    first = ft.run(algorithm, population, start, rounds=5, record=ft.Sampler(burn_in=2, sites=True), progress=False)
    first.save(tmp_path / "run.safetensors")
    sampler = ft.Sampler(burn_in=2, sites=True)
    again = ft.Run(algorithm, population, start, record=sampler).load(tmp_path / "run.safetensors")
    for _ in again.rounds(8):
        pass
    assert torch.equal(sampler.draws()["sites.theta"], whole.draws()["sites.theta"])
