"""Hierarchical models against statsmodels, brute-force integration and NUTS; devices' posteriors and their coverage."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from support.oracles.closed_forms import distance
from torch import Tensor
from torch.distributions import MultivariateNormal

import fedtorch as ft
from fedtorch.federation.algorithms.ep import devices, posterior, settled
from fedtorch.federation.algorithms.ep._start import Factors
from fedtorch.federation.algorithms.ep.correction import corrected
from fedtorch.federation.algorithms.ep.fitting import converged
from fedtorch.models import gaussian, hierarchical
from fedtorch.models.device_posterior import interval
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical import generalised, hyperpriors, linear_devices
from fedtorch.models.quadrature import gauss_hermite

NOISE = 0.25


def infer(model: hierarchical.Model, data: ft.data.FederatedData, tolerance: float = 0.01) -> ft.Run:
    return ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled(tolerance))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear_data(count: int, features: int, rows: int, seed: int = 0) -> tuple[ft.data.FederatedData, Tensor]:
    """Devices with coefficients N(μ, 0.5 I) around a standard normal μ, and their coefficients."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(features, generator=generator, dtype=torch.float64)
    own = centre + 0.5**0.5 * torch.randn(count, features, generator=generator, dtype=torch.float64)
    clients = []
    for theta in own:
        x = torch.randn(rows, features, generator=generator, dtype=torch.float64)
        clients.append((x, x @ theta + NOISE**0.5 * torch.randn(rows, generator=generator, dtype=torch.float64)))
    return ft.data.from_tensors(clients), own


@pytest.mark.parametrize("correlated", [False, True])
def test_a_devices_evidence_is_that_of_its_rows(correlated: bool) -> None:
    """log N(y; X μ, X (S + V) X' + σ² I), and tilted moments against importance weights of many nodes."""
    data, _ = linear_data(2, 2, 5)
    model = hierarchical.linear(hierarchical.normal(2, correlated=correlated), noise=NOISE, rule=gauss_hermite(2, 15)
                                if not correlated else gauss_hermite(3, 9))  # fmt: skip
    size = len(model.names)
    root = torch.tril(0.3 * draw(size, size, seed=1)) + 0.7 * torch.eye(size)
    cavity = Moments((0.2 * draw(2, size, seed=2)), (root @ root.mT).expand(2, size, size))
    block = data.stack([0, 1])
    tilted = model.project(cavity, model.prepare(block), torch.zeros(2, dtype=torch.int64)).tilted
    rule = gauss_hermite(size, 14 if size == 4 else 9)
    phi = cavity.mean[:, None] + rule.nodes @ torch.linalg.cholesky(cavity.covariance).mT
    hierarchy = hierarchical.normal(2, correlated=correlated)
    for k, (x, y) in enumerate(data):
        spread = x @ hierarchy.covariance(phi[k, :, 2:]) @ x.mT + NOISE * torch.eye(5).double()
        log = MultivariateNormal(phi[k, :, :2] @ x.mT, spread).log_prob(y) + rule.weights.log()
        weight = torch.softmax(log, 0)
        mean = weight @ phi[k]
        sd = (weight @ (phi[k] - mean).square()).sqrt()
        # Fixed nodes resolve a factor that is twice as sharp as the cavity to some thousandths of an sd.
        assert float(((tilted.mean[k] - mean) / sd).abs().max()) < 0.03
        assert float((tilted.covariance[k].diagonal().sqrt() / sd - 1).abs().max()) < 0.03


def test_mixed_effects_against_statsmodels() -> None:
    """A random intercept and slope, two fixed effects: restricted maximum likelihood under weak priors."""
    from statsmodels.regression.mixed_linear_model import MixedLM

    generator = torch.Generator().manual_seed(3)
    clients, group = [], []
    for k in range(60):
        x = torch.cat([torch.ones(12, 1), torch.randn(12, 3, generator=generator)], 1).double()
        theta = torch.tensor([1.0, 0.5, -1.0, 2.0]).double()
        theta[:2] += torch.tensor([0.8, 0.4]) * torch.randn(2, generator=generator)
        clients.append((x, x @ theta + 0.6 * torch.randn(12, generator=generator).double()))
        group += [k] * 12
    data = ft.data.from_tensors(clients)
    names = ["intercept", "slope", "first", "second"]
    hierarchy = hierarchical.normal(
        4,
        random=["intercept", "slope"],
        correlated=True,
        sd=10.0,
        variance=hyperpriors.non_informative(),
        names=names,
    )
    model = hierarchical.linear(hierarchy)
    run = infer(model, data)
    x, y = data.pool()[0]
    reference = MixedLM(y.numpy(), x.numpy(), groups=numpy.array(group), exog_re=x[:, :2].numpy()).fit()
    fixed, error = torch.as_tensor(reference.fe_params), torch.as_tensor(reference.bse_fe)
    estimated = torch.as_tensor(reference.cov_re)
    expected = torch.stack([estimated[0, 0], estimated[1, 1] - estimated[1, 0] ** 2 / estimated[0, 0]]).log()
    q = posterior(run)
    assert converged(run)
    assert model.names[4:] == (
        "log variance intercept",
        "log variance slope",
        "dependence slope on intercept",
        "log noise",
    )
    assert float(((q.mean[:4] - fixed) / error).abs().max()) < 0.1
    assert float((q.stddev[:4] / error - 1).abs().max()) < 0.1  # Bayes adds what the variances are not known by
    # A mean differs from a mode by the skewness of a log variance, some tenths of an sd.
    assert float(((q.mean[4:6] - expected) / q.stddev[4:6]).abs().max()) < 0.4
    assert abs(float((q.mean[7] - math.log(reference.scale)) / q.stddev[7])) < 0.1


def test_device_posteriors_are_mixtures_of_conditional_normals() -> None:
    """Against composition sampling from the cavity by a grid over log τ, for one feature."""
    data, _ = linear_data(6, 1, 8)
    model = hierarchical.linear(hierarchical.normal(1), noise=NOISE)
    run = infer(model, data)
    found, cavities = devices(run), gaussian.moments(gaussian.Natural(**run.tensors()))
    for k, (x, y) in enumerate(data):
        mean, covariance = (part[k] for part in cavities)
        zeta = mean[1] + covariance[1, 1].sqrt() * torch.linspace(-8, 8, 2001, dtype=torch.float64)
        centre = mean[0] + covariance[0, 1] / covariance[1, 1] * (zeta - mean[1])
        spread = zeta.exp() + covariance[0, 0] - covariance[0, 1] ** 2 / covariance[1, 1]
        square, cross = x.square().sum(), (x[:, 0] * y).sum()
        estimate, error = cross / square, NOISE / square
        log = -0.5 * (zeta - mean[1]).square() / covariance[1, 1]
        log = log - 0.5 * (spread + error).log() - 0.5 * (estimate - centre).square() / (spread + error)
        weight = torch.softmax(log, 0)
        conditional = (centre / spread + estimate / error) / (1 / spread + 1 / error)
        total = (weight * conditional).sum()
        variance = (weight / (1 / spread + 1 / error)).sum() + (weight * (conditional - total).square()).sum()
        marginal = found.marginals()
        assert abs(float((marginal.mean[k, 0] - total) / variance.sqrt())) < 1e-4  # twenty-five nodes
        assert abs(float(marginal.stddev[k, 0] / variance.sqrt() - 1)) < 1e-4
    draws = found.distribution().sample((4000,))
    assert draws.shape == (4000, 6, 1)
    errors = (draws.mean(0) - found.distribution().mean).abs() / found.distribution().variance.sqrt()
    assert float(errors.max()) < 4 / 4000**0.5  # standard errors


def test_a_new_device_learns_from_few_rows() -> None:
    data, own = linear_data(60, 3, 30, seed=5)
    model = hierarchical.linear(hierarchical.normal(3), noise=NOISE)
    q = posterior(infer(model, data.select(range(50))))
    few = ft.data.from_tensors([(x[:2], y[:2]) for x, y in data.select(range(50, 60))])
    adapted = linear_devices.adapted(model, q, few.stack(range(10))).distribution()
    error = (adapted.mean - own[50:]).square().sum(1)
    prior = (q.mean[:3] - own[50:]).square().sum(1)
    alone = torch.stack([torch.linalg.lstsq(x, y[:, None]).solution[:, 0] for x, y in few]) - own[50:]
    assert float(error.mean()) < 0.8 * float(prior.mean())
    assert float(error.mean()) < 0.8 * float(alone.square().sum(1).mean())
    nothing = ft.data.FederatedData((torch.zeros(0, 3).double(), torch.zeros(0).double()), torch.tensor([0]),
                                    ("new",), allow_empty=True)  # fmt: skip
    told = linear_devices.adapted(model, q, nothing.stack([0])).distribution()
    assert distance(told.mean[0], q.mean[:3]) < 1e-6  # eleven nodes and more of a normal density


def brute_force(log_density: Any, cavity: Moments, points: int = 41) -> tuple[Tensor, Tensor]:
    """Means and sds of (μ, log τ) for one feature by sums over (μ, log τ, θ)."""
    root = torch.linalg.cholesky(cavity.covariance)
    line = torch.linspace(-5, 5, points, dtype=torch.float64)
    white = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    phi = cavity.mean + white @ root.mT
    steps = torch.linspace(-8, 8, 401, dtype=torch.float64)
    theta = phi[:, :1] + (phi[:, 1:] / 2).exp() * steps
    log_factor = (log_density(theta) - 0.5 * steps.square()).logsumexp(1)
    weight = torch.softmax(log_factor - 0.5 * white.square().sum(1), 0)
    mean = weight @ phi
    return mean, (weight @ (phi - mean).square()).sqrt()


@pytest.mark.parametrize("kind", ["logistic", "Poisson"])
def test_tilted_moments_of_generalised_models(kind: str) -> None:
    x = draw(12, 1, seed=1)
    eta = 0.4 + 1.5 * x[:, 0]
    y = (torch.sigmoid(eta) > 0.5).double() if kind == "logistic" else eta.exp().round()
    model = (generalised.logistic if kind == "logistic" else generalised.poisson)(hierarchical.normal(1))
    cavity = Moments(torch.tensor([[0.5, -0.5]]).double(), torch.tensor([[[0.4, 0.1], [0.1, 0.6]]]).double())
    block = model.prepare(ft.data.from_tensors([(x, y)]).stack([0]))
    tilted = model.project(cavity, block, torch.zeros(1, dtype=torch.int64)).tilted

    def log_density(theta: Tensor) -> Tensor:
        predictor = theta[..., None] * x[:, 0]
        rest = torch.nn.functional.softplus(predictor) if kind == "logistic" else predictor.exp()
        return (y * predictor - rest).sum(-1)

    mean, sd = brute_force(log_density, Moments(cavity.mean[0], cavity.covariance[0]))
    assert float(((tilted.mean[0] - mean) / sd).abs().max()) < 0.01  # seven nodes around the mode of θ
    assert float((tilted.covariance[0].diagonal().sqrt() / sd - 1).abs().max()) < 0.01


@pytest.mark.parametrize("kind", [pytest.param("logistic", marks=pytest.mark.slow), "Poisson"])
def test_generalised_models_find_what_their_devices_share(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mean, sd, clients = torch.tensor([0.5, -0.7]).double(), 0.5, []
    for _ in range(40 if kind == "logistic" else 12):  # counts tell more
        x = torch.cat([torch.ones(25, 1), torch.randn(25, 1, generator=generator)], 1).double()
        eta = x @ (mean + sd * torch.randn(2, generator=generator).double())
        uniform = torch.rand(25, generator=generator).double()
        counts = torch.poisson(eta.exp(), generator=generator)
        clients.append((x, (uniform < torch.sigmoid(eta)).double() if kind == "logistic" else counts))
    model = (generalised.logistic if kind == "logistic" else generalised.poisson)(hierarchical.normal(2))
    run = infer(model, ft.data.from_tensors(clients))
    truth = torch.cat([mean, torch.full((2,), 2 * math.log(sd)).double()])
    assert converged(run)
    assert float(((posterior(run).mean - truth) / posterior(run).stddev).abs().max()) < 3
    assert bool((devices(run).marginals().stddev < 1).all())


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="Expected one of the coefficients"):
        hierarchical.normal(2, random=["slope"])
    with pytest.raises(ValueError, match="Expected the number of a coefficient below 2, but got 2"):
        hierarchical.normal(2, random=[2])
    with pytest.raises(ValueError, match="Expected distinct random coefficients"):
        hierarchical.normal(2, random=[1, 1])
    with pytest.raises(ValueError, match="Expected a hyperprior for each of 2 random coefficients, but got 1"):
        hierarchical.normal(2, variance=[hyperpriors.log_normal()])
    with pytest.raises(ValueError, match="Expected a positive scale and power"):
        hyperpriors.half_cauchy(-1.0)
    with pytest.raises(ValueError, match="Expected a positive sd"):
        hyperpriors.log_normal(0.0, 0.0)


def test_scaling_the_data_of_known_priors_scales_the_answer() -> None:
    data, _ = linear_data(12, 2, 10)
    scaled = ft.data.from_tensors([(x, 3 * y) for x, y in data])
    shift = 2 * math.log(3)
    one = infer(hierarchical.linear(hierarchical.normal(2), noise=NOISE), data, tolerance=1e-6)
    model = hierarchical.linear(
        hierarchical.normal(2, sd=3.0, variance=hyperpriors.log_normal(shift, 1.0)), noise=9 * NOISE
    )
    small, large = (posterior(run, tolerance=1e-6).mean for run in (one, infer(model, scaled, tolerance=1e-6)))
    assert distance(large[:2], 3 * small[:2]) < 1e-3  # placement of nodes, to 0.02 of an sd
    assert distance(large[2:], small[2:] + shift) < 1e-3


def coverage(runs: int, count: int) -> tuple[float, float]:
    """Share of 90 % intervals of the devices' coefficients that hold the truth, and its Monte Carlo standard error."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = hierarchical.linear(hierarchical.normal(2), noise=NOISE)
    inside = []
    for _ in range(runs):
        mu, tau = normal(2), normal(2).exp()  # from the prior of the paper's Example 4.1
        theta = mu + tau.sqrt() * normal(count, 2)
        rows = [normal(5, 2) for _ in range(count)]
        data = ft.data.from_tensors([(x, x @ own + NOISE**0.5 * normal(5)) for x, own in zip(rows, theta)])
        run = infer(model, data, tolerance=0.02)
        q = posterior(run, tolerance=0.02)
        low, high = interval(devices(run, tolerance=0.02).marginals(), 0.9)
        shared = interval(torch.distributions.Normal(q.mean, q.stddev), 0.9)
        truth = torch.cat([mu, tau.log()])
        held = [((low <= theta) & (theta <= high)).flatten(), (shared[0] <= truth) & (truth <= shared[1])]
        inside.append(torch.cat(held).double().mean())
    values = torch.stack(inside)
    return float(values.mean()), float(values.std() / runs**0.5)


def test_intervals_hold_the_truth() -> None:
    share, error = coverage(12, 8)
    assert abs(share - 0.9) < 3 * error


@pytest.mark.slow
def test_intervals_hold_the_truth_in_five_hundred_data_sets() -> None:
    share, error = coverage(500, 10)
    assert abs(share - 0.9) < 3 * error


@pytest.mark.parametrize(("count", "tolerance"), [(5, 0.03), (20, 0.01), (100, 0.005)])
def test_correction_improves_the_normal_approximation(count: int, tolerance: float) -> None:
    """Sds against sums over a grid of (μ, log τ), for one feature: q's are up to 16 % too small."""
    data, _ = linear_data(count, 1, 20)
    model = hierarchical.linear(hierarchical.normal(1), noise=NOISE)
    run = infer(model, data)
    q, better = posterior(run), corrected(run)
    grid = torch.cartesian_prod(torch.linspace(-3, 3, 200), torch.linspace(-4, 4, 200)).double()
    block = model.prepare(data.stack(range(count)))
    log = model.log_factor(grid.expand(count, -1, -1), block).sum(0) - 0.5 * grid.square().sum(1)
    weight = torch.softmax(log, 0)
    mean = weight @ grid
    sd = (weight @ (grid - mean).square()).sqrt()
    assert float(((better.posterior.mean - mean) / sd).abs().max()) < tolerance
    assert float((better.posterior.stddev / sd - 1).abs().max()) < tolerance
    assert float((better.posterior.stddev / sd - 1).abs().max()) < float((q.stddev / sd - 1).abs().max())
    order = grid[:, 1].argsort()
    quantile = grid[order, 1][(weight[order].cumsum(0) < 0.05).sum()]
    assert abs(float((better.quantile(0.05)[1] - quantile) / sd[1])) < 0.05  # the grid's step, and a thousand nodes


def test_devices_from_common_nodes_are_those_of_the_posterior_itself() -> None:
    """θ_k given all rows against sums over a grid of (μ, log τ), for one feature and five devices."""
    data, _ = linear_data(5, 1, 4)
    model = hierarchical.linear(hierarchical.normal(1), noise=NOISE)
    run = infer(model, data)
    better, normal = devices(run, given=corrected(run)).marginals(), devices(run).marginals()
    grid = torch.cartesian_prod(torch.linspace(-4, 4, 300), torch.linspace(-6, 5, 300)).double()
    block = model.prepare(data.stack(range(5)))
    log = model.log_factor(grid.expand(5, -1, -1), block).sum(0) - 0.5 * grid.square().sum(1)
    weight = torch.softmax(log, 0)
    errors: dict[str, list[float]] = {"common nodes": [], "normal": []}
    for k, (x, y) in enumerate(data):
        precision = (-grid[:, 1]).exp() + x.square().sum() / NOISE
        centre = (grid[:, 0] * (-grid[:, 1]).exp() + (x[:, 0] * y).sum() / NOISE) / precision
        mean = weight @ centre
        sd = (weight @ (1 / precision + (centre - mean).square())).sqrt()
        for name, part in (("common nodes", better), ("normal", normal)):
            errors[name] += [abs(float((part.mean[k, 0] - mean) / sd)), abs(float(part.stddev[k, 0] / sd - 1))]
    assert max(errors["common nodes"]) < 0.001  # eight thousand quasi-random nodes
    assert max(errors["common nodes"]) < max(errors["normal"]) < 0.01


def test_unreliable_correction_warns() -> None:
    data, _ = linear_data(6, 2, 8)
    model = hierarchical.linear(hierarchical.normal(2), noise=NOISE)
    run = infer(model, data)
    far = gaussian.natural(Moments(torch.full((4,), 9.0).double(), 0.01 * torch.eye(4).double()))
    run.server = run.server._replace(posterior=far)
    conflict = pytest.warns(RuntimeWarning, match="9.0 prior sds from the prior's: the prior is in conflict")
    with conflict, pytest.warns(RuntimeWarning, match="Expected at least 100 effective nodes, but got"):
        corrected(run)


def test_minimal_factors_have_no_correction_or_devices() -> None:
    data, _ = linear_data(6, 1, 8)
    model = hierarchical.linear(hierarchical.normal(1), noise=NOISE)
    told = Factors(model.project, model.prior, model.start, model.prepare, model.log_factor)
    run, other = infer(model, data), ft.run(ft.ep(told), ft.InProcess(data), rounds=50, until=settled())
    assert torch.equal(corrected(other).weights, corrected(run).weights)
    with pytest.raises(
        TypeError, match=r"Expected a run of a hierarchical\.Model on data at hand, but got one of a Fac"
    ):
        devices(other)
    silent = ft.run(ft.ep(told._replace(log_factor=None)), ft.InProcess(data), rounds=50, until=settled())
    with pytest.raises(ValueError, match=r"use Factors\(\.\.\., log_factor=\)"):
        corrected(silent)


def test_a_device_factor_is_the_evidence_of_its_rows() -> None:
    """log N(y; Xμ, X S X' + σ² I) at any φ, also with fixed effects and of fewer rows than features."""
    x, y = draw(2, 3, seed=1), draw(2, seed=2)
    model = hierarchical.linear(hierarchical.normal(3, random=[1]))
    phi = draw(1, 4, 5, seed=3)
    found = model.log_factor(phi, model.prepare(ft.data.from_tensors([(x, y)]).stack([0])))[0]
    for value, (a, b, c, zeta, log_noise) in zip(found, phi[0]):
        covariance = zeta.exp() * torch.outer(x[:, 1], x[:, 1]) + log_noise.exp() * torch.eye(2).double()
        expected = MultivariateNormal(x @ torch.stack([a, b, c]), covariance).log_prob(y)
        assert abs(float(value - expected)) < 1e-10


def test_nodes_too_far_out_for_a_factor_have_no_weight() -> None:
    """One of these nodes is 396 standard deviations away, with variances down to 1e-34; others have up to 1e10."""
    data, _ = linear_data(20, 4, 15, seed=2)
    run = infer(hierarchical.linear(hierarchical.normal(4), noise=NOISE), data)
    assert len(corrected(run, points=16_384).nodes) == 8192  # the first half tells enough
    better = corrected(run, points=16_384, enough=math.inf)
    assert float((better.nodes - better.posterior.mean).div(better.posterior.stddev).norm(dim=1).max()) > 300
    assert bool(better.weights.isfinite().all())
    assert better.effective > 1000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_against_nuts() -> None:
    """The hierarchical model with K = 20 and d = 4; θ is integrated, as θ̂_k ~ N(μ, diag(τ) + σ² (X_k'X_k)⁻¹)."""
    from pyro.infer import MCMC, NUTS

    data, _ = linear_data(20, 4, 15, seed=2)
    own = torch.stack([torch.linalg.lstsq(x, y[:, None]).solution[:, 0] for x, y in data])
    errors = torch.stack([NOISE * torch.linalg.inv(x.mT @ x) for x, _ in data])

    def potential(at: dict[str, Tensor]) -> Tensor:
        factor = torch.linalg.cholesky_ex(errors + torch.diag(at["zeta"].exp())).L
        white = torch.linalg.solve_triangular(factor, (own - at["mu"])[..., None], upper=False)
        prior = at["mu"].square().sum() + at["zeta"].square().sum()
        return 0.5 * (prior + white.square().sum()) + factor.diagonal(dim1=-2, dim2=-1).log().sum()

    start = {name: torch.zeros(4).double() for name in ("mu", "zeta")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        chain = MCMC(NUTS(potential_fn=potential), num_samples=5000, warmup_steps=300, initial_params=start,
                     disable_progbar=True)  # fmt: skip
        chain.run()
    draws = torch.cat([chain.get_samples()[name] for name in ("mu", "zeta")], 1)
    model = hierarchical.linear(hierarchical.normal(4), noise=NOISE)
    run = infer(model, data)
    q, better = posterior(run), corrected(run, points=65_536)  # 27 700 effective nodes: sds to 0.4 %
    assert float(((q.mean - draws.mean(0)) / draws.std(0)).abs().max()) < 0.1
    assert float(((better.posterior.mean - draws.mean(0)) / draws.std(0)).abs().max()) < 0.1
    assert float((better.posterior.stddev / draws.std(0) - 1).abs().max()) < 0.05
    assert float((q.stddev / better.posterior.stddev - 1).abs().max()) < 0.05


def test_offset_and_weight_of_a_linear_device() -> None:
    """Rows y ~ N(x'θ + offset, σ² / weight), beside the normal density of all of them."""
    x, y, offset, weight = draw(6, 2, seed=1), draw(6, seed=2), draw(6, seed=3), draw(6, seed=4).exp()
    model = hierarchical.linear(hierarchical.normal(2))
    data = ft.data.from_tensors(
        [(x, y, {"offset": offset, "weight": weight}), (x[:2], y[:2], {"offset": offset[:2], "weight": weight[:2]})]
    )
    phi = 0.5 * draw(2, 3, 5, seed=5)
    found = model.log_factor(phi, model.prepare(data.stack([0, 1])))
    for k, n in enumerate((6, 2)):
        for at, value in zip(phi[k], found[k]):
            covariance = (x * at[2:4].exp()) @ x.T + torch.diag(at[4].exp() / weight)
            law = MultivariateNormal((x @ at[:2] + offset)[:n], covariance[:n, :n])
            assert abs(float(law.log_prob(y[:n]) - value)) < 1e-10
