"""Factors against inverses, and draws by their linear map."""

from __future__ import annotations

import torch

from fedtorch import linalg, random

ROOT = random.normal(random.key(0), (3, 4, 4), torch.float64)
MATRIX = ROOT @ ROOT.mT + torch.eye(4)
FACTOR = torch.linalg.cholesky(MATRIX)


def test_the_symmetric_part() -> None:
    assert torch.equal(linalg.symmetric(ROOT), linalg.symmetric(ROOT).mT)
    assert torch.equal(linalg.symmetric(MATRIX + MATRIX.mT), MATRIX + MATRIX.mT)


def test_the_inverse_of_a_factor() -> None:
    inverse = linalg.inverse_factor(FACTOR)
    assert torch.allclose(inverse.mT @ inverse, torch.linalg.inv(MATRIX), rtol=1e-10, atol=1e-12)


def test_a_draw_has_the_mean_and_the_covariance() -> None:
    """At z = 0 it is the mean; what it makes of the unit vectors is a root of the covariance."""
    shift = ROOT[..., 0]
    mean = linalg.normal_draw(FACTOR, shift, torch.zeros_like(shift))
    assert torch.allclose(mean, torch.linalg.solve(MATRIX, shift), rtol=1e-10, atol=1e-12)
    root = torch.stack([linalg.normal_draw(FACTOR, 0 * shift, z.expand_as(shift)) for z in torch.eye(4).double()], -1)
    assert torch.allclose(root @ root.mT, torch.linalg.inv(MATRIX), rtol=1e-10, atol=1e-12)
