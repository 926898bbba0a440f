"""What a party contributes."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from support.verticals import draw
from torch import distributions as D

from fedtorch import vfl
from fedtorch.vfl.model.predictors import laplace_prior, normal_prior, slopes


def test_linear_on_shared_and_on_batched_features() -> None:
    predictor = vfl.linear(3, outputs=2)
    theta, x = draw(0, 4, 5, 6), draw(1, 4, 7, 3)
    expected = torch.einsum("bmcp,bnp->bmcn", theta.reshape(4, 5, 2, 3), x)
    torch.testing.assert_close(predictor.forward(theta, x), expected, rtol=ROUNDING, atol=ROUNDING)
    one = predictor.forward(theta, x[2])[2]
    torch.testing.assert_close(one, expected[2], rtol=ROUNDING, atol=ROUNDING)


def test_priors_are_densities() -> None:
    theta = draw(0, 2, 3, 4)
    normal, laplace = D.Normal(0, 0.7), D.Laplace(0, 0.7)
    torch.testing.assert_close(normal_prior(0.7)(theta), normal.log_prob(theta).sum(-1).double())
    torch.testing.assert_close(laplace_prior(0.7)(theta), laplace.log_prob(theta).sum(-1).double())
    for prior in (normal_prior, laplace_prior):
        with pytest.raises(ValueError, match="Expected a positive"):
            prior(0.0)


def test_slopes_by_level() -> None:
    p, levels, n = 2, 3, 8
    x, groups = draw(0, n, p), torch.tensor([0, 1, 2, 2, 1, 0, 0, 2])
    predictor = vfl.multilevel(p, levels)
    theta = draw(1, 1, 1, predictor.size)
    mean, spread, u = theta[0, 0, :2], theta[0, 0, 2:4].exp(), theta[0, 0, 4:].reshape(levels, p)
    beta = mean + spread * u
    torch.testing.assert_close(slopes(theta, p, levels)[0, 0], beta, rtol=ROUNDING, atol=ROUNDING)
    eta = predictor.forward(theta, vfl.by_level(x, groups, levels))[0, 0, 0]
    torch.testing.assert_close(eta, (x * beta[groups]).sum(1), rtol=ROUNDING, atol=ROUNDING)
    # The density of (μ, log σ, u): that of σ is half-normal, times the Jacobian σ.
    expected = D.Normal(0, 1).log_prob(mean).sum() + D.Normal(0, 1).log_prob(u).sum()
    expected = expected + (D.HalfNormal(1.0).log_prob(spread) + spread.log()).sum()
    assert float(predictor.log_prior(theta)) == pytest.approx(float(expected), rel=ROUNDING)
    # Parametrised by β: the same predictor, and the density of β instead of that of u.
    other = vfl.multilevel(p, levels, centred=True)
    moved = torch.cat([theta[..., : 2 * p], beta.flatten().reshape(1, 1, -1)], -1)
    assert torch.equal(other.forward(moved, vfl.by_level(x, groups, levels))[0, 0, 0], eta)
    difference = D.Normal(mean, spread).log_prob(beta).sum() - D.Normal(0, 1).log_prob(u).sum()
    assert float(other.log_prior(moved)) == pytest.approx(float(expected + difference), rel=ROUNDING)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="Expected groups from 0 to 1, but got 0 to 2"):
        vfl.by_level(draw(0, 3, 2), torch.tensor([0, 1, 2]), 2)
    with pytest.raises(ValueError, match="at least one feature"):
        vfl.linear(0)
