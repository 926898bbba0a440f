"""When expectation propagation halves its damping, when all clients go back, and where to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance
from torch import Tensor

from fedtorch.federation.algorithms.ep import _damping as damping
from fedtorch.federation.algorithms.ep._damping import Moved, Pace
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Moments, Natural


def number(*values: float) -> Tensor:
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)


def round_of(pace: Pace, change: float = 1e-3, improper: float = 0.0, **arguments: Any) -> tuple[Pace, Moved]:
    settings = {"version": 6, "proper": True, "everybody": True, "most": 1.0, **arguments}
    settings.update({name: torch.tensor(settings[name]) for name in ("proper", "everybody")})
    return damping.update(pace, number(change, change / 2), improper=number(improper), **settings)


def pace(delta: float = 0.5, speed: float = 1.0, back: bool = False, good: int = 5, retreats: int = 0) -> Pace:
    return Pace(number(delta), number(speed), torch.tensor(back), torch.tensor(good), torch.tensor(retreats))


def test_two_good_rounds_make_up_for_a_halving_and_no_more() -> None:
    now, _ = round_of(pace(0.25))
    assert float(now.damping) == pytest.approx(0.25 * 2**0.5)
    now, _ = round_of(now._replace(speed=number(1.0)), version=7)
    assert float(now.damping) == pytest.approx(0.5)
    assert int(now.good) == 7
    assert not bool(now.back)
    assert float(round_of(pace(0.9), most=0.9)[0].damping) == 0.9


@pytest.mark.parametrize("trouble", [{"proper": False}, {"improper": 0.1}])
def test_failure_halves_damping_and_steps_back_once(trouble: dict[str, Any]) -> None:
    now, moved = round_of(pace(), **trouble)
    assert bool(now.back)
    assert (float(now.damping), float(moved.damping)) == (0.25, 0.5)
    assert float(moved.remaining) == torch.inf
    assert int(now.good) == (5 if "improper" in trouble else 6)  # cavities are of the q before the round
    again, _ = round_of(now, version=7)
    assert float(again.damping) == 0.25  # a round back took no steps
    assert not bool(again.back)
    assert int(again.good) == int(now.good)


def test_sites_step_back_until_q_is_a_density() -> None:
    now, _ = round_of(pace(back=True), proper=False)
    assert bool(now.back)
    assert not bool(round_of(now, proper=True)[0].back)


def test_a_cavity_that_stays_none_does_not_hold_up_the_others() -> None:
    now, turned = pace(1.0), []
    for version in range(6, 20):
        now, _ = round_of(now._replace(speed=number(1.0)), improper=0.0 if bool(now.back) else 0.2, version=version)
        turned.append(bool(now.back))
    assert sum(turned) == int(now.retreats) == 5
    assert not any(turned[10:])
    assert bool(round_of(now, proper=False)[0].back)  # but q must be a density


@pytest.mark.parametrize(("version", "everybody", "factor"), [(3, True, 2**0.5), (4, True, 0.5), (4, False, 2**0.5)])
def test_changes_must_shrink_after_some_rounds_of_everybody(version: int, everybody: bool, factor: float) -> None:
    now, moved = round_of(pace(0.5, speed=0.1), change=0.05, version=version, everybody=everybody)
    assert float(now.damping) == pytest.approx(0.5 * factor)
    assert float(moved.remaining) == torch.inf
    assert float(round_of(pace(), change=torch.nan)[0].damping) == 0.25


def test_damping_does_not_vanish() -> None:
    assert float(round_of(pace(1 / 64), proper=False)[0].damping) == 1 / 64
    assert float(round_of(pace(1e-3), proper=False, most=1e-3)[0].damping) == 1e-3


def test_what_remains_is_a_geometric_series() -> None:
    """Changes of 0.1, 0.05, 0.025 … in rounds of damping 0.5: what follows the second adds up to 0.1 undamped."""
    _, moved = round_of(pace(0.5, speed=0.2), change=0.05)
    assert float(moved.remaining) == pytest.approx(sum(0.1 * 0.5**k for k in range(1, 60)))
    assert (float(moved.mean_change), float(moved.sd_change)) == (0.05, 0.025)
    begun, moved = damping.begun(0.7)
    assert float(moved.remaining) == torch.inf
    for version in (0, 1):
        begun, moved = round_of(begun, change=0.1 / (1 + version), version=version)
        assert float(moved.remaining) == torch.inf  # the start is no trend


@pytest.mark.parametrize("change", [0.0, 1e-15])
def test_rounds_at_the_fixed_point_stand_still(change: float) -> None:
    """Where changes are rounding, none of them is much smaller than the last."""
    now, moved = round_of(pace(0.5, speed=1e-15), change)
    assert float(moved.remaining) == 2 * change
    assert float(now.damping) > 0.5


def test_where_each_client_goes_back_to() -> None:
    """One that has not stepped stays; then its site before a step from a good q; else the one remembered."""
    site, before, good = (Natural(number(a, a, a)[:, None], number(a, a, a)[:, None]) for a in (1.0, 2.0, 3.0))
    found = damping.last_good(site, before, good, torch.tensor([-1, 4, 6]), torch.tensor([5, 5, 5]))
    assert found.shift[:, 0].tolist() == found.precision[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert damping.halfway(found, site).shift[:, 0].tolist() == [1.0, 1.5, 2.0]


def test_going_half_the_way_again_and_again_ends_among_densities() -> None:
    bad, good = Natural(number(0.0, 0.0), number(-8.0, 0.0, 1.0)), Natural(number(0.0, 0.0), number(1.0, 0.2, 1.0))
    times = 0
    while not bool(gaussian.is_proper(bad)):
        bad, times = damping.halfway(bad, good), times + 1
    assert times == 4  # 9 / 2⁴ < 1 − 0.2²


def test_changes_are_in_sds_and_far_is_five_of_them() -> None:
    def normal(mean: float, sd: float) -> Natural:
        return gaussian.natural(Moments(number(mean, 0.0), torch.diag(number(sd, 1.0)).square()))

    assert distance(damping.changes(normal(0.0, 1.0), normal(1.0, 2.0)), number(0.5, 0.5)) < ROUNDING
    assert damping.is_near(normal(0.0, 2.0), normal(9.9, 1.0))
    assert not damping.is_near(normal(0.0, 2.0), normal(10.1, 1.0))
    assert damping.is_near(normal(0.0, 2.0), normal(10.1, 9.0))  # it was too narrow
    nothing = Natural(number(0.0, 0.0), number(0.0, 0.0, 0.0))
    assert damping.is_near(nothing, normal(100.0, 1.0))
    assert bool(damping.changes(nothing, normal(0.0, 1.0)).isnan().all())
