"""Likelihoods against torch's distributions, and the responses that they refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from torch import Tensor, distributions as D

from fedtorch import random
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.likelihoods import ResponseLikelihood

S = random.normal(random.key(0), (2, 3, 1, 7), torch.float64)
SHARED = random.normal(random.key(1), (2, 3, 1), torch.float64)
NONE = SHARED[..., :0]
COUNTS = torch.tensor([0.0, 1, 2, 3, 9, 40, 0], dtype=torch.float64)
LABELS = (COUNTS > 0).double()


def negative_binomial(log_r: Tensor | float) -> D.Distribution:
    return D.NegativeBinomial(torch.as_tensor(log_r, dtype=torch.float64).exp(), logits=S[..., 0, :] - log_r)


CASES: dict[str, tuple[ResponseLikelihood, Tensor, Tensor, D.Distribution]] = {
    "gaussian": (likelihoods.gaussian(), COUNTS, SHARED, D.Normal(S[..., 0, :], SHARED.exp())),
    "gaussian, sd known": (likelihoods.gaussian(0.7), COUNTS, NONE, D.Normal(S[..., 0, :], 0.7)),
    "bernoulli": (likelihoods.bernoulli(), LABELS, NONE, D.Bernoulli(logits=S[..., 0, :])),
    "poisson": (likelihoods.poisson(), COUNTS, NONE, D.Poisson(S[..., 0, :].exp())),
    "negative binomial": (likelihoods.negative_binomial(), COUNTS, SHARED, negative_binomial(SHARED)),
    "negative binomial, known": (
        likelihoods.negative_binomial(2.0), COUNTS, NONE, negative_binomial(torch.tensor(2.0).double().log())
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_log_prob_and_mean_are_those_of_torch(name: str) -> None:
    likelihood, y, shared, expected = CASES[name]
    assert likelihood.log_prob(y, S, shared).shape == (2, 3, 7)
    torch.testing.assert_close(likelihood.log_prob(y, S, shared), expected.log_prob(y), rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(likelihood.mean(S, shared), expected.mean, rtol=ROUNDING, atol=ROUNDING)


def test_categorical_is_that_of_torch() -> None:
    s, y = random.normal(random.key(2), (2, 3, 4, 7), torch.float64), torch.tensor([0, 1, 2, 3, 3, 1, 0])
    likelihood, expected = likelihoods.categorical(4), D.Categorical(logits=s.mT)
    torch.testing.assert_close(likelihood.log_prob(y, s, NONE), expected.log_prob(y), rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(likelihood.mean(s, NONE), expected.probs.mT, rtol=ROUNDING, atol=ROUNDING)
    assert likelihood.features(y, s).argmax(-2).equal(y)
    stacked = likelihood.log_prob(y.expand(5, 2, 1, 7), s.expand(5, 2, 3, 4, 7), NONE)
    torch.testing.assert_close(stacked[3], likelihood.log_prob(y, s, NONE), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    likelihood, y, shared, _ = CASES[name]
    inputs = (S.clone().requires_grad_(), shared.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda s, g: likelihood.log_prob(y, s, g), inputs)


REFUSED: list[tuple[Callable[[], ResponseLikelihood], list[float], str]] = [
    (likelihoods.poisson, [1.0, -1.0], "counts .* got -1.0 in row 1"),
    (likelihoods.poisson, [1.5, 1.0], "counts .* got 1.5 in row 0"),
    (likelihoods.negative_binomial, [1.0, float("inf")], "counts .* got inf in row 1"),
    (likelihoods.bernoulli, [0.0, 2.0], "labels 0 and 1 .* got 2.0 in row 1"),
    (lambda: likelihoods.categorical(3), [0.0, 3.0], "labels from 0 to 2 .* got 3.0 in row 1"),
    (likelihoods.gaussian, [float("nan"), 1.0], "finite numbers .* got nan in row 0"),
]


@pytest.mark.parametrize(("make", "response", "message"), REFUSED)
def test_a_response_that_does_not_fit_is_refused(
    make: Callable[[], ResponseLikelihood], response: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make().check(torch.tensor(response))
    make().check(torch.tensor([0.0, 1.0]))


def test_refusals_at_construction() -> None:
    for make in (likelihoods.gaussian, likelihoods.negative_binomial):
        with pytest.raises(ValueError, match=r"Expected a positive .* but got -1.0"):
            make(-1.0)
    with pytest.raises(ValueError, match="at least 2 classes"):
        likelihoods.categorical(1)


def test_custom_likelihood_fits() -> None:
    huber = dataclasses.replace(
        likelihoods.gaussian(1.0),
        log_prob=lambda y, s, shared: (
            -torch.nn.functional.huber_loss(s[..., 0, :], y.expand(2, 3, 7), reduction="none")
        ),
    )
    assert huber.log_prob(COUNTS, S, NONE).shape == (2, 3, 7)
