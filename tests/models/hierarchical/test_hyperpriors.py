"""Hyperpriors against the densities of the scales that they are priors of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import HalfCauchy, Normal

import fedtorch as ft
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.models.hierarchical import hyperpriors, shrinkage
from fedtorch.models.hierarchical.hyperpriors import Hyperprior

X = torch.linspace(-5, 5, 41, dtype=torch.float64)


def log_density(of: Hyperprior, x: Tensor) -> Tensor:
    """log p(x) up to a constant."""
    factor = torch.zeros_like(x) if of.log_density is None else of.log_density(x)
    return of.shift * x - 0.5 * of.precision * x.square() + factor


def equal_but_for_a_constant(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first - first[0], second - second[0], rtol=0, atol=1e-12)


def test_a_log_normal_scale_has_a_normal_logarithm() -> None:
    normal = Normal(*torch.tensor([0.75, 1.5]).double())
    assert equal_but_for_a_constant(log_density(hyperpriors.log_normal(0.75, 1.5), X), normal.log_prob(X))


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_the_density_of_the_logarithm_is_that_of_the_scale_times_its_derivative(power: float) -> None:
    scale = (power * X).exp()
    half_cauchy = log_density(hyperpriors.half_cauchy(2.0, power), X)
    assert equal_but_for_a_constant(half_cauchy, HalfCauchy(torch.tensor(2.0).double()).log_prob(scale) + scale.log())
    assert equal_but_for_a_constant(log_density(hyperpriors.non_informative(power), X), scale.log())


@pytest.mark.parametrize(
    "penalties",
    [hyperpriors.half_cauchy(1.0, power=1.0), hyperpriors.non_informative(power=1.0), hyperpriors.log_normal()],
    ids=["half-Cauchy", "non-informative", "log-normal"],
)
def test_the_posterior_of_a_ridge_penalty(penalties: Hyperprior) -> None:
    """(log λ, log σ²) on a grid, where the devices' evidences are exact."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(30):
        x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        theta = 0.8 * torch.randn(3, generator=generator, dtype=torch.float64)
        clients.append((x, x @ theta + 0.5 * torch.randn(8, generator=generator, dtype=torch.float64)))
    data, noise = ft.data.from_tensors(clients), hyperpriors.log_normal(0.0, 5.0)
    model = shrinkage.penalised(shrinkage.ridge(3), penalties=penalties, noise=noise)
    q = posterior(ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled()))
    grid = torch.cartesian_prod(torch.linspace(-3, 1, 161).double(), torch.linspace(-2.2, -0.6, 161).double())
    block = model.prepare(data.stack(range(len(data))))
    log = model.log_factor(grid.expand(len(data), -1, -1), block).sum(0)
    weight = torch.softmax(log + log_density(penalties, grid[:, 0]) + log_density(noise, grid[:, 1]), 0)
    mean = weight @ grid
    sd = (weight @ (grid - mean).square()).sqrt()
    assert float(((q.mean - mean) / sd).abs().max()) < 0.05
    assert float((q.stddev / sd - 1).abs().max()) < 0.02
