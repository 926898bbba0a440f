"""Factors against inverses, draws by their linear map, and columns of very different units against `numpy.lstsq`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtorch import linalg, random

EPS = torch.finfo(torch.float64).eps

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


def normal(seed: int, *shape: int) -> Tensor:
    return random.normal(random.key(seed), shape, torch.float64)


def spread(seed: int, columns: int) -> Tensor:
    """Factors from 1e-6 to 1e6, both of them among two or more."""
    powers = 12 * random.uniform(random.fold_in(random.key(seed), 1), (columns,), torch.float64) - 6
    powers[:1], powers[1:2] = -6, 6
    return 10**powers


def test_scales_are_powers_of_two() -> None:
    diagonal = torch.tensor([0.0, 1.0, 3.0, 5e17, 1e-30, 1e300], dtype=torch.float64)
    scale = linalg.unit_scale(diagonal)
    assert bool((torch.frexp(scale).mantissa == 0.5).all())
    assert scale[0] == 1
    assert bool(((scale**2 * diagonal)[1:] >= 0.5).all() & ((scale**2 * diagonal)[1:] < 2).all())


@pytest.mark.parametrize("seed", range(40))
def test_solutions_agree_with_numpy_on_columns_of_one_size(seed: int) -> None:
    p = 1 + seed % 8
    x = normal(seed, p + 1 + seed % 13, p) * spread(seed, p)
    y = normal(seed + 100, len(x))
    size = x.norm(dim=0)
    expected = np.linalg.lstsq((x / size).numpy(), y.numpy(), rcond=None)[0]
    found = linalg.pseudo_inverse(x.T @ x) @ (x.T @ y) * size
    condition = float(torch.linalg.cond(x / size)) ** 2  # forming X'X squares it
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * EPS * condition * np.abs(expected).max())


@pytest.mark.parametrize("seed", range(20))
def test_of_dependent_columns_the_least_norm_in_their_own_units(seed: int) -> None:
    """Pairs of proportional columns, for which that is known: coefficients as the columns are, whatever the others."""
    pairs = 1 + seed % 4
    base, factor, scale = normal(seed, 30, pairs), normal(seed + 1, pairs), spread(seed, pairs)
    x = torch.cat([base * scale, base * scale * factor, torch.zeros(30, 1, dtype=torch.float64)], 1)
    order = random.permutation(random.key(seed), x.shape[1])
    y = normal(seed + 2, 30)
    moved = x[:, order]
    parts = linalg.equilibrated(moved.T @ moved)
    assert int(parts.rank) == pairs
    found = (linalg.pseudo_inverse(moved.T @ moved) @ (moved.T @ y))[order.argsort()]
    once = torch.linalg.lstsq(base, y[:, None]).solution[:, 0] / scale
    share = 1 + factor.square()
    expected = torch.cat([once / share, once * factor / share])
    size = x[:, :-1].norm(dim=0)
    assert float(((found[:-1] - expected) * size).norm() / (expected * size).norm()) < 1e-9
    assert found[-1] == 0
    null = parts.null()
    assert float((null.mT @ null - torch.diag((null != 0).any(0).double())).abs().max()) < 1e-12


def test_stacked_matrices_of_different_rank() -> None:
    x = normal(0, 3, 9, 4)
    x[1, :, 2] = x[1, :, 0]
    x[2, :, 1:3] = 0
    gram = x.mT @ x
    assert linalg.equilibrated(gram).rank.tolist() == [4, 3, 2]
    assert torch.allclose(linalg.pseudo_inverse(gram), torch.linalg.pinv(gram, rtol=1e-12, hermitian=True), atol=1e-11)
    assert linalg.pseudo_inverse(gram[:0]).shape == (0, 4, 4)
    assert not linalg.pseudo_inverse(torch.zeros(3, 3)).any()
