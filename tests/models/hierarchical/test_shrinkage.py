"""Penalised hierarchical models against one another, brute-force integration, and the selection they are for."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from support.oracles.closed_forms import distance
from torch import Tensor
from torch.distributions import MultivariateNormal

import fedtorch as ft
from fedtorch.federation.algorithms.ep import devices, posterior, settled
from fedtorch.federation.algorithms.ep.fitting import converged
from fedtorch.models._reduced import reduced
from fedtorch.models.device_posterior import selected
from fedtorch.models.hierarchical import hyperpriors, shrinkage
from fedtorch.models.hierarchical.shrinkage import ShrinkagePrior
from fedtorch.models.linear import block_statistics


def data(count: int, rows: int, coefficients: list[float], noise: float, seed: int = 0) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(seed)
    theta, clients = torch.tensor(coefficients, dtype=torch.float64), []
    for _ in range(count):
        x = torch.randn(rows, len(theta), generator=generator, dtype=torch.float64)
        clients.append((x, x @ theta + noise * torch.randn(rows, generator=generator, dtype=torch.float64)))
    return ft.data.from_tensors(clients)


KINDS = {
    "ridge": shrinkage.ridge,
    "lasso": shrinkage.lasso,
    "elastic net": shrinkage.elastic_net,
    "fused lasso": shrinkage.fused_lasso,
    "horseshoe": shrinkage.horseshoe,
}


def infer(penalty: ShrinkagePrior, rows: ft.data.FederatedData) -> ft.Run:
    model = shrinkage.penalised(penalty, penalties=hyperpriors.log_normal(0.0, 2.0))
    return ft.run(ft.ep(model), ft.InProcess(rows), rounds=50, until=settled())


@functools.cache
def inferred(name: str) -> ft.Run:
    """A penalty of four coefficients on the same rows, for several tests."""
    return infer(KINDS[name](4), data(5, 30, [1.5, 1.5, 0.0, 0.0], 0.5))


def log_prior(name: str, theta: Tensor, log_penalties: list[float], noise: float) -> Tensor:
    """log p(θ | φ) of two coefficients as section 4.3 and Van Erp et al. write it; of each one for the horseshoe."""
    sigma = noise**0.5
    rates = [math.exp(value) for value in log_penalties]
    if name == "lasso":
        return (-rates[0] / sigma * theta.abs() + math.log(rates[0] / sigma / 2)).sum(-1)
    if name == "ridge":
        return torch.distributions.Normal(0.0, (noise / rates[0]) ** 0.5).log_prob(theta).sum(-1)
    if name == "elastic net":
        return (-rates[0] / sigma * theta.abs() - rates[1] / (2 * noise) * theta.square()).sum(-1)
    if name == "fused lasso":
        return -rates[0] / sigma * theta.abs().sum(-1) - rates[1] / sigma * (theta[..., 1] - theta[..., 0]).abs()
    scale = rates[0] * sigma
    local = torch.linspace(-16, 16, 1601, dtype=torch.float64)
    half_cauchy = math.log(2 / math.pi) + local - torch.nn.functional.softplus(2 * local) + math.log(0.02)
    spread = scale * local.exp()
    log = -0.5 * (theta[..., None] / spread).square() - spread.log() - 0.5 * math.log(2 * math.pi) + half_cauchy
    return log.logsumexp(-1)


CASES = {
    "ridge": (shrinkage.ridge(2), [0.3]),
    "lasso": (shrinkage.lasso(2), [0.3]),
    "elastic net": (shrinkage.elastic_net(2), [0.3, -0.4]),
    "fused lasso": (shrinkage.fused_lasso(2), [0.3, 0.8]),
    "horseshoe": (shrinkage.horseshoe(2), [0.3]),
}


@pytest.mark.parametrize("name", CASES)
def test_evidence_and_moments_of_a_device(name: str) -> None:
    """log ∫ N(y; Xθ, σ²) p(θ | φ) dθ and the moments of θ by sums over a grid of θ."""
    penalty, log_penalties = CASES[name]
    x, y = data(1, 4, [0.8, 0.1], 0.5)[0]
    noise = 0.3
    line = torch.linspace(-12, 12, 961, dtype=torch.float64) + 0.0125  # not at the kinks or the pole at 0
    theta = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    if name == "horseshoe":
        each = log_prior(name, line, log_penalties, noise)
        prior = (each[:, None] + each).flatten()
    else:
        prior = log_prior(name, theta, log_penalties, noise)
    if name in ("elastic net", "fused lasso"):
        prior = prior - (prior.logsumexp(0) + 2 * math.log(0.025))
    likelihood = torch.distributions.Normal(theta @ x.mT, noise**0.5).log_prob(y).sum(-1)
    log = prior + likelihood
    weight = torch.softmax(log, 0)
    mean = weight @ theta
    sd = (weight @ (theta - mean).square()).sqrt()
    evidence = float(log.logsumexp(0)) + 2 * math.log(0.025)
    statistics = reduced(block_statistics(ft.data.from_tensors([(x, y)]).stack([0]), 2))
    zeta = torch.tensor(log_penalties, dtype=torch.float64)[None, None]
    found = shrinkage._sparse(penalty, statistics, zeta, torch.full((1, 1), math.log(noise), dtype=torch.float64))
    # Expectation propagation over θ is exact for the ridge; for the others it has errors of its own.
    tolerance = 1e-4 if name == "ridge" else 0.05
    centre, covariance = found.moments()
    assert abs(float(found.log_evidence) - evidence) < tolerance
    assert float(((centre[0, 0] - mean) / sd).abs().max()) < tolerance
    assert float((covariance[0, 0].diagonal().sqrt() / sd - 1).abs().max()) < tolerance


def test_the_ridge_is_a_normal_model() -> None:
    x, y = data(1, 5, [0.8, 0.1, -0.4], 0.5)[0]
    statistics = reduced(block_statistics(ft.data.from_tensors([(x, y)]).stack([0]), 3))
    zeta, log_noise = torch.tensor([[[0.5]]]).double(), torch.tensor([[-0.75]]).double()
    found = shrinkage._sparse(shrinkage.ridge(3), statistics, zeta, log_noise)
    noise, variance = math.exp(-0.75), math.exp(-0.75 - 0.5)
    covariance = variance * x @ x.mT + noise * torch.eye(5).double()
    expected = MultivariateNormal(torch.zeros(5).double(), covariance).log_prob(y)
    assert abs(float(found.log_evidence - expected)) < 1e-10


def test_one_part_of_the_elastic_net_at_zero_is_the_other() -> None:
    rows = data(5, 30, [1.5, 1.5, 0.0, 0.0], 0.5)
    for penalty, pure in ((shrinkage.elastic_net(4, l2=1e-10), "lasso"), (shrinkage.elastic_net(4, l1=1e-10), "ridge")):
        near, exact = posterior(infer(penalty, rows)), posterior(inferred(pure))
        assert distance(near.mean, exact.mean) < 1e-5
        assert distance(near.stddev, exact.stddev) < 1e-5


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("elastic net", "fused lasso"))) for name in KINDS]
)
def test_every_penalty_converges_and_finds_the_noise(name: str) -> None:
    run = inferred(name)
    q = posterior(run)
    assert converged(run)
    assert run.algorithm.settings["model"].names[-1] == "log noise"
    assert abs(float((q.mean[-1] - 2 * math.log(0.5)) / q.stddev[-1])) < 3
    marginals = devices(run).marginals()
    assert bool(selected(marginals, 0.9)[:, :2].all())


def test_more_features_than_rows() -> None:
    rows = data(5, 3, [2.0, 0.0, 0.0, 0.0], 0.1)
    run = infer(shrinkage.lasso(4), rows)
    assert converged(run)
    assert bool(devices(run).distribution().mean.isfinite().all())


def selection(runs: int) -> tuple[float, Tensor]:
    """Correct inclusion, and the false inclusion of each run, of case I of Table 2."""
    truth = [3, 1.5, 0, 0, 2, 0, 0, 0]
    correct, wrong = [], []
    for seed in range(runs):
        rows = data(10, 100, truth, 0.05, seed)
        chosen = selected(devices(infer(shrinkage.lasso(8), rows)).marginals(), 0.9)
        null = torch.tensor(truth) == 0
        correct.append(float(chosen[:, ~null].double().mean()))
        wrong.append(float(chosen[:, null].double().mean()))
    return min(correct), torch.tensor(wrong)


@pytest.mark.slow
def test_selection_includes_all_effects_and_a_tenth_of_the_others() -> None:
    correct, wrong = selection(2)
    assert correct == 1.0
    assert abs(float(wrong.mean()) - 0.1) < 3 * (0.1 * 0.9 / (2 * 50)) ** 0.5  # standard errors


@pytest.mark.slow
def test_false_inclusion_is_nominal() -> None:
    correct, wrong = selection(60)
    assert correct == 1.0
    assert abs(float(wrong.mean()) - 0.1) < 0.02


def test_penalties_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="Expected penalties of at least 0, not both 0"):
        shrinkage.elastic_net(3, l1=0.0, l2=0.0)
    with pytest.raises(ValueError, match="Expected penalties of at least 0"):
        shrinkage.elastic_net(3, l1=-1.0)
    with pytest.raises(ValueError, match="Expected at least 2 features to fuse, but got 1; use lasso"):
        shrinkage.fused_lasso(1)
