"""The baselines: Geweke's test of the site's sampler, consensus of normal draws in closed form."""

from __future__ import annotations

import pytest
import torch
from support.oracles import geweke
from support.oracles.closed_forms import linear_clients, same_bits
from support.oracles.sampled import sampled
from torch import Tensor

import fedtorch as ft
from experiments.sparse import baselines
from fedtorch import random

LENGTHS = [pytest.param((200, 60), id="short"), pytest.param((400, 250), id="long", marks=pytest.mark.slow)]
PRIOR = {"spike": 0.05, "variance": (2.5, 0.7), "inclusion": (1.5, 2.0), "noise": (2.0, 1.0)}


def prior_draws(count: int, purpose: int) -> baselines.LoneSite:
    keys = random.split(geweke.keys(purpose, count), 5)
    f64 = torch.float64
    rho = random.beta(keys[0], 1.5, 2.0, (1,), f64)
    gamma = (random.uniform(keys[1], (2,), f64) < rho).to(f64)
    eta = 0.7 / random.gamma(keys[2], 2.5, (2,), f64)
    theta = random.normal(keys[3], (2,), f64) * (torch.where(gamma > 0, 1.0, 0.05) * eta).sqrt()
    return baselines.LoneSite(theta[:, None], gamma[:, None], eta[:, None], random.gamma(keys[4], 2.0, (1,), f64))


def statistics(site: baselines.LoneSite) -> dict[str, Tensor]:
    product = (site.theta[..., 0] * site.included[..., 0]).tanh()
    values = {
        "theta": site.theta.tanh(),
        "gamma": site.included,
        "eta": site.variance.log(),
        "sigma2": -site.noise.log(),
    }
    return {**values, "product": product, "pair": site.included.prod(-1)}


@pytest.mark.parametrize("length", LENGTHS)
def test_geweke(length: tuple[int, int]) -> None:
    replicates, rounds = length
    x = random.normal(random.key(5), (6, 2), torch.float64)
    setting = geweke.Setting(x, 1, 2.0, geweke.fixed_scales, lambda keys, p: (keys, {}), lambda keys: keys)
    local, site = baselines.lone_regression(**PRIOR), prior_draws(replicates, 2)
    chains: dict[str, list[Tensor]] = {name: [] for name in statistics(site)}
    for t in range(rounds):
        data = geweke.regression_data(setting, site, geweke.keys(3, replicates, t))
        site = local.sweep({}, site, data, geweke.keys(4, replicates, t)[:, None], 1)
        for name, value in statistics(site).items():
            chains[name].append(value)
    name, score, bound = geweke.worst(geweke.z_scores(statistics(prior_draws(100 * replicates, 1)), chains))
    assert abs(score) < bound, (name, score, bound)


def test_consensus_of_normal_draws() -> None:
    """Sites with posteriors N(m_k, S_k) give N(m, S), S = (Σ S_k⁻¹)⁻¹, m = S Σ S_k⁻¹ m_k."""
    keys, draws = random.fold_in(random.key(1), torch.arange(3)), 20_000
    factors = torch.tensor([[[1.0, 0.0], [0.8, 0.3]], [[0.2, 0.0], [-0.4, 1.0]], [[0.5, 0.0], [0.1, 0.7]]]).double()
    means = torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]]).double()
    samples = means[:, None] + random.normal(keys, (draws, 2), torch.float64) @ factors.mT
    inverses = torch.linalg.inv(factors @ factors.mT)
    covariance = torch.linalg.inv(inverses.sum(0))
    mean = covariance @ (inverses @ means[..., None]).sum(0)[:, 0]
    joined = baselines.consensus(samples)
    error = covariance.diag().sqrt() / draws**0.5
    assert bool(((joined.mean(0) - mean).abs() < 8 * error).all())  # twice 4 errors: the weights are estimates, too
    assert torch.allclose(joined.mT.cov(), covariance, rtol=8 * (2 / draws) ** 0.5, atol=8e-3 * float(covariance.max()))


def test_pooled_and_separate_sites() -> None:
    data = linear_clients([40, 60])
    algorithm = ft.gibbs(baselines.lone_regression(), baselines.nothing_shared(), sweeps=5, chains=2)
    watch = lambda round: {"included": round.clients.table.read(slice(0, 1)).variables.included[0]}
    sampler = sampled(algorithm, ft.InProcess(data.pool()), torch.zeros(3), rounds=40, burn_in=10, watch=watch)
    assert ft.run(algorithm, ft.InProcess(data.pool()), torch.zeros(3), rounds=3).bytes_up == 0
    assert bool((sampler.mean()["included"] > 0).all())
    runs = [
        list(ft.Run(algorithm, ft.InProcess(data, chunk), torch.zeros(3)).rounds(3))[-1].clients.state_dict()
        for chunk in (None, 1)
    ]
    assert same_bits(*runs)


def test_votes_and_errors() -> None:
    votes = baselines.majority_vote(torch.tensor([[0.9, 0.6, 0.1], [0.7, 0.4, 0.2], [0.2, 0.1, 0.9]]))
    assert votes.tolist() == [True, False, False]
    with pytest.raises(ValueError, match=r"Expected draws \(K, T, p\) with more draws"):
        baselines.consensus(torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match="Expected a spike between 0 and 1"):
        baselines.lone_regression(spike=2.0)
