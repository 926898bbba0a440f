"""Families q(θ) against torch's multivariate normal."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from support.verticals import draw

from fedtorch import tree, vfl
from fedtorch.vfl.fit.guide import GaussianFamily, full_covariance, low_rank

FAMILIES = {"diagonal": vfl.diagonal(), "full": full_covariance(), "low rank": low_rank(2)}
B, D = 3, 5


def some(family: GaussianFamily) -> dict[str, torch.Tensor]:
    start = family.init(B, D, 0.5, torch.float64, torch.device("cpu"))
    return tree.map(lambda leaf: leaf + 0.4 * draw(leaf.numel(), *leaf.shape), start)


@pytest.mark.parametrize("name", FAMILIES)
def test_density_and_draws(name: str) -> None:
    family = FAMILIES[name]
    q = some(family)
    exact = torch.distributions.MultivariateNormal(q["mean"], family.covariance(q))
    theta = draw(1, B, 7, D)
    found = family.log_density(q, theta)
    torch.testing.assert_close(found, exact.log_prob(theta.movedim(1, 0)).T, rtol=ROUNDING, atol=ROUNDING)
    # A draw is affine in its noise, so its moments are those of the matrix that multiplies it.
    count = family.noises(D)
    eye = torch.eye(count, dtype=torch.float64).expand(B, count, count)
    columns = family.draw(q, eye) - family.draw(q, torch.zeros_like(eye))
    torch.testing.assert_close(columns.mT @ columns, family.covariance(q), rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(family.draw(q, torch.zeros_like(eye))[:, 0], q["mean"], rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_start_and_size(name: str) -> None:
    family = FAMILIES[name]
    q = family.init(B, D, 0.5, torch.float64, torch.device("cpu"))
    assert q["mean"].abs().max() == 0
    spread = family.covariance(q).diagonal(dim1=-2, dim2=-1).sqrt()
    assert (spread / 0.5 - 1).abs().max() < 0.01
    empty = family.init(B, 0, 0.5, torch.float64, torch.device("cpu"))
    theta = family.draw(empty, torch.zeros(B, 2, family.noises(0), dtype=torch.float64))
    assert family.log_density(empty, theta).abs().max() == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="rank of at least 1, but got 0"):
        low_rank(0)
