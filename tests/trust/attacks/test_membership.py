"""Membership inference finds the rows of an overfitted model, and no more than ε allows of a private one."""

from __future__ import annotations

import math

import pytest
import torch
from support.oracles.neighbour_tests import most_detections
from torch import nn

import fedtorch as ft
from fedtorch.trust import attacks, privacy
from fedtorch.trust.attacks.membership import confidence, likelihood_ratios

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(80, 10, generator=GENERATOR)
Y = torch.randint(3, (80,), generator=GENERATOR)  # nothing to learn but the rows themselves


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 3))


def test_an_overfitted_model_tells_its_rows() -> None:
    local = ft.gradient_descent(network(), steps=60, loss=nn.functional.cross_entropy,
                                optimizer=lambda p: torch.optim.Adam(p, lr=0.01))  # fmt: skip
    found = attacks.membership(local, X, Y, shadows=32)
    assert found.scores.shape == found.member.shape == (32, 80)
    assert found.area() > 0.9
    assert found.detections(0.01) > 10 * 0.01


@pytest.mark.slow
def test_membership_attack_is_within_epsilon() -> None:
    """ε = 0.5 leaves an area of some per cent above one half; there are 32·40 nearly independent scores a side."""
    delta = 1e-3
    noise = privacy.noise_for(epsilon=0.5, sampling_rate=0.5, rounds=20, delta=delta)
    local = privacy.example_level(
        network(), clip=1.0, noise=noise, sampling_rate=0.5, steps=20, delta=delta, entropy=privacy.from_seed(0),
        loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
    )  # fmt: skip
    found = attacks.membership(local, X, Y, shadows=32)
    alarms, detections = found.roc()
    error = 1 / math.sqrt(32 * 40)
    assert bool((detections <= most_detections(alarms, 0.5, delta) + 4 * error).all())
    assert found.area() < 0.6
    assert local.budget.ledger.epsilon <= 0.501


def test_the_attack_is_the_ratio_of_normal_densities() -> None:
    generator = torch.Generator().manual_seed(1)
    member = torch.cat([torch.rand(6, 5, generator=generator) < 0.5] * 2)
    member[6:] = ~member[:6]
    values = torch.randn(12, 5, generator=generator, dtype=torch.float64) + 2 * member
    found = likelihood_ratios(values, member)
    for target in (0, 7):
        others = torch.arange(12) != target
        for row in range(5):
            seen, rest, own = member[others, row], values[others, row], float(values[target, row])
            sides = [rest[seen], rest[~seen]]
            variance = sum(float((side - side.mean()).square().sum()) for side in sides) / 11
            logs = [-((own - float(side.mean())) ** 2) / (2 * variance) for side in sides]
            assert float(found[target, row]) == pytest.approx(logs[0] - logs[1])
    separated = likelihood_ratios(values + 50 * member, member)
    assert bool(((separated > 0) == member).all())


def test_confidences_are_log_odds() -> None:
    logits = torch.randn(2, 4, 3, generator=GENERATOR, dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 1])
    p = logits.softmax(2).gather(2, targets.expand(2, -1)[..., None])[..., 0]
    assert float((confidence(logits, targets) - (p / (1 - p)).log()).abs().max()) < 1e-12


@pytest.mark.parametrize(("shadows", "rows"), [(6, 80), (9, 80), (8, 3)])
def test_attacks_that_cannot_be_made_are_refused(shadows: int, rows: int) -> None:
    local = ft.gradient_descent(network(), steps=1, loss=nn.functional.cross_entropy, optimizer=torch.optim.Adam)
    with pytest.raises(ValueError, match="at least 8 shadows"):
        attacks.membership(local, X[:rows], Y[:rows], shadows=shadows)
