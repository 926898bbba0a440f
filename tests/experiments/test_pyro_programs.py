"""The Pyro programs are the models of the Gibbs samplers: by their joint density, by NUTS, and by exact oracles."""

from __future__ import annotations

import math

import pytest
import torch
from pyro import poutine
from scipy import stats
from support.oracles import sparse_oracle
from support.oracles.sampled import sampled
from torch import Tensor

import fedtorch as ft
from experiments.benchmarks.parts import pyro_programs
from fedtorch import random
from fedtorch.models.gibbs import logistic, sparse
from fedtorch.models.gibbs.kernels import LocalKernel


def sites(counts: tuple[int, ...], effects: list[float], seed: int = 0) -> ft.data.FederatedData:
    """Sites with the same coefficients and standard normal noise."""
    key = random.fold_in(random.key(seed), torch.arange(2))
    beta, total = torch.tensor(effects, dtype=torch.float64), sum(counts)
    x = random.normal(key[0], (total, len(effects)), torch.float64)
    y = x @ beta + random.normal(key[1], (total,), torch.float64)
    return ft.data.FederatedData((x, y), torch.tensor(counts))


def log_density(data: ft.data.FederatedData, v: dict[str, Tensor]) -> float:
    """The joint density of the model, written with scipy."""
    total = stats.beta(1, 1).logpdf(float(v["rho"]))
    for j, (theta, eta) in enumerate(zip(v["theta"].tolist(), v["eta"].tolist())):
        total += stats.invgamma(2, scale=0.5).logpdf(eta)
        rho, slab = float(v["rho"]), stats.norm(0, math.sqrt(eta)).pdf(theta)
        total += math.log(rho * slab + (1 - rho) * stats.norm(0, math.sqrt(0.01 * eta)).pdf(theta))
        total += stats.halfcauchy.logpdf(float(v["tau"][j]))
    for k, (x, y) in enumerate(data):
        scale = v["lambda"][k] * v["tau"]
        total += stats.halfcauchy.logpdf(v["lambda"][k].numpy()).sum() + stats.norm.logpdf(v["z"][k].numpy()).sum()
        total += stats.invgamma(1, scale=1).logpdf(float(v["sigma2"][k]))
        mean = (x @ (v["theta"] + scale * v["z"][k])).numpy()
        total += stats.norm(mean, math.sqrt(float(v["sigma2"][k]))).logpdf(y.numpy()).sum()
    return float(total)


def test_the_joint_density() -> None:
    data = sites((4, 7), [0.6, 0.0])
    program = pyro_programs.regression(data)
    for seed in range(5):
        keys = random.fold_in(random.key(seed), torch.arange(7))
        positive = lambda i, shape, keys=keys: random.exponential(keys[i], shape, torch.float64)
        values = {
            "rho": random.uniform(keys[0], (), torch.float64),
            "eta": positive(1, (2,)),
            "theta": random.normal(keys[2], (2,), torch.float64),
            "tau": positive(3, (2,)),
            "lambda": positive(4, (2, 2)),
            "z": random.normal(keys[5], (2, 2), torch.float64),
            "sigma2": positive(6, (2,)),
        }
        trace = poutine.trace(poutine.condition(program, values)).get_trace()
        assert float(trace.log_prob_sum()) == pytest.approx(log_density(data, values), rel=1e-10)


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    draws = pyro_programs.nuts(pyro_programs.regression(sites((9, 7), [0.6])), draws=3, warmup=3, depth=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert draws["theta_k"].shape == (3, 2, 1)
    assert 0 < float(pyro_programs.inclusion(draws)) < 1
    binary = sites((9, 7), [0.6]).map(lambda rows: (rows[0], (rows[1] > 0).double()))
    assert pyro_programs.nuts(pyro_programs.logistic_regression(binary), draws=2, warmup=2, depth=2)[
        "intercept"
    ].shape == (
        2,
        2,
    )


def test_other_priors_and_the_inclusion_of_one_draw() -> None:
    program = pyro_programs.regression(sites((4, 7), [0.6]), pyro_programs.Priors(noise=(3.0, 1.0)))
    law = poutine.trace(program).get_trace().nodes["sigma2"]["fn"]
    assert torch.equal(law.mean, torch.full((2,), 0.5, dtype=torch.float64))  # of IG(3, 1), for each site
    one_draw = {"theta": torch.tensor([[0.0, 3.0]]), "eta": torch.ones(1, 2), "rho": torch.tensor([0.5])}
    found = pyro_programs.inclusion(one_draw, spike=0.01)
    assert found.tolist() == pytest.approx([1 / 11, 1.0], rel=1e-4)  # at 0 the spike is ten times as high


def test_the_density_without_the_sites_coefficients() -> None:
    """It is that of the whole model at (θ_k) less the conditional density of θ_k given the rest, at any θ_k."""
    data = sites((4, 7), [0.6, 0.0])
    keys = random.split(random.key(3), 6)
    positive = lambda i, shape: random.exponential(keys[i], shape, torch.float64)
    values = {
        "rho": random.uniform(keys[0], (), torch.float64),
        "eta": positive(1, (2,)),
        "theta": random.normal(keys[2], (2,), torch.float64),
        "tau": positive(3, (2,)),
        "lambda": positive(4, (2, 2)),
        "sigma2": positive(5, (2,)),
    }
    trace = poutine.trace(poutine.condition(pyro_programs.collapsed_regression(data), values)).get_trace()
    z = random.normal(random.key(4), (2, 2), torch.float64)
    expected = log_density(data, {**values, "z": z})
    for k, (x, y) in enumerate(data):
        scale, noise = values["lambda"][k] * values["tau"], values["sigma2"][k]
        design = x * scale
        covariance = torch.linalg.inv(design.T @ design / noise + torch.eye(2, dtype=torch.float64))
        mean = covariance @ design.T @ (y - x @ values["theta"]) / noise
        expected -= float(stats.multivariate_normal(mean.numpy(), covariance.numpy()).logpdf(z[k].numpy()))
    assert float(trace.log_prob_sum()) == pytest.approx(expected, rel=1e-9)
    draws = {name: value.expand(20_000, *value.shape) for name, value in values.items()}
    found = pyro_programs.site_coefficients(data, draws, random.key(5))
    last_mean, last_sd = values["theta"] + scale * mean, scale * covariance.diagonal().sqrt()
    assert bool(((found[:, 1].mean(0) - last_mean).abs() < 4.5 * last_sd / 20_000**0.5).all())
    assert torch.allclose(found[:, 1].std(0), last_sd, rtol=4.5 / 40_000**0.5)


def check_agreement(found: Tensor, sd: Tensor, oracle: sparse_oracle.Posterior) -> None:
    """Posterior means within 0.1 sd and inclusion probabilities within 0.05; all by (θ, θ_1, …, inclusion)."""
    gap = found - torch.cat([oracle.theta, oracle.sites.flatten(), oracle.inclusion])
    assert float((gap / sd)[:-1].abs().max()) < 0.1, gap / sd
    assert float(gap[-1:].abs().max()) < 0.05, gap


def small_posterior(kind: str) -> tuple[ft.data.FederatedData, sparse_oracle.Posterior, Tensor]:
    """Two sites, their posterior, and the units of its moments; errors of the oracle are below 0.01 of these."""
    data = sites((25, 30), [0.5], seed=1)
    if kind == "linear":
        oracle = sparse_oracle.regression(data)
    else:
        data = data.map(lambda rows: (rows[0], (rows[1] > 0).double()))
        oracle = sparse_oracle.logistic_regression(data, 40_000)
    assert float(oracle.error.max()) < 0.01
    return data, oracle, torch.cat([oracle.theta_sd, oracle.sites_sd.flatten(), torch.ones(1)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_nuts_agrees_with_the_posterior(kind: str) -> None:
    data, oracle, sd = small_posterior(kind)
    linear = kind == "linear"
    program = pyro_programs.collapsed_regression(data) if linear else pyro_programs.logistic_regression(data)
    draws = pyro_programs.nuts(program, draws=2000, warmup=200, depth=7, compile=True)
    if linear:
        draws["theta_k"] = pyro_programs.site_coefficients(data, draws, random.key(0))
    means = [draws["theta"].mean(0), draws["theta_k"].mean(0).flatten(), pyro_programs.inclusion(draws)]
    check_agreement(torch.cat(means), sd, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_gibbs_agrees_with_the_posterior(kind: str) -> None:
    """Against draws without Markov chains, also within the Monte Carlo errors of both."""
    data, oracle, sd = small_posterior(kind)
    local: LocalKernel = sparse.regression() if kind == "linear" else logistic.logistic_regression()

    def watch(round: ft.Round) -> dict[str, Tensor]:
        own = round.clients.table.read(slice(0, 2)).variables.theta.transpose(0, 1)
        shared = round.server.variables
        return {"all": torch.cat([shared.theta, own.flatten(1), shared.prior.included], 1)}

    algorithm = ft.gibbs(local, sparse.hierarchy(), sweeps=10 if kind == "linear" else 3, chains=64)
    sampler = sampled(algorithm, ft.InProcess(data), torch.zeros(1), rounds=450, burn_in=50, watch=watch, keep=False)
    found = sampler.moments["all"].mean
    check_agreement(found.mean(0), sd, oracle)
    error = ((found.std(0) / sd).square() / 64 + oracle.error.square()).sqrt()
    z = (found.mean(0) - torch.cat([oracle.theta, oracle.sites.flatten(), oracle.inclusion])) / sd / error
    assert float(z.abs().max()) < sparse_oracle.bound(len(z))
