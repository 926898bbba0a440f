"""Encoders: their start, their size, that a stack is many separate ones, and a posterior that one learns alone."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import ROUNDING

from fedtorch import random, tree
from fedtorch.models import encoders

FEATURES = random.normal(random.key(0), (4, 3, 2, 9), torch.float64)


@pytest.mark.parametrize("make", [encoders.affine(), encoders.perceptron()])
def test_a_new_encoder_answers_zero(make: encoders.EncoderFactory) -> None:
    weights = make(2, 5).start(random.key(1), 4, torch.float64)
    answer = lambda w: encoders.encoded(make, w, FEATURES, 5)
    assert torch.equal(answer(weights), torch.zeros(4, 3, 5, 9, dtype=torch.float64))
    gradients = torch.func.grad(lambda w: (answer(w) - 1).square().sum())(weights)
    assert gradients["skip"].abs().min() > 0


def test_the_formula() -> None:
    make = encoders.perceptron(6)
    weights = make(2, 5).start(random.key(1), 4, torch.float64)
    weights = {n: random.normal(random.key(i), w.shape, torch.float64) for i, (n, w) in enumerate(weights.items())}
    found = encoders.encoded(make, weights, FEATURES, 5)
    for b in range(4):
        one = {name: value[b, 0] for name, value in weights.items()}
        v = FEATURES[b, 2, :, 7]
        inner = (one["first"] @ v + one["bias"][:, 0]).tanh()
        expected = one["skip"] @ v + one["shift"][:, 0] + one["second"] @ inner
        torch.testing.assert_close(found[b, 2, :, 7], expected, rtol=ROUNDING, atol=ROUNDING)
        module = make(2, 5).double()  # an encoder with weights of its own is the same
        module.load_state_dict(one)
        torch.testing.assert_close(module(FEATURES[b : b + 1])[0], found[b], rtol=ROUNDING, atol=ROUNDING)


def test_weights_start_alike_for_one_key_and_differ_for_several() -> None:
    module = encoders.perceptron(6)(2, 5)
    alike = module.start(random.key(1), 3)
    assert torch.equal(alike["first"][0], alike["first"][2])
    several = module.start(random.fold_in(random.key(1), torch.arange(3)), 3)
    assert not torch.equal(several["first"][0], several["first"][2])
    assert {n: w.shape for n, w in tree.items(alike)} == {n: w.shape for n, w in tree.items(several)}


def test_an_encoder_learns_the_posterior_of_a_latent_variable() -> None:
    """Of z ~ N(0, 1) and y ~ N(z, s²) it is N(y / (1 + s²), s² / (1 + s²)): affine in y, and not in log s."""
    same, several = torch.full((200,), 0.5).double(), random.uniform(random.key(2), (200,), torch.float64).add(0.2)
    assert divergence(encoders.affine(), same) < 1e-8
    assert divergence(encoders.perceptron(8), several) < 0.1 * divergence(encoders.affine(), several)


def divergence(make: encoders.EncoderFactory, noise: torch.Tensor) -> float:
    """Return KL(q, posterior) a row after an encoder of (y, log s) has been trained to the largest bound."""
    y = random.normal(random.key(0), (200,), torch.float64) * (1 + noise.square()).sqrt()
    seen, variance = torch.stack([y, noise.log()])[None, None], noise.square() / (1 + noise.square())
    module = make(2, 2).double()
    module.load_state_dict({name: w[0, 0] for name, w in module.start(random.key(1), 1, torch.float64).items()})
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        mean, log_sd = module(seen)[0, 0]
        second = (2 * log_sd).exp()
        bound = log_sd - 0.5 * ((y - mean).square() + second) / noise.square() - 0.5 * (mean.square() + second)
        (value := -bound.mean()).backward()
        return value

    optimizer.step(loss)
    mean, log_sd = module(seen).detach()[0, 0]
    ratio = (2 * log_sd).exp() / variance
    return float((ratio - 1 - ratio.log() + (mean - y * variance / noise.square()).square() / variance).mean() / 2)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1 hidden unit, but got 0"):
        encoders.perceptron(0)
