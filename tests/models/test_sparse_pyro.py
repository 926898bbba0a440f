"""The Pyro programs are the models of the Gibbs samplers: by their joint density, and by NUTS."""

from __future__ import annotations

import math

import pytest
import torch
from pyro import poutine
from scipy import stats
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.models import logistic, sparse, sparse_pyro


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
    program = sparse_pyro.regression(data)
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
    draws = sparse_pyro.nuts(sparse_pyro.regression(sites((9, 7), [0.6])), draws=3, warmup=3, depth=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert draws["theta_k"].shape == (3, 2, 1)
    assert 0 < float(sparse_pyro.inclusion(draws)) < 1
    binary = sites((9, 7), [0.6]).map(lambda rows: (rows[0], (rows[1] > 0).double()))
    assert sparse_pyro.nuts(sparse_pyro.logistic_regression(binary), draws=2, warmup=2, depth=2)["intercept"].shape == (
        2,
        2,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_gibbs_agrees_with_nuts(kind: str) -> None:
    """Posterior means within 0.1 sd and inclusion probabilities within 0.05."""
    data = sites((25, 30), [0.5], seed=1)
    program, local = sparse_pyro.regression(data), sparse.regression()
    if kind == "logistic":
        data = data.map(lambda rows: (rows[0], (rows[1] > 0).double()))
        program, local = sparse_pyro.logistic_regression(data), logistic.logistic_regression()

    def watch(round: ft.Round) -> dict[str, Tensor]:
        own = round.clients.table.read(slice(0, 2)).variables.theta.transpose(0, 1)
        shared = round.server.variables
        return {"theta": shared.theta, "theta_k": own, "included": shared.prior.included}

    algorithm = ft.gibbs(local, sparse.hierarchy(), sweeps=10, chains=8)
    rounds = 3000 if kind == "linear" else 1000
    sampler = ft.Sampler(algorithm, ft.InProcess(data), torch.zeros(1), burn_in=100, watch=watch).run(rounds)
    oracle = sparse_pyro.nuts(program, draws=1500, warmup=500)
    for name in ("theta", "theta_k"):
        gap = (sampler.mean()[name] - oracle[name].mean(0)).abs() / oracle[name].std(0)
        assert float(gap.max()) < 0.1, (name, gap)
    gap = (sampler.mean()["included"] - sparse_pyro.inclusion(oracle)).abs()
    assert float(gap.max()) < 0.05, gap
