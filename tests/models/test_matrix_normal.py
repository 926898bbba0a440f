"""Updates of Ω descend, conjugate gradients solve the dense equations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from torch import Tensor

from fedtorch.models import low_rank
from fedtorch.models.linear import SufficientStatistics, sufficient_statistics
from fedtorch.models.matrix_normal import (
    CovarianceUpdate,
    exponential_average,
    inverse_wishart,
    posterior_mode,
    zhang_yeung,
)

VARIANCE = torch.tensor(0.05, dtype=torch.float64)
UPDATES: dict[str, Callable[[], CovarianceUpdate]] = {
    "inverse_wishart": inverse_wishart,
    "inverse_wishart, damped": lambda: inverse_wishart(alpha=0.3, freedom=4.0, scale=2.0),
    "exponential_average": exponential_average,
    "exponential_average, whole": lambda: exponential_average(1.0),
    "zhang_yeung": lambda: zhang_yeung(trace=5.0),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("rank", [2, 5, 64])
def test_updates_never_increase_the_objective(name: str, rank: int) -> None:
    learn = UPDATES[name]()
    for units, features in [(1, 3), (4, 7), (30, 3)]:
        covariance = low_rank.identity(units, rank, float("inf"))
        for seed in range(20):
            theta = draw(units, 2, seed=seed) @ draw(2, features, seed=seed + 1) + 0.1 * draw(units, features)
            new = learn.update(covariance, theta, VARIANCE, units)
            before, after = (learn.penalty(part, theta, VARIANCE, units) for part in (covariance, new))
            if bool(covariance.multiple.isfinite()):
                assert float(after - before) <= 1e-10 * float(before.abs())
            assert new.vectors.shape == covariance.vectors.shape
            covariance = new


def test_the_inverse_wishart_mode() -> None:
    theta = draw(6, 4)
    found = inverse_wishart(freedom=2.0, scale=3.0).update(low_rank.identity(6, 64), theta, VARIANCE, 6).dense()
    m = 4 + 2 + 6 + 1
    assert torch.allclose(
        found, (m * 3 * VARIANCE * torch.eye(6, dtype=torch.float64) + theta @ theta.T) / m, rtol=0, atol=ROUNDING
    )


def test_the_exponential_average_of_the_paper() -> None:
    theta, learn = draw(6, 4), exponential_average(0.2, floor=1e-12)
    covariance, dense = low_rank.identity(6, 64), torch.eye(6, dtype=torch.float64)
    for _ in range(5):
        covariance = learn.update(covariance, theta, VARIANCE, 6)
        dense = 0.8 * dense + 0.2 / 4 * theta @ theta.T
    assert torch.allclose(covariance.dense(), dense, rtol=0, atol=10 * ROUNDING)


def test_the_closed_form_of_zhang_and_yeung() -> None:
    theta = draw(4, 9)
    values, vectors = torch.linalg.eigh(theta @ theta.T)
    root = (vectors * values.sqrt()) @ vectors.T
    found = zhang_yeung(floor=1e-14).update(low_rank.identity(4, 64), theta, VARIANCE, 4)
    assert torch.allclose(found.dense(), root / root.trace(), rtol=0, atol=1e-9)  # the floor's root is 1e-8
    assert float(
        zhang_yeung(trace=2.0).update(low_rank.identity(7, 3), draw(7, 5), VARIANCE, 7).diagonal().sum()
    ) == pytest.approx(2)


def problem(units: int, rows: int, features: int) -> tuple[SufficientStatistics, Tensor, low_rank.LowRank]:
    x, noise = draw(units, rows, features), 0.1 + draw(units, seed=1).square()
    y = (x @ draw(units, features, seed=2)[..., None])[..., 0] + draw(units, rows, seed=3)
    covariance = low_rank.LowRank.from_factor(torch.tensor(0.01, dtype=torch.float64), draw(units, 3, seed=4), 3)
    return sufficient_statistics(x, y), noise, covariance


def dense_mode(statistics: SufficientStatistics, noise: Tensor, precision: Tensor) -> Tensor:
    """The mode of Θ from one system with K·d unknowns, `(K, d)`."""
    units, features = statistics.cross.shape
    blocks = torch.block_diag(*(statistics.gram / noise[:, None, None]))
    matrix = blocks + torch.kron(precision.contiguous(), torch.eye(features, dtype=torch.float64))
    return torch.linalg.solve(matrix, (statistics.cross / noise[:, None]).flatten()).reshape(units, features)


@pytest.mark.parametrize("shape", [(1, 5, 3), (8, 6, 4), (8, 2, 4), (25, 9, 2)])
def test_conjugate_gradients_find_the_dense_mode(shape: tuple[int, int, int]) -> None:
    statistics, noise, covariance = problem(*shape)
    expected = dense_mode(statistics, noise, torch.linalg.inv(covariance.dense()))
    found = posterior_mode(statistics, noise, covariance, tolerance=1e-13)
    assert torch.allclose(found.coefficients, expected, rtol=0, atol=1e-9)  # residual times a condition of thousands
    assert found.residual < 1e-12
    assert found.iterations <= 4 * statistics.cross.numel()


def test_the_preconditioner_makes_the_iterations_few() -> None:
    statistics, noise, covariance = problem(300, 10, 5)
    assert posterior_mode(statistics, noise, covariance).iterations < 60  # 1500 unknowns, 15 shared directions


def test_bad_input() -> None:
    statistics, noise, covariance = problem(4, 6, 3)
    with pytest.raises(ValueError, match=r"Expected positive noise variances, but got 0\.0"):
        posterior_mode(statistics, 0 * noise, covariance)
    with pytest.raises(ValueError, match="for each of 4 units, but got"):
        posterior_mode(statistics, noise[:3], covariance)
    for alpha in (0.0, 1.5):
        for make in (exponential_average, lambda alpha: inverse_wishart(alpha=alpha)):
            with pytest.raises(ValueError, match=r"Expected alpha in \(0, 1\]"):
                make(alpha)
    with pytest.raises(ValueError, match="Expected a positive floor"):
        exponential_average(0.1, floor=0.0)
    with pytest.raises(ValueError, match="Expected a positive trace"):
        zhang_yeung(trace=0.0)
    with pytest.raises(ValueError, match="Expected freedom of at least 0"):
        inverse_wishart(freedom=-1.0)
