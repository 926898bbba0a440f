"""The posterior of Θ: the dense one by brute force, the row's step as a regression on factors, calibration."""

from __future__ import annotations

import math

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from torch import Tensor

import fedtorch as ft
from fedtorch.federation.algorithms.matrix_normal import devices
from fedtorch.models import low_rank
from fedtorch.models.device_posterior import interval
from fedtorch.models.linear import SufficientStatistics, sufficient_statistics
from fedtorch.models.matrix_normal_posterior import average, posterior


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(units: int, rows: int, d: int, rank: int) -> tuple[SufficientStatistics, Tensor, low_rank.LowRank]:
    x, noise = draw(units, rows, d), 0.1 + draw(units, seed=1).square()
    y = (x @ draw(units, d, seed=2)[..., None])[..., 0] + draw(units, rows, seed=3)
    omega = low_rank.LowRank.from_factor(torch.tensor(0.3, dtype=torch.float64), draw(units, rank, seed=4), rank + 1)
    return sufficient_statistics(x, y), noise, omega


def dense(statistics: SufficientStatistics, noise: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `(K d,)` and covariance `(K d, K d)` of Θ given Ω by one inverse."""
    d = statistics.cross.shape[1]
    prior = torch.kron(torch.linalg.inv(omega).contiguous(), torch.eye(d, dtype=torch.float64))
    covariance = torch.linalg.inv(torch.block_diag(*(statistics.gram / noise[:, None, None])) + prior)
    return covariance @ (statistics.cross / noise[:, None]).flatten(), covariance


@pytest.mark.parametrize("shape", [(1, 5, 3, 1), (8, 6, 4, 2), (8, 2, 4, 3), (12, 9, 2, 5), (4, 3, 2, 0)])
def test_given_the_covariance_it_is_the_dense_posterior(shape: tuple[int, int, int, int]) -> None:
    statistics, noise, omega = problem(*shape)
    mean, covariance = dense(statistics, noise, omega.dense())
    units, d = statistics.cross.shape
    found = average(statistics, noise, omega, known=True)
    over = torch.eye(d, dtype=torch.float64).repeat(1, units) / units
    assert torch.allclose(found.mean, over @ mean, rtol=0, atol=100 * ROUNDING)
    assert torch.allclose(found.covariance, over @ covariance @ over.mT, rtol=0, atol=100 * ROUNDING)
    each = posterior(statistics, noise, omega, known=True)
    blocks = covariance.reshape(units, d, units, d).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert torch.allclose(each.means.flatten(), mean, rtol=0, atol=100 * ROUNDING)
    assert torch.allclose(each.covariances[:, 0], blocks, rtol=0, atol=100 * ROUNDING)


def test_the_row_adds_what_a_regression_on_the_factors_leaves_open() -> None:
    """θ_k = Ẑ'f + √a e with f ~ N(0, diag(s)/K): the joint normal of (θ_k, f), inverted as a whole."""
    statistics, noise, omega = problem(8, 6, 4, 2)
    a, vectors, values = omega.trimmed()
    units, d = statistics.cross.shape
    mean, _ = dense(statistics, noise, omega.dense())
    factor = vectors * values.sqrt()
    shared = factor.mT @ torch.linalg.solve(omega.dense(), mean.reshape(units, d))  # E[Z | Θ] is linear in Θ
    known, whole = (posterior(statistics, noise, omega, known=known).covariances[:, 0] for known in (True, False))
    eye = torch.eye(d, dtype=torch.float64)
    for k in range(units):
        gram = statistics.gram[k] / noise[k]
        below = shared @ shared.mT / a + torch.diag(units / values)
        both = torch.cat([torch.cat([gram + eye / a, -shared.mT / a], 1), torch.cat([-shared / a, below], 1)])
        with_row = torch.linalg.inv(both)[:d, :d]
        added = with_row - torch.linalg.inv(gram + eye / a)
        assert torch.allclose(whole[k] - known[k], added, rtol=0, atol=1e-11)
        assert float(torch.linalg.eigvalsh(added).min()) > -ROUNDING
    both_of = [average(statistics, noise, omega, known=known).covariance for known in (True, False)]
    assert torch.allclose(both_of[1] - both_of[0], (whole - known).sum(0) / units**2, rtol=0, atol=1e-11)


def related(units: int, d: int, rows: int, seed: int) -> tuple[ft.data.FederatedData, Tensor]:
    """Ω = BB'/3 + 0.01 I, noise variance 0.1."""
    shared = draw(units, 3, seed=seed)
    omega = shared @ shared.mT / 3 + 0.01 * torch.eye(units, dtype=torch.float64)
    theta = torch.linalg.cholesky(omega) @ draw(units, d, seed=seed + 1000)
    x = draw(units, rows, d, seed=seed + 2000)
    y = (x @ theta[..., None])[..., 0] + math.sqrt(0.1) * draw(units, rows, seed=seed + 3000)
    return ft.data.from_tensors(list(zip(x, y))), theta


def covered(units: int, d: int, rows: int, seeds: int) -> dict[bool, float]:
    """The share of true coefficients in intervals of 90 %, with Ω̂ taken for the truth and without."""
    hits: dict[bool, list[Tensor]] = {True: [], False: []}
    for seed in range(seeds):
        data, theta = related(units, d, rows, seed)
        head = ft.LinearHead(d, intercept=False, dtype=torch.float64)
        run = ft.run(ft.matrix_normal(ft.least_squares(head), noise=0.1), ft.InProcess(data), rounds=40)
        for known, inside in hits.items():
            low, high = interval(devices(run, known=known).marginals(), 0.9)
            inside.append(((low < theta) & (theta < high)).double().mean())
    return {known: float(torch.stack(inside).mean()) for known, inside in hits.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("units", "d", "rows"), [(100, 8, 20), (30, 40, 60), (300, 5, 10)])
def test_intervals_of_ninety_per_cent_cover_ninety_per_cent(units: int, d: int, rows: int) -> None:
    """Twelve federations, some 10 000 coefficients; a federation's share has an sd of one per cent."""
    found = covered(units, d, rows, 12)
    assert found[False] == pytest.approx(0.9, abs=0.015)
    assert found[True] < found[False] - 0.015
    if d < 10:  # few coefficients tell little of a row of Ω
        assert found[True] < 0.85


@pytest.mark.slow
def test_a_step_for_the_spectrum_alone_takes_intervals_to_nothing() -> None:
    """Given the directions that were fitted to Θ̂, the marginal likelihood is largest where units have nothing alone."""
    data, theta = related(100, 8, 20, seed=0)
    head = ft.LinearHead(8, intercept=False, dtype=torch.float64)
    server = ft.run(ft.matrix_normal(ft.least_squares(head), noise=0.1), ft.InProcess(data), rounds=40).server
    known, noise = SufficientStatistics.of(data), torch.full((100,), 0.1, dtype=torch.float64)
    a, vectors, values = server.covariance.trimmed()

    def spectrum(at: Tensor) -> low_rank.LowRank:
        return low_rank.LowRank(at[0].exp(), vectors, at[1:].exp())

    start = torch.cat([a[None], values]).log()
    at = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([at], max_iter=60, line_search_fn="strong_wolfe")

    def less() -> Tensor:
        optimiser.zero_grad()
        value = -marginal_likelihood(known, noise, spectrum(at)) + ((at - start) / 10).square().sum() / 2
        value.backward()
        return value

    optimiser.step(less)
    assert float(at[0].detach().exp()) < 0.01 * float(a)
    low, high = interval(posterior(known, noise, spectrum(at.detach()), known=True).marginals(), 0.9)
    assert float(((low < theta) & (theta < high)).double().mean()) < 0.5


def marginal_likelihood(statistics: SufficientStatistics, noise: Tensor, omega: low_rank.LowRank) -> Tensor:
    """log p(y | Ω) up to a constant, by one determinant of all coefficients."""
    d = statistics.cross.shape[1]
    dense, blocks = omega.dense(), torch.block_diag(*(statistics.gram / noise[:, None, None]))
    prior = torch.kron(torch.linalg.inv(dense).contiguous(), torch.eye(d, dtype=torch.float64))
    factor = torch.linalg.cholesky(blocks + prior)
    right = (statistics.cross / noise[:, None]).reshape(-1, 1)
    fit = (right * torch.cholesky_solve(right, factor)).sum()
    return fit / 2 - factor.diagonal().log().sum() - d * torch.logdet(dense) / 2
