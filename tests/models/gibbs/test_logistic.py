"""Pólya–Gamma numbers by their Laplace transform, logistic regression by Geweke's test and against quadrature."""

from __future__ import annotations

import math

import pytest
import torch
from support.oracles import calibration, geweke
from support.oracles.closed_forms import linear_clients, same_bits
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.models.gibbs import global_priors, logistic, sparse
from fedtorch.models.gibbs.polya_gamma import polya_gamma

SAMPLES = 40_000


@pytest.mark.parametrize("tilt", [0.0, 0.3, -2.0, 3.2, 8.0, 60.0])
def test_polya_gamma_has_its_laplace_transform(tilt: float) -> None:
    """E e^{−sω} = cosh(ψ/2) / cosh(√((ψ²/2 + s)/2)) (Polson et al. 2013, equation 2), and the mean."""
    draws = polya_gamma(random.key(3), torch.full((SAMPLES,), tilt, dtype=torch.float64))
    assert bool((draws > 0).all())
    for s in (0.5, 3.0, 20.0, 200.0):
        values = (-s * draws).exp()
        expected = math.exp(_log_cosh(tilt / 2) - _log_cosh(math.sqrt((tilt**2 / 2 + s) / 2)))
        assert abs(float(values.mean()) - expected) < 4 * float(values.std()) / SAMPLES**0.5
    mean = 0.25 if tilt == 0 else math.tanh(tilt / 2) / (2 * tilt)
    assert abs(float(draws.mean()) - mean) < 4 * float(draws.std()) / SAMPLES**0.5


def _log_cosh(x: float) -> float:
    return abs(x) + math.log1p(math.exp(-2 * abs(x))) - math.log(2)


def test_polya_gamma_numbers_depend_on_their_place_only() -> None:
    keys = random.fold_in(random.key(4), torch.arange(6)).reshape(2, 3)
    tilt = 4 * random.normal(random.key(5), (2, 3, 50), torch.float64)
    stacked = polya_gamma(keys, tilt)
    assert torch.equal(stacked[1, 2], polya_gamma(keys[1, 2], tilt[1, 2]))
    assert torch.equal(stacked[..., :7], polya_gamma(keys, tilt[..., :7]))
    assert polya_gamma(keys[:0], tilt[:0]).shape == (0, 3, 50)


X = random.normal(random.key(6), (4, 1), torch.float64)


def _normal(keys: Tensor, p: int) -> tuple[Tensor, dict[str, Tensor]]:
    return random.normal(keys, (p,), torch.float64), {}


def _ones(keys: Tensor) -> Tensor:
    return torch.ones(len(keys), dtype=torch.float64)


SETTING = geweke.Setting(X, 2, 1.0, geweke.horseshoe_scales, _normal, _ones)
KERNELS = logistic.logistic_regression(intercept_scale=2.0), sparse.hierarchy(global_priors.gaussian())


def simulate(setting: geweke.Setting, sites: logistic.LogisticSite, key: Tensor) -> logistic._Rows:
    psi = (setting.x * sites.theta).sum(-1) + sites.intercept
    y = (random.uniform(key, (len(setting.x),), torch.float64) < torch.sigmoid(psi)).double()
    rows = torch.cat([torch.ones_like(setting.x[:, :1]), setting.x], -1).expand(len(y), -1, -1)
    return logistic._Rows(rows, y - 0.5, torch.full((len(y),), len(setting.x)))


def start(joint: geweke.Joint) -> geweke.Joint:
    intercept = 2.0 * random.normal(geweke.keys(9, len(joint.sites.theta)), (1,), torch.float64)
    sites = logistic.LogisticSite(*joint.sites._replace(noise=torch.ones_like(intercept)), intercept)
    return joint._replace(sites=sites)


@pytest.mark.parametrize(
    "length", [pytest.param((10, 12), id="short"), pytest.param((100, 250), marks=pytest.mark.slow)]
)
def test_geweke(length: tuple[int, int]) -> None:
    scores = geweke.run(*KERNELS, SETTING, lambda prior: {}, *length, simulate=simulate, start=start)
    name, score, bound = geweke.worst(scores)
    assert abs(score) < bound, (name, score, bound)


@pytest.mark.slow
def test_posteriors_are_calibrated() -> None:
    length = calibration.Length(400, 15, 12, 3)
    truth = start(geweke.draw_joint(SETTING, length.replicates, 6))
    data = simulate(SETTING, truth.sites, geweke.keys(7, SETTING.sites * length.replicates))
    statistics = lambda joint: geweke.statistics(joint, SETTING.sites, lambda prior: {})
    begin = torch.zeros(1)
    calibration.check(calibration.of_gibbs(*KERNELS, SETTING, truth, data, statistics, length, start=begin, sweeps=2))


def binary_clients(sizes: list[int]) -> ft.data.FederatedData:
    return linear_clients(sizes).map(lambda rows: (rows[0], (rows[1] > 0).double()))


def test_chunks_and_no_clients() -> None:
    algorithm = ft.gibbs(logistic.logistic_regression(), sparse.hierarchy(), sweeps=2, chains=2)
    runs = [
        list(ft.Run(algorithm, ft.InProcess(binary_clients([5, 9, 30]), chunk), torch.zeros(3)).rounds(3))[-1].server
        for chunk in (None, 1)
    ]
    assert same_bits(*runs)


def test_responses_are_checked() -> None:
    algorithm = ft.gibbs(logistic.logistic_regression(), sparse.hierarchy())
    with pytest.raises(ValueError, match="Client 'client 0': Expected responses of 0 and 1"):
        ft.Run(algorithm, ft.InProcess(linear_clients([5, 9])), torch.zeros(3)).step()
