"""Projections of a density times a factor against closed forms and sums over a grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING, distance
from support.oracles.normal_factors import conjugate
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import projections
from fedtorch.models.hierarchical.integrals import newton
from fedtorch.models.quadrature import gauss_hermite


def quartic(phi: Tensor, data: Any) -> Tensor:
    """log f_k(φ) = −Σ (φ − y)⁴ / 4: not normal."""
    y = data.batch[0]
    return -0.25 * ((phi[:, :, None, 0] - y[:, None, :, 0]).pow(4) * data.mask[:, None]).sum(-1)


@pytest.mark.parametrize(
    ("project", "tolerance"),
    [
        (projections.quadrature(quartic, gauss_hermite(1, 40)), 1e-6),
        (projections.importance(quartic, draws=20_000), 0.03),  # a few standard errors, 1 / √20000 each
    ],
)
def test_projections_of_a_factor_that_is_not_normal(project: projections.Projection, tolerance: float) -> None:
    y = torch.tensor([[0.5], [1.0], [-0.2]], dtype=torch.float64)
    block = ft.data.from_tensors([(y,), (y[:2],)]).stack([0, 1])
    cavity = Moments(torch.tensor([[0.3], [1.0]]).double(), torch.tensor([[[0.5]], [[2.0]]]).double())
    found = project(cavity, block, random.fold_in(random.key(0), torch.arange(2)))
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)[None, :, None].expand(2, -1, -1)
    log = quartic(grid, block) - 0.5 * (grid[..., 0] - cavity.mean).square() / cavity.covariance[:, 0]
    weight = torch.softmax(log, 1)
    mean = (weight * grid[..., 0]).sum(1)
    sd = (weight * (grid[..., 0] - mean[:, None]).square()).sum(1).sqrt()
    assert float(((found.tilted.mean[:, 0] - mean) / sd).abs().max()) < tolerance
    assert float((found.tilted.covariance[:, 0, 0].sqrt() / sd - 1).abs().max()) < tolerance


def test_the_mode_of_the_laplace_projection_has_no_gradient() -> None:
    y = torch.tensor([[0.5], [1.0], [-0.2]], dtype=torch.float64)
    block = ft.data.from_tensors([(y,)]).stack([0])
    cavity = Moments(torch.tensor([[0.25]]).double(), torch.tensor([[[0.5]]]).double())
    found = projections.laplace(quartic)(cavity, block, torch.zeros(1, dtype=torch.int64)).tilted
    mode = found.mean.requires_grad_()
    log = quartic(mode[:, None], block).sum() - (mode - 0.25).square().sum() / (2 * 0.5)
    (gradient,) = torch.autograd.grad(log, mode)
    assert float(gradient.abs()) < 1e-8  # Newton's method stops where a step is shorter than the root of 1e-18
    assert distance(found.covariance[0], 1 / (2 + 3 * (mode - y).square().sum()).detach()[None, None]) < 1e-8


def test_the_laplace_projection_is_exact_for_normal_factors() -> None:
    levels = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
    exact_one, data = conjugate(levels)
    block, key = data.stack([0, 1, 2]), torch.zeros(3, dtype=torch.int64)
    cavity = Moments(torch.ones(3, 2).double(), 2 * torch.eye(2).double().expand(3, 2, 2))

    def factor(phi: Tensor, data: Any) -> Tensor:
        away = phi[:, :, None] - data.batch[0][:, None]
        return -0.5 * (away.square().sum(-1) * data.mask[:, None]).sum(-1)

    expected = exact_one(cavity, block, key).tilted
    assert distance(projections.laplace(factor)(cavity, block, key).tilted, expected) < ROUNDING
    assert distance(projections.quadrature(factor)(cavity, block, key).tilted, expected) < 1e-6  # eleven points


def test_draws_that_are_common_to_tilted_and_cavity_do_not_add_up_their_errors() -> None:
    """Sites of a thousand clients whose factor is constant: zero, whatever the draws."""
    project = projections.importance(lambda phi, data: torch.zeros_like(phi[..., 0]), draws=100)
    cavity = Moments(torch.zeros(1000, 2).double(), torch.eye(2).double().expand(1000, 2, 2))
    found = project(cavity, None, random.fold_in(random.key(0), torch.arange(1000)))
    assert distance(found.tilted, found.reference) < ROUNDING


def test_solved_problems_and_settled_clients_are_left_out_and_change_nothing() -> None:
    """Newton's method, and nodes that move: most clients are done at once, and the last take many steps."""
    goal = torch.tensor([0.0, 0.1, -0.1, 0.2, 40.0], dtype=torch.float64)[:, None]
    problem = lambda goal: lambda x: ((x - goal).square() / 2 + (x - goal).cosh().log() * 50)[:, 0]
    sizes: list[int] = []

    def only(ids: Tensor) -> newton.Objective:
        sizes.append(len(ids))
        return problem(goal[ids])

    start, metric = torch.zeros_like(goal), torch.ones(5, 1, 1).double()
    whole, parts = (newton.minimised(problem(goal), start, metric, None, way) for way in (None, only))
    assert distance(parts[0], goal) < 1e-8
    assert distance(parts[0], whole[0]) < 1e-8
    assert torch.allclose(parts[1], whole[1], rtol=1e-12)
    assert min(sizes) == 1

    asked: list[int] = []

    def factor(phi: Tensor, y: Tensor) -> Tensor:
        asked.append(len(y))
        return -0.5 * ((phi[..., 0] - y) / torch.where(y.abs() > 1, 0.05, 1.0).double()).square()

    y = torch.tensor([[0.1], [0.2], [0.0], [4.0]], dtype=torch.float64)
    cavity, keys = Moments(torch.zeros(4, 1).double(), torch.ones(4, 1, 1).double()), torch.zeros(4, dtype=torch.int64)
    found, some = (projections.quadrature(factor, apart=apart)(cavity, y, keys).tilted for apart in (False, True))
    assert all(torch.allclose(one, other, rtol=1e-12, atol=0) for one, other in zip(found, some))
    assert asked[-1] == 1
