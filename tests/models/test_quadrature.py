"""Rules against the moments of normal densities, and nodes that find sharp and distant factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from torch import Tensor

from fedtorch.models.gaussian import Moments
from fedtorch.models.quadrature import QuadratureRule, default_rule, gauss_hermite, quasi_random, tilt, two_shells


def moments(rule: QuadratureRule) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of weights and errors of the second and fourth moments."""
    x, w = rule.nodes, rule.weights
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    pairs = torch.einsum("ij,kl->ijkl", eye, eye)
    fourth = torch.einsum("r,ri,rj,rk,rl->ijkl", w, x, x, x, x)
    expected = pairs + pairs.permute(0, 2, 1, 3) + pairs.permute(0, 2, 3, 1)
    return w.sum(), (torch.einsum("r,ri,rj->ij", w, x, x) - eye).abs().max(), (fourth - expected).abs().max()


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4, 5, 8, 11, 16])
def test_default_rules_are_exact_to_degree_four(dimensions: int) -> None:
    for rule in (default_rule(dimensions), two_shells(dimensions)):
        total, second, fourth = moments(rule)
        assert bool((rule.weights > 0).all())
        assert abs(float(total) - 1) < ROUNDING
        assert float(second) < ROUNDING
        assert float(fourth) < 10 * ROUNDING
        assert float((rule.weights @ rule.nodes).abs().max()) < ROUNDING


def test_quasi_random_rules_are_exact_to_degree_three() -> None:
    rule = quasi_random(6, 100)
    total, second, _ = moments(rule)
    assert abs(float(total) - 1) < ROUNDING
    assert float(second) < ROUNDING


@pytest.mark.parametrize(
    ("dimensions", "sharpness"), [(1, 0.1), (1, 1e4), (3, 1.0), (3, 1e4), (9, 0.1), (9, 1.0), (9, 30.0)]
)
def test_a_normal_factor_is_found_wherever_it_is(dimensions: int, sharpness: float) -> None:
    """Its posterior is normal, so that nodes at its moments are exact; the evidence too."""
    cavity = Moments(torch.zeros(2, dimensions).double(), torch.eye(dimensions).double().expand(2, -1, -1))
    centre = torch.tensor([[2.5], [-1.5]]).double().expand(2, dimensions)

    def factor(zeta: Tensor) -> tuple[Tensor, None]:
        return -0.5 * sharpness * (zeta - centre[:, None]).square().sum(-1), None

    found = tilt(cavity, factor, default_rule(dimensions))
    mean = (found.weights[..., None] * found.nodes).sum(1)
    sd = (found.weights[..., None] * (found.nodes - mean[:, None]).square()).sum(1).sqrt()
    exact_sd = (1 + sharpness) ** -0.5
    normaliser = -0.5 * (dimensions * torch.tensor(1 + sharpness).double().log()
                         + sharpness / (1 + sharpness) * centre.square().sum(1))  # fmt: skip
    assert float((mean - centre * sharpness / (1 + sharpness)).abs().max()) < 1e-3 * exact_sd  # placed to 0.02 sd
    assert float((sd / exact_sd - 1).abs().max()) < 5e-3
    assert float((found.log_normaliser - normaliser).abs().max()) < 1e-3 * dimensions


def test_a_factor_that_is_not_found_gives_no_number() -> None:
    cavity = Moments(torch.zeros(1, 9).double(), torch.eye(9).double()[None])

    def factor(zeta: Tensor) -> tuple[Tensor, None]:
        return -0.5e4 * (zeta - 2.5).square().sum(-1), None

    assert bool(tilt(cavity, factor, default_rule(9)).weights.isnan().all())


def test_no_dimensions_are_one_node() -> None:
    cavity = Moments(torch.zeros(3, 0).double(), torch.zeros(3, 0, 0).double())
    found = tilt(cavity, lambda zeta: (torch.full(zeta.shape[:2], -2.0).double(), None), default_rule(0))
    assert torch.equal(found.weights, torch.ones(3, 1).double())
    assert torch.equal(found.log_normaliser, torch.full((3,), -2.0).double())


def test_rules_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="Expected points of at least 1"):
        gauss_hermite(2, 0)
    with pytest.raises(ValueError, match="Expected at least 14 points for 6 dimensions, but got 10"):
        quasi_random(6, 10)
    with pytest.raises(ValueError, match="Expected at least 1 dimension, but got 0"):
        two_shells(0)


@pytest.mark.parametrize("bias", [0.0, 0.3, 30.0])
def test_a_rough_factor_finds_the_place_and_decides_nothing(bias: float) -> None:
    """The factor itself is asked a few times then, and its moments are found even where the rough one errs."""
    goal = torch.tensor([[0.5], [-4.0], [8.0]], dtype=torch.float64)
    asked: list[int] = []

    def quartic(goal: Tensor) -> Any:
        def factor(zeta: Tensor) -> tuple[Tensor, None]:
            asked.append(len(zeta))
            away = zeta[..., 0] - goal
            return -8 * away.square() - 0.5 * away.pow(4), None

        return factor

    cavity = Moments(torch.zeros(3, 1).double(), torch.full((3, 1, 1), 4.0).double())
    rule = gauss_hermite(1, 25)
    plain = tilt(cavity, quartic(goal), rule)
    several, asked[:] = len(asked), []
    coarse = lambda ids: lambda zeta: (-9 * (zeta[..., 0] - goal[ids] - bias / 4).square(), None)
    every = torch.arange(3)
    found = tilt(cavity, quartic(goal), rule, only=lambda ids: quartic(goal[ids]), rough=(coarse(every), coarse))
    mean, wanted = ((nodes.weights * nodes.nodes[..., 0]).sum(1) for nodes in (found, plain))
    torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.log_normaliser, plain.log_normaliser, rtol=0, atol=1e-4)
    assert bias > 1 or len(asked) < several
