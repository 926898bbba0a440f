"""A Pyro model as local factor, against the closed form of the linear model and on bad models."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import MultivariateNormal

import fedtorch as ft
from fedtorch.federation.algorithms.ep import devices, posterior, settled
from fedtorch.federation.algorithms.ep._start import Factors
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.hierarchical import projections
from fedtorch.models.hierarchical.pyro_factor import pyro_factor

NOISE = 0.25
PHI = torch.tensor([[0.3, -1.0], [1.0, 0.5]], dtype=torch.float64)


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


def test_posteriors_of_clients_are_those_of_the_linear_model() -> None:
    """In a fixed coordinate system: θ is the slope itself. Rows differ in number, so that some are filled up."""
    model = hierarchical.linear(hierarchical.normal(1), noise=NOISE)
    ragged = ft.data.from_tensors([(x[: 2 + k], y[: 2 + k]) for k, (x, y) in enumerate(data(4))])
    own = pyro_factor(linear).model(model.prior, names=model.names)
    runs = [ft.run(ft.ep(one), ft.InProcess(ragged), rounds=50, until=settled(1e-3)) for one in (own, model)]
    mine, theirs = (devices(run, tolerance=1e-3).distribution() for run in runs)
    assert float(((mine.mean - theirs.mean) / theirs.variance.sqrt()).abs().max()) < 0.02
    assert float((mine.variance / theirs.variance - 1).abs().max()) < 0.03
    assert own.names == model.names
    given, wanted = (
        one.given(PHI.expand(4, 2, 2), torch.full((4, 2), 0.5).double(), rows)
        for one, rows in ((own, ragged.stack(range(4))), (model, model.prepare(ragged.stack(range(4)))))
    )
    assert torch.allclose(given.means, wanted.means, atol=1e-8)
    assert torch.allclose(given.covariances, wanted.covariances, atol=1e-8)


def spread_out(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """A model that a mask of a plate does not understand: a latent variable for each row, and a mean over rows."""
    slope = pyro.sample("slope", dist.Normal(phi[0] + y.mean() - y.mean(), 1.0))
    with pyro.plate("rows", len(y)):
        own = pyro.sample("own", dist.Normal(slope * x[:, 0], (phi[1] / 2).exp()))
        pyro.sample("y", dist.Normal(own, NOISE**0.5), obs=y)


def whole(phi: Tensor, x: Tensor, y: Tensor) -> None:
    """Rows are one observation, outside of any plate."""
    slope = pyro.sample("slope", dist.Normal(phi[0], (phi[1] / 2).exp()))
    pyro.sample("y", dist.Normal(slope * x[:, 0], NOISE**0.5).to_event(1), obs=y)


@pytest.mark.parametrize(("model", "filled"), [(linear, True), (whole, False), (spread_out, False)])
def test_ragged_clients_together_have_the_factors_that_they_have_alone(model: Any, filled: bool) -> None:
    ragged = ft.data.from_tensors([(x[:n], y[:n]) for n, (x, y) in zip((3, 5, 3, 6), data(4))])
    factor = pyro_factor(model)
    together = factor(PHI.expand(4, 2, 2), ragged.stack(range(4)))
    alone = torch.cat([pyro_factor(model)(PHI[None], ragged.stack([k])) for k in range(4)])
    assert torch.allclose(together, alone, rtol=1e-10)
    assert factor._filled is filled


def test_clients_in_chunks_have_the_same_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    block = data(5).stack(range(5))
    whole_block = pyro_factor(linear)(PHI.expand(5, 2, 2), block)
    monkeypatch.setattr("fedtorch.models.hierarchical.pyro_factor._CHUNK", 1)
    assert torch.allclose(pyro_factor(linear)(PHI.expand(5, 2, 2), block), whole_block, rtol=1e-12)
    assert pyro_factor(linear)(PHI.expand(0, 2, 2), data(1).stack([])).shape == (0, 2)


def test_two_latents_have_the_moments_of_their_normal_density() -> None:
    """Intercept and slope with a known normal posterior; the cavity says φ nearly exactly."""

    def two(phi: Tensor, x: Tensor, y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        slope = pyro.sample("slope", dist.Normal(phi[0], 2.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(level + slope * x[:, 0], NOISE**0.5), obs=y)

    block = data(2).stack([0, 1])
    cavity = gaussian.Moments(torch.full((2, 1), 0.3).double(), torch.full((2, 1, 1), 1e-10).double())
    found = pyro_factor(two).devices(cavity, block).distribution()
    for k, (x, y) in enumerate(data(2)):
        design = torch.cat([torch.ones_like(x), x], 1)
        precision = design.T @ design / NOISE + torch.diag(torch.tensor([1.0, 0.25]).double())
        mean = torch.linalg.solve(precision, design.T @ y / NOISE + torch.tensor([0.0, 0.3 / 4]).double())
        assert torch.allclose(found.mean[k], mean, atol=1e-4)
        assert torch.allclose(found.variance[k], torch.linalg.inv(precision).diagonal(), rtol=1e-4)


def test_bad_clients_and_names_are_refused() -> None:
    holes = ft.data.FederatedData(data(2).rows, torch.tensor([12, 0]), allow_empty=True)
    model = pyro_factor(linear).model(hierarchical.linear(hierarchical.normal(1), noise=NOISE).prior)
    with pytest.raises(ValueError, match="Client '1': Expected rows to observe, but got none; leave the client out"):
        ft.Run(ft.ep(model), ft.InProcess(holes))
    ragged = ft.data.from_tensors([(x[:n], y[:n]) for n, (x, y) in zip((3, 5), data(2))])
    with pytest.raises(ValueError, match=r"Expected clients with as many latent variables each, but got \[4, 6\]"):
        pyro_factor(spread_out).model(model.prior).given(PHI.expand(2, 2, 2), torch.ones(2, 2), ragged.stack([0, 1]))
    with pytest.raises(ValueError, match="Expected a name for each of 2 coordinates of phi, but got 1"):
        pyro_factor(linear).model(model.prior, names=["mean"])


def test_rows_that_the_model_cannot_observe_are_named_with_their_client() -> None:
    """A count below zero, a category without a parameter, a density that is not a number: before the first round."""

    def counts(phi: Tensor, kind: Tensor, y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(phi[0], 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson((level + phi[kind]).exp()), obs=y)

    def sizes(phi: Tensor, kind: Tensor, y: Tensor) -> None:
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.LogNormal(phi[0], 1.0), obs=y)

    prior = torch.distributions.MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
    kind, y = torch.tensor([0, 1]), torch.tensor([3.0, 1.0]).double()

    def begin(model: Any, kinds: Tensor = kind, ys: Tensor = y) -> None:
        rows = ft.data.from_tensors([(kind, y), (kinds, ys)], ["north", "south"])
        ft.Run(ft.ep(pyro_factor(model).model(prior)), ft.InProcess(rows))

    begin(counts)
    with pytest.raises(ValueError, match=r"Client 'south': Expected observations that Poisson .* at 'y', but got -1"):
        begin(counts, ys=-y + 2)
    with pytest.raises(ValueError, match=r"Client 'south': Expected rows that the model takes, .* index 2 is out"):
        begin(counts, kinds=kind + 1)
    with pytest.raises(ValueError, match="Client 'south': Expected a log density of the rows, but got NaN"):
        begin(sizes, ys=-y)


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
