"""The alarm at values that are no numbers to reckon with, and Page and Hinkley's test as a loop."""

from __future__ import annotations

import math

import pytest
import torch
from support.oracles.closed_forms import linear_clients

import fedtorch as ft
from fedtorch.trust.drift import DriftAlarm, training_loss


def watched(values: list[float | None], **settings: float) -> tuple[list[int], list[str]]:
    said: list[str] = []
    drift = DriftAlarm(**{"threshold": 1.0, **settings}, alarm=said.append)
    for number, value in enumerate(values, 1):
        drift.watch(number, value)
    return drift.rounds, said


def pages_test(values: list[float], threshold: float, slack: float) -> list[int]:
    """Σ (x_s − mean of x_1 … x_s − δ) minus its least so far, anew after every alarm."""
    alarms, since = [], 0
    for t in range(len(values)):
        part = values[since : t + 1]
        steps = [x - sum(part[: s + 1]) / (s + 1) - slack for s, x in enumerate(part)]
        sums = [sum(steps[:s]) for s in range(len(steps) + 1)]
        if sums[-1] - min(sums) > threshold:
            alarms.append(t + 1)
            since = t + 1
    return alarms


@pytest.mark.parametrize("slack", [0.0, 0.3])
def test_it_is_pages_test(slack: float) -> None:
    values = torch.randn(150, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cumsum(0).tolist()
    alarms = pages_test(values, 4.0, slack)
    assert len(alarms) >= 3
    assert watched(values, threshold=4.0, slack=slack)[0] == alarms


@pytest.mark.parametrize(("bad", "why"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_what_is_not_finite_raises_the_alarm_and_leaves_the_rest_as_it_was(bad: float, why: str) -> None:
    rounds, said = watched([1.0, 1.1, bad, 0.9, bad, 1.0, 2.0, 2.0])
    assert rounds == [3, 5, 8]
    assert said[0] == f"Drift in round 3: {why}, where the mean was 1.05"
    without = watched([1.0, 1.1, 0.9, 1.0, 2.0, 2.0])[1]
    assert said[2] == without[0].replace("round 6", "round 8")
    assert watched([bad])[1] == [f"Drift in round 1: {why}, where nothing was measured before"]


def test_numbers_that_overflow_raise_the_alarm_too() -> None:
    assert watched([-1e308, -1e308, 1e308, 1.0, 1.0, 9.0], threshold=5.0)[0] == [3, 6]
    assert watched([-1.7e308, 1.7e308, -1.7e308, 1.0, 1.0, 30.0], threshold=5.0)[0][-1] == 6


def test_nothing_measured_is_passed_over() -> None:
    assert watched([1.0, None, 1.0, None, 4.0])[0] == [5]
    data = linear_clients([3, 4])
    drift = DriftAlarm(threshold=1e-6)
    nobody = ft.Faults(before=lambda keys, ids: torch.ones_like(ids, dtype=torch.bool))
    run = ft.run(ft.fedavg(ft.least_squares(torch.nn.Linear(3, 1).double())), ft.InProcess(data), rounds=2,
        record=drift, faults=nobody)  # fmt: skip
    assert training_loss(run.last) is None
    assert drift.rounds == []


def test_it_goes_on_from_a_state_after_inf() -> None:
    first, second = (DriftAlarm(threshold=1.0, alarm=lambda said: None) for _ in range(2))
    values = [1.0, 1.2, math.inf, 0.9, 3.0, math.nan]
    for number, value in enumerate(values[:3], 1):
        first.watch(number, value)
    assert all(bool(leaf.isfinite().all()) for leaf in first.state_dict().values())
    second.load_state_dict(first.state_dict())
    for number, value in enumerate(values[3:], 4):
        second.watch(number, value)
    assert second.rounds == watched(values)[0] == [3, 5, 6]
    dead = {"numbers": torch.tensor([3.0, math.inf, math.nan, math.nan]).double(), "rounds": torch.tensor([2])}
    second.load_state_dict(dead)  # as written before Inf was an alarm
    second.watch(4, 1.0)
    second.watch(5, 4.0)
    assert second.rounds == [2, 5]


@pytest.mark.parametrize("settings", [{"threshold": math.inf}, {"threshold": math.nan}, {"slack": math.inf}])
def test_an_alarm_that_never_rings_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Expected a positive threshold and a slack of at least 0"):
        watched([], **settings)
