"""Data augmentation against closed forms of the posterior, in any blocks, resumed, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gaps import START, clients
from support.oracles.closed_forms import distance
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms._augmentation import GUESS, RIDGE, WEIGHT, NormalDraws
from fedtorch.models.gibbs import imputation


def begin(data: ft.data.FederatedData, draws: int, **settings: Any) -> ft.Run:
    p = data.rows.values.shape[1]
    start = imputation.Normal(torch.zeros(p), torch.eye(p))
    chunk = settings.pop("chunk", None)
    return ft.Run(ft.normal_em(draws, **settings), ft.InProcess(data, chunk), start)


def after(rounds: int, data: ft.data.FederatedData, draws: int, **settings: Any) -> NormalDraws:
    run = begin(data, draws, **settings)
    for _ in run.rounds(rounds):
        pass
    return run.server


def one_sample(rows: int) -> Tensor:
    z = random.normal(random.key(7), (rows, 2), torch.float64)
    return z @ torch.tensor([[2.0, 0.0], [1.0, 0.5]]).double() + torch.tensor([10.0, -1.0]).double()


def test_without_gaps_draws_have_the_moments_of_the_posterior() -> None:
    """An inverse Wishart distribution, and a mean that is a multivariate t."""
    z, chains = one_sample(30), 2000
    found = after(2, imputation.incomplete([(z[:10, :1], z[:10, 1]), (z[10:, :1], z[10:, 1])]), chains, between=False)
    squares = z.T.cov(correction=0) * 30
    squares = squares + RIDGE * torch.diag(z.var(0, correction=0))
    freedom = 30 - 1 + RIDGE
    wanted = squares / (freedom - 3)
    sd = found.normal.covariance.std(0) / chains**0.5
    assert float(((found.normal.covariance.mean(0) - wanted).abs() / sd).max()) < 4.5
    error = (wanted.diagonal() / 30 / chains).sqrt()
    assert float(((found.normal.mean.mean(0) - z.mean(0)).abs() / error).max()) < 4.5
    assert float((found.normal.mean.var(0) / (wanted.diagonal() / 30) - 1).abs().max()) < 5 * (2 / chains) ** 0.5


def test_a_monotone_pattern_has_its_closed_form() -> None:
    """Little and Rubin (2019), section 7.2: the mean of what is missing is that of a regression on what is observed."""
    z, chains = one_sample(120), 300
    x, hidden = z[:, :1].clone(), z[:, 1] < -1.0  # at random given what is observed
    x[hidden] = torch.nan
    found = after(50, imputation.incomplete([(x[:50], z[:50, 1]), (x[50:], z[50:, 1])]), chains, between=False)
    seen = z[~hidden]
    slope = seen.T.cov()[0, 1] / seen[:, 1].var()
    wanted = seen[:, 0].mean() + slope * (z[:, 1].mean() - seen[:, 1].mean())
    draws = found.normal.mean[:, 0]
    assert abs(float(draws.mean() - wanted)) < 4.5 * float(draws.std()) / chains**0.5
    residual = (seen[:, 0] - seen[:, 0].mean() - slope * (seen[:, 1] - seen[:, 1].mean())).var() * (len(seen) - 1)
    of_slope = (found.normal.covariance[:, 0, 1] / found.normal.covariance[:, 1, 1]).var()
    expected = residual / (len(seen) - 4) / ((seen[:, 1] - seen[:, 1].mean()).square().sum())
    assert 0.6 < float(of_slope / expected) < 1.4  # five standard errors of a variance of 300 draws


def test_variances_between_sites_have_their_closed_form() -> None:
    """With many rows a site's mean is known, and τ is inverse gamma."""
    levels, chains, rows = torch.tensor([0.0, 1.0, 3.0, 5.0, 6.0]).double(), 400, 40
    z = 0.01 * random.normal(random.key(2), (5, rows, 2), torch.float64) + levels[:, None, None]
    found = after(12, imputation.incomplete([(own[:, :1], own[:, 1]) for own in z]), chains)
    variance = z.flatten(0, 1).var(0, correction=0)
    squares = z.mean(1).var(0) * 4 + WEIGHT * GUESS * variance
    precision = 1 / found.normal.between
    wanted = (5 - 1 + WEIGHT) / squares
    error = precision.std(0) / chains**0.5
    assert float(((precision.mean(0) - wanted).abs() / error).max()) < 4.5


def test_chunks_give_the_same_draws() -> None:
    data = imputation.incomplete(clients(0.3))
    assert distance(after(4, data, 3).normal, after(4, data, 3, chunk=1).normal) < 1e-9


def test_a_chain_draws_the_same_beside_others() -> None:
    data = imputation.incomplete(clients(0.3))
    few, many = after(4, data, 2).normal, after(4, data, 5).normal
    assert distance(few.mean, many.mean[:2]) < 1e-12


def test_resumed_draws_are_the_uninterrupted_ones() -> None:
    data = imputation.incomplete(clients(0.3))
    whole, half, rest = begin(data, 2), begin(data, 2), begin(data, 2)
    for run, rounds in ((whole, 6), (half, 3)):
        for _ in run.rounds(rounds):
            pass
    rest.load_state_dict(half.state_dict())
    for _ in rest.rounds(6):
        pass
    assert torch.equal(rest.server.normal.covariance, whole.server.normal.covariance)


def test_constant_columns_do_not_break_draws() -> None:
    data = imputation.incomplete([(torch.cat([x, torch.ones(len(x), 1).double()], 1), y) for x, y in clients(0.2)])
    assert bool(after(5, data, 2).normal.covariance.isfinite().all())


def test_cells_of_a_constant_column_are_the_constant() -> None:
    """Whatever its units are: no spread is made up for values that have none."""
    rows = []
    for x, y in clients(0.2):
        same = torch.tensor([5e8, 0.0]).double().repeat(len(x), 1)
        rows.append((torch.cat([x, torch.where(torch.arange(len(x))[:, None] % 3 == 0, torch.nan, same)], 1), y))
    normal = after(5, imputation.incomplete(rows), 2).normal
    width = len(rows[0][0][0])
    assert normal.mean[:, width - 2].tolist() == pytest.approx([5e8] * 2, rel=1e-12)
    assert float(normal.mean[:, width - 1].abs().max()) < 1e-70
    assert float((normal.covariance[:, width - 2, width - 2].sqrt() / 5e8).max()) < 1e-12
    assert float(normal.covariance[:, width - 1, width - 1].max()) < 1e-150


def test_what_has_no_posterior_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one draw, but got draws=0"):
        ft.normal_em(0)
    x, y = torch.full((3, 1), torch.nan), torch.ones(3)
    with pytest.raises(ValueError, match=r"values of every column, but no site has any of columns \[0\]"):
        after(1, imputation.incomplete([(x, y)]), 2)
    few = imputation.incomplete([(torch.ones(1, 4), torch.ones(1))])
    with pytest.raises(ValueError, match="more rows than the 5 columns, but got 1"):
        after(3, few, 2)  # one more, for a column that does not vary is infinitely many sds from the start
    with pytest.raises(ValueError, match="rows with missing cells, but got a tuple"):
        ft.Run(ft.normal_em(2), ft.InProcess(ft.data.from_tensors([(x.nan_to_num(), y)])), START).step()
