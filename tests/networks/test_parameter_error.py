"""Solvers say "converged" only of parameters that are right, not of equations that hold at others."""

from __future__ import annotations

import pytest
import torch

import fedtorch as ft
from fedtorch.networks import solvers
from fedtorch.networks.solvers import LinearProblem, Solution

N = 30


def stiff(alpha: float, decades: float, seed: int = 0, size: float = 1.0, dtype=torch.float64) -> LinearProblem:
    """Edges whose weights differ by so many powers of ten up and down."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        (size * torch.randn(5, 2, generator=generator).double(), torch.randn(5, generator=generator).double())
        for _ in range(N)
    ]
    edges = [(i, i + 1) for i in range(N - 1)] + [(0, 5), (3, 20), (7, 28)]
    order = torch.randperm(len(edges), generator=generator)
    weights = 10 ** torch.linspace(-decades, decades, len(edges), dtype=torch.float64)[order]
    return solvers.linear_problem(ft.data.from_tensors(rows), ft.Network(edges, weights), alpha, dtype=dtype)


def wrong(found: Solution, problem: LinearProblem) -> float:
    """Relative error beside the direct solution, in the norm of the diagonal blocks or as it is, the larger one."""
    exact = solvers.direct(problem).parameters
    difference = found.parameters - exact
    size = lambda w: float((w * (problem.blocks @ w[:, :, None])[:, :, 0]).sum().sqrt())
    return max(float(difference.norm() / exact.norm()), size(difference) / size(exact))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("alpha", "decades"), [(1e6, 3), (1.0, 6), (1.0, 9)])
def test_conjugate_gradients_go_on_until_the_parameters_are_right(alpha: float, decades: float, seed: int) -> None:
    one = stiff(alpha, decades, seed)
    found = solvers.conjugate_gradient(one)
    assert found.reason == "converged"
    assert wrong(found, one) <= found.error <= 1e-5  # the square root of the tolerance


@pytest.mark.parametrize("size", [0.03, 1e-3])
def test_float64_limit_is_reported(size: float) -> None:
    """Conditions of 1e12 and 1e15: the equations hold to rounding, the parameters do not."""
    for seed in range(2):
        one = stiff(1e6, 3, seed, size)
        found = solvers.conjugate_gradient(one)
        assert (found.reason, found.converged) == ("ill-conditioned", False)
        assert found.optimality < 1e-14
        assert max(wrong(found, one), 1e-5) < found.error
        hopeless = solvers.conjugate_gradient(stiff(1e6, 3, seed, 1e-5))
        assert not hopeless.converged
        assert hopeless.error > 1


def test_unfinished_solvers_are_not_converged() -> None:
    """At residuals that would have been small enough."""
    one = stiff(1e6, 3, 1)
    for solve in (solvers.chebyshev, solvers.fedrelax, solvers.fedgd):
        found = solve(one, rounds=1500, tolerance=1e-3)
        assert (found.reason, found.converged) == ("rounds", False)
        assert wrong(found, one) < found.error
        assert found.optimality < 1e-3 or solve is solvers.fedgd
    known = solvers.chebyshev(stiff(1e3, 1), tolerance=1e-8)
    assert known.reason == "converged"
    assert wrong(known, stiff(1e3, 1)) <= known.error <= 1e-4


def test_the_estimate_is_in_no_units_and_knows_the_pooled_direction() -> None:
    one = stiff(1e3, 1)
    w = solvers.direct(one).parameters
    generator = torch.Generator().manual_seed(0)
    off = w + 0.01 * torch.randn(2, generator=generator).double()  # the same everywhere: hardly any residual
    estimate = one.error(one.cross - one.product(off), off)
    size = lambda w: float((w * (one.blocks @ w[:, :, None])[:, :, 0]).sum().sqrt())
    assert size(off - w) / size(off) <= estimate < 5 * size(off - w) / size(off)
    units = torch.tensor([1e4, 1e-3], dtype=torch.float64)
    alone = stiff(0.0, 1)  # a penalty would have other units
    scaled = LinearProblem(alone.network, 0.0, alone.statistics._replace(
        gram=alone.gram * units[:, None] * units, cross=alone.cross * units))  # fmt: skip
    estimates = [p.error(p.cross - p.product(w / u), w / u) for p, u in ((alone, 1.0), (scaled, units))]
    assert estimates[0] == pytest.approx(estimates[1], rel=1e-9)
    assert alone.pooled_eigenvalue == pytest.approx(1.0)
    assert one.error(torch.zeros_like(w), w) == 0.0


def test_in_float32_half_of_its_digits_are_asked_for() -> None:
    one = stiff(1.0, 0.5, dtype=torch.float32)
    found = solvers.conjugate_gradient(one)
    assert found.converged
    assert found.error < 1e-3
    assert not solvers.conjugate_gradient(stiff(1e6, 3, dtype=torch.float32)).converged
