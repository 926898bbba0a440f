"""q(s|θ)q(z|s) against NUTS on the collapsed model: the posterior of a logistic regression over 2 and 10 parties."""

from __future__ import annotations

import math

import pytest
import torch
from verticals import KEY, logistic_data, predictors

from fedtorch import vfl
from fedtorch.models import likelihoods
from fedtorch.vfl import oracles
from fedtorch.vfl.prediction import log_score


def single(data: vfl.VerticalData) -> vfl.VerticalData:
    return data._replace(features=tuple(x.float() for x in data.features), response=data.response.float())


def agrees(parties: int, width: int, rows: int, steps: int, draws: int, allowed: tuple[float, float]) -> None:
    """Means within `allowed[0]` sd and sds within a factor 1 ± `allowed[1]`, beyond the error of NUTS itself."""
    widths = [width // parties] * parties
    data = logistic_data(widths, rows)
    model = vfl.augmented(likelihoods.bernoulli(), predictors(widths), 1.0)
    guide = vfl.Guide.of(vfl.sums(), joint=True)
    fit = vfl.sfvi(model, guide, single(data), key=KEY, steps=steps, lr=0.02, draws=8)
    mean, covariance = (part[0].double() for part in fit.moments())
    found = oracles.nuts_posterior(model, data, points=20, draws=draws, warmup=draws // 4, chains=1)
    assert found.r_hat.max() < 1.02
    reference, effective = found.flat, found.effective
    sd = reference.std(0)
    # Four standard errors of NUTS's mean and sd on top of what is allowed.
    assert ((mean - reference.mean(0)).abs() / sd < allowed[0] + 4 / effective.sqrt()).all()
    ratio = covariance.diagonal().sqrt() / sd
    assert ((ratio - 1).abs() < allowed[1] + 4 / (2 * effective).sqrt()).all()
    # And the predictions: mean log scores of the same rows.
    thetas = fit.sample(KEY, 200)
    ours = log_score(model, thetas, single(data)).mean()
    chosen = reference[:: max(1, len(reference) // 200)]
    theirs = log_score(model, list(chosen.unsqueeze(0).split(model.sizes, -1)), data).mean()
    assert float(ours) == pytest.approx(float(theirs), abs=0.01)


def test_a_small_posterior_agrees_with_nuts() -> None:
    agrees(2, 2, 80, steps=1200, draws=200, allowed=(0.1, 0.1))


@pytest.mark.slow
@pytest.mark.parametrize("parties", [2, 10])
def test_the_posterior_agrees_with_nuts(parties: int) -> None:
    agrees(parties, 20, 500, steps=6000, draws=2000, allowed=(0.1, 0.1))


def test_parties_are_ranked_by_how_much_they_move_the_predictor() -> None:
    data = logistic_data([2, 2], 60)
    x = data.features
    y = (x[0].sum(1) > 0).double()
    model = vfl.augmented(likelihoods.bernoulli(), predictors([2, 2]), 0.5)
    fit = vfl.sfvi(model, vfl.Guide.of(vfl.sums(), joint=True), data._replace(response=y), key=KEY, steps=200, lr=0.05)
    moved = vfl.spread(fit, data, KEY)[0]
    assert moved[0] > 1.5 * moved[1]


def test_attenuation() -> None:
    """The mean of a logistic curve over normal noise against quadrature, at the slope that matters."""
    assert vfl.attenuation(1.0) == pytest.approx(0.847, abs=5e-4)
    noise = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = torch.exp(-0.5 * noise.square()) / math.sqrt(2 * math.pi) * (noise[1] - noise[0])
    for variance in (0.5, 2.0, 10.0):
        s = torch.linspace(-3, 3, 13, dtype=torch.float64)
        exact = ((s[:, None] + math.sqrt(variance) * noise).sigmoid() * density).sum(1)
        assert (exact - (s * vfl.attenuation(variance)).sigmoid()).abs().max() < 0.02


def test_scores_without_noise_are_plain() -> None:
    data = logistic_data([2, 1], 12)
    model = vfl.power(likelihoods.bernoulli(), predictors([2, 1]), 1.0)
    thetas = [torch.full((1, 3, d), 0.3, dtype=torch.float64) for d in model.sizes]
    s = 0.3 + 0.3 * torch.cat(data.features, 1).sum(1)
    plain = likelihoods.bernoulli().log_prob(data.response, s[None], s)
    torch.testing.assert_close(log_score(model, thetas, data, noise=0.0)[0], plain)
    assert vfl.noise_variance(model).tolist() == [0.5]
    assert log_score(model, thetas, data).shape == (1, 12)
