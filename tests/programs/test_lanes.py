"""Instructions on groups of lanes do what NumPy's operations do, group by group."""

from __future__ import annotations

import numpy
import pytest

from fedtorch.programs import choice, program
from fedtorch.programs.lanes import LANES, multiply, subtract_multiples, subtract_products

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def _by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "on")


@program("void(float64[::1], float64[::1], float64[::1], int64)")
def instructions(out, factors, rows, count):
    """Run each on its own part of `out`, three groups in all."""
    multiply(out, 1, factors, 2, rows, 3, count)
    subtract_multiples(out, 10, factors, 1, rows, 0, count)
    subtract_products(out[20 * LANES :], 1, factors, 1, rows, 2, count)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_places_and_counts(count: int) -> None:
    numbers = numpy.random.default_rng(1)
    out, factors, rows = (numbers.normal(size=(groups, LANES)) for groups in (30, 9, 9))
    wanted = out.copy()
    wanted[1 : 1 + count] = factors[2] * rows[3 : 3 + count]
    wanted[10 : 10 + count] -= factors[1] * rows[:count]
    for k in range(count):
        wanted[21] -= factors[1 + k] * rows[2 + k]
    instructions(out.reshape(-1), factors.reshape(-1), rows.reshape(-1), count)
    assert numpy.array_equal(out, wanted)  # each product and each difference is rounded once
