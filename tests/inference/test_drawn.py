"""Draws of a Gibbs sampler are criticised like those of expectation propagation."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms.ep import settled
from fedtorch.federation.runs.sampler import load_arviz
from fedtorch.inference import checks, loo
from fedtorch.inference.ranef import site_estimates
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import deviations, global_priors, sparse
from fedtorch.models.gibbs.logistic import logistic_regression
from fedtorch.models.hierarchical import hyperpriors


def data_of(binary: bool) -> ft.data.FederatedData:
    parts = []
    for k in range(3):
        for_x, for_y = random.split(random.fold_in(random.key(5), k), 2)
        x = random.normal(for_x, (25 + 5 * k, 2), torch.float64)
        eta, uniform = x[:, 0] + 0.5 * k, random.uniform(for_y, (25 + 5 * k,), torch.float64)
        parts.append((x, (uniform < eta.sigmoid()).double() if binary else eta + torch.special.ndtri(uniform)))
    return ft.data.from_tensors(parts)


def sampled(binary: bool, rounds: int = 20, **arguments: object) -> ft.Run:
    local = logistic_regression() if binary else sparse.regression(**arguments)  # type: ignore[arg-type]
    algorithm = ft.gibbs(local, sparse.hierarchy(), sweeps=1, chains=2)
    sampler = ft.Sampler(burn_in=4, sites=True)
    return ft.run(algorithm, ft.InProcess(data_of(binary)), torch.zeros(2), rounds=rounds, record=sampler)


@pytest.fixture(scope="module")
def runs() -> dict[bool, ft.Run]:
    return {binary: sampled(binary) for binary in (False, True)}


def pointwise(run: ft.Run, binary: bool) -> Tensor:
    """Log densities `(chains, draws, rows)` from what the sampler has kept, written out."""
    draws, columns = run.recorders[0].draws(), []
    for k, (x, y) in enumerate(run.population.data):
        eta = draws["sites.theta"][:, :, k] @ x.mT
        if binary:
            eta = eta + draws["sites.intercept"][:, :, k, None]
            columns.append(torch.distributions.Bernoulli(logits=eta).log_prob(y))
        else:
            columns.append(torch.distributions.Normal(eta, draws["sites.noise"][:, :, k, None].rsqrt()).log_prob(y))
    return torch.cat(columns, -1)


@pytest.mark.parametrize("binary", [False, True])
def test_numbers_are_arviz_ones(binary: bool, runs: dict[bool, ft.Run]) -> None:
    az, run = load_arviz(), runs[binary]
    values, theta = pointwise(run, binary), run.recorders[0].draws()["sites.theta"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = {"theta": theta.flatten(2).numpy()}
        theirs = az.loo(az.from_dict(log_likelihood={"y": values.numpy()}, posterior=posterior))
    ours = loo(run)
    of_r = (ours.left_out / (ours.left_out - 1)) ** 0.5  # standard errors are R's, by n - 1; ArviZ has 1 / n
    expected = theirs.elpd_loo, of_r * theirs.se, theirs.p_loo
    assert (ours.elpd, ours.se, ours.parameters) == pytest.approx(expected, abs=1e-8)


def test_checks_take_its_draws(runs: dict[bool, ft.Run]) -> None:
    run = runs[True]
    found = checks.calibration(run, bins=3)
    assert float((found.observed * found.rows).sum()) == pytest.approx(float(run.population.data.rows[1].sum()))
    assert ft.plots.predictive_check(run).axes[0].get_title() == "share of yes by site"
    assert site_estimates(run, 0.9).coefficients == ("Intercept", "0", "1")
    assert float(checks.histograms(runs[False]).observed.sum()) == 90


def test_fewer_draws_are_spread_over_the_chains(runs: dict[bool, ft.Run]) -> None:
    every = runs[False].recorders[0].draws()["sites.theta"]  # (2, 16, 3, 2)
    run = runs[False]
    draws = run.algorithm.posterior.draws(run, 16, None, 0.01, 0)
    found = draws.at(run.population.data.stack([0, 1, 2]), torch.arange(3), torch.arange(3))
    torch.testing.assert_close(found.theta, every[:, ::2].flatten(0, 1).transpose(0, 1))
    assert 0 < found.efficiency <= 1


def test_samplers_without_all_coefficients_are_refused() -> None:
    with pytest.raises(TypeError, match="in place of intercept=True"):
        loo(sampled(binary=False, intercept=True, rounds=7))
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2)
    population = ft.InProcess(data_of(binary=False))
    plain = ft.run(algorithm, population, torch.zeros(2), rounds=3, record=ft.Sampler())
    with pytest.raises(TypeError, match="Expected a sampler that has recorded the coefficients of the sites"):
        loo(plain)
    with pytest.raises(TypeError, match=r"Expected a run of ft\.ep"):
        loo(plain, out="site")


NOISE, TAU = 0.25, 0.36  # variances, which both models below know


@pytest.fixture(scope="module")
def both() -> tuple[ft.Run, ft.Run]:
    """One model, by draws and by expectation propagation, which is exact of it."""
    parts = []
    for k in range(8):
        x, z = random.normal(random.fold_in(random.key(3), k), (2, 12), torch.float64)
        theta = torch.tensor([1.0, -0.5]).double() + TAU**0.5 * z[:2]
        x = torch.stack([torch.ones(10).double(), x[2:]], 1)
        parts.append((x, x @ theta + NOISE**0.5 * z[2:]))
    population = ft.InProcess(ft.data.from_tensors(parts, names=list("abcdefgh")))
    local = sparse.regression(deviation=deviations.normal(), noise_shape=1e6)
    shared = sparse.hierarchy(global_priors.gaussian(2.0), scale=TAU**0.5, noise_scale=1e6 * NOISE)
    sampler = ft.Sampler(burn_in=10, sites=True)
    start = torch.zeros(2).double()
    sampled = ft.run(
        ft.gibbs(local, shared, sweeps=2, chains=8), population, start, rounds=160, record=sampler, progress=False
    )
    hierarchy = hierarchical.normal(2, sd=2.0, variance=hyperpriors.log_normal(math.log(TAU), 1e-4))
    run = ft.run(ft.ep(hierarchical.linear(hierarchy, noise=NOISE)), population, rounds=20, until=settled(1e-6))
    return sampled, run


@pytest.mark.slow
def test_new_sites_are_those_of_expectation_propagation(both: tuple[ft.Run, ft.Run]) -> None:
    x = torch.tensor([[1.0, 2.0], [1.0, -0.5]]).double()
    drawn, exact = (ft.inference.predict(run, x) for run in both)
    error = exact["sd"] / 600**0.5  # effective draws of what sites share, at the least
    assert not drawn["known"].any()
    for column, errors in (("estimate", 4), ("sd", 4), ("low", 8), ("high", 8), ("new_low", 8), ("new_high", 8)):
        assert ((drawn[column] - exact[column]).abs() < errors * error).all(), column


@pytest.mark.slow
def test_plots_of_sites_are_those_of_expectation_propagation(both: tuple[ft.Run, ft.Run]) -> None:
    drawn, exact = (site_estimates(run, 0.9) for run in both)
    error = (exact.high - exact.low) / 3.29 / 800**0.5
    torch.testing.assert_close(drawn.own, exact.own, rtol=0, atol=2e-3)
    torch.testing.assert_close(drawn.own_sd, exact.own_sd, rtol=0.01, atol=0)
    assert bool(((drawn.mean - exact.mean).abs() < 5 * error).all())
    assert bool(((drawn.low - exact.low).abs() < 10 * error).all())
    assert bool(((drawn.centre - exact.centre).abs() < 0.2 * (exact.centre_high - exact.centre)).all())
    assert bool(((drawn.spread / exact.spread - 1).abs() < 0.5).all()), "of eight sites, not of all that might be"
    for plot in (ft.plots.forest, ft.plots.shrinkage, ft.plots.funnel):
        assert len(plot(both[0]).axes) == 2


@pytest.mark.parametrize(
    ("prior", "quartiles"),  # of |deviation| / tau: half-Cauchy times half-normal has no closed ones, so of lambda
    [
        (deviations.normal, [1.0, 1.0, 1.0]),
        (deviations.laplace, [(2 * math.log(4 / 3)) ** 0.5, (2 * math.log(2)) ** 0.5, (2 * math.log(4)) ** 0.5]),
        (deviations.horseshoe, [2**0.5 - 1, 1.0, 2**0.5 + 1]),
    ],
)
def test_new_site_is_drawn_from_the_prior_of_deviations(prior: Any, quartiles: list[float]) -> None:
    newcomer = sparse.regression(deviation=prior()).newcomer
    assert newcomer is not None
    ones = torch.ones(20_000, 1).double()
    new = newcomer({"theta": 3 * ones, "precision": 4 * ones, "noise": ones[:, 0]}, random.key(0))
    scales = (4 * new.variance).sqrt().quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    torch.testing.assert_close(scales, torch.tensor(quartiles).double(), rtol=0.04, atol=0)
    assert bool((new.mean == 3).all())


def test_samplers_without_newcomers_are_refused() -> None:
    with pytest.raises(TypeError, match="a site's intercept that is integrated out has no distribution"):
        ft.inference.predict(sampled(binary=False, intercept=True, rounds=7), torch.zeros(1, 2))
    own = deviations.Deviation(lambda keys, shape: (), lambda w, u, energy, noise: (w, u))
    with pytest.raises(TypeError, match="a deviation of your own needs its prior="):
        ft.inference.predict(sampled(binary=False, deviation=own, rounds=7), torch.zeros(1, 2))
