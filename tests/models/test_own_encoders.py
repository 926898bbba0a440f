"""A user's own encoders alone: a stack answers as each module does, and a law is drawn from given numbers."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from torch import Tensor, nn

from fedtorch import random
from fedtorch.models.own_encoders import Laws, OwnEncoder, factory

FEATURES = random.normal(random.key(0), (2, 3, 2, 5), torch.float64)  # (B, M, F, n)


def module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def test_a_stack_answers_as_each_of_its_modules() -> None:
    encoder = OwnEncoder(module(), 2, 3)
    several = [module(seed) for seed in (1, 2)]
    for name in dict(encoder.named_parameters()):
        stacked = torch.stack([each.get_parameter(name.replace("/", ".")) for each in several])
        setattr(encoder, name, nn.Parameter(stacked.detach()))
    found = encoder(FEATURES)
    for b, each in enumerate(several):
        torch.testing.assert_close(found[b], each(FEATURES[b].mT).mT, rtol=ROUNDING, atol=ROUNDING)


def test_a_stack_starts_with_the_modules_own_weights_and_leaves_the_module_alone() -> None:
    given = module()
    start = factory(given)(2, 3).start(random.key(0), 2, torch.float64)
    assert {name: tuple(weight.shape) for name, weight in start.items()}["0/weight"] == (2, 4, 2)
    start["0/weight"].zero_()
    assert given.get_parameter("0.weight").abs().min() > 0


def test_a_law_is_drawn_from_given_numbers_beside_the_prior() -> None:
    class Law(nn.Module):
        def forward(self, rows: Tensor) -> torch.distributions.Distribution:
            return torch.distributions.Normal(0.5 * rows[:, :1], 2.0)

    laws = OwnEncoder(Law(), 2, 2)(FEATURES)
    assert isinstance(laws, Laws)
    centre, noise = FEATURES[:, :, 1:], random.normal(random.key(1), (2, 3, 1, 5), torch.float64)
    z, ratio = laws.drawn(laws, centre, torch.tensor(0.7, dtype=torch.float64), noise)
    q = torch.distributions.Normal(0.5 * FEATURES[:, :, :1], 2.0)
    torch.testing.assert_close(z, q.loc + 2.0 * noise, rtol=ROUNDING, atol=ROUNDING)
    expected = torch.distributions.Normal(centre, 0.7).log_prob(z) - q.log_prob(z)
    torch.testing.assert_close(ratio, expected.sum(2), rtol=ROUNDING, atol=ROUNDING)


def test_rows_of_which_a_module_makes_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \(3, 2\) to \(3, 4\)"):
        OwnEncoder(module(), 2, 4)
