"""Functions that draw against expectation draw from keys, and leave the global generator as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedtorch import random
from fedtorch.module_randomness.watched_generators import drawn, each_drawn_if_random, unless_drawn

KEYS = random.fold_in(random.key(3), torch.arange(3))


@pytest.fixture(autouse=True)
def _untouched_generator():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def test_one_of_several_draws():
    function = lambda client: F.dropout(torch.ones(5), 0.5, training=client == 1)
    several = each_drawn_if_random(function, len(KEYS), lambda: KEYS, KEYS.device)
    assert torch.equal(several[1], drawn(lambda: function(1), KEYS[1]))
    assert torch.equal(several[0], torch.ones(5))


def test_a_function_that_draws_and_fails():
    def fails() -> None:
        torch.rand(3)
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        unless_drawn(fails, lambda: (None, True), torch.device("cpu"))
    own = torch.default_generator
    with pytest.raises(NotImplementedError, match="explicit generator"):
        each_drawn_if_random(
            lambda _: torch.rand(3) * torch.rand(3, generator=own), len(KEYS), lambda: KEYS, KEYS.device
        )


def test_who_has_drawn_elsewhere_is_not_put_back():
    before = torch.get_rng_state()
    result = unless_drawn(lambda: torch.rand(3), lambda: (torch.zeros(3), False), torch.device("cpu"))
    moved = torch.get_rng_state()
    torch.set_rng_state(before)
    assert torch.equal(result, torch.zeros(3))
    assert not torch.equal(moved, before)
