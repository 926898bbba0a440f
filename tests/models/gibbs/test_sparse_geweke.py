"""Geweke's test and calibration of every Gibbs kernel of the sparse models: short versions always, long with `slow`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles import calibration, geweke
from torch import Tensor

from fedtorch import random
from fedtorch.models.gibbs import _gaussian_conditional as gaussian_conditional, deviations, global_priors, sparse

LENGTHS = [pytest.param((40, 16), id="short"), pytest.param((250, 400), id="long", marks=pytest.mark.slow)]
SHAPE = 2.0


def design(n: int, p: int) -> Tensor:
    return random.normal(random.key(5), (n, p), torch.float64)


def normal_prior(keys: Tensor, p: int) -> tuple[Tensor, dict[str, Tensor]]:
    return random.normal(keys, (p,), torch.float64), {}


def no_statistics(prior: Any) -> dict[str, Tensor]:
    return {}


def one(keys: Tensor) -> Tensor:
    return torch.ones(len(keys), dtype=torch.float64)


SETTING = geweke.Setting(design(6, 2), 3, SHAPE, geweke.horseshoe_scales, normal_prior, one)


def spike_and_slab(
    groups: list[int], shared: bool
) -> Callable[[Tensor, int], tuple[Tensor, global_priors.SpikeAndSlab]]:
    def draw(keys: Tensor, p: int) -> tuple[Tensor, global_priors.SpikeAndSlab]:
        fold, f64 = lambda i: random.fold_in(keys, i), torch.float64
        rho = random.beta(fold(0), 1.5, 2.0, (), f64)
        blocks = max(groups) + 1
        gamma = (random.uniform(fold(1), (blocks,), f64) < rho[:, None]).to(f64)[:, torch.tensor(groups)]
        eta = 0.7 / random.gamma(fold(2), 2.5, (1 if shared else p,), f64)
        z = random.normal(fold(3), (p,), f64)
        theta = z * (torch.where(gamma > 0, 1.0, 0.05) * eta).sqrt()
        return theta, global_priors.SpikeAndSlab(gamma, eta, rho)

    return draw


def of_spike_and_slab(prior: global_priors.SpikeAndSlab) -> dict[str, Tensor]:
    pairs = (prior.included[:, :1] * prior.included[:, -1:]).clone()
    return {"gamma": prior.included, "log eta": prior.variance.log(), "rho": prior.inclusion[:, None], "pairs": pairs}


def mixture(scales: geweke.Scales, slab: float) -> Callable[[Tensor, int], tuple[Tensor, global_priors.Mixture]]:
    """Direct draws: the scales are accepted with the probability that the slab leaves to them."""

    def draw(keys: Tensor, p: int) -> tuple[Tensor, global_priors.Mixture]:
        leaves = [torch.empty(len(keys), size, dtype=torch.float64) for size in (p, p, 1, 1)]
        left, attempt = torch.arange(len(keys)), 0
        while len(left):
            key = random.fold_in(keys[left], attempt)
            drawn = (*scales(random.fold_in(key, 0), (p,)), *geweke.horseshoe_scales(random.fold_in(key, 1), (1,)))
            for leaf, new in zip(leaves, drawn):
                leaf[left] = new
            keep = (1 + slab / (drawn[0] * drawn[2])).rsqrt().prod(-1)
            left = left[random.uniform(random.fold_in(key, 2), (), torch.float64) >= keep]
            attempt += 1
        w, u, t, x = leaves
        theta = random.normal(random.fold_in(keys, -1), (p,), torch.float64) / (w * t + slab).sqrt()
        return theta, global_priors.Mixture(w, u, t, x)

    return draw


def of_mixture(prior: global_priors.Mixture) -> dict[str, Tensor]:
    return {"log lambda_j": -prior.precision.log(), "log tau_0": -prior.scale.log()}


def check(scores: dict[str, float]) -> None:
    name, score, bound = geweke.worst(scores)
    assert abs(score) < bound, (name, score, bound)


GLOBAL = {
    "gaussian": (global_priors.gaussian(), normal_prior, no_statistics),
    "spike and slab": (
        global_priors.spike_and_slab(spike=0.05, variance=(2.5, 0.7), inclusion=(1.5, 2.0)),
        spike_and_slab([0, 1], False),
        of_spike_and_slab,
    ),
    "shared variance": (
        global_priors.spike_and_slab(spike=0.05, variance=(2.5, 0.7), inclusion=(1.5, 2.0), shared_variance=True),
        spike_and_slab([0, 1], True),
        of_spike_and_slab,
    ),
    "groups": (
        global_priors.spike_and_slab(spike=0.05, variance=(2.5, 0.7), inclusion=(1.5, 2.0), groups=[0, 1, 1]),
        spike_and_slab([0, 1, 1], False),
        of_spike_and_slab,
    ),
    "regularised horseshoe": (
        global_priors.regularised_horseshoe(slab=1.5),
        mixture(geweke.horseshoe_scales, 1.5**-2),
        of_mixture,
    ),
    "Bayesian lasso": (global_priors.bayesian_lasso(), mixture(geweke.laplace_scales, 0.0), of_mixture),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", GLOBAL)
def test_global_priors(name: str, length: tuple[int, int]) -> None:
    prior, draw, of_prior = GLOBAL[name]
    setting = SETTING._replace(prior=draw, x=design(6, 3 if name == "groups" else 2))
    local, shared = sparse.regression(noise_shape=SHAPE), sparse.hierarchy(prior)
    check(geweke.run(local, shared, setting, of_prior, *length))


DEVIATIONS = {
    "horseshoe": (deviations.horseshoe(), geweke.horseshoe_scales),
    "laplace": (deviations.laplace(), geweke.laplace_scales),
    "normal": (deviations.normal(), geweke.fixed_scales),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", DEVIATIONS)
def test_deviations_and_several_sweeps(name: str, length: tuple[int, int]) -> None:
    deviation, scales = DEVIATIONS[name]
    local = sparse.regression(deviation=deviation, noise_shape=SHAPE)
    shared = sparse.hierarchy(global_priors.gaussian())
    check(geweke.run(local, shared, SETTING._replace(scales=scales), no_statistics, *length, sweeps=3))


@pytest.mark.parametrize("length", LENGTHS)
def test_noise_that_sites_share_and_known_scales(length: tuple[int, int]) -> None:
    def rate(keys: Tensor) -> Tensor:
        return random.gamma(keys, 3.0, (), torch.float64) / 2.0

    shared = sparse.hierarchy(global_priors.gaussian(), scale=0.3, noise_prior=(3.0, 2.0), noise_shape=SHAPE)
    setting = SETTING._replace(noise=rate, scale=0.3)
    check(geweke.run(sparse.regression(noise_shape=SHAPE), shared, setting, no_statistics, *length))


@pytest.mark.parametrize("length", [pytest.param((40, 6), id="short"), LENGTHS[1]])
@pytest.mark.parametrize("rows", [3, 9], ids=["fewer rows than coefficients", "more rows"])
def test_one_problem_after_another(rows: int, length: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "gaussian_conditional", gaussian_conditional.factorisation)
    x = design(rows, 4)

    def simulate(setting: geweke.Setting, sites: sparse.RegressionSite, key: Tensor) -> gaussian_conditional.Design:
        y = geweke.draw_responses(setting, sites, key)
        data = geweke.regression_data(setting, sites, key)
        return data._replace(x=x.expand(len(y), *x.shape), y=y)

    setting = SETTING._replace(x=x, sites=2)
    shared = sparse.hierarchy(global_priors.gaussian())
    scores = geweke.run(
        sparse.regression(noise_shape=SHAPE), shared, setting, no_statistics, *length, simulate=simulate
    )
    check(scores)


def test_it_fails_without_the_factor_one_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conditional of τ_j² as printed in the source's Algorithm 3, a fault that the test must find."""
    about = sparse.exact.about
    monkeypatch.setattr(sparse.exact, "about", lambda *sums: (*about(*sums)[:2], 2 * about(*sums)[2]))
    shared = sparse.hierarchy(global_priors.gaussian())
    scores = geweke.run(sparse.regression(noise_shape=SHAPE), shared, SETTING, no_statistics, 60, 40)
    _, score, bound = geweke.worst(scores)
    assert abs(score) > 2 * bound


CALIBRATED = [
    pytest.param(calibration.Length(200, 15, 20, 4), id="short"),
    pytest.param(calibration.Length(2000, 31, 60, 12), id="long", marks=pytest.mark.slow),
]


def places(
    local: Any, shared: Any, setting: geweke.Setting, of_prior: Any, length: calibration.Length
) -> dict[str, Tensor]:
    truth = geweke.draw_joint(setting, length.replicates, 6)
    data = geweke.regression_data(setting, truth.sites, geweke.keys(7, setting.sites * length.replicates))
    statistics = lambda joint: geweke.statistics(joint, setting.sites, of_prior)
    start = torch.zeros(setting.x.shape[1])
    return calibration.of_gibbs(local, shared, setting, truth, data, statistics, length, start=start, sweeps=5)


@pytest.mark.parametrize("length", CALIBRATED)
@pytest.mark.parametrize("name", GLOBAL)
def test_posteriors_under_global_priors_are_calibrated(name: str, length: calibration.Length) -> None:
    prior, draw, of_prior = GLOBAL[name]
    setting = SETTING._replace(prior=draw, x=design(6, 3 if name == "groups" else 2))
    local, shared = sparse.regression(noise_shape=SHAPE), sparse.hierarchy(prior)
    calibration.check(places(local, shared, setting, of_prior, length))


@pytest.mark.parametrize("length", CALIBRATED)
@pytest.mark.parametrize("name", ["laplace", "normal"])
def test_posteriors_of_deviations_are_calibrated(name: str, length: calibration.Length) -> None:
    deviation, scales = DEVIATIONS[name]
    local = sparse.regression(deviation=deviation, noise_shape=SHAPE)
    setting = SETTING._replace(scales=scales)
    calibration.check(places(local, sparse.hierarchy(global_priors.gaussian()), setting, no_statistics, length))


def test_a_sampler_that_is_wrong_is_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same fault as Geweke's test finds."""
    about = sparse.exact.about
    monkeypatch.setattr(sparse.exact, "about", lambda *sums: (*about(*sums)[:2], 2 * about(*sums)[2]))
    shared = sparse.hierarchy(global_priors.gaussian())
    length = calibration.Length(400, 15, 20, 4)
    found = calibration.worst(places(sparse.regression(noise_shape=SHAPE), shared, SETTING, no_statistics, length))
    assert found.probability < found.bound
