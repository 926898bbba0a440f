"""Newton's method on many problems at once, and where its searches begin: least points in closed form or on grids."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedtorch.models.hierarchical.integrals.newton import minimised
from fedtorch.models.hierarchical.integrals.smooth import Search, integrated
from fedtorch.models.hierarchical.pyro_factor import Starts
from fedtorch.models.quadrature import gauss_hermite


def metric(like: Tensor) -> Tensor:
    return torch.eye(like.shape[1], dtype=like.dtype).expand(len(like), -1, -1)


def rosenbrock(at: Tensor) -> Tensor:
    return (1 - at[:, 0]).square() + 100 * (at[:, 1] - at[:, 0].square()).square()


def test_valleys_are_followed_to_their_end_in_any_units() -> None:
    """Rosenbrock's function, whose second derivatives are indefinite at some starts, also in other units."""
    start = torch.tensor([[-1.2, 1.0], [0.0, 3.0], [2.0, -2.0], [1.0, 1.0]], dtype=torch.float64)
    units = torch.tensor([1e6, 1e-5], dtype=torch.float64)
    for scale in (torch.ones_like(units), units):
        found = minimised(lambda at, scale=scale: rosenbrock(at / scale), start * scale, metric(start))
        torch.testing.assert_close(found.at / scale, torch.ones_like(start), rtol=0, atol=1e-7)
        assert float(found.value.abs().max()) < 1e-14


def test_long_tails_and_walls_take_few_evaluations() -> None:
    """Student's t seen from its tail, where H is negative, and a wall of e^x: fifty halved steps each before."""
    asked: list[int] = []

    def objective(at: Tensor) -> Tensor:
        asked.append(len(at))
        tail = 2.5 * (1 + (at[:, 0] - 30).square() / 4).log()
        return tail + (at[:, 1] + 20).exp() - 5 * at[:, 1]

    start = torch.zeros(3, 2, dtype=torch.float64)
    found = minimised(objective, start, metric(start))
    best = torch.tensor([30.0, math.log(5) - 20], dtype=torch.float64)
    torch.testing.assert_close(found.at, best.expand(3, 2), rtol=1e-9, atol=1e-9)
    assert len(asked) < 60


def test_a_short_step_is_the_last_and_a_quadratic_needs_no_other() -> None:
    """With `still`, the value is as foretold: exact for a quadratic, of third order in the step for others."""
    goal = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    asked: list[int] = []

    def parabola(at: Tensor) -> Tensor:
        asked.append(len(at))
        return 3 * (at - goal).square()[:, 0] + 7

    found = minimised(parabola, torch.zeros_like(goal), metric(goal), still=100.0)
    torch.testing.assert_close(found.at, goal)
    torch.testing.assert_close(found.value, torch.full((2,), 7.0).double())
    assert len(asked) == 1
    poisson = lambda at: (at.exp() - 4 * at)[:, 0]
    found = minimised(poisson, torch.full((1, 1), 1.0).double(), metric(goal[:1]), still=0.1)
    assert abs(float(found.at) - math.log(4)) < 0.1**2
    assert abs(float(found.value) - (4 - 4 * math.log(4))) < 4 * 0.1**3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_problems_without_a_way_on_stay_where_they_are(bad: float) -> None:
    """Others are solved beside them; the objective that falls for ever ends after its evaluations."""
    goal = torch.tensor([[2.0], [1.0], [0.5]], dtype=torch.float64)

    def objective(at: Tensor) -> Tensor:
        value = (at - goal).square()[:, 0]
        return torch.stack([value[0], value[1] * bad, -at[2, 0].exp()])

    found = minimised(objective, torch.zeros_like(goal), metric(goal))
    assert float(found.at[0]) == pytest.approx(2.0)
    assert float(found.at[1]) == 0.0


def test_no_problem_and_no_coordinate() -> None:
    empty = torch.zeros(0, 2, dtype=torch.float64)
    found = minimised(lambda at: at.square().sum(1), empty, metric(empty))
    assert [len(part) for part in found] == [0, 0, 0]


def test_integrals_do_not_depend_on_where_the_search_begins() -> None:
    """Of a skew density; about a mode within 0.03 of an sd they are the same to the rule's own error."""
    at = torch.linspace(-1, 1, 5, dtype=torch.float64)[None, :, None]
    log_joint = lambda theta, at: (3 * theta - (theta + at).exp() - 0.5 * theta.square())[..., 0]
    rule = gauss_hermite(1, 15)
    plain = integrated(log_joint, at, 1, rule)
    warm = integrated(log_joint, at, 1, rule, search=Search(torch.full((1, 5, 1), 0.9).double(), 0.03))
    for one, other in zip(warm, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    grid = torch.linspace(-8, 8, 16001, dtype=torch.float64)
    for r in range(5):
        log = log_joint(grid[:, None], at[0, r])
        exact = torch.trapezoid(log.exp(), grid).log()
        assert abs(float(warm.log_factor[0, r] - exact)) < 1e-5


def test_starts_are_exact_for_linear_modes_and_per_client() -> None:
    """Clients apart, nodes that do not vary in some direction, and latent variables of another number."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    starts, ids = Starts(5), torch.tensor([3, 1])
    phi, slope, level = draw(2, 9, 3), draw(2, 3, 2), draw(2, 1, 2)
    assert starts.at(ids, phi, 2) is None
    starts.keep(ids, phi, level + phi @ slope)
    assert starts.at(torch.tensor([0, 1]), phi, 2) is None
    near = 0.3 * phi + 0.1
    torch.testing.assert_close(starts.at(ids, near, 2), level + near @ slope, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(starts.at(ids[1:], near[1:], 2), (level + near @ slope)[1:], rtol=1e-6, atol=1e-6)
    flat = phi * torch.tensor([1.0, 0.0, 1.0]).double()
    starts.keep(ids, flat, level + flat @ slope)
    torch.testing.assert_close(starts.at(ids, 0.5 * flat, 2), level + 0.5 * flat @ slope, rtol=1e-6, atol=1e-6)
    starts.keep(torch.tensor([0]), phi[:1], draw(1, 9, 1))
    assert starts.at(torch.tensor([0]), phi[:1], 1) is not None
    starts.keep(torch.tensor([0]), phi[:1], draw(1, 9, 4))
    assert starts.at(ids, phi, 2) is None
    lost = torch.full((1, 9, 1), math.nan).double()
    starts.keep(torch.tensor([0]), phi[:1], lost)
    assert starts.at(torch.tensor([0]), phi[:1], 1) is None
