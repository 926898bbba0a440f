"""Multiple imputation end to end: at a site as in one process, against MICE, in coverage, and what it refuses."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy
import pandas
import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.inference import completed, imputed, pooled
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import imputation
from fedtorch.sites import Hub, Policy, SiteConfiguration, join
from fedtorch.sites.streams import memory

few_rounds = pytest.mark.filterwarnings("ignore:Expected chains that have mixed")


def complete_rows(seed: int, rows: int, clients: int) -> tuple[Tensor, Tensor]:
    """Rows y = x₀ + x₁ + noise."""
    keys = random.fold_in(random.key(seed), torch.arange(2))
    x = random.normal(keys[0], (clients, rows, 2), torch.float64)
    x[..., 0] += 0.7 * x[..., 1]
    return x, x.sum(-1) + random.normal(keys[1], (clients, rows), torch.float64)


def sites(seed: int, rows: int = 40, clients: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Rows whose x₀ is missing where the response or x₁ is large: at random given what is observed."""
    x, y = complete_rows(seed, rows, clients)
    x[..., 0] = torch.where((y > 0.8) | (x[..., 1] > 1.2), torch.nan, x[..., 0])
    return [(x[k], y[k]) for k in range(clients)]


def least_squares(data: ft.data.FederatedData, intercept: bool = True) -> tuple[Tensor, Tensor]:
    x, y = data.rows
    x = torch.cat([torch.ones(len(x), 1).double(), x], 1) if intercept else x
    inverse = torch.linalg.inv(x.T @ x)
    beta = inverse @ x.T @ y
    return beta, (y - x @ beta).square().sum() / (len(y) - x.shape[1]) * inverse


@few_rounds
def test_the_same_seed_completes_the_same_and_observed_cells_stay() -> None:
    data = imputation.incomplete(sites(0))
    first, again, other = (imputed(data, 3, rounds=20, between=False, seed=s) for s in (1, 1, 2))
    x = data.rows.values[:, :2]
    seen = data.rows.observed[:, :2]
    for one, two, third in zip(first, again, other):
        assert torch.equal(one.rows[0], two.rows[0])
        assert torch.equal(one.rows[0][seen], x[seen])
        assert not torch.equal(one.rows[0], third.rows[0])
    assert len(first[1:]) == 2
    assert torch.equal(first[-1].rows[0], first[2].rows[0])


@few_rounds
def test_chunks_and_orders_of_clients_complete_the_same_given_the_draws() -> None:
    data = imputation.incomplete(sites(0))
    found = imputed(data, 2, rounds=10, between=False)
    chunked = imputed(data, 2, rounds=10, between=False, population=lambda rows: ft.InProcess(rows, 1))
    assert torch.allclose(found[1].rows[0], chunked[1].rows[0], atol=1e-9)


def offered(mean: Any, covariance: Any, between: Any, key: int) -> ft.Algorithm:
    """Build what a site offers: a hierarchical model of rows that it completes itself."""
    return ft.ep(hierarchical.linear(hierarchical.normal(2))) | completed(mean, covariance, between, key)


@few_rounds
def test_sites_that_complete_their_rows_get_the_numbers_of_one_process() -> None:
    """Draws travel as settings; in one process the data are the same."""
    data = imputation.incomplete(sites(0), ["a", "b", "c"])
    draw = imputed(data, 2, rounds=10).run.server.normal
    settings = {"mean": draw.mean[1].tolist(), "covariance": draw.covariance[1].tolist()}
    settings |= {"between": draw.between[1].tolist(), "key": 5}
    together = ft.run(offered(**settings), ft.InProcess(data), rounds=3)
    host, threads = Hub(), []
    for k, name in enumerate(data.names):
        link = lambda name=name: memory.link(host, name)
        threads.append(threading.Thread(target=join, args=(link, SiteConfiguration(data.select([k]), {"ep": offered}))))
        threads[-1].start()
    remote = ft.Remote(host, list(data.names), "ep", settings, rows=data.rows)
    apart = ft.run(offered(**settings), remote, rounds=3)
    remote.finish(apart)
    for thread in threads:
        thread.join()
    assert torch.allclose(apart.server.posterior.shift, together.server.posterior.shift, rtol=1e-9)


def test_the_draws_at_sites_need_no_rows_at_the_server() -> None:
    data = imputation.incomplete(sites(0), ["a", "b", "c"])
    offers = {"draws": lambda draws: ft.normal_em(draws, columns=3)}
    host, threads = Hub(), []
    for k, name in enumerate(data.names):
        link = lambda name=name: memory.link(host, name)
        brought = SiteConfiguration(data.select([k]), offers, Policy(minimum=1))  # which draws as one process does
        threads.append(threading.Thread(target=join, args=(link, brought)))
        threads[-1].start()
    remote = ft.Remote(host, list(data.names), "draws", {"draws": 2}, rows=data.rows)
    apart = ft.Run(ft.normal_em(2, columns=3), remote)
    for _ in apart.rounds(4):
        pass
    remote.finish(apart)
    for thread in threads:
        thread.join()
    together = ft.run(ft.normal_em(2, columns=3), ft.InProcess(data), rounds=4)
    assert torch.allclose(apart.server.normal.covariance, together.server.normal.covariance, rtol=1e-8)


@few_rounds
def test_runs_are_pooled_by_name() -> None:
    data = imputation.incomplete(sites(0))
    model = hierarchical.linear(hierarchical.normal(2, random=[], names=["a", "b"]))
    fits = [ft.run(ft.ep(model), ft.InProcess(each), rounds=6) for each in imputed(data, 2, rounds=60, between=False)]
    found = pooled(fits)
    assert found.names[:2] == ("a", "b")
    by_hand = torch.stack([ft.inference.pooled([fit, fit]).mean for fit in fits]).mean(0)
    assert torch.allclose(found.mean, by_hand)


@pytest.mark.slow
def test_close_to_mice() -> None:
    """Their imputation is by chained equations and predictive means: estimates agree to a third of an sd."""
    from statsmodels.imputation import mice
    from statsmodels.regression.linear_model import OLS

    x, y = (leaf[0] for leaf in complete_rows(3, 400, 1))
    x[random.uniform(random.key(1), (400,), torch.float64) < 0.3, 0] = torch.nan  # predictive means need donors
    frame = pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y})
    state = numpy.random.get_state()  # noqa: NPY002
    numpy.random.seed(0)  # noqa: NPY002
    try:
        theirs = mice.MICE("y ~ a + b", OLS, mice.MICEData(frame, k_pmm=5)).fit(3, 12)
    finally:
        numpy.random.set_state(state)  # noqa: NPY002
    fits = [least_squares(each) for each in imputed(imputation.incomplete([(x, y)]), 40, rounds=60, between=False)]
    ours = pooled(fits, freedom=397)
    sd = ours.covariance.diagonal().sqrt()
    gap = (ours.mean - torch.tensor(numpy.asarray(theirs.params))) / sd
    assert float(gap.abs().max()) < 0.35
    assert float((sd / torch.tensor(numpy.asarray(theirs.bse)) - 1).abs().max()) < 0.3


def test_what_cannot_be_imputed_is_refused() -> None:
    complete = ft.data.from_tensors([(torch.ones(3, 2), torch.ones(3))])
    with pytest.raises(ValueError, match=r'rows with missing cells, as from_frame\(..., missing="impute"\) makes them'):
        imputed(complete)
    data = imputation.incomplete(sites(0))
    with pytest.raises(ValueError, match="imputations >= 1 and rounds >= 2, but got 0 and 100"):
        imputed(data, 0)
    frame = pandas.DataFrame({"site": ["a", "b"], "age": [None, None], "y": [1.0, 2.0]}).astype({"age": float})
    empty = ft.data.from_frame(frame, client="site", features=["age"], target="y", missing="impute")
    with pytest.raises(ValueError, match=r"no client has any of \['age'\]; leave these out"):
        imputed(empty)


def test_chains_that_have_not_mixed_warn() -> None:
    x = torch.full((60, 1), torch.nan).double()
    x[:4, 0] = torch.tensor([0.0, 1.0, 5.0, 2.0]).double()
    data = imputation.incomplete([(x, random.normal(random.key(0), (60,), torch.float64))])
    with pytest.warns(RuntimeWarning, match="have mixed after 10 rounds, but got R-hat"):
        imputed(data, 4, rounds=10, between=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_intervals_cover_where_those_of_complete_rows_do_not() -> None:
    """Of 200 data sets, 95 % intervals of x₀'s effect: within three standard errors; complete cases are biased."""
    covered, complete, error, of_complete, count = 0, 0, 0.0, 0.0, 200
    for seed in range(count):
        rows = sites(100 + seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            fits = [least_squares(each) for each in imputed(imputation.incomplete(rows), 20, rounds=150, between=False)]
        row = pooled(fits, names=["one", "a", "b"], freedom=117).summary().loc["a"]
        covered += int(row["low"] <= 1 <= row["high"])
        error += (row["estimate"] - 1) / count
        kept = [(x[~x.isnan().any(1)], y[~x.isnan().any(1)]) for x, y in rows]
        beta, covariance = least_squares(ft.data.from_tensors(kept))
        off = float((beta[1] - 1) / covariance[1, 1].sqrt())
        complete += int(abs(off) <= 1.98)
        of_complete += float(beta[1] - 1) / count
    share = covered / count
    assert abs(share - 0.95) < 3 * (0.95 * 0.05 / count) ** 0.5, (share, complete / count, error, of_complete)
    assert complete / count < 0.9, (share, complete / count)
    assert abs(error) < 0.05 < abs(of_complete), (error, of_complete)


@pytest.mark.slow
@pytest.mark.timeout(900)
@few_rounds
def test_means_of_sites_matter_where_one_site_has_never_measured_a_column() -> None:
    """Of 30 data sets of six sites, all but four intervals cover, and fewer than two thirds if sites are one sample."""
    covered = {True: 0, False: 0}
    for seed in range(30):
        keys = random.fold_in(random.key(seed), torch.arange(2))
        levels = random.normal(keys[0], (6, 1, 3), torch.float64)
        x, y = complete_rows(seed, 40, 6)
        y, x = y + levels[..., :2].sum(-1) + levels[..., 2], x + levels[..., :2]
        x[..., 0] = torch.where(y - y.mean(1, keepdim=True) > 1, torch.nan, x[..., 0])
        x[0, :, 0] = torch.nan
        data = imputation.incomplete([(x[k], y[k]) for k in range(6)])
        for between in covered:
            fits = [within_sites(each) for each in imputed(data, 10, rounds=60, between=between, seed=seed)]
            row = pooled(fits, names=["a", "b"], freedom=232).summary().loc["a"]
            covered[between] += int(row["low"] <= 1 <= row["high"])
    assert covered[True] >= 26, covered
    assert covered[False] < 20, covered


def within_sites(data: ft.data.FederatedData) -> tuple[Tensor, Tensor]:
    """Return the effects of the covariates beside an intercept for each site."""
    owner = torch.arange(len(data)).repeat_interleave(data.counts)
    intercepts = torch.nn.functional.one_hot(owner).double()
    x, y = torch.cat([intercepts[:, 1:], data.rows[0]], 1), data.rows[1]
    beta, covariance = least_squares(ft.data.FederatedData((x, y), torch.tensor([len(y)])))
    return beta[-2:], covariance[-2:, -2:]


def graded(seed: int, rows: int = 80, clients: int = 3) -> pandas.DataFrame:
    """Return y ~ x + grade with the grade missing where y is large: at random given what is observed."""
    normal = random.normal(random.key(seed), (3, rows * clients), torch.float64).numpy()
    score = normal[0] + normal[1]
    grade = numpy.where(score < -0.6, "a", numpy.where(score < 0.6, "b", "c"))
    effect = {"a": 0.0, "b": 0.5, "c": -0.5}
    frame = pandas.DataFrame({"site": numpy.arange(len(grade)) % clients, "x": normal[0], "grade": grade})
    frame["y"] = frame["x"] + frame["grade"].map(effect) + normal[2]
    return frame.assign(grade=frame["grade"].where(frame["y"] < 0.7))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_intervals_cover_where_levels_of_a_factor_are_missing() -> None:
    """Of 200 data sets a third of whose grades are missing; complete rows alone are biased."""
    count, truth = 200, {"grade[T.b]": 0.5, "grade[T.c]": -0.5, "x": 1.0}
    covered, of_complete = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0)
    settings = {"client": "site", "formula": "y ~ x + grade", "standardise": False}
    for seed in range(count):
        frame = graded(seed)
        data = ft.data.from_frame(frame, **settings, missing="impute")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            fits = [least_squares(each, False) for each in imputed(data, 20, rounds=60, between=False)]
        summary = pooled(fits, names=data.design.columns, freedom=236).summary()
        beta, covariance = least_squares(ft.data.from_frame(frame, **settings, missing="drop"), False)
        for name, value in truth.items():
            covered[name] += int(summary.loc[name, "low"] <= value <= summary.loc[name, "high"])
            j = data.design.columns.index(name)
            of_complete[name] += int(abs(float((beta[j] - value) / covariance[j, j].sqrt())) <= 1.98)
    for name in truth:
        assert abs(covered[name] / count - 0.95) < 3 * (0.95 * 0.05 / count) ** 0.5, (covered, of_complete)
    assert min(of_complete.values()) / count < 0.8, of_complete
