"""Draws of a Gibbs sampler are criticised like those of expectation propagation."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.runs.sampler import load_arviz
from fedtorch.inference import checks, loo
from fedtorch.inference._rows import kept
from fedtorch.models.gibbs import sparse
from fedtorch.models.gibbs.logistic import logistic_regression


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
    assert (ours.elpd, ours.se, ours.parameters) == pytest.approx((theirs.elpd_loo, theirs.se, theirs.p_loo), abs=1e-8)


def test_checks_take_its_draws(runs: dict[bool, ft.Run]) -> None:
    run = runs[True]
    found = checks.calibration(run, bins=3)
    assert float((found.observed * found.rows).sum()) == pytest.approx(float(run.population.data.rows[1].sum()))
    assert ft.plots.predictive_check(run).axes[0].get_title() == "share of yes by site"
    assert float(checks.histograms(runs[False]).observed.sum()) == 90


def test_fewer_draws_are_spread_over_the_chains(runs: dict[bool, ft.Run]) -> None:
    every = runs[False].recorders[0].draws()["sites.theta"]  # (2, 16, 3, 2)
    found = kept(runs[False], 16, random.key(0))
    torch.testing.assert_close(found.theta, every[:, ::2].flatten(0, 1).transpose(0, 1))
    assert 0 < found.efficiency <= 1


def test_what_has_no_draws_of_all_coefficients_is_refused() -> None:
    with pytest.raises(TypeError, match="in place of intercept=True"):
        loo(sampled(binary=False, intercept=True, rounds=7))
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2)
    population = ft.InProcess(data_of(binary=False))
    plain = ft.run(algorithm, population, torch.zeros(2), rounds=3, record=ft.Sampler())
    with pytest.raises(TypeError, match="Expected a sampler that has recorded the coefficients of the sites"):
        loo(plain)
    with pytest.raises(TypeError, match=r"Expected a run of ft\.ep"):
        loo(plain, out="site")
