"""Encoders: their start, their size, and that a stack of them is many separate ones."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import ROUNDING

from fedtorch import random, tree
from fedtorch.vfl.fit import encoder

FEATURES = random.normal(random.key(0), (4, 3, 2, 9), torch.float64)


@pytest.mark.parametrize("make", [encoder.affine(), encoder.perceptron()])
def test_a_new_encoder_answers_zero(make: encoder.EncoderFactory) -> None:
    weights = make(2, 5).start(random.key(1), 4, torch.float64)
    answer = lambda w: encoder.encoded(make, w, FEATURES, 5)
    assert torch.equal(answer(weights), torch.zeros(4, 3, 5, 9, dtype=torch.float64))
    gradients = torch.func.grad(lambda w: (answer(w) - 1).square().sum())(weights)
    assert gradients["skip"].abs().min() > 0


def test_the_formula() -> None:
    make = encoder.perceptron(6)
    weights = make(2, 5).start(random.key(1), 4, torch.float64)
    weights = {n: random.normal(random.key(i), w.shape, torch.float64) for i, (n, w) in enumerate(weights.items())}
    found = encoder.encoded(make, weights, FEATURES, 5)
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
    module = encoder.perceptron(6)(2, 5)
    alike = module.start(random.key(1), 3)
    assert torch.equal(alike["first"][0], alike["first"][2])
    several = module.start(random.fold_in(random.key(1), torch.arange(3)), 3)
    assert not torch.equal(several["first"][0], several["first"][2])
    assert {n: w.shape for n, w in tree.items(alike)} == {n: w.shape for n, w in tree.items(several)}


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1 hidden unit, but got 0"):
        encoder.perceptron(0)
