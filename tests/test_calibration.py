"""What the calibration tests can see: nothing in right posteriors, and a tenth in the sds of wrong ones."""

from __future__ import annotations

import pytest
import torch
from support.oracles import calibration, geweke
from torch import Tensor

from fedtorch import random

COUNT = 3000


def posteriors(scale: float = 1.0, shift: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """(truths, means, sds) of θ ~ N(0, 1) and three rows y ~ N(θ, 2), whose posteriors are made wrong on purpose."""
    z = random.normal(geweke.keys(30, COUNT), (4,), torch.float64)
    truth = z[:, 0]
    mean = (truth[:, None] + 2**0.5 * z[:, 1:]).sum(1) / 2 / 2.5
    sd = torch.full_like(mean, 2.5**-0.5)
    return truth, mean + shift * sd, scale * sd


def by_distribution(truth: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    return torch.special.ndtr((truth - mean) / sd)


def among_draws(truth: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    draws = random.normal(geweke.keys(31, COUNT), (63,), torch.float64).mT
    return calibration.among(truth, mean + sd * draws)


@pytest.mark.parametrize("places", [by_distribution, among_draws])
def test_right_posteriors_are_calibrated(places: object) -> None:
    calibration.check({"theta": places(*posteriors())})  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [{"scale": 1.1}, {"scale": 1 / 1.1}, {"shift": 0.12}])
@pytest.mark.parametrize("places", [by_distribution, among_draws])
def test_wrong_posteriors_are_not(places: object, wrong: dict[str, float]) -> None:
    found = calibration.worst({"theta": places(*posteriors(**wrong))})  # type: ignore[operator]
    assert found.probability < found.bound


def test_draws_equal_to_the_truth_are_broken_at_random() -> None:
    """Of a coin whose side is not known the posterior is half and half, and places are uniform nevertheless."""
    coins = (random.uniform(geweke.keys(32, COUNT), (32,), torch.float64) < 0.5).double().mT
    calibration.check({"side": calibration.among(coins[0], coins[1:])})
    found = calibration.worst({"side": calibration.among(coins[0], torch.zeros_like(coins[1:]))})
    assert found.probability < found.bound
