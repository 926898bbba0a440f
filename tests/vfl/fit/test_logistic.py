"""q(s|θ)q(z|s) against NUTS on the collapsed model: the posterior of a logistic regression over 2 and 10 parties."""

from __future__ import annotations

import math

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from support.verticals import KEY, MODELS, draw, logistic_data, predictors

from experiments.vfl import oracles
from fedtorch import random, vfl
from fedtorch.models.quadrature import gauss_hermite
from fedtorch.vfl.fit.prediction import log_score, lost_score, spread
from fedtorch.vfl.model import likelihoods


def single(data: vfl.VerticalData) -> vfl.VerticalData:
    return data._replace(features=tuple(x.float() for x in data.features), response=data.response.float())


def agrees(parties: int, width: int, rows: int, steps: int, draws: int, errors: float) -> None:
    """Means within 0.1 sd and sds within 10 %, and `errors` standard errors of NUTS on top of that."""
    widths = [width // parties] * parties
    data = logistic_data(widths, rows)
    model = vfl.augmented(likelihoods.bernoulli(), predictors(widths), 1.0)
    guide = vfl.Guide(vfl.sums(), joint=True)
    fit = vfl.sfvi(model, guide, single(data), steps=steps, lr=0.02, draws=8)
    mean, covariance = (part[0].double() for part in fit.moments())
    found = oracles.nuts_posterior(model, data, points=20, draws=draws, warmup=draws // 4, chains=1)
    assert found.r_hat.max() < 1.02
    reference, effective = found.flat, found.effective
    sd = reference.std(0)
    assert ((mean - reference.mean(0)).abs() / sd < 0.1 + errors / effective.sqrt()).all()
    ratio = covariance.diagonal().sqrt() / sd
    assert ((ratio - 1).abs() < 0.1 + errors / (2 * effective).sqrt()).all()
    # And the predictions: mean log scores of the same rows.
    thetas = fit.sample(200)
    ours = log_score(model, thetas, single(data)).mean()
    chosen = reference[:: max(1, len(reference) // 200)]
    theirs = log_score(model, list(chosen.unsqueeze(0).split(model.sizes, -1)), data).mean()
    assert float(ours) == pytest.approx(float(theirs), abs=0.01)


@pytest.mark.slow
def test_a_small_posterior_agrees_with_nuts() -> None:
    agrees(2, 2, 80, steps=500, draws=200, errors=4)


@pytest.mark.slow
@pytest.mark.parametrize("parties", [2, 10])
def test_the_posterior_agrees_with_nuts(parties: int) -> None:
    """All 20 coefficients and the intercept, the error of NUTS included.

    Found: with two parties means within 0.038 sd and sds within 7.7 %, with ten within 0.032 sd and 2.4 %, of which
    NUTS's own standard errors are 0.02 sd and 2 %.
    """
    agrees(parties, 20, 500, steps=6000, draws=2000, errors=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_lost_score_and_spread_rank_parties(name: str) -> None:
    """Slopes of 2, 1 and 0: by what predictions of other rows lose without a party, and by how much it moves them."""
    slopes, rows = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64), 600
    x = draw(1, rows, 3)
    y = random.bernoulli(KEY, (x @ slopes).sigmoid(), (rows,)).double()
    train, test = (vfl.VerticalData(x[part].split(1, 1), y[part]) for part in (slice(300), slice(300, rows)))
    model = MODELS[name](likelihoods.bernoulli(), predictors([1, 1, 1]), 0.5)
    fit = vfl.sfvi(model, vfl.Guide(vfl.sums(), joint=True), train, steps=300, lr=0.05)
    lost = lost_score(model, fit.sample(100), test)[0]
    # Three standard errors of a difference that is paired by row.
    for more, less in ((2, 0), (0, 1)):
        gap = lost[more] - lost[less]
        assert gap.mean() > 3 * gap.std() / gap.numel() ** 0.5
    assert lost[1].mean().abs() < 3 * lost[1].std() / 300**0.5 + 0.01  # a party of noise is worth nothing
    assert spread(fit, test)[0].argsort().tolist() == [1, 0, 2]


def test_lost_score_equals_score_without_the_party() -> None:
    """Features of mean zero held at their mean are features of zeros."""
    data = logistic_data([2, 1], 12)
    data = data._replace(features=tuple(x - x.mean(0) for x in data.features))
    model = vfl.augmented(likelihoods.bernoulli(), predictors([2, 1]), 1.0)
    thetas = [draw(j, 1, 5, d) for j, d in enumerate(model.sizes)]
    lost = lost_score(model, thetas, data)
    assert lost.shape == (1, 2, 12)
    for j in range(2):
        held = tuple(x * (k != j) for k, x in enumerate(data.features))
        expected = log_score(model, thetas, data) - log_score(model, thetas, data._replace(features=held))
        torch.testing.assert_close(lost[:, j], expected, rtol=ROUNDING, atol=ROUNDING)


def test_attenuation() -> None:
    """The mean of a logistic curve over normal noise against quadrature, at the slope that matters."""
    assert vfl.attenuation(1.0) == pytest.approx(0.847, abs=5e-4)
    noise = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = torch.exp(-0.5 * noise.square()) / math.sqrt(2 * math.pi) * (noise[1] - noise[0])
    for variance in (0.5, 2.0, 10.0):
        s = torch.linspace(-3, 3, 13, dtype=torch.float64)
        exact = ((s[:, None] + math.sqrt(variance) * noise).sigmoid() * density).sum(1)
        assert (exact - (s * vfl.attenuation(variance)).sigmoid()).abs().max() < 0.02


@pytest.mark.parametrize(("spread", "bound"), [(0.1, 0.031), (1.0, 0.031), (2.0, 0.031), (5.0, 0.06)])
@pytest.mark.parametrize("variance", [0.5, 2.0, 10.0])
def test_attenuation_of_large_samples(variance: float, spread: float, bound: float) -> None:
    """The factor is within its stated error of the slope that a logistic regression of infinitely many rows finds."""
    grid = torch.linspace(-8, 8, 801, dtype=torch.float64)
    density = torch.softmax(-0.5 * grid.square(), 0)
    s = spread * grid
    chance = (s[:, None] + math.sqrt(variance) * grid).sigmoid() @ density
    low, high = 0.01, 1.5  # the score falls with the slope
    for _ in range(50):
        slope = (low + high) / 2
        score = (density * s * (chance - (slope * s).sigmoid())).sum()
        low, high = (slope, high) if score > 0 else (low, slope)
    assert abs(float(vfl.attenuation(variance)) / slope - 1) < bound


def test_slopes_on_the_scale_of_a_pooled_regression() -> None:
    """Most likely slopes with the noise of two parties, times `attenuation`, are those of a logistic regression.

    Rows count with their chances in place of drawn labels, so a logistic regression finds the true slopes.
    """
    expected = torch.tensor([0.3, 0.8, -0.9, 1.1], dtype=torch.float64)
    x = torch.cat([torch.ones(400, 1, dtype=torch.float64), draw(1, 400, 3)], 1)
    chance = (x @ expected).sigmoid()
    model = vfl.augmented(likelihoods.bernoulli(), predictors([1, 2]), 1.0)
    rule = gauss_hermite(1, 20)
    noise = vfl.noise_variance(model).double().sqrt() * rule.nodes[:, 0]
    found = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([found], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        likely = rule.weights @ (x @ found + noise[:, None]).sigmoid()
        value = -(chance * likely.log() + (1 - chance) * (1 - likely).log()).sum()
        value.backward()
        return value

    search.step(loss)
    mean = found.detach()
    assert ((vfl.attenuation(vfl.noise_variance(model)) * mean / expected)[1:] - 1).abs().max() < 0.03
    assert (mean / expected)[1:].min() > 1.25  # the model's own scale


def test_scores_without_noise_are_plain() -> None:
    data = logistic_data([2, 1], 12)
    model = vfl.power(likelihoods.bernoulli(), predictors([2, 1]), 1.0)
    thetas = [torch.full((1, 3, d), 0.3, dtype=torch.float64) for d in model.sizes]
    s = 0.3 + 0.3 * torch.cat(data.features, 1).sum(1)
    plain = likelihoods.bernoulli().log_prob(data.response, s[None], s)
    torch.testing.assert_close(log_score(model, thetas, data, noise=0.0)[0], plain)
    assert vfl.noise_variance(model).tolist() == [0.5]
    assert log_score(model, thetas, data).shape == (1, 12)
