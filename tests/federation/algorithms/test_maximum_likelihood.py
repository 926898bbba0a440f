"""Maximum marginal likelihood against statsmodels, closed forms and itself in other blocks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pandas
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import fedtorch as ft
from fedtorch import random
from fedtorch.federation.algorithms.maximum_likelihood import _newton as newton, devices, estimates, maximised
from fedtorch.models import hierarchical
from fedtorch.models.hierarchical import generalised, hyperpriors, shrinkage
from fedtorch.models.quadrature import gauss_hermite

SIZES = (4, 9, 5, 12, 7, 3, 8, 6)
NAMES = ["constant", "slope"]


def clients(family: str = "gaussian", first: float = 30.0) -> ft.data.FederatedData:
    """Devices with intercepts around `first` and slopes around 2, in units of their own."""
    rows = []
    for k, n in enumerate(SIZES):
        keys = random.fold_in(random.key(k), torch.arange(3))
        x = torch.stack([torch.ones(n).double(), 10 * random.uniform(keys[0], (n,), torch.float64)], 1)
        own = random.normal(keys[1], (2,), torch.float64) * torch.tensor([8.0, 1.5])
        if family == "gaussian":
            y = x @ (own + torch.tensor([first, 2.0])) + 3 * random.normal(keys[2], (n,), torch.float64)
        else:
            y = (random.uniform(keys[2], (n,), torch.float64) < torch.sigmoid(own[0] / 8 + 0.1 * x[:, 1])).double()
        rows.append((x, y))
    return ft.data.from_tensors(rows)


def fit(model: hierarchical.Model, data: ft.data.FederatedData, chunk: int | None = None, **options: bool) -> ft.Run:
    algorithm = ft.maximum_likelihood(model, **options)
    return ft.run(algorithm, ft.InProcess(data, chunk), rounds=60, until=maximised(1e-12))


@pytest.fixture(scope="module")
def gaussian() -> ft.data.FederatedData:
    return clients()


@pytest.mark.parametrize("restricted", [False, True])
def test_the_linear_model_is_that_of_statsmodels(gaussian: ft.data.FederatedData, restricted: bool) -> None:
    mixed = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    x, y = (torch.cat([row[i] for row in gaussian]).numpy() for i in (0, 1))
    groups = np.repeat(np.arange(len(SIZES)), SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = mixed.MixedLM(y, x, groups, exog_re=x).fit(reml=restricted, method=["bfgs"], gtol=1e-10)
    ours = estimates(fit(hierarchical.linear(hierarchical.normal(2, correlated=True)), gaussian, restricted=restricted))
    # Their optimiser stops where the likelihood has eight digits, so estimates have four or five.
    torch.testing.assert_close(ours.mean[:2], torch.tensor(theirs.fe_params), rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.spread, torch.tensor(theirs.cov_re), rtol=2e-4, atol=0)
    assert ours.noise == pytest.approx(theirs.scale**0.5, rel=1e-5)
    assert ours.log_likelihood == pytest.approx(theirs.llf, abs=1e-7)
    assert ours.log_likelihood >= theirs.llf - 1e-9


def dense(phi: Tensor, data: ft.data.FederatedData) -> tuple[Tensor, Tensor]:
    """The log likelihood of uncorrelated intercepts and slopes, and X'V⁻¹X, with V written out."""
    log, information = phi.new_zeros(()), phi.new_zeros(2, 2)
    for x, y in data:
        v = x @ torch.diag(phi[2:4].exp()) @ x.T + phi[4].exp() * torch.eye(len(y)).double()
        log = log + torch.distributions.MultivariateNormal(x @ phi[:2], v).log_prob(y)
        information = information + x.T @ torch.linalg.solve(v, x)
    return log, information


def test_standard_errors_are_those_of_second_derivatives(gaussian: ft.data.FederatedData) -> None:
    model = hierarchical.linear(hierarchical.normal(2))
    found = estimates(fit(model, gaussian))
    second = torch.autograd.functional.hessian(lambda phi: dense(phi, gaussian)[0], found.mean)
    units = torch.outer(found.errors, found.errors)
    torch.testing.assert_close(found.covariance / units, torch.linalg.inv(-second) / units, rtol=0, atol=1e-5)  # 0.1⁴
    assert found.log_likelihood == pytest.approx(float(dense(found.mean, gaussian)[0]), abs=1e-9)
    restricted = estimates(fit(model, gaussian, restricted=True))

    def criterion(zeta: Tensor) -> Tensor:
        log, information = dense(torch.cat([restricted.mean[:2], zeta]), gaussian)
        return log - 0.5 * torch.logdet(information) + math.log(2 * math.pi)

    zeta = restricted.mean[2:]
    assert restricted.log_likelihood == pytest.approx(float(criterion(zeta)), abs=1e-8)
    torch.testing.assert_close(
        restricted.covariance[:2, :2], torch.linalg.inv(dense(restricted.mean, gaussian)[1]), rtol=1e-6, atol=0
    )
    # The criterion has no slope at its maximum, but for 0.1⁴ / 30 of its fifth derivatives, in units of the errors.
    slope = torch.autograd.functional.jacobian(criterion, zeta) * restricted.errors[2:]
    torch.testing.assert_close(slope, torch.zeros(3).double(), atol=1e-5, rtol=0)


def test_balanced_groups_have_closed_forms() -> None:
    """K groups of n rows: REML equates the mean squares between and within groups with their expectations."""
    y = torch.tensor([[1.0, 2.0, 3.0], [7.0, 9.0, 8.5], [4.0, 5.5, 4.5], [2.0, 0.0, 1.0]]).double()
    data = ft.data.from_tensors([(torch.ones(3, 1), row) for row in y])
    k, n = y.shape
    within = float(y.var(1).mean())
    between = n * float(y.mean(1).var())
    for restricted, share in ((True, 1.0), (False, (k - 1) / k)):
        found = estimates(fit(hierarchical.linear(hierarchical.normal(1)), data, restricted=restricted))
        assert float(found.mean[0]) == pytest.approx(float(y.mean()), abs=1e-8)
        assert found.noise == pytest.approx(within**0.5, rel=1e-6)
        assert float(found.spread) == pytest.approx((share * between - within) / n, rel=1e-5)
        assert float(found.errors[0]) == pytest.approx((share * between / (n * k)) ** 0.5, rel=1e-5)


def test_logistic_regression_has_the_likelihood_of_a_fine_grid() -> None:
    data = clients("logistic")
    x = [row[0] for row in data]
    y = [row[1] for row in data]
    grid = torch.linspace(-8, 8, 801, dtype=torch.float64)
    weight = torch.softmax(-0.5 * grid.square(), 0)

    def loss(phi: np.ndarray) -> float:
        total = 0.0
        for a, b in zip(x, y):
            eta = (a @ torch.tensor(phi[:2]))[:, None] + math.exp(phi[2] / 2) * grid
            log = (b[:, None] * eta - torch.nn.functional.softplus(eta)).sum(0)
            total -= float((log + weight.log()).logsumexp(0))
        return total

    best = minimize(loss, np.zeros(3), method="BFGS", options={"gtol": 1e-8})
    model = generalised.logistic(hierarchical.normal(2, random=[0], names=NAMES), inner=gauss_hermite(1, 25))
    found = estimates(fit(model, data))
    assert found.log_likelihood == pytest.approx(-best.fun, abs=1e-6)
    torch.testing.assert_close(found.mean, torch.tensor(best.x), rtol=1e-3, atol=1e-4)
    assert found.names == ("mean constant", "mean slope", "log variance constant")
    assert (found.noise, float(found.sds[1])) == (None, 0)


def test_laplaces_method_is_at_the_mode() -> None:
    """One row of y = 1: log σ(u) − u²/(2τ) at its maximum, less half the logarithm of τ times the curvature there."""
    model = generalised.logistic(hierarchical.normal(1), inner=None)
    data = model.prepare(ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1))]).stack([0]))
    tau, u = 9.0, torch.zeros(()).double()
    for _ in range(50):
        p = torch.sigmoid(u)
        u = u + (1 - p - u / tau) / (p * (1 - p) + 1 / tau)
    p = torch.sigmoid(u)
    expected = p.log() - u**2 / (2 * tau) - 0.5 * (tau * p * (1 - p) + 1).log()
    found = model.log_factor(torch.tensor([[[0.0, math.log(tau)]]]).double(), data)
    assert float(found) == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("restricted", [False, True])
def test_the_same_in_blocks_and_with_lost_messages(gaussian: ft.data.FederatedData, restricted: bool) -> None:
    model = hierarchical.linear(hierarchical.normal(2))
    whole, blocks = (fit(model, gaussian, chunk, restricted=restricted) for chunk in (None, 3))
    # Sums of eight values in another order differ in the last digits, which differences of nodes divide by 0.1².
    torch.testing.assert_close(blocks.server.best.at, whole.server.best.at, rtol=1e-8, atol=1e-8)
    algorithm = ft.maximum_likelihood(model, restricted=restricted)
    lossy = ft.run(algorithm, ft.InProcess(gaussian), rounds=200, faults=ft.lost_messages(0.1), until=maximised(1e-12))
    assert lossy.number > whole.number
    assert torch.equal(lossy.server.best.at, whole.server.best.at)


def test_neither_the_start_nor_the_prior_matters(gaussian: ft.data.FederatedData) -> None:
    plain = estimates(fit(hierarchical.linear(hierarchical.normal(2)), gaussian))
    variance = hyperpriors.half_cauchy(5.0)
    far = hierarchical.normal(2, mean=-500.0, sd=torch.tensor([300.0, 0.1]), variance=variance)
    other = estimates(fit(hierarchical.linear(far), gaussian))
    torch.testing.assert_close(other.mean, plain.mean, rtol=1e-6, atol=1e-6)
    shifted = estimates(fit(hierarchical.linear(hierarchical.normal(2)), clients(first=1030.0)))
    torch.testing.assert_close(shifted.mean[0] - 1000, plain.mean[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(shifted.errors, plain.errors, rtol=1e-4, atol=0)


@pytest.mark.parametrize("restricted", [False, True])
def test_effects_and_predictions_solve_hendersons_equations(gaussian: ft.data.FederatedData, restricted: bool) -> None:
    """Of [X Z]'[X Z] / σ² + blockdiag(0, τ⁻¹) the inverse is the covariance of errors, given the variances."""
    model = hierarchical.linear(hierarchical.normal(2, random=[0], names=NAMES))
    run = fit(model, gaussian, restricted=restricted)
    found, count = estimates(run), len(SIZES)
    x, y = (torch.cat([row[i] for row in gaussian]) for i in (0, 1))
    own = torch.block_diag(*[torch.ones(n, 1).double() for n in SIZES])
    every, noise = torch.cat([x, own], 1), found.noise**2
    penalty = torch.block_diag(torch.zeros(2, 2), torch.eye(count) / found.spread[0, 0])
    covariance = torch.linalg.inv(every.T @ every / noise + penalty)
    solution = covariance @ every.T @ y / noise

    def expected(rows: Tensor) -> list[Tensor]:
        return [rows @ solution, (rows @ covariance @ rows.T).diagonal().sqrt()]

    def check(table: pandas.DataFrame, rows: Tensor) -> None:
        for column, value in zip(("estimate", "sd"), expected(rows)):
            torch.testing.assert_close(torch.tensor(table[column].tolist()).double(), value, rtol=1e-6, atol=1e-9)

    eye = torch.eye(count).double()
    check(ft.inference.ranef(run), torch.cat([torch.zeros(count, 2), eye], 1))
    totals = ft.inference.ranef(run, total=True)
    check(totals.xs("constant", level="coefficient"), torch.cat([torch.tensor([[1.0, 0.0]]).expand(count, -1), eye], 1))
    names = [str(name) for name in run.population.names]
    row = torch.tensor([[1.0, 4.0]]).double()
    check(ft.inference.predict(run, row, site=names[3]), torch.cat([row, eye[3:4]], 1))
    new = ft.inference.predict(run, row)
    mean, error = expected(torch.cat([row, torch.zeros(1, count)], 1))
    assert float(new["estimate"].iloc[0]) == pytest.approx(float(mean), rel=1e-6)
    assert float(new["sd"].iloc[0]) == pytest.approx(float((error.square() + found.spread[0, 0]).sqrt()), rel=1e-6)
    below, above = (float(new[edge].iloc[0]) for edge in ("new_low", "new_high"))
    spread = float((error.square() + found.spread[0, 0] + noise).sqrt())
    assert (above - below) / (2 * 1.6448536) == pytest.approx(spread, rel=1e-5)


def test_devices_are_shrunk_towards_the_mean() -> None:
    """θ_k given its rows has precision n / σ² + 1 / τ."""
    y = torch.tensor([[1.0, 2.0, 3.0], [7.0, 9.0, 8.5], [4.0, 5.5, 4.5]]).double()
    run = fit(hierarchical.linear(hierarchical.normal(1)), ft.data.from_tensors([(torch.ones(3, 1), row) for row in y]))
    found, own = estimates(run), devices(run).marginals()
    assert found.noise is not None
    weight = float(found.spread) / (float(found.spread) + found.noise**2 / 3)
    expected = found.mean[0] + weight * (y.mean(1) - found.mean[0])
    torch.testing.assert_close(own.mean[:, 0], expected)
    torch.testing.assert_close(own.variance[:, 0], torch.full((3,), weight * found.noise**2 / 3).double())


def test_the_summary_names_what_was_found(gaussian: ft.data.FederatedData) -> None:
    run = fit(hierarchical.linear(hierarchical.normal(2, correlated=True, names=NAMES)), gaussian)
    found, table = estimates(run), run.summary()
    assert list(table.index) == [*NAMES, "sd(constant)", "sd(slope)", "cor(constant, slope)", "sigma"]
    values = [*found.mean[:2], *found.sds, found.correlation[0, 1], found.noise]
    assert table["estimate"].tolist() == pytest.approx([float(value) for value in values])
    assert table["sd"][:2].tolist() == pytest.approx(found.errors[:2].tolist())
    assert table["n"].tolist() == [sum(SIZES)] * 2 + [len(SIZES)] * 3 + [sum(SIZES)]


def test_scales_without_means_are_named_as_they_are() -> None:
    """A ridge's penalty: devices' coefficients are drawn from N(0, σ² / l2)."""
    data = clients().map(lambda rows: (rows[0], rows[1] / 10))
    run = fit(shrinkage.penalised(shrinkage.ridge(2)), data)
    table = run.summary()
    assert list(table.index) == list(estimates(run).names)
    assert bool((table["sd"] > 0).all())


def test_restricted_likelihood_is_that_of_linear_models() -> None:
    model = generalised.logistic(hierarchical.normal(2, random=[0]))
    with pytest.raises(ValueError, match="Expected a linear model for restricted likelihood"):
        fit(model, clients("logistic"), restricted=True)


@pytest.mark.parametrize("random", ["(1 | site)", "(1 + age | site)"])
def test_the_summary_of_a_formula_is_in_the_units_of_its_columns(random: str) -> None:
    generator = np.random.default_rng(1)
    frame = pandas.DataFrame({"site": np.repeat(list("abcdefgh"), 12), "age": generator.normal(60, 10, 96)})
    level, slope = (dict(zip("abcdefgh", generator.normal(0, sd, 8))) for sd in (2.0, 0.1))
    frame["y"] = 3 + frame["site"].map(level) + (0.4 + frame["site"].map(slope)) * frame["age"]
    frame["y"] += generator.normal(0, 1, 96)
    summaries = []
    for standardise in (True, False):
        data = ft.data.from_frame(frame, client="site", formula=f"y ~ age + {random}", standardise=standardise)
        summaries.append(fit(hierarchical.regression(data.design), data).summary())
    numbers = [summary[["estimate", "sd"]].to_numpy() for summary in summaries]
    np.testing.assert_allclose(*numbers, rtol=2e-3, atol=1e-6)
    assert abs(summaries[0].loc["age", "estimate"] - 0.4) < 0.2


@pytest.mark.parametrize("algorithm", [ft.maximum_likelihood, ft.ep])
def test_separation_is_said_with_the_column_and_a_remedy(algorithm: Callable[..., ft.Algorithm]) -> None:
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame({"site": np.repeat(list("abcdef"), 50), "x": generator.normal(size=300)})
    frame["ward"] = generator.choice(["u", "v"], 300)
    for separated in (False, True):
        frame["y"] = (generator.uniform(size=300) < 1 / (1 + np.exp(-0.5 * frame["x"]))).astype(int)
        if separated:
            frame.loc[frame["ward"] == "v", "y"] = 1
        data = ft.data.from_frame(frame, client="site", formula="y ~ x + ward + (1 | site)")
        run = ft.run(algorithm(hierarchical.regression(data.design, "logistic")), ft.InProcess(data), rounds=20)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run.summary()
        words = " ".join(str(each.message) for each in seen)
        assert ("'ward[T.v]' may do so (all rows" in words) == separated
        assert "'x'" not in words


def test_a_variance_of_zero_is_said() -> None:
    rows = torch.tensor([-1.0, 0.0, 1.0])
    data = ft.data.from_tensors([(torch.ones(3, 1), rows + 0.01 * k) for k in range(4)])
    run = fit(hierarchical.linear(hierarchical.normal(1)), data, restricted=True)
    with pytest.warns(RuntimeWarning, match="singular fit"):
        found = estimates(run)
    assert float(found.sds) < 1e-3
    assert found.errors.isnan().tolist() == [False, True, False]
    pooled = torch.cat([y for _, y in data])
    assert found.noise == pytest.approx(float(pooled.std()), rel=1e-4)


@pytest.mark.parametrize("seed", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_correlation_of_one_is_said_and_its_likelihood_is_reached(seed: int) -> None:
    """Clients have intercepts only, and slopes by chance: the maximum has them in proportion to these."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(12):
        x, own = generator.uniform(-1, 1, 10), generator.normal()
        y = 10 + x + own + generator.normal(size=10)
        rows.append((torch.tensor(np.c_[np.ones(10), x]), torch.tensor(y)))
    run = fit(hierarchical.linear(hierarchical.normal(2, correlated=True, names=NAMES)), ft.data.from_tensors(rows))
    assert run.number < 60, "it settles, at infinity"
    with pytest.warns(RuntimeWarning, match=r"at cor\(constant, slope\), as where .*a correlation as 1 or -1"):
        found = estimates(run)
    assert float(found.correlation[0, 1].abs()) > 0.9999

    def loss(at: np.ndarray) -> float:  # of loadings of both on one deviation, in the log noise, and in the means
        loadings, total = torch.tensor(at[2:4]), 0.0
        for x, y in rows:
            v = x @ torch.outer(loadings, loadings) @ x.T + math.exp(at[4]) * torch.eye(len(y)).double()
            total -= float(torch.distributions.MultivariateNormal(x @ torch.tensor(at[:2]), v).log_prob(y))
        return total

    sign = float(found.correlation[0, 1].sign())
    start = np.array([10.0, 1.0, 1.0, 0.1 * sign, 0.0])
    assert found.log_likelihood == pytest.approx(-minimize(loss, start, method="BFGS").fun, abs=1e-6)


def four_coefficients(seed: int, sites: int) -> pandas.DataFrame:
    """Rows of sites whose intercepts and three slopes differ, and depend on each other."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(8, 20, sites)
    root = np.array([[1, 0, 0, 0], [0.3, 0.7, 0, 0], [-0.2, 0.1, 0.5, 0], [0.1, -0.3, 0.2, 0.6]])
    parts = []
    for k, size in enumerate(sizes):
        own, x = np.array([1, -0.5, 0.3, 0.8]) + root @ generator.normal(size=4), generator.normal(size=(size, 3))
        y = own[0] + x @ own[1:] + 0.5 * generator.normal(size=size)
        parts.append(pandas.DataFrame({"site": f"s{k}", "a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y}))
    return pandas.concat(parts, ignore_index=True)


@pytest.mark.parametrize("restricted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_four_random_coefficients_are_where_the_dense_likelihood_is_largest(restricted: bool) -> None:
    """Of N(y; Xβ, X S X' + σ²I) with β put where it is best, or integrated over, whose slopes are zero there."""
    frame = four_coefficients(2, 30)
    data = ft.data.from_frame(frame, client="site", formula="y ~ a + b + c + (1 + a + b + c | site)", standardise=False)
    found = estimates(fit(hierarchical.regression(data.design), data, restricted=restricted))
    rows = [
        (torch.tensor(np.c_[np.ones(len(of)), of[["a", "b", "c"]]]), torch.tensor(of["y"].to_numpy()))
        for _, of in frame.groupby("site")
    ]
    lower = torch.tril_indices(4, 4)

    def likelihood(at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the ten entries of a root of S, and log σ."""
        root = at.new_zeros(4, 4).index_put((lower[0], lower[1]), at[:10])
        normal, right, total = at.new_zeros(4, 4), at.new_zeros(4), at.new_zeros(())
        for x, y in rows:
            half = torch.linalg.cholesky(x @ root @ root.T @ x.T + (2 * at[10]).exp() * torch.eye(len(y)).double())
            wx, wy = (torch.linalg.solve_triangular(half, each, upper=False) for each in (x, y[:, None]))
            normal, right = normal + wx.T @ wx, right + (wx.T @ wy)[:, 0]
            total = total - 0.5 * (wy.square().sum() + len(y) * math.log(2 * math.pi)) - half.diagonal().log().sum()
        best = torch.linalg.solve(normal, right)
        total = total + 0.5 * right @ best
        if restricted:
            total = total + 2 * math.log(2 * math.pi) - 0.5 * torch.logdet(normal)
        return total, best, torch.linalg.inv(normal)

    assert found.noise is not None
    at = torch.cat([torch.linalg.cholesky(found.spread)[lower[0], lower[1]], torch.tensor([found.noise]).log()])
    value, best, covariance = likelihood(at.requires_grad_())
    (slope,) = torch.autograd.grad(value, at)
    # Newton's steps end where 1e-12 is left to gain, so that slopes are 1e-6 of what a standard error's step would be.
    assert found.log_likelihood == pytest.approx(float(value.detach()), abs=1e-8)
    assert float(slope.abs().max()) < 1e-4
    assert float((found.mean[:4] - best.detach()).abs().max()) < 1e-6
    ratio = found.errors[:4] / covariance.detach().diagonal().sqrt()  # of variances that are known, or of all together
    assert bool((ratio > 1 - 1e-6).all())
    assert bool((ratio < (1 + 1e-6 if restricted else 1.03)).all())


@pytest.mark.slow
def test_covariances_of_less_than_full_rank_are_said_within_sixty_rounds() -> None:
    """No correlation is 1 there: four coefficients of which three explain all."""
    data = ft.data.from_frame(four_coefficients(0, 12), client="site", formula="y ~ a + b + c + (1 + a + b + c | site)")
    run = fit(hierarchical.regression(data.design), data)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = estimates(run)
    said = " ".join(str(each.message) for each in seen)
    assert "random coefficients 'Intercept', " in said
    assert "is singular, as if fewer of them explained all (a singular fit)" in said
    assert "allow more rounds" not in said
    assert float(found.correlation.abs().tril(-1).max()) < 0.99


def test_a_converged_fit_of_less_than_full_rank_is_said() -> None:
    """No variance is zero there and no correlation of two is 1, but two combinations explain three coefficients."""
    generator = np.random.default_rng(322)
    root, parts = generator.normal(size=(3, 2)), []
    for k in range(8):
        x, own = generator.normal(size=(6, 2)), 1 + root @ generator.normal(size=2)
        y = own[0] + x @ own[1:] + generator.normal(size=6)
        parts.append(pandas.DataFrame({"site": f"s{k}", "a": x[:, 0], "b": x[:, 1], "y": y}))
    frame = pandas.concat(parts, ignore_index=True)
    data = ft.data.from_frame(frame, client="site", formula="y ~ a + b + (1 + a + b | site)")
    algorithm = ft.maximum_likelihood(hierarchical.regression(data.design))
    run = ft.run(algorithm, ft.InProcess(data), rounds=60, until=maximised())
    assert run.number < 60
    with pytest.warns(
        RuntimeWarning, match="inform every variance, but .* of the random coefficients 'Intercept', 'a'"
    ):
        found = estimates(run)
    assert float(found.sds.min()) > 0.1
    assert float(torch.linalg.eigvalsh(found.correlation)[0]) < 1e-4
    assert found.errors.isnan().tolist() == [False] * 3 + [True] * 6 + [False]


def test_what_cannot_be_done_is_refused(gaussian: ft.data.FederatedData) -> None:
    with pytest.raises(TypeError, match="Expected a hierarchical model"):
        ft.maximum_likelihood(ft.fedavg)  # type: ignore[arg-type]
    model = hierarchical.linear(hierarchical.normal(2))
    early = ft.run(ft.maximum_likelihood(model), ft.InProcess(gaussian), rounds=1)
    with pytest.raises(RuntimeError, match="none after 1 rounds"):
        estimates(early)
    with pytest.raises(TypeError, match=r"Expected a run of ft\.maximum_likelihood, but got one of ep"):
        estimates(ft.run(ft.ep(model), ft.InProcess(gaussian), rounds=1))
    rough = ft.run(ft.maximum_likelihood(model), ft.InProcess(gaussian), rounds=60, until=maximised(0.01))
    with pytest.warns(RuntimeWarning, match=f"Not converged after {rough.number} rounds"):
        estimates(rough)
    without = hierarchical.linear(hierarchical.normal(2))._replace(
        hierarchy=hierarchical.normal(2)._replace(mean=torch.zeros(2, 0).double())
    )
    with pytest.raises(ValueError, match="Expected means to integrate over"):
        ft.maximum_likelihood(without, restricted=True)


def test_differences_are_those_of_a_quartic() -> None:
    def f(z: Tensor) -> Tensor:
        x, y, w = z.T
        return 2 + x - 3 * y * w + x**2 * 5 + w**4 + y**3 - x * w + x**2 * y**2 - x**3 * w

    value, gradient, second = newton.differences(f(newton.stencil(3)), 3)
    exact = torch.autograd.functional.hessian(lambda z: f(z[None])[0], torch.zeros(3).double())
    assert float(value) == 2
    torch.testing.assert_close(gradient, torch.tensor([1.0, 0.0, 0.0]).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(second, exact, atol=1e-12, rtol=0)


def test_a_resumed_run_is_the_uninterrupted_one(gaussian: ft.data.FederatedData, tmp_path: object) -> None:
    model = hierarchical.linear(hierarchical.normal(2))
    algorithm = ft.maximum_likelihood(model)
    first = ft.run(algorithm, ft.InProcess(gaussian), rounds=3)
    first.save(f"{tmp_path}/run.safetensors")
    again = ft.Run(algorithm, ft.InProcess(gaussian))
    again.load(f"{tmp_path}/run.safetensors")
    for _ in again.rounds(6):
        pass
    assert torch.equal(again.server.at, ft.run(algorithm, ft.InProcess(gaussian), rounds=6).server.at)


@pytest.mark.parametrize(
    ("algorithm", "family"),
    [
        (ft.ep, "gaussian"),
        (ft.ep, "logistic"),
        (ft.maximum_likelihood, "gaussian"),
        pytest.param(ft.maximum_likelihood, "logistic", marks=pytest.mark.slow),
    ],
)
def test_dependent_columns_are_said_with_their_names(algorithm: Callable[..., ft.Algorithm], family: str) -> None:
    """Of columns a, b and their sum, not of one that stands beside them, and not where the sum is another column."""
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(generator.normal(size=(120, 4)), columns=["a", "b", "c", "y"])
    frame["site"] = np.repeat(list("abcd"), 30)
    frame["y"] = frame["a"] + frame["y"] if family == "gaussian" else (frame["a"] + frame["y"] > 0).astype(float)
    for dependent in (False, True):
        rows = frame.assign(d=frame["a"] + 2 * frame["b"]) if dependent else frame.assign(d=frame["a"] * frame["b"])
        data = ft.data.from_frame(rows, client="site", formula="y ~ a + b + c + d + (1 | site)")
        run = ft.run(algorithm(hierarchical.regression(data.design, family)), ft.InProcess(data), rounds=6)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run.summary()
        words = " ".join(str(each.message) for each in seen)
        assert ("those of 'a', 'b' and 'd' are dependent, or nearly" in words) == dependent
        assert "flat" not in words, "of what is said once already"


def test_restricted_likelihood_of_dependent_columns_is_refused_with_the_reason() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    data = ft.data.from_tensors([(x[k::4, [0, 1, 0]], x[k::4].sum(1) + k) for k in range(4)])
    run = fit(hierarchical.linear(hierarchical.normal(3, random=[0])), data, restricted=True)
    with pytest.raises(RuntimeError, match=r"columns are linearly dependent, which \[.*\] are here\. Leave such"):
        estimates(run)


@pytest.mark.parametrize("family", ["gaussian", "logistic", "cumulative"])
def test_an_empty_cell_is_named_and_all_else_is_as_without_its_column(family: str) -> None:
    """Of a product of factors one cell has no rows, so that its column is zero and rows say nothing of it."""
    generator = np.random.default_rng(0)
    rows = pandas.DataFrame({"d": generator.choice(["d0", "d1"], 300), "e": generator.choice(["e0", "e1", "e2"], 300)})
    rows["site"], rows["y"] = np.repeat(list("abcdef"), 50), generator.normal(size=300)
    rows = rows[~((rows["d"] == "d1") & (rows["e"] == "e2"))]
    rows["y"] = {
        "gaussian": rows["y"],
        "logistic": (rows["y"] > 0.3).astype(int),
        "cumulative": pandas.cut(rows["y"], [-9, -0.5, 0.5, 9], labels=["low", "middle", "high"]),
    }[family]
    tables = []
    for formula in ("y ~ d * e", "y ~ d + e + other"):
        data = ft.data.from_frame(
            rows.assign(other=((rows["d"] == "d1") & (rows["e"] == "e1")).astype(float)), client="site", formula=formula
        )
        model = hierarchical.regression(data.design, family)
        run = ft.run(ft.maximum_likelihood(model), ft.InProcess(data), rounds=20, until=maximised())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            tables.append(run.summary())
        words = " ".join(str(each.message) for each in seen)
        assert ("those of 'd[T.d1]:e[T.e2]' are dependent" in words) == (formula == "y ~ d * e"), words
        assert "separated" not in words
        assert "flat" not in words
    empty, without = tables[0].loc["d[T.d1]:e[T.e2]"], tables[1].rename({"other": "d[T.d1]:e[T.e1]"})
    assert math.isnan(empty["sd"])
    np.testing.assert_allclose(tables[0].loc[without.index, "estimate"], without["estimate"], rtol=1e-5, atol=1e-6)
    named = [name for name in without.index if name != "sigma"]
    np.testing.assert_allclose(tables[0].loc[named, "sd"], without.loc[named, "sd"], rtol=1e-3)
