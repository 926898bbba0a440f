"""Encoders: their start, their size, and that a stack of them is many separate ones."""

from __future__ import annotations

import pytest
import torch
from support.closed_forms import ROUNDING

from fedtorch import random, tree
from fedtorch.vfl import encoder

FEATURES = random.normal(random.key(0), (4, 3, 2, 9), torch.float64)


@pytest.mark.parametrize("make", [encoder.linear, encoder.perceptron])
def test_a_new_encoder_answers_zero(make: type) -> None:
    network = make()
    weights = network.init(random.key(1), 4, 2, 5, torch.float64)
    assert torch.equal(network.forward(weights, FEATURES), torch.zeros(4, 3, 5, 9, dtype=torch.float64))
    gradients = torch.func.grad(lambda w: (network.forward(w, FEATURES) - 1).square().sum())(weights)
    assert gradients["skip"].abs().min() > 0


def test_the_formula() -> None:
    network = encoder.perceptron(6)
    weights = network.init(random.key(1), 4, 2, 5, torch.float64)
    weights = {n: random.normal(random.key(i), w.shape, torch.float64) for i, (n, w) in enumerate(weights.items())}
    found = network.forward(weights, FEATURES)
    for b in range(4):
        one = {name: value[b, 0] for name, value in weights.items()}
        v = FEATURES[b, 2, :, 7]
        inner = (one["first"] @ v + one["bias"][:, 0]).tanh()
        expected = one["skip"] @ v + one["shift"][:, 0] + one["second"] @ inner
        torch.testing.assert_close(found[b, 2, :, 7], expected, rtol=ROUNDING, atol=ROUNDING)


def test_weights_start_alike_for_one_key_and_differ_for_several() -> None:
    network = encoder.perceptron(6)
    alike = network.init(random.key(1), 3, 2, 5)
    assert torch.equal(alike["first"][0], alike["first"][2])
    several = network.init(random.fold_in(random.key(1), torch.arange(3)), 3, 2, 5)
    assert not torch.equal(several["first"][0], several["first"][2])
    assert {n: w.shape for n, w in tree.items(alike)} == {n: w.shape for n, w in tree.items(several)}


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1 hidden unit, but got 0"):
        encoder.perceptron(0)
