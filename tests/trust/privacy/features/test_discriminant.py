"""Discriminants with little leak against a search among all directions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedtorch.trust import privacy


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    factors = draw(2, 4, 6)
    return draw(2, 4), factors @ factors.mT, draw(2, 4)


def measured(direction: Tensor, means: Tensor, covariances: Tensor, private: Tensor) -> tuple[Tensor, Tensor]:
    """(separation, leak) of directions `(..., d)`, by the correlation of aᵀx with the best guess from F x."""
    c = covariances.mean(0)
    variance = (direction @ c * direction).sum(-1)
    cross = direction @ c @ private.T
    told = (torch.linalg.solve(private @ c @ private.T, cross[..., None])[..., 0] * cross).sum(-1) / variance
    return (direction @ (means[1] - means[0])).abs() / variance.sqrt(), -0.5 * torch.log1p(-told)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("leak", [0.0, 0.05, 0.5])
def test_no_direction_that_leaks_less_separates_more(seed: int, leak: float) -> None:
    means, covariances, private = problem(seed)
    found = privacy.private_discriminant(means, covariances, private, leak)
    separation, lost = measured(found.direction, means, covariances, private)
    assert found.separation == pytest.approx(float(separation))
    assert found.leak == pytest.approx(float(lost), abs=1e-9)
    assert found.leak <= leak + 1e-9
    generator = torch.Generator().manual_seed(9)
    directions = torch.randn(200_000, 4, generator=generator, dtype=torch.float64)
    others, leaks = measured(directions, means, covariances, private)
    assert float(others[leaks <= max(leak, 1e-3)].max()) <= found.separation * (1 if leak else 1.1)


def test_without_a_bound_it_is_fisher_s() -> None:
    means, covariances, private = problem(4)
    found = privacy.private_discriminant(means, covariances, private, math.inf)
    fisher = torch.linalg.solve(covariances.mean(0), means[1] - means[0])
    assert torch.allclose(found.direction / found.direction.norm(), fisher / fisher.norm())
    draws = torch.randn(2, 100_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    same = covariances.mean(0)
    rows = draws @ torch.linalg.cholesky(same).T + means[:, None]
    z = rows @ found.direction
    threshold = (means @ found.direction).mean()
    right = 0.5 * float((z[0] < threshold).double().mean() + (z[1] > threshold).double().mean())
    assert right == pytest.approx(found.accuracy, abs=4 * math.sqrt(0.25 / 200_000))


def test_what_cannot_be_is_refused() -> None:
    means, covariances, private = problem(5)
    with pytest.raises(ValueError, match="Expected means"):
        privacy.private_discriminant(means, covariances, private.T, 0.1)
    with pytest.raises(ValueError, match="leak of at least 0"):
        privacy.private_discriminant(means, covariances, private, -0.1)
    with pytest.raises(ValueError, match="positive definite"):
        privacy.private_discriminant(means, -covariances, private, 0.1)
    with pytest.raises(ValueError, match="differ outside the protected part"):
        privacy.private_discriminant(means, covariances, torch.eye(4), 0.1)
