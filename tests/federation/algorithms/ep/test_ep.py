"""Expectation propagation against closed forms and exact quadrature, under lost messages, and on bad input."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.algorithm_cases import Case
from support.oracles.closed_forms import ROUNDING, distance
from support.oracles.normal_factors import conjugate
from torch import Tensor
from torch.distributions import MultivariateNormal

import fedtorch as ft
from fedtorch import progress, random, tree
from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.ep import posterior, settled
from fedtorch.federation.algorithms.ep._start import Factors
from fedtorch.federation.algorithms.ep.correction import corrected
from fedtorch.federation.algorithms.ep.fitting import converged
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.gaussian import Moments, Natural
from fedtorch.models.hierarchical import hyperpriors, projections
from fedtorch.models.quadrature import gauss_hermite

NOISE = 0.25


def devices(count: int, features: int, rows: int = 20, seed: int = 0) -> ft.data.FederatedData:
    """Rows of `count` linear devices with coefficients N(μ, 0.5 I) and noise of variance 0.25."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centre, clients = draw(features), []
    for _ in range(count):
        x = draw(rows, features)
        clients.append((x, x @ (centre + 0.5**0.5 * draw(features)) + NOISE**0.5 * draw(rows)))
    return ft.data.from_tensors(clients)


def algorithm(model: hierarchical.Model, **arguments: Any) -> ft.Algorithm:
    return ft.ep(model, **arguments)


def linear(features: int, noise: Any = NOISE, **arguments: Any) -> hierarchical.Model:
    return hierarchical.linear(hierarchical.normal(features, **arguments), noise=noise)


def settle(one: ft.Algorithm, data: ft.data.FederatedData, tolerance: float = 0.01, rounds: int = 50) -> ft.Run:
    return ft.run(one, ft.InProcess(data), rounds=rounds, until=settled(tolerance))


def q(one: ft.Algorithm, data: ft.data.FederatedData, tolerance: float = 0.01, rounds: int = 50) -> MultivariateNormal:
    """The posterior of a run that converges."""
    return posterior(settle(one, data, tolerance, rounds), tolerance=tolerance)


def exact(data: ft.data.FederatedData) -> tuple[Tensor, Tensor]:
    """Means and sds of (μ, log τ) by a grid, for one feature: θ̂_k ~ N(μ, τ + s_k²) is sufficient."""
    squares = torch.stack([x.square().sum() for x, _ in data])
    estimates = torch.stack([(x[:, 0] * y).sum() for x, y in data]) / squares
    low, high = torch.tensor([-4.0, -6.0]), torch.tensor([4.0, 5.0])
    for _ in range(3):
        axes = [torch.linspace(float(a), float(b), 301, dtype=torch.float64) for a, b in zip(low, high)]
        mu, zeta = torch.meshgrid(*axes, indexing="ij")
        log = -0.5 * (mu.square() + zeta.square())
        for estimate, square in zip(estimates, squares):
            variance = zeta.exp() + NOISE / square
            log = log - 0.5 * variance.log() - 0.5 * (estimate - mu).square() / variance
        weight = torch.softmax(log.flatten(), 0).reshape(log.shape)
        mean = torch.stack([(weight * mu).sum(), (weight * zeta).sum()])
        sd = torch.stack([(weight * (part - m).square()).sum().sqrt() for part, m in zip((mu, zeta), mean)])
        low, high = mean - 8 * sd, mean + 8 * sd
    return mean, sd


@pytest.mark.parametrize(
    ("count", "tolerance", "rounds"), [(100, 0.02, 8), pytest.param(1000, 0.005, 5, marks=pytest.mark.slow)]
)
def test_exact_quadrature_of_one_feature(count: int, tolerance: float, rounds: int) -> None:
    data = devices(count, 1)
    run = settle(algorithm(linear(1)), data)
    mean, sd = exact(data)
    assert converged(run)
    assert run.number <= rounds  # the summed one included
    assert float((posterior(run).stddev / sd - 1).abs().max()) < tolerance
    assert float(((posterior(run).mean - mean) / sd).abs().max()) < 0.05


def test_two_features_with_orthogonal_columns_are_two_problems_of_one() -> None:
    """With X'X diagonal the exact posterior is a product of the two coordinates'."""
    one = devices(100, 1, seed=1), devices(100, 1, seed=2)
    clients = [(torch.block_diag(first[0], second[0]), torch.cat([first[1], second[1]])) for first, second in zip(*one)]
    run = settle(algorithm(linear(2)), ft.data.from_tensors(clients))
    assert run.number <= 8
    for j, data in enumerate(one):
        _, sd = exact(data)
        assert float((posterior(run).stddev[[j, 2 + j]] / sd - 1).abs().max()) < 0.02


def test_exact_for_a_conjugate_model_after_one_round_of_sites() -> None:
    levels = torch.arange(15.0, dtype=torch.float64).reshape(5, 3).sin()
    project, data = conjugate(levels)
    prior = MultivariateNormal(torch.ones(3, dtype=torch.float64), 2 * torch.eye(3, dtype=torch.float64))
    run = ft.run(ft.ep(Factors(project, prior)), ft.InProcess(data), rounds=2)
    found = posterior(run, tolerance=math.inf)
    count = torch.arange(1.0, 6.0, dtype=torch.float64)
    precision = 0.5 + count.sum()
    assert distance(found.mean, (0.5 + (count[:, None] * levels).sum(0)) / precision) < ROUNDING
    assert distance(found.covariance_matrix, torch.eye(3, dtype=torch.float64) / precision) < ROUNDING


def sum_of_sites(round: ft.Round, clients: int) -> Natural:
    sent = round.clients.table.read(slice(0, clients)).told
    return tree.map(lambda leaf: leaf.sum(0), sent.site)


@pytest.mark.parametrize("cohort", [None, 7])
def test_prior_and_sites_make_the_posterior_after_lost_messages(cohort: int | None) -> None:
    data, model = devices(20, 2), linear(2)
    lost = ft.lost_messages(before=0.2, after=0.3)
    run = ft.Run(algorithm(model), ft.InProcess(data), cohort=cohort, faults=lost, seed=3)
    for round in run.rounds(40):
        heard = round.server.total
        assert distance(heard.site, sum_of_sites(round, 20)) < ROUNDING
        whole = tree.add(round.server.prior, tree.add_scaled(heard.site, round.server.share, heard.waiting))
        assert distance(whole, round.server.posterior) < ROUNDING
    assert float(heard.waiting) == 0
    everybody, some = q(algorithm(model), data, tolerance=1e-6), posterior(run, tolerance=math.inf)
    assert distance(some.mean, everybody.mean) < 5e-3  # of sds of 0.15: as near
    # as forty rounds with losses come
    assert distance(some.stddev, everybody.stddev) < 5e-3


def test_two_thousand_clients_do_not_lose_symmetry() -> None:
    data = devices(2000, 2, rows=3)
    model = hierarchical.linear(hierarchical.normal(2), noise=NOISE, rule=gauss_hermite(2, 4))
    run = settle(algorithm(model), data)
    precision = gaussian.unpack(run.server.posterior.precision)
    assert converged(run)
    assert torch.equal(precision, precision.mT)
    assert float(torch.linalg.eigvalsh(precision).min()) > 0
    assert distance(run.server.total.site, sum_of_sites(run.last, 2000)) < 100 * ROUNDING  # 2000 summands


def test_sites_may_be_indefinite_and_are_not_clipped() -> None:
    run = settle(algorithm(linear(2)), devices(50, 2))
    sites = run.clients.table.read(slice(0, 50)).told.site
    assert int((~gaussian.is_proper(sites)).sum()) > 25
    assert bool(gaussian.is_proper(Natural(**run.tensors())).all())


def test_splitting_a_device_of_a_model_without_device_effects_changes_nothing() -> None:
    """All coefficients fixed: linear Gaussian in φ, so every row is a factor of its own."""
    data, model = devices(4, 3), linear(3, random=[])
    (x, y), *others = list(data)
    halves = ft.data.from_tensors([(x[:7], y[:7]), (x[7:], y[7:]), *others])
    runs = [ft.run(algorithm(model), ft.InProcess(d), rounds=3) for d in (data, halves)]
    whole, split = (posterior(run, tolerance=math.inf) for run in runs)
    assert distance(whole.mean, split.mean) < ROUNDING
    assert distance(whole.covariance_matrix, split.covariance_matrix) < ROUNDING
    x, y = data.pool()[0]
    precision = torch.eye(3, dtype=torch.float64) + x.mT @ x / NOISE
    assert distance(whole.mean, torch.linalg.solve(precision, x.mT @ y / NOISE)) < ROUNDING


def test_splitting_a_device_with_effects_of_its_own_changes_the_posterior() -> None:
    data, model = devices(4, 1), linear(1)
    (x, y), *others = list(data)
    halves = ft.data.from_tensors([(x[:7], y[:7]), (x[7:], y[7:]), *others])
    whole, split = (q(algorithm(model), d) for d in (data, halves))
    assert distance(whole.stddev, split.stddev) > 0.01


def test_permuted_clients_and_a_silent_one() -> None:
    data, model = devices(8, 2), linear(2)
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    first, second = (
        ft.run(algorithm(model), ft.InProcess(d), rounds=8).server.posterior for d in (data, data.select(order))
    )
    assert distance(first, second) < 1000 * ROUNDING  # rounding, through eight rounds of a nonlinear map
    silent = ft.Faults(after=lambda keys, ids: ids == 3)
    without = ft.run(algorithm(model), ft.InProcess(data), faults=silent, rounds=8).server.posterior
    others = data.select([0, 1, 2, 4, 5, 6, 7])
    alone = ft.run(algorithm(model), ft.InProcess(others), rounds=8).server.posterior
    assert distance(without, alone) < 1000 * ROUNDING


def test_it_converges_from_another_start() -> None:
    """The fixed point does not depend on the summed round, and damping only slows it down."""
    data, model = devices(20, 1), linear(1)
    found = [
        q(one, data, tolerance=1e-6, rounds=100)
        for one in (
            algorithm(model),
            ft.ep(Factors(model.project, model.prior, prepare=model.prepare)),
            algorithm(model, damping=0.5),
        )
    ]
    for other in found[1:]:
        assert distance(found[0].mean, other.mean) < 1e-5
        assert distance(found[0].stddev, other.stddev) < 1e-5


def test_the_posterior_of_one_federation_is_the_prior_of_the_next() -> None:
    levels = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    project, data = conjugate(levels)
    prior = MultivariateNormal(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    algorithm = ft.ep(Factors(project, prior))
    together = ft.run(algorithm, ft.InProcess(data), rounds=2).server.posterior
    one = ft.run(algorithm, ft.InProcess(data.select([0, 1])), rounds=2).server.posterior
    two = ft.run(algorithm, ft.InProcess(data.select([2, 3])), one._asdict(), rounds=2)
    assert distance(two.server.posterior, together) < ROUNDING


@pytest.mark.parametrize(
    "variance",
    [hyperpriors.half_cauchy(1.0), hyperpriors.non_informative(), hyperpriors.log_normal(0.5, 2.0)],
    ids=["half-Cauchy", "non-informative", "log-normal"],
)
def test_hyperpriors_against_quadrature(variance: hyperpriors.Hyperprior) -> None:
    """One feature, measured without noise: the posterior of (μ, log τ) on a grid."""
    data = devices(60, 1, rows=10)
    run = settle(algorithm(linear(1, noise=NOISE, variance=variance)), data)
    squares = torch.stack([x.square().sum() for x, _ in data])
    estimates = torch.stack([(x[:, 0] * y).sum() for x, y in data]) / squares
    mu, zeta = torch.meshgrid(torch.linspace(-3, 3, 401).double(), torch.linspace(-4, 3, 401).double(), indexing="ij")
    factor = 0 if variance.log_density is None else variance.log_density(zeta)
    log = -0.5 * mu.square() + variance.shift * zeta - 0.5 * variance.precision * zeta.square() + factor
    for estimate, square in zip(estimates, squares):
        total = zeta.exp() + NOISE / square
        log = log - 0.5 * total.log() - 0.5 * (estimate - mu).square() / total
    weight = torch.softmax(log.flatten(), 0).reshape(log.shape)
    mean = (weight * zeta).sum()
    sd = (weight * (zeta - mean).square()).sum().sqrt()
    assert converged(run)
    assert abs(float((posterior(run).mean[1] - mean) / sd)) < 0.05
    assert abs(float(posterior(run).stddev[1] / sd - 1)) < 0.03


@pytest.mark.parametrize("count", [1, 2])
def test_few_clients_fewer_rows_than_features_and_constant_features(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(3, 4, generator=generator), torch.ones(3, 2)], 1).double()
    data = ft.data.from_tensors([(x + 0.1 * k, x.sum(1)) for k in range(count)])
    run = settle(algorithm(linear(6)), data)
    assert converged(run)
    found = posterior(run).stddev
    assert bool((found > 0).all())
    shrunk = found[:6] < 1  # every direction is learnt about, or stays with its prior
    assert bool((shrunk | (found[:6] < 1.2)).all())


def test_a_device_without_rows_is_no_factor() -> None:
    data = devices(6, 2)
    padded = ft.data.FederatedData(data.rows, torch.cat([data.counts, torch.zeros(1, dtype=torch.int64)]),
                                   tuple("abcdefg"), allow_empty=True)  # fmt: skip
    alone, beside = (q(algorithm(linear(2)), d, tolerance=1e-5) for d in (data, padded))
    assert distance(alone.mean, beside.mean) < 1e-3  # both are that near to their fixed point
    assert distance(alone.stddev, beside.stddev) < 1e-3


def test_no_silent_non_convergence() -> None:
    data, one = devices(5, 1), algorithm(linear(1))
    short = settle(one, data, rounds=2)
    assert not converged(short)
    with pytest.warns(RuntimeWarning, match="Not converged after 2 rounds"):
        posterior(short)
    with pytest.warns(RuntimeWarning, match="Not converged after 2 rounds"):
        ep.devices(short)
    with pytest.warns(RuntimeWarning, match="Not converged after 2 rounds"):
        corrected(short)
    run = settle(one, data)
    assert converged(run)
    assert not converged(run, 1e-9)
    report = run.history
    assert list(report["round"]) == list(range(1, run.number + 1))
    assert bool((report["round_bytes_up"] > 0).all())
    assert bool((report["damping"] > 0).all())
    assert bool((report["improper"] == 0).all())
    assert settled()(report)  # what a run keeps and the frame that it shows are alike
    assert not settled()(report[:-1])
    assert settled(patience=2)(report) == settled(patience=2)(run.log) == settled()(report[:-1])
    improper = algorithm(linear(1, variance=hyperpriors.non_informative()))
    with pytest.raises(RuntimeError, match="use a proper prior, or more clients"):
        posterior(settle(improper, devices(1, 1), rounds=8))
    with pytest.raises(TypeError, match=r"Expected a run of ft\.ep, but got one of fedavg"):
        posterior(ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(1, 1))), ft.InProcess(data)))


def test_rounds_without_an_answer_do_not_count_as_rounds_that_stand_still() -> None:
    data = devices(5, 1)
    gone = ft.Faults(before=lambda keys, ids: torch.full_like(ids, run.number > 5, dtype=torch.bool))
    run = ft.Run(algorithm(linear(1)), ft.InProcess(data), faults=gone)
    for _ in run.rounds(6):
        pass
    nearest = float(run.log["remaining"][-1])
    for _ in run.rounds(9):
        pass
    assert list(run.log["answered"]) == [5.0] * 6 + [0.0] * 3
    assert converged(run, nearest)
    assert not converged(run, nearest, patience=3)


def test_a_resumed_run_stops_where_it_would_have(tmp_path: Path) -> None:
    data, one = devices(12, 1), algorithm(linear(1))
    whole = settle(one, data, tolerance=1e-4)
    first = ft.run(one, ft.InProcess(data), rounds=3)
    first.save(tmp_path / "run")
    rest = ft.Run(one, ft.InProcess(data)).load(tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="Not converged after 3 rounds"):
        posterior(rest)
    for _ in rest.rounds(50, until=settled(1e-4)):
        pass
    assert rest.number == whole.number > 3
    assert torch.equal(posterior(rest).mean, posterior(whole).mean)


def test_clients_whose_site_is_not_renewed_are_named() -> None:
    project, data = conjugate(torch.arange(3.0, dtype=torch.float64)[:, None])
    prior = MultivariateNormal(torch.zeros(1).double(), torch.eye(1).double())

    def fails_for_two_rows(cavity: Moments, data: Any, key: Tensor) -> projections.Projected:
        found = project(cavity, data, key)
        lost = (data.count == 2)[:, None]
        return projections.Projected(found.tilted._replace(mean=found.tilted.mean.where(~lost, torch.nan)), cavity)

    with pytest.warns(RuntimeWarning, match=r"1 kept an old one \('1'\): the projection found no moments"):
        posterior(settle(ft.ep(Factors(fails_for_two_rows, prior)), data))


def test_the_prior_goes_where_the_devices_rows_are() -> None:
    """A stand-in for an accelerator: tensors of torch's meta device."""
    model, places = linear(2), []

    def summary(data: Any, prior: hyperpriors.Prior) -> dict[str, Tensor]:
        places.append(prior.normal.shift.device)
        return {}

    told = ft.ep(model._replace(start=projections.Start(summary, model.start.estimate)))
    server, state = told.init(model.prior.normal._asdict(), 3)
    rows = tree.to(tree.expand(state, 3), "meta")
    inbox = tree.to(tree.expand(told.outbox(server), 3), "meta")
    inbox = inbox._replace(version=torch.zeros(3), back=torch.zeros(3, dtype=torch.bool))
    told.client(inbox, rows, {}, ft.Turn(random.key(0).expand(3), 0))
    assert places[-1].type == "meta"


def test_bad_settings_are_refused() -> None:
    project, _ = conjugate(torch.zeros(2, 1, dtype=torch.float64))
    prior = MultivariateNormal(torch.zeros(1).double(), torch.eye(1).double())
    with pytest.raises(ValueError, match=r"Expected damping in \(0, 1\], but got 0"):
        ft.ep(Factors(project, prior), damping=0.0)
    with pytest.raises(TypeError, match="Expected a Prior, a Natural or a MultivariateNormal, but got dict"):
        ft.ep(Factors(project, {}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected one normal prior, but got a batch of"):
        ft.ep(Factors(project, prior.expand([2])))
    with pytest.raises(ValueError, match=r"Expected rows \(x, y\) of shapes \(2,\) and \(\)"):
        ft.Run(algorithm(linear(2)), ft.InProcess(devices(3, 1))).step()
    with pytest.raises(ValueError, match="Expected a positive noise variance, but got 0"):
        linear(1, noise=0.0)
    exactly = linear(1, noise=lambda statistics: statistics.count * 0.0)
    with pytest.raises(ValueError, match="Client '0': Expected positive noise variances, but noise= gave"):
        ft.Run(algorithm(exactly), ft.InProcess(devices(3, 1))).step()


def random_problem(seed: int, most: int) -> tuple[ft.data.FederatedData, float | None, int]:
    """2 to `most` clients of 1 to 1000 rows, 1 to 10 features, known or unknown noise, near and far apart."""
    generator = torch.Generator().manual_seed(1000 + seed)
    u = torch.rand(6, generator=generator, dtype=torch.float64)
    count, features = int(2 * (most / 2) ** float(u[0])), 1 + int(u[1] * 10)
    spread = float(torch.exp(torch.randn(1, generator=generator) * 0.7))
    noise = float(10 ** (-1 + 1.5 * float(u[2])))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centre = normal(features)
    sizes = (1000 ** torch.rand(count, generator=generator, dtype=torch.float64)).long().clamp(1, 1000)
    mixing = torch.eye(features).double() + (0.5 * normal(features, features) if u[3] > 0.5 else 0)
    clients = []
    for rows in sizes.tolist():
        theta, x = centre + spread * normal(features), normal(rows, features) @ mixing
        clients.append((x, x @ theta + noise * normal(rows)))
    return ft.data.from_tensors(clients), None if u[4] > 0.5 else noise**2, features


@pytest.mark.parametrize(("problems", "most"), [(range(8), 30), pytest.param(range(200), 2000, marks=pytest.mark.slow)])
@pytest.mark.timeout(14_400)
def test_random_problems_do_not_fail(problems: range, most: int) -> None:
    """Each converges. Where clients are few and of very different sizes, one may have no cavity; the fit names it."""
    named = 0
    for seed in problems:
        data, noise, features = random_problem(seed, most)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = settle(algorithm(linear(features, noise=noise)), data, rounds=100)
            posterior(run)
        assert converged(run)
        assert all("kept an old one" in str(warning.message) for warning in told)
        assert bool(told) == bool((run.last.info["improper"] + run.last.info["failed"]).any())
        named += bool(told)
    assert named <= max(1, len(problems) // 20)


def around(levels: list[float], noise: float, rows: int = 20) -> ft.data.FederatedData:
    """Devices of one coefficient, rows exact but for noise of this variance."""
    x, e = torch.ones(rows, 1, dtype=torch.float64), noise**0.5 * random.normal(random.key(3), (rows,), torch.float64)
    return ft.data.from_tensors([(x, level + e - e.mean()) for level in levels])


def test_one_device_is_exact_in_one_step() -> None:
    """Its cavity is the prior, however far from it and how narrow the first estimate is: p(μ, log τ) N(5; μ, τ)."""
    run = settle(algorithm(linear(1, noise=1e-4)), around([5.0], 1e-4))
    assert converged(run)
    assert run.number == 3  # a summary, the step, and one that finds nothing left to do
    mean, sd = by_quadrature([5.0], 1e-4)
    found = posterior(run)
    assert ((found.mean - mean) / sd).abs().max() < 1e-3
    assert (found.stddev / sd - 1).abs().max() < 1e-3


def by_quadrature(levels: list[float], noise: float) -> tuple[Tensor, Tensor]:
    """Mean and sd of (μ, log τ) given `around(levels, noise)`: p(μ, log τ) Π_k N(level_k; μ, τ + noise / 20)."""
    prior = MultivariateNormal(*gaussian.moments(linear(1, noise=noise).prior.normal))
    grid = torch.cartesian_prod(torch.linspace(-7, 11, 801).double(), torch.linspace(-15, 15, 651).double())
    variance = grid[:, 1].exp() + noise / 20
    log_density = prior.log_prob(grid)
    for level in levels:
        log_density = log_density - 0.5 * (level - grid[:, 0]).square() / variance - 0.5 * variance.log()
    weights = log_density.softmax(0)
    mean = weights @ grid
    return mean, (weights @ (grid - mean).square()).sqrt()


@pytest.mark.parametrize(
    ("levels", "means", "sds"),
    [
        ([5.0, 5.0], 0.03, 0.06),
        ([5.0, 5.2], 0.03, 0.06),
        ([4.0, 6.0], 0.01, 0.01),
        ([5.0, -5.0], 0.02, 0.01),
        ([5.0, 5.2, 4.9], 0.1, 0.16),
        ([5.0, 5.0, 5.0], 0.1, 0.16),
        ([4.0, 5.0, 6.0], 0.01, 0.02),
    ],
)
def test_few_devices_far_from_the_prior(levels: list[float], means: float, sds: float) -> None:
    """Between a wide τ at μ near 0 and a small one at μ near 5 the posterior is bent, and the more so the more devices
    agree; q is normal, which costs up to 0.1 sd and 16 % of an sd, and which the correction takes out.
    """
    run = settle(algorithm(linear(1, noise=1e-4)), around(levels, 1e-4))
    assert converged(run)
    (mean, sd), found, better = by_quadrature(levels, 1e-4), posterior(run), corrected(run)
    assert ((found.mean - mean) / sd).abs().max() < means
    assert (found.stddev / sd - 1).abs().max() < sds
    error = 2 / better.effective**0.5  # two standard errors
    assert error < 0.06
    assert ((better.posterior.mean - mean) / sd).abs().max() < error
    assert (better.posterior.stddev / sd - 1).abs().max() < error


def test_a_correction_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = settle(algorithm(linear(1)), devices(3, 1))
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=itertools.count(0.0, 3.0).__next__))
    found = corrected(run, points=2048)
    assert len(found.nodes) == 2048
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Correction: 1,536 of 6,144 nodes")  # of three devices
    assert lines[-1].startswith("Correction: 6,144 of 6,144 nodes")


def test_half_of_the_nodes_are_taken_where_they_are_enough() -> None:
    run = settle(algorithm(linear(3)), devices(8, 3))
    half, every = (corrected(run, points=2048, enough=enough) for enough in (1.0, math.inf))
    assert (len(half.nodes), len(every.nodes)) == (1024, 2048)
    assert torch.equal(half.nodes, every.nodes[:1024])
    assert every.effective > half.effective


def test_a_prior_in_conflict_with_the_data_is_named() -> None:
    """Thirty devices at 20 ± 0.3 under μ ~ N(0, 1): a wide τ at μ near 0, or a small one at μ near 20."""
    levels = [20 + 0.3 * math.sin(7 * k) for k in range(30)]
    run = settle(algorithm(linear(1, noise=1e-2)), around(levels, 1e-2), rounds=30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = posterior(run, tolerance=math.inf)
    assert float(found.mean[0]) > 4
    assert any("the prior is in conflict with the data" in str(warning.message) for warning in caught)
    posterior(settle(algorithm(linear(1, noise=1e-2, sd=20.0)), around(levels, 1e-2)))  # a wider one is fine


@pytest.mark.parametrize("freedom", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_a_correction_has_tails_like_those_of_t(freedom: int) -> None:
    """One factor that is t itself, under a prior that hardly matters: sds by quadrature over the radius."""

    def log_factor(phi: Tensor, data: Any) -> Tensor:
        return -0.5 * (freedom + 2) * (phi.square().sum(-1) / freedom).log1p()

    prior = MultivariateNormal(torch.zeros(2).double(), 1e4 * torch.eye(2).double())
    one = ft.ep(Factors(projections.quadrature(log_factor), prior, log_factor=log_factor))
    better = corrected(settle(one, ft.data.from_tensors([(torch.zeros(1, 1).double(),)])))
    radius = torch.linspace(0, 2000, 400_001, dtype=torch.float64)[1:]
    on_axis = torch.stack([radius, torch.zeros_like(radius)], 1)
    weights = (log_factor(on_axis, None) - 0.5e-4 * radius.square() + radius.log()).softmax(0)
    sd = (weights @ radius.square() / 2).sqrt()
    assert ((better.posterior.stddev / sd - 1).abs() < 0.02).all()
    assert better.effective > 1000


def test_the_effective_size_is_that_of_variances_too() -> None:
    """A hundredth of the nodes with a hundred times the variance: all the mass is seen, and hardly any of the sd."""
    from fedtorch.federation.algorithms.ep.correction import effective

    weights, away = torch.full((1000,), 1e-3).double(), random.normal(random.key(0), (1000, 1), torch.float64)
    assert 800 < effective(weights, away) <= 1000
    assert effective(weights, torch.cat([away[:990], 100 * away[990:]])) < 40


CASES: dict[str, Case] = {
    "ep": Case(
        lambda: ft.ep(hierarchical.linear(hierarchical.normal(3, random=[0, 2]))),
        waits=10,  # whether to start or to go back; whether nodes have settled; version, pace; history's numbers
    )
}
