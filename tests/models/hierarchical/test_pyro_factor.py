"""A Pyro model as local factor, against the closed form of the linear model and on bad models."""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import MultivariateNormal

import fedtorch as ft
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.federation.algorithms.ep._start import Factors
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.hierarchical import projections
from fedtorch.models.hierarchical.pyro_factor import pyro_factor

NOISE = 0.25


def linear(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """The linear hierarchical model of one feature, as a user would write it."""
    slope = pyro.sample("slope", dist.Normal(phi[0], (phi[1] / 2).exp()))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(slope * x[:, 0], NOISE**0.5), obs=y)


def data(count: int) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(1)
    clients = []
    for _ in range(count):
        x = torch.randn(6, 1, generator=generator, dtype=torch.float64)
        slope = 0.5 + 0.8 * torch.randn(1, generator=generator, dtype=torch.float64)
        clients.append((x, x @ slope + NOISE**0.5 * torch.randn(6, generator=generator, dtype=torch.float64)))
    return ft.data.from_tensors(clients)


def test_the_factor_of_a_linear_model_is_its_evidence() -> None:
    block = data(3).stack([0, 1, 2])
    phi = torch.tensor([[0.3, -1.0], [1.0, 0.5]], dtype=torch.float64).expand(3, 2, 2)
    expected = torch.stack(
        [
            torch.stack(
                [
                    MultivariateNormal(x[:, 0] * m, z.exp() * x @ x.mT + NOISE * torch.eye(6).double()).log_prob(y)
                    for m, z in phi[k]
                ]
            )
            for k, (x, y) in enumerate(data(3))
        ]
    )
    before = torch.get_rng_state()
    assert torch.allclose(pyro_factor(linear)(phi, block), expected, atol=1e-9)  # Newton's stopping, squared
    assert torch.equal(torch.get_rng_state(), before)


def test_a_users_model_gives_the_posterior_of_the_linear_model() -> None:
    model = hierarchical.linear(hierarchical.normal(1), noise=NOISE)
    federation = ft.InProcess(data(3))
    factors = Factors(projections.quadrature(pyro_factor(linear)), model.prior)
    runs = [ft.run(ft.ep(one), federation, rounds=50, until=settled(1e-3)) for one in (factors, model)]
    own, ours = (posterior(run, tolerance=1e-3) for run in runs)
    assert float(((own.mean - ours.mean) / ours.stddev).abs().max()) < 0.02  # nodes over φ against nodes over ζ only
    assert float((own.stddev / ours.stddev - 1).abs().max()) < 0.02


def test_constrained_latents_and_no_latents() -> None:
    def positive(phi: Tensor, y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(phi[0], 0.5))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(0.0, scale), obs=y)

    def shared(phi: Tensor, y: Tensor) -> None:
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(phi[0], 1.0), obs=y)

    y = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    block = ft.data.from_tensors([(y,)]).stack([0])
    phi = torch.tensor([[[0.2]]], dtype=torch.float64)
    grid = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    log = dist.Normal(0.2, 0.5).log_prob(grid) + dist.Normal(0.0, grid.exp()[:, None]).log_prob(y).sum(1)
    expected = torch.trapezoid(log.exp(), grid).log()
    assert float((pyro_factor(positive)(phi, block) - expected).abs()) < 1e-4  # 25 nodes of a skew density
    assert torch.allclose(pyro_factor(shared)(phi, block)[0, 0], dist.Normal(0.2, 1.0).log_prob(y).sum())


def test_discrete_latents_are_refused() -> None:
    def mixture(phi: Tensor, y: Tensor) -> None:
        pyro.sample("kind", dist.Bernoulli(0.5))

    block = ft.data.from_tensors([(torch.ones(2, 1),)]).stack([0])
    with pytest.raises(ValueError, match="continuous latent variables, but got a discrete 'kind'"):
        pyro_factor(mixture)(torch.zeros(1, 1, 1, dtype=torch.float64), block)


def test_gaussian_round_trip() -> None:
    moments = gaussian.Moments(torch.ones(2, 3).double(), (2 * torch.eye(3)).double().expand(2, 3, 3))
    again = gaussian.moments(gaussian.natural(moments))
    assert torch.allclose(again.mean, moments.mean)
    assert torch.allclose(again.covariance, moments.covariance)
