"""Moves of the global parameter with all sites: their conditional in closed form, and what they are good for."""

from __future__ import annotations

from typing import Any

import arviz
import pytest
import torch
from support.oracles.closed_forms import distance, linear_clients
from support.oracles.sampled import sampled
from torch import Tensor

import fedtorch as ft
from fedtorch import exact, random
from fedtorch.models.gaussian import unpack
from fedtorch.models.gibbs import _interweaving as interweaving, deviations, global_priors, logistic, sparse

SIZES = [12, 5, 9, 30]


def told(rounds: int = 4) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """A round of two chains, and the sites' rows."""
    data = linear_clients(SIZES)
    algorithm = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2)
    faults = ft.Faults(after=lambda keys, ids: random.bernoulli(keys, 0.4))
    return ft.run(algorithm, ft.InProcess(data), torch.zeros(3), faults=faults, rounds=rounds).last, list(data)


def test_the_sums_are_the_likelihood_of_a_move() -> None:
    """Q and Q times the mean, from the rows of all sites in one place, also when some have not answered lately."""
    round, rows = told()
    shared, heard = round.server.variables, round.server.total
    score, information = exact.value(heard["score"]), unpack(exact.value(heard["information"]))
    found = score + (information @ shared.centre[..., None])[..., 0]
    sites = round.clients.table.read(slice(0, len(SIZES))).variables
    expected = [torch.zeros(2, 3).double(), torch.zeros(2, 3, 3).double()]
    for k, (x, y) in enumerate(rows):
        for c in range(2):
            deviation, noise = sites.place[k, c] - shared.centre[c], sites.noise[k, c]
            expected[0][c] += noise * x.T @ (y - x @ deviation)
            expected[1][c] += noise * x.T @ x
    assert distance(found, expected[0]) < 1e-11
    assert distance(information, expected[1]) < 1e-11


def test_a_move_is_a_draw_from_the_conditional() -> None:
    """Mean Q⁻¹ s and covariance Q⁻¹, by the moments of many chains at one place."""
    chains, p = 8_000, 2
    information = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    score, centre = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.3, 0.1]).double()
    prior = torch.tensor([0.5, 4.0]).double()
    packed = information[[0, 1, 1], [0, 0, 1]]
    wide = lambda value: value.expand(chains, -1)
    keys = random.fold_in(random.key(1), torch.arange(chains))
    found = interweaving.move(*(wide(part) for part in (score, packed, torch.zeros(p).double(), centre, prior)), keys)
    covariance = torch.linalg.inv(information + prior.diag())
    mean = covariance @ (score + information @ centre)
    z = (found.mean(0) - mean) / (covariance.diagonal() / chains).sqrt()
    assert float(z.abs().max()) < 4
    spread = (found - mean).T @ (found - mean) / chains
    error = ((covariance.square() + covariance.diagonal()[:, None] * covariance.diagonal()) / chains).sqrt()
    assert float(((spread - covariance) / error).abs().max()) < 4


def test_theta_stays_where_nothing_is_known_of_it() -> None:
    """Equal columns under a flat prior."""
    told = torch.ones(1, 2).double(), torch.ones(1, 3).double()
    theta = torch.tensor([[0.4, 0.7]]).double()
    assert torch.equal(interweaving.move(*told, theta, theta, torch.zeros(()).double(), random.key(0)[None]), theta)


def test_sites_that_are_silent_move_with_the_others() -> None:
    """What a site told before a move stays true after it: its deviation is its place less the centre."""
    round, _ = told(30)
    sites, shared = round.clients.table.read(slice(0, len(SIZES))).variables, round.server.variables
    moved = shared.theta - shared.centre
    assert float(moved.abs().min()) > 0
    lag = (sites.theta - sites.place - moved).abs().amax((1, 2))
    assert float(lag.max()) > 1e-3  # of one that was silent, or that moved after it answered
    heard = round.server.total
    _, first, second = exact.about(
        *exact.read(*(heard[name] for name in ("precision", "first", "second")), exact.limbs(shared.centre))
    )
    deviation = sites.place - shared.centre
    assert distance(first, (sites.precision * deviation).sum(0)) < 1e-11
    assert distance(second, (sites.precision * deviation.square()).sum(0)) < 1e-11


def test_silent_sites_leave_the_posterior_as_it_is() -> None:
    """The conjugate case in closed form, when every site is silent in half of the rounds: σ is as good as known."""
    tau, sigma, chains = 0.5, 0.8, 96
    keys = random.fold_in(random.key(0), torch.arange(3))
    x = random.normal(keys[0], (4, 15, 2), torch.float64)
    effects = torch.tensor([1.0, -0.5]).double() + tau * random.normal(keys[1], (4, 2), torch.float64)
    y = (x @ effects[..., None])[..., 0] + sigma * random.normal(keys[2], (4, 15), torch.float64)
    within = torch.linalg.inv(sigma**2 * torch.eye(15, dtype=torch.float64) + tau**2 * x @ x.mT)
    covariance = torch.linalg.inv(torch.eye(2, dtype=torch.float64) + (x.mT @ within @ x).sum(0))
    mean = covariance @ (x.mT @ within @ y[..., None]).sum(0)[:, 0]
    local = sparse.regression(deviation=deviations.normal(), noise_shape=1e9)
    shared = sparse.hierarchy(global_priors.gaussian(), scale=tau, noise_scale=1e9 * sigma**2)
    algorithm = ft.gibbs(local, shared, sweeps=1, chains=chains)
    population = ft.InProcess(ft.data.from_tensors([*zip(x, y)]))
    sampler = sampled(algorithm, population, torch.zeros(2), rounds=60, burn_in=20, faults=ft.dropouts(0.5))
    draws = sampler.draws()["theta"]
    for value, expected in ((draws, mean), ((draws - mean).square(), covariance.diagonal())):
        each = value.mean(1)
        assert float(((each.mean(0) - expected) / (each.std(0) / chains**0.5)).abs().max()) < 4


@pytest.mark.parametrize(
    ("make", "logits", "rounds"),
    [
        pytest.param(sparse.regression, False, 200, marks=pytest.mark.slow),
        pytest.param(logistic.logistic_regression, True, 60, marks=pytest.mark.slow),
    ],
)
def test_chains_mix_faster(make: Any, logits: bool, rounds: int) -> None:
    """Effective samples of θ with and without, the median coefficient of sites alike: twice as many at least."""
    x = random.normal(random.key(0), (4, 80, 4), torch.float64)
    mean = x @ torch.tensor([0.5, 0.5, 0.0, 0.0]).double()
    y = mean + random.normal(random.key(1), (4, 80), torch.float64)
    data = ft.data.from_tensors([(x[k], (y[k] > 0).double() if logits else y[k]) for k in range(4)])
    found = []
    for interweave in (0, sparse.INTERWEAVE):
        algorithm = ft.gibbs(make(interweave=interweave), sparse.hierarchy(), sweeps=2, chains=6)
        sampler = sampled(algorithm, ft.InProcess(data), torch.zeros(4), rounds=rounds, burn_in=rounds // 5)
        found.append(float(arviz.ess(sampler.inference_data())["theta"].median()))
    assert found[1] > 2 * found[0], found
