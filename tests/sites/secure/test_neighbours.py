"""Neighbours and thresholds: figures for servers that cheat, what is refused with which advice, and drawn graphs."""

from __future__ import annotations

import random
import re

import pytest

from fedtorch.sites.secure.messages import Session
from fedtorch.sites.secure.neighbours import Neighbourhoods, circle, neighbourhoods


@pytest.mark.parametrize(
    ("n", "active", "curious"),
    [
        (4, (3, 2, 0), (3, 2, 0)),
        (7, (6, 4, 1), (4, 2, 1)),
        (10, (8, 5, 1), (6, 2, 1)),
        (20, (16, 10, 2), (10, 3, 2)),
        (50, (36, 21, 5), (22, 6, 5)),
        (100, (72, 42, 10), (36, 11, 10)),
        (1000, (464, 274, 83), (100, 38, 37)),
    ],
)
def test_neighbours_and_thresholds_of_the_defaults(
    n: int, active: tuple[int, int, int], curious: tuple[int, int, int]
) -> None:
    assert neighbourhoods(n) == active
    assert neighbourhoods(n, adversary="curious") == curious


@pytest.mark.parametrize("n", range(3, 60))
def test_what_is_advised_where_nothing_will_do_will_do(n: int) -> None:
    """And one more would not; from seven clients on the defaults will."""
    for settings in ({}, {"corrupt": 0.3}, {"minimum": max(3, n - 1)}):
        try:
            near = neighbourhoods(n, **settings)
        except ValueError as error:
            advised = re.findall(r"at most (\d+) \(`(\w+)=([0-9.e-]+)`\)", str(error))
            assert (settings, n) != ({}, n) or n in (3, 5, 6)
            for most, name, value in advised:
                assert round(float(value) * n) == int(most)
                neighbourhoods(n, **{**settings, name: float(value)})
                with pytest.raises(ValueError, match="no threshold keeps them"):
                    neighbourhoods(n, **{**settings, name: (int(most) + 1) / n})
        else:
            assert 2 * near.threshold > near.neighbours + near.colluding
            assert near.threshold >= settings.get("minimum", 3) - 1
    assert neighbourhoods(n, dropouts=0, everybody=True).neighbours == n - 1


def test_fewer_than_three_or_parts_that_are_none_are_refused() -> None:
    for arguments in ((2,), (10, 1.5), (10, 0.1, -0.1)):
        with pytest.raises(ValueError, match="at least 3 clients, and corrupt ones and dropouts as parts"):
            neighbourhoods(*arguments)
    assert neighbourhoods(20, corrupt=2, dropouts=6) == neighbourhoods(20)
    assert neighbourhoods(8, corrupt=2, dropouts=1).colluding == 2
    with pytest.raises(ValueError, match="neither fewer of the one nor of the other alone"):
        neighbourhoods(20, corrupt=0.95, dropouts=0.95)


@pytest.mark.parametrize("n", [20, 50, 100])
def test_on_drawn_circles_no_client_has_more_corrupt_neighbours_than_are_allowed_for(n: int) -> None:
    """So that what can be learnt is of `Session.honest` clients; of corrupt ones, fewer would not have been enough."""
    generator, near = random.Random(0), neighbourhoods(n)
    keys = {k: bytes([k]) * 32 for k in range(1, n + 1)}
    session = Session(b"run", 0, 0, keys, 2, near, 3)
    session.check()
    worst = 0
    for trial in range(100):
        bad = {*generator.sample(sorted(keys), round(0.1 * n))}
        drawn = circle(sorted(keys), near.neighbours, bytes([trial]))
        for k, others in drawn.items():
            assert len(others) == near.neighbours
            corrupt = len({*others} & bad)
            if k not in bad:
                assert 2 * (near.threshold - corrupt) > near.neighbours - corrupt  # one secret is safe
                worst = max(worst, corrupt)
    assert worst == near.colluding
    assert session.honest == near.threshold - near.colluding + 1
    assert Neighbourhoods(6, 4).least("curious") == 1
