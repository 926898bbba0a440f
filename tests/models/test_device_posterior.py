"""Intervals, tests, discovery and prediction from mixtures, against single normal densities and draws."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal

from fedtorch.models.device_posterior import (
    DevicePosterior,
    discoveries,
    interval,
    null_probability,
    quantile,
    selected,
)


def one_normal() -> DevicePosterior:
    """Two devices whose mixtures have two equal parts."""
    means = torch.tensor([[1.0, 0.0], [0.1, -2.0]]).double()[:, None].expand(2, 2, 2)
    covariance = torch.tensor([[0.25, 0.1], [0.1, 1.0]]).double().expand(2, 2, 2, 2)
    return DevicePosterior(torch.tensor([[0.3, 0.7]] * 2).double(), means, covariance, torch.zeros(2, 2).double())


def test_a_mixture_of_equal_parts_is_one_normal_density() -> None:
    marginals = one_normal().marginals()
    normal = Normal(torch.tensor([[1.0, 0.0], [0.1, -2.0]]).double(), torch.tensor([0.5, 1.0]).double())
    for mine, theirs in zip(interval(marginals, 0.9), interval(normal, 0.9)):
        assert torch.allclose(mine, theirs)
    assert torch.equal(selected(marginals, 0.9), torch.tensor([[True, False], [False, True]]))
    assert torch.equal(selected(normal, 0.9), selected(marginals, 0.9))
    assert torch.allclose(
        null_probability(marginals), normal.cdf(torch.tensor(0.0)).minimum(1 - normal.cdf(torch.tensor(0.0)))
    )
    width = null_probability(marginals, 0.5)
    assert torch.allclose(width, normal.cdf(torch.tensor(0.5)) - normal.cdf(torch.tensor(-0.5)))
    assert torch.allclose(one_normal().distribution().mean[:, 0], marginals.mean[:, 0])


def test_quantiles_of_a_mixture_of_two() -> None:
    posterior = DevicePosterior(
        torch.tensor([[0.5, 0.5]]).double(), torch.tensor([[[-1.0], [1.0]]]).double(),
        0.01 * torch.ones(1, 2, 1, 1).double(), torch.full((1, 2), torch.nan).double(),
    )  # fmt: skip
    marginals = posterior.marginals()
    for probability in (0.05, 0.4, 0.95):
        assert torch.allclose(marginals.cdf(quantile(marginals, probability)), torch.tensor(probability).double())
    assert not bool(selected(marginals, 0.9))


def test_the_predictive_density_has_the_noise() -> None:
    x = torch.tensor([[[1.0, 2.0]], [[0.0, 1.0]]]).double()
    learnt, known, line = (one_normal().predictive(x, noise) for noise in (None, 3.0, 0.0))
    variance = torch.tensor([[0.25 + 4 + 0.4], [1.0]]).double()
    assert torch.allclose(line.variance, variance)
    assert torch.allclose(learnt.variance, variance + 1)
    assert torch.allclose(known.variance, variance + 3)
    assert torch.allclose(learnt.mean, torch.tensor([[1.0], [-2.0]]).double())


def test_discoveries_keep_the_bayesian_rate() -> None:
    null = torch.tensor([[0.01, 0.5], [0.02, 0.2]]).double()
    called = discoveries(null, 0.1)
    assert torch.equal(called, torch.tensor([[True, False], [True, True]]))  # means 0.01, 0.015, 0.077, 0.18
    assert float(null[called].mean()) <= 0.1
    assert not bool(discoveries(torch.full((3,), 0.4), 0.1).any())
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(20_000, generator=generator)
    truth = torch.rand(20_000, generator=generator) < probability
    share = float(truth[discoveries(probability, 0.2)].double().mean())
    assert abs(share - 0.2) < 3 * (0.2 * 0.8 / 8000) ** 0.5  # of 8000 that are called


def test_settings_that_do_not_fit() -> None:
    marginals = one_normal().marginals()
    with pytest.raises(ValueError, match="Expected a level between 0 and 1, but got 1"):
        interval(marginals, 1.0)
    with pytest.raises(ValueError, match="Expected a probability between 0 and 1, but got 0"):
        quantile(marginals, 0.0)
    with pytest.raises(ValueError, match="Expected a width of at least 0, but got -1"):
        null_probability(marginals, -1.0)
    with pytest.raises(ValueError, match="Expected a rate between 0 and 1, but got 2"):
        discoveries(torch.zeros(2), 2.0)
