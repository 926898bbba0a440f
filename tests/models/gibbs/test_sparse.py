"""Sparse regression: awkward data, many coefficients, splines, and what it selects."""

from __future__ import annotations

from typing import Any

import arviz
import pytest
import torch
from scipy import stats
from support.oracles import geweke, sparse_oracle
from support.oracles.closed_forms import linear_clients
from support.oracles.sampled import sampled
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms.normal_em import normal_em
from fedtorch.models.device_posterior import discoveries
from fedtorch.models.gibbs import deviations, directed, global_priors, graphical, imputation, logistic, sparse, splines


def sample(data: ft.data.FederatedData, rounds: int = 60, prior: Any = None, sweeps: int = 5, **arguments: Any) -> Any:
    algorithm = ft.gibbs(sparse.regression(**arguments), sparse.hierarchy(prior), sweeps=sweeps, chains=4)
    start = torch.zeros(data[0][0].shape[1])
    return sampled(algorithm, ft.InProcess(data), start, rounds=rounds, burn_in=rounds // 5)


def simulated(counts: list[int], effects: Tensor, seed: int = 0) -> ft.data.FederatedData:
    """Sites alike, covariates and noise standard normal."""
    keys = random.fold_in(random.key(seed), torch.arange(2))
    x = random.normal(keys[0], (sum(counts), len(effects)), torch.float64)
    y = x @ effects + random.normal(keys[1], (len(x),), torch.float64)
    return ft.data.FederatedData((x, y), torch.tensor(counts))


def widened(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows with their first column once more, a constant one and one of zeros."""
    x, one = rows[0], torch.ones(len(rows[0]), 1, dtype=torch.float64)
    return torch.cat([x, x[:, :1], one, 0 * one], 1), rows[1]


@pytest.mark.parametrize("intercept", [False, True])
def test_collinear_and_constant_columns_and_a_client_with_one_row(intercept: bool) -> None:
    """The conjugate case in closed form: also the sum and the difference of two equal columns' coefficients.

    σ is known to a relative 3e-5, by a prior as sure as 2e9 observations. Errors come from independent chains.
    """
    data, chains, tau, sigma = simulated([40, 1, 50, 60], torch.tensor([1.5, 0.0]).double()), 24, 0.5, 0.8
    data = data.map(widened)
    precision, shift = torch.eye(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for x, y in data:
        if intercept:
            x, y = x - x.mean(0), y - y.mean()
        solved = torch.linalg.solve(sigma**2 * torch.eye(len(x), dtype=torch.float64) + tau**2 * x @ x.T, x)
        precision, shift = precision + x.T @ solved, shift + solved.T @ y
    covariance = torch.linalg.inv(precision)
    contrasts = torch.eye(5, dtype=torch.float64)
    contrasts[[0, 0, 2, 2], [0, 2, 0, 2]] = torch.tensor([1.0, 1.0, 1.0, -1.0]).double()
    mean, sd = contrasts @ covariance @ shift, (contrasts @ covariance @ contrasts.T).diagonal().sqrt()
    local = sparse.regression(deviation=deviations.normal(), noise_shape=1e9, intercept=intercept)
    shared = sparse.hierarchy(global_priors.gaussian(), scale=tau, noise_scale=1e9 * sigma**2)
    population = ft.InProcess(data)
    sampler = sampled(
        ft.gibbs(local, shared, sweeps=2, chains=chains), population, torch.zeros(5), rounds=55, burn_in=15
    )
    draws = sampler.draws()["theta"] @ contrasts.T
    for value, expected in ((draws, mean), ((draws - mean).square(), sd.square())):
        each = value.mean(1)
        z = (each.mean(0) - expected) / (each.std(0) / chains**0.5)
        assert float(z.abs().max()) < stats.t.ppf(1 - 1e-3 / 20, chains - 1)


def test_the_horseshoe_of_collinear_columns_keeps_their_sum() -> None:
    """The rows say much of θ_1 + θ_3, and the sparse prior little: its posterior is near that of a single column."""
    data = simulated([40, 1, 50, 60], torch.tensor([1.5, 0.0]).double())
    total = sample(data.map(widened), 30).draws()["theta"][..., [0, 2]].sum(-1)
    single = sample(data, 30).draws()["theta"][..., 0]
    assert bool(total.isfinite().all())
    sd = (total.var() + single.var()).sqrt()
    assert abs(float(total.mean() - single.mean())) < float(sd)


def test_missing_values_are_refused_with_the_way_out() -> None:
    x, y = torch.randn(5, 2, generator=torch.Generator()), torch.zeros(5)
    x[3, 1] = torch.nan
    with pytest.raises(
        ValueError,
        match=r"client '0', row 3; remove or impute such rows, see fedtorch\.models\.gibbs\.imputation",
    ):
        ft.data.from_tensors([(x, y)])
    block = ft.data.ClientData((x[None], y[None]), torch.tensor([5]))
    with pytest.raises(ValueError, match=r"imputation\.impute, or in every round by imputation\.imputing"):
        sparse.regression().prepare(block)
    with pytest.raises(ValueError, match=r"Expected rows \(x, y\) of shapes"):
        sparse.regression().prepare(ft.data.ClientData((y[None],), torch.tensor([5])))


def test_imputed_covariates_keep_an_effect() -> None:
    """A site that lacks the covariate of the effect, which others have.

    The posterior's mean is 0.61 and its sd 0.36, the chains' error a twelfth of that.
    """
    data = simulated([80, 80], torch.tensor([0.8, 0.0]).double())
    rows = [(x.clone(), y) for x, y in data]
    rows[1][0][:, 0] = torch.nan
    gaps = imputation.incomplete(rows)
    start = imputation.Normal(torch.zeros(3).double(), torch.eye(3).double())
    final = ft.run(normal_em(), ft.InProcess(gaps), start, rounds=60).last
    found = sample(imputation.impute(gaps, final.server, random.key(1)), 180)
    assert float(arviz.ess(found.inference_data())["theta"][0]) > 100
    assert float(found.mean()["theta"][0]) == pytest.approx(0.8, abs=0.3)


def test_an_intercept_takes_out_the_level() -> None:
    data = simulated([40, 60], torch.tensor([0.8, 0.0]).double())
    shifted = ft.data.from_tensors([(x + 3.0, y + 10 * k) for k, (x, y) in enumerate(data)])
    same, found = sample(data, 8, intercept=True), sample(shifted, 8, intercept=True)
    assert torch.allclose(same.mean()["theta"], found.mean()["theta"], atol=1e-6)


def test_more_coefficients_than_rows() -> None:
    effects = torch.zeros(50, dtype=torch.float64)
    effects[[3, 40]] = 1.5
    found = sample(simulated([35, 60, 50, 45], effects), rounds=15)
    inclusion = found.mean()["prior.included"]
    assert sorted(inclusion.topk(2).indices.tolist()) == [3, 40]
    assert float(inclusion.sort().values[:-2].mean()) < 0.5 < float(inclusion[[3, 40]].min())


def test_splines_select_functions_by_blocks() -> None:
    keys, counts = random.fold_in(random.key(2), torch.arange(2)), torch.tensor([80, 100])
    x = random.uniform(keys[0], (180, 3), torch.float64)
    y = (6 * x[:, 1]).sin() + 0.3 * random.normal(keys[1], (180,), torch.float64)
    data = ft.data.FederatedData((x, y - y.mean()), counts)
    basis, groups = splines.b_splines(x, pieces=3)
    found = sample(
        data.map(lambda rows: (splines.b_splines(rows[0], pieces=3)[0], rows[1])),
        prior=global_priors.spike_and_slab(groups=groups),
        intercept=True,
    )
    included = found.draws()["prior.included"]
    blocks = included.unflatten(-1, (3, 5))
    assert bool((blocks == blocks[..., :1]).all())
    inclusion = blocks.mean((0, 1))[:, 0]
    assert float(inclusion[1]) > 0.9 > 0.5 > float(inclusion[[0, 2]].max())
    whole = torch.cat([1 - basis[:, :5].sum(1, keepdim=True), basis[:, :5]], 1)
    assert bool((whole >= -1e-12).all())
    with pytest.raises(ValueError, match="Expected finite x and lower < upper"):
        splines.b_splines(x, lower=1.0)


@pytest.mark.parametrize(
    ("prior", "deviation"),
    [
        (global_priors.regularised_horseshoe(), deviations.laplace()),
        (global_priors.bayesian_lasso(), deviations.horseshoe()),
    ],
)
def test_alternatives_find_the_effect(prior: Any, deviation: Any) -> None:
    data = simulated([60, 80, 100, 70, 90], torch.tensor([1.0, 0.0, 0.0]).double())
    found = sample(data, 40, prior, deviation=deviation).mean()["theta"]
    assert float(found[0]) == pytest.approx(1.0, abs=0.3)
    assert float(found[1:].abs().max()) < 0.25


@pytest.mark.parametrize(
    ("chains", "rounds"), [pytest.param(24, 70, id="short"), pytest.param(200, 1000, marks=pytest.mark.slow, id="long")]
)
def test_the_posterior_without_markov_chains(chains: int, rounds: int) -> None:
    """Within 0.1 sd for means and 0.05 for inclusion, and within the Monte Carlo errors of both sides.

    Errors of the sampler come from the spread over independent chains, those of the oracle from its weights.
    """
    data = simulated([25, 30], torch.tensor([0.5, 0.0]).double(), seed=1)
    oracle = sparse_oracle.regression(data, 50_000 if rounds < 100 else 400_000)

    def watch(round: ft.Round) -> dict[str, Tensor]:
        sites = round.clients.table.read(slice(0, 2)).variables.theta.transpose(0, 1)
        shared = round.server.variables
        return {"all": torch.cat([shared.theta, sites.flatten(1), shared.prior.included], 1)}

    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=10, chains=chains)
    sampler = sampled(
        algorithm, ft.InProcess(data), torch.zeros(2), rounds=rounds, burn_in=rounds // 4, watch=watch, keep=False
    )
    found = sampler.moments["all"].mean
    unit = torch.cat([oracle.theta_sd, oracle.sites_sd.flatten(), torch.ones(2)])
    gap = (found.mean(0) - torch.cat([oracle.theta, oracle.sites.flatten(), oracle.inclusion])) / unit
    error = ((found.std(0) / unit).square() / chains + oracle.error.square()).sqrt()
    assert float((gap / error).abs().max()) < sparse_oracle.bound(len(gap))
    assert float(gap[:-2].abs().max()) < 0.1
    assert float(gap[-2:].abs().max()) < 0.05


@pytest.mark.parametrize("seeds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_inclusion_at_the_sizes_of_the_paper(seeds: int) -> None:
    """Four sites of 125 rows, three effects of 0.5, noise 1, default hyperparameters."""
    effects = torch.zeros(11, dtype=torch.float64)
    effects[:3] = 0.5
    found = [
        sample(simulated([125] * 4, effects, seed), 150 if seeds > 1 else 30, sweeps=20).mean()["prior.included"]
        for seed in range(seeds)
    ]
    inclusion = torch.stack(found)
    assert float(inclusion[:, :3].mean()) > 0.9
    assert float(inclusion[:, 3:].mean()) < 0.2
    chosen = torch.stack([discoveries(1 - each, 0.1) for each in inclusion])
    false = chosen[:, 3:].sum(1) / chosen.sum(1).clamp(min=1)
    assert float(false.mean()) <= 0.1 + 3 * 0.1 / seeds**0.5  # a share in each of `seeds` repetitions


@pytest.mark.parametrize(
    ("replicates", "rounds"),
    [pytest.param(40, 50, id="short"), pytest.param(300, 1200, marks=pytest.mark.slow, id="long")],
)
def test_intervals_are_nominal(replicates: int, rounds: int) -> None:
    """Truth drawn from the prior: 95 % intervals of θ cover it in 95 % of cases, within 3 standard errors.

    So many federations of three sites side by side, each with its own truth and data.
    """
    prior = global_priors.spike_and_slab(spike=0.05, variance=(2.5, 0.7), inclusion=(1.5, 2.0))
    x = random.normal(random.key(5), (12, 2), torch.float64)
    ones = lambda keys: torch.ones(len(keys), dtype=torch.float64)
    setting = geweke.Setting(x, 3, 2.0, geweke.horseshoe_scales, _spike_and_slab_draws, ones)
    truth = geweke.draw_joint(setting, replicates, 6)
    data = geweke.regression_data(setting, truth.sites, geweke.keys(7, 3 * replicates))
    local, shared = sparse.regression(noise_shape=2.0), sparse.hierarchy(prior)
    joint = geweke.draw_joint(setting, replicates, 8)
    draws = []
    for t in range(rounds):
        joint = geweke.step(local, shared, setting, joint, data, t, sweeps=5)
        if t >= rounds // 5:
            draws.append(joint.shared.theta)
    low, high = torch.stack(draws).quantile(torch.tensor([0.025, 0.975]).double(), 0)
    rate = ((low < truth.shared.theta) & (truth.shared.theta < high)).double().mean(1)
    assert abs(float(rate.mean()) - 0.95) < 3 * max(float(rate.std()), 0.1) / replicates**0.5


def _spike_and_slab_draws(keys: Tensor, p: int) -> tuple[Tensor, global_priors.SpikeAndSlab]:
    """Direct draws from the prior of the intervals' test."""
    fold, f64 = lambda i: random.fold_in(keys, i), torch.float64
    rho = random.beta(fold(0), 1.5, 2.0, (), f64)
    gamma = (random.uniform(fold(1), (p,), f64) < rho[:, None]).to(f64)
    eta = 0.7 / random.gamma(fold(2), 2.5, (p,), f64)
    theta = random.normal(fold(3), (p,), f64) * (torch.where(gamma > 0, 1.0, 0.05) * eta).sqrt()
    return theta, global_priors.SpikeAndSlab(gamma, eta, rho)


@pytest.mark.parametrize(
    ("kernels", "coefficients"),
    [
        ((sparse.regression(), sparse.hierarchy()), 2),
        ((logistic.logistic_regression(), sparse.hierarchy()), 2),
        ((graphical.neighbourhoods(), graphical.every_response(sparse.hierarchy())), 6),
        ((directed.regression(), sparse.hierarchy()), 6),
    ],
)
def test_a_start_of_another_size_is_refused(kernels: Any, coefficients: int) -> None:
    data = simulated([4, 5], torch.ones(2).double())
    if coefficients == 2:
        data = data.map(lambda rows: (rows[0], (rows[1] > 0).double()))
    else:
        data = data.map(lambda rows: torch.cat([rows[0], rows[1][:, None]], 1))
    start = torch.zeros(3 if coefficients == 2 else 12)
    with pytest.raises(ValueError, match=f"Expected a start of {coefficients} coefficients for these rows, but got"):
        ft.Run(ft.gibbs(*kernels), ft.InProcess(data), start).step()


def test_discoveries_keep_their_rate() -> None:
    inclusion = random.uniform(random.key(0), (5, 8), torch.float64)
    for rate in (0.0, 0.05, 0.3, 1.0):
        chosen = discoveries(1 - inclusion, rate)
        assert not bool(chosen.any()) or float((1 - inclusion[chosen]).mean()) <= rate
        left = inclusion[~chosen]
        if left.numel():
            more = torch.cat([inclusion[chosen], left.max()[None]])
            assert float((1 - more).mean()) > rate
    with pytest.raises(ValueError, match="Expected a rate between 0 and 1"):
        discoveries(1 - inclusion, 2.0)


def test_hyperparameters_are_checked() -> None:
    for make, message in (
        (lambda: sparse.regression(noise_shape=0.0), "Expected a positive noise_shape, but got 0.0"),
        (lambda: sparse.hierarchy(scale=-1.0), "Expected a positive scale, but got -1.0"),
        (lambda: sparse.hierarchy(noise_prior=(0.0, 1.0)), "Expected a positive shape and rate of noise_prior"),
        (lambda: global_priors.spike_and_slab(spike=1.5), "Expected a spike between 0 and 1, but got 1.5"),
        (lambda: global_priors.spike_and_slab(inclusion=(0.0, 1.0)), "Expected two positive numbers for inclusion"),
        (lambda: global_priors.spike_and_slab(groups=[0, 2]), "Expected a block 0, 1, … for every coefficient"),
        (lambda: global_priors.regularised_horseshoe(slab=0.0), "Expected a positive slab"),
        (lambda: global_priors.gaussian(0.0), "Expected a positive scale"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(global_priors.spike_and_slab(groups=[0, 1])))
    with pytest.raises(ValueError, match="Expected a group for each of 3 coefficients, but got 2"):
        ft.Run(algorithm, ft.InProcess(linear_clients([4, 5])), torch.zeros(3)).step()
