"""The collapsed likelihood against closed forms and against plain integration."""

from __future__ import annotations

import math

import pytest
import torch
from support.verticals import SD, draw

from fedtorch import random, vfl
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.collapsed import collapsed_log_likelihood

Y, CENTRE, NONE = draw(0, 6), draw(1, 2, 3, 1, 6), torch.zeros(2, 3, 0, dtype=torch.float64)


@pytest.mark.parametrize("parties", [1, 2, 5])
def test_a_gaussian_likelihood_in_closed_form(parties: int) -> None:
    """Noise variance σ² + Jρ²; the power model has ρ(J−1)/J instead, and a factor that does not depend on the mean."""
    rho = 0.6
    many = [vfl.linear(1)] * parties
    exact = torch.distributions.Normal(CENTRE[..., 0, :], math.sqrt(SD**2 + parties * rho**2))
    # Gauss–Hermite of 40 points on a Gaussian of comparable width: exact but for rounding.
    found = collapsed_log_likelihood(vfl.augmented(likelihoods.gaussian(SD), many, rho), Y, CENTRE, NONE, 40)
    torch.testing.assert_close(found, exact.log_prob(Y), rtol=1e-9, atol=1e-9)
    smaller = rho * (parties - 1) / parties
    exact = torch.distributions.Normal(CENTRE[..., 0, :], math.sqrt(SD**2 + parties * smaller**2))
    found = collapsed_log_likelihood(vfl.power(likelihoods.gaussian(SD), many, rho), Y, CENTRE, NONE, 40)
    constant = found - exact.log_prob(Y)
    torch.testing.assert_close(constant, constant[:1, :1, :1].expand_as(constant), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("parties", [2, 3])
def test_powers_of_a_bernoulli_by_monte_carlo(parties: int) -> None:
    rho, draws = 1.0, 200_000
    model = vfl.power(likelihoods.bernoulli(), [vfl.linear(1)] * parties, rho)
    y, centre = torch.tensor([1.0, 0.0]).double(), torch.tensor([[[[0.5, 1.0]]]]).double()
    e = rho * random.normal(random.key(0), (draws, parties, 2), torch.float64)
    arguments = centre[0, 0] + e.sum(1, keepdim=True) - e
    values = torch.nn.functional.logsigmoid((2 * y - 1) * arguments).mean(1).exp()
    found = collapsed_log_likelihood(model, y, centre, NONE[:1, :1], 40)[0, 0].exp()
    standard_error = values.std(0) / math.sqrt(draws)
    assert ((found - values.mean(0)).abs() < 4 * standard_error).all()


def test_nodes_follow_a_narrow_likelihood() -> None:
    """Counts of thousands under a noise of 2.8: the plain rule misses them, the adaptive one does not."""
    model = vfl.augmented(likelihoods.poisson(), [vfl.linear(1)] * 2, 2.0)
    y, centre = torch.tensor([0.0, 3, 5000]).double(), torch.tensor([[[[1.0, 4.0, 6.0]]]]).double()
    s = torch.linspace(-30, 30, 400_001, dtype=torch.float64)[:, None]
    density = torch.distributions.Normal(centre[0, 0], math.sqrt(8.0)).log_prob(s)
    exact = (density + torch.distributions.Poisson(s.exp()).log_prob(y)).logsumexp(0) + math.log(60 / 400_000)
    found = collapsed_log_likelihood(model, y, centre, NONE[:1, :1], 64, adaptive=True)[0, 0]
    assert (found - exact).abs().max() < 1e-6
    plain = collapsed_log_likelihood(model, y, centre, NONE[:1, :1], 32)[0, 0]
    assert (plain - exact).abs().max() > 1
    tracked = centre.clone().requires_grad_()
    slope = torch.autograd.grad(
        collapsed_log_likelihood(model, y, tracked, NONE[:1, :1], 64, adaptive=True).sum(), tracked
    )[0]
    h = 1e-4
    up, down = (collapsed_log_likelihood(model, y, centre + d, NONE[:1, :1], 64, adaptive=True)[0, 0] for d in (h, -h))
    torch.testing.assert_close(slope[0, 0, 0], (up - down) / (2 * h), rtol=1e-5, atol=1e-6)


def test_refusals() -> None:
    several = vfl.augmented(likelihoods.categorical(3), [vfl.linear(1, outputs=3)], 1.0)
    with pytest.raises(ValueError, match="one output, but got 3"):
        collapsed_log_likelihood(several, Y, CENTRE.expand(2, 3, 3, 6), NONE)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_modes_are_found_however_far_they_are(unit: float) -> None:
    """Responses a thousand sds from their predictors, in any units: steps have no longest one."""
    model = vfl.augmented(likelihoods.gaussian(SD * unit), [vfl.linear(1)] * 2, 0.6 * unit)
    y, centre = unit * (Y + 1000.0), unit * CENTRE
    exact = torch.distributions.Normal(centre[..., 0, :], unit * math.sqrt(SD**2 + 2 * 0.6**2)).log_prob(y)
    found = collapsed_log_likelihood(model, y, centre, NONE, 8, adaptive=True)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=0)
