"""Conditional draws against their moments, imputation within the chain by Geweke's test, and rows that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gaps import START, clients, fit
from support.oracles import calibration, geweke
from support.oracles.closed_forms import same_bits
from support.oracles.sampled import sampled
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms.normal_em import normal_em
from fedtorch.models.gibbs import global_priors, imputation, logistic, sparse


def test_draws_have_the_conditional_moments() -> None:
    data = imputation.incomplete(clients(0.2))
    found = fit(data, 100)
    means = imputation.impute(data, found).rows[0]
    draws = torch.stack([imputation.impute(data, found, random.key(s)).rows[0] for s in range(400)])
    observed = data.rows.observed[:, :3]
    assert torch.equal(draws[0][observed], data.rows.values[:, :3][observed])
    error = draws.std(0)[~observed] / 400**0.5
    assert bool(((draws.mean(0) - means)[~observed].abs() < 5 * error).all())
    residual = found.covariance[0, 0] - found.covariance[0, 1:] @ torch.linalg.solve(
        found.covariance[1:, 1:], found.covariance[1:, 0]
    )
    only_first = (~observed[:, 0]) & observed[:, 1:].all(1)
    assert torch.allclose(draws.var(0)[only_first, 0], residual, rtol=5 * (2 / 400) ** 0.5)


def test_a_row_of_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected an observed value in every row"):
        imputation.incomplete([(torch.full((1, 2), torch.nan), torch.full((1,), torch.nan))])


ROWS = 5
NORMAL = imputation.Normal(
    torch.tensor([0.5, -0.3, 0.0]).double(),
    torch.tensor([[1.0, 0.6, 0], [0.6, 1.5, 0], [0, 0, 1.0]], dtype=torch.float64),
)
SEEN = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0], [1, 0]]).bool()
KERNELS = imputation.imputing(sparse.regression(noise_shape=2.0), NORMAL), sparse.hierarchy(global_priors.gaussian())


def _normal(keys: Tensor, p: int) -> tuple[Tensor, dict[str, Tensor]]:
    return random.normal(keys, (p,), torch.float64), {}


def _ones(keys: Tensor) -> Tensor:
    return torch.ones(len(keys), dtype=torch.float64)


SETTING = geweke.Setting(torch.zeros(ROWS, 2), 2, 2.0, geweke.horseshoe_scales, _normal, _ones)


def simulate(setting: geweke.Setting, sites: Any, key: Tensor) -> ft.data.ClientData:
    """Rows of a normal distribution, some of whose entries are hidden once the response is drawn."""
    factor = torch.linalg.cholesky(NORMAL.covariance[:2, :2])
    x = random.normal(random.fold_in(key, 0), (ROWS, 2), torch.float64) @ factor.mT + NORMAL.mean[:2]
    y = (x * sites.theta).sum(-1)
    y = y + random.normal(random.fold_in(key, 1), (ROWS,), torch.float64) / sites.noise.sqrt()
    observed = torch.cat([SEEN, torch.ones(ROWS, 1).bool()], 1).expand(len(x), -1, -1)
    values = torch.where(observed, torch.cat([x, y[..., None]], -1), 0.0)
    return KERNELS[0].prepare(ft.data.ClientData(imputation.Incomplete(values, observed), torch.full((len(x),), ROWS)))


@pytest.mark.parametrize(
    "length", [pytest.param((20, 15), id="short"), pytest.param((100, 150), id="long", marks=pytest.mark.slow)]
)
def test_geweke_with_missing_covariates(length: tuple[int, int]) -> None:
    scores = geweke.run(*KERNELS, SETTING, lambda prior: {}, *length, simulate=simulate)
    name, score, bound = geweke.worst(scores)
    assert abs(score) < bound, (name, score, bound)


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(calibration.Length(40, 7, 8, 2), id="short"),
        pytest.param(calibration.Length(600, 15, 40, 6), id="long", marks=pytest.mark.slow),
    ],
)
def test_posteriors_with_missing_covariates_are_calibrated(length: calibration.Length) -> None:
    truth = geweke.draw_joint(SETTING, length.replicates, 6)
    data = simulate(SETTING, truth.sites, geweke.keys(7, SETTING.sites * length.replicates))
    statistics = lambda joint: geweke.statistics(joint, SETTING.sites, lambda prior: {})
    start = torch.zeros(2)
    calibration.check(calibration.of_gibbs(*KERNELS, SETTING, truth, data, statistics, length, start=start, sweeps=3))


def imputed(missing: float, chunk: int | None = None) -> Any:
    data = imputation.incomplete(clients(missing))
    local = imputation.imputing(sparse.regression(), fit(data, 20))
    algorithm = ft.gibbs(local, sparse.hierarchy(), sweeps=2, chains=2)
    return ft.run(algorithm, ft.InProcess(data, chunk), torch.zeros(3), rounds=4).last.server


def test_imputing_in_chunks_is_the_same_to_the_bit() -> None:
    assert same_bits(imputed(0.3), imputed(0.3, 1))


def test_without_gaps_imputing_is_the_regression() -> None:
    """But for the keys: the posterior means of both, within their Monte Carlo errors."""
    rows = [(x - 1.0, y - 1.0) for x, y in clients(0.0)]
    gaps = imputation.incomplete(rows)
    means = []
    for local, data in (
        (imputation.imputing(sparse.regression(), fit(gaps, 2)), gaps),
        (sparse.regression(), ft.data.from_tensors(rows)),
    ):
        algorithm = ft.gibbs(local, sparse.hierarchy(), sweeps=3, chains=12)
        sampler = sampled(algorithm, ft.InProcess(data), torch.zeros(3), rounds=24, burn_in=8, keep=False)
        means.append(sampler.moments["theta"].mean)
    error = ((means[0].var(0) + means[1].var(0)) / 12).sqrt()
    assert float(((means[0].mean(0) - means[1].mean(0)) / error).abs().max()) < 4


def test_imputing_needs_responses() -> None:
    x, y = torch.ones(3, 2), torch.tensor([0.0, torch.nan, 1.0])
    data = imputation.incomplete([(x, y)])
    local = imputation.imputing(sparse.regression(), imputation.Normal(torch.zeros(3), torch.eye(3)))
    with pytest.raises(ValueError, match="Expected a response in every row"):
        ft.Run(ft.gibbs(local, sparse.hierarchy()), ft.InProcess(data), torch.zeros(2)).step()


def test_imputing_wants_a_regression_through_the_origin() -> None:
    normal = imputation.Normal(torch.zeros(3), torch.eye(3))
    for kernel in (sparse.regression(intercept=True), logistic.logistic_regression()):
        with pytest.raises(ValueError, match=r"Expected sparse\.regression\(\.\.\.\) without intercepts"):
            imputation.imputing(kernel, normal)


def test_gaps_are_filled_from_a_normal_of_single_precision() -> None:
    gaps = imputation.incomplete(clients(0.3))
    single = imputation.Normal(START.mean.float(), START.covariance.float())
    for (x, y), (other_x, other_y) in zip(imputation.impute(gaps, single), imputation.impute(gaps, START)):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_bad_rows_are_refused() -> None:
    x, y = torch.ones(2, 1), torch.ones(2)
    for sites, shapes in (([], r"\[\]"), ([(x, y[:, None])], r"\[\(\(2, 1\), \(2, 1\)\)\]")):
        with pytest.raises(
            ValueError, match=rf"Expected x \(n, p\) and y \(n,\) of every site, but got shapes {shapes}"
        ):
            imputation.incomplete(sites)
    with pytest.raises(ValueError, match="Expected finite values, but got NaN or Inf in field 'values'"):
        imputation.incomplete([(x / 0, y)])
    complete, gaps = ft.data.from_tensors([(x, y)]), imputation.incomplete([(x, y)])
    pair = imputation.Normal(torch.zeros(2).double(), torch.eye(2).double())
    gibbs = ft.gibbs(imputation.imputing(sparse.regression(), pair), sparse.hierarchy())
    for use in (
        lambda: ft.Run(normal_em(), ft.InProcess(complete), pair).step(),
        lambda: ft.Run(gibbs, ft.InProcess(complete), torch.zeros(1)).step(),
        lambda: imputation.impute(complete, pair),
    ):
        with pytest.raises(ValueError, match="Expected rows with missing cells, but got a tuple; make them by"):
            use()
    for use in (
        lambda: ft.Run(normal_em(), ft.InProcess(gaps), START).step(),
        lambda: imputation.impute(gaps, START),
        lambda: imputation.imputing(sparse.regression(), START).prepare(gaps.stack([0])),
    ):
        with pytest.raises(
            ValueError, match="Expected a normal distribution of 2 columns, the response last, but got one"
        ):
            use()
