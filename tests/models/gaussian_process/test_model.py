"""The multi-output Gaussian process against dense formulas, GPyTorch's exact GP and finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch.models.gaussian_process import ConvolvedGP, fit
from fedtorch.models.gaussian_process._rows import row_fit
from fedtorch.models.gaussian_process.algebra import stable_cholesky
from fedtorch.models.gaussian_process.joining import join
from fedtorch.models.gaussian_process.kernels import ConvolutionProcess, Coregionalisation, EmbedCategories
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

DTYPE = torch.float64
UNITS, ROWS = 4, 12
COUNTS = torch.tensor([12, 5, 1, 9])
MASK = (torch.arange(ROWS) < COUNTS[:, None]).to(DTYPE)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def data(dims: int = 1) -> tuple[Tensor, Tensor]:
    x = draw(UNITS, ROWS, dims) * MASK[..., None]
    y = (torch.tensor([[1.0], [2.0], [-1.0], [0.5]]) * (2 * x.sum(-1)).sin() + 0.1 * draw(UNITS, ROWS, seed=1)) * MASK
    return x, y


def model(dims: int = 1, latents: int = 2, units: int = UNITS, **arguments: object) -> ConvolvedGP:
    inducing = torch.linspace(-2, 2, 5, dtype=DTYPE)[:, None].repeat(1, dims) + 0.1 * draw(5, dims, seed=3)
    shape = torch.Size([units]) if units else torch.Size()
    gp = ConvolvedGP(inducing, latents=latents, batch_shape=shape, **arguments)  # type: ignore[arg-type]
    own = dict(gp.named_parameters())
    for number, name in enumerate(gp.unit_names):
        if name in own:
            own[name].data = own[name].data + 0.3 * draw(*own[name].shape, seed=number)
    gp.rebase()
    return gp


def dense(gp: ConvolvedGP, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(V C_gf over all rows that are there, each row's noise, Ω block by block), without whitening."""
    there = MASK.flatten() > 0
    w = gp.embed(gp.inducing)
    latent = gp.kernel.latent(w)
    latent = latent + gp.jitter * torch.eye(len(w), dtype=DTYPE)
    cross = gp.kernel.cross(gp.embed(x), w)  # (M, I, N, J)
    shared = torch.zeros(UNITS * ROWS, UNITS * ROWS, dtype=DTYPE)
    for i in range(gp.kernel.latents):
        rows = cross[:, i].reshape(UNITS * ROWS, -1)
        shared = shared + rows @ torch.linalg.solve(latent[i], rows.mT)
    residual = torch.zeros_like(shared)
    for m in range(UNITS):
        block = slice(m * ROWS, (m + 1) * ROWS)
        own = gp.kernel.covariance(gp.embed(x)[m], gp.embed(x)[m])[m]
        residual[block, block] = own - shared[block, block]
    noise = gp.likelihood.noise.expand(UNITS, ROWS).flatten()
    return shared[there][:, there], noise[there], residual[there][:, there]


@pytest.mark.parametrize("dims", [1, 2])
@torch.no_grad()
def test_the_bound_is_the_dense_one(dims: int) -> None:
    gp, (x, y) = model(dims), data(dims)
    shared, noise, residual = dense(gp, x)
    zero, rows = torch.zeros(len(noise), dtype=DTYPE), y.flatten()[MASK.flatten() > 0]
    expected = MultivariateNormal(zero, shared + torch.diag(noise)).log_prob(rows)
    expected = expected - 0.5 * (residual.diagonal() / noise).sum()
    assert abs(float(gp.bound(x, y, MASK) - expected)) < 1e-8
    sharper = MultivariateNormal(zero, residual + shared + torch.diag(noise)).log_prob(rows)
    assert abs(float(gp.bound(x, y, MASK, exact_units=True) - sharper)) < 1e-8
    assert float(sharper) > float(expected)


@pytest.mark.parametrize("exact_units", [False, True])
@torch.no_grad()
def test_the_bound_is_reached_by_q_and_by_no_other(exact_units: bool) -> None:
    gp, (x, y) = model(mean=True), data()
    gp.condition(x, y, MASK, exact_units)

    def at_q() -> float:
        return float(gp.expected_log_likelihood(x, y, MASK, exact_units=exact_units).sum() - gp.divergence())

    best = float(gp.bound(x, y, MASK, exact_units))
    assert abs(at_q() - best) < 1e-8
    mean, root = gp.posterior_mean, gp.posterior_root
    for seed in range(3):
        gp.posterior_mean, gp.posterior_root = mean + 0.01 * draw(*mean.shape, seed=seed), root
        assert at_q() < best
        gp.posterior_mean, gp.posterior_root = mean, root + 0.01 * draw(*root.shape, seed=seed).tril()
        assert at_q() < best


@torch.no_grad()
def test_q_does_not_depend_on_the_basis() -> None:
    gp, (x, y) = model(), data()
    gp.condition(x, y, MASK)
    mean, variance = gp.marginals(x)
    before = gp.basis
    gp.basis = before + 0.1 * draw(*before.shape).tril()
    site = gp.site(x, y, MASK)
    from fedtorch.models.gaussian_process.algebra import posterior

    gp.posterior_mean, gp.posterior_root, evidence = posterior(
        gp.change(), site.precision.sum(0), site.shift.sum(0), site.constant.sum()
    )
    again, spread = gp.marginals(x)
    assert torch.allclose(mean, again, rtol=0, atol=1e-9)
    assert torch.allclose(variance, spread, rtol=0, atol=1e-9)
    assert abs(float(evidence - gp.bound(x, y, MASK))) < 1e-8


class Exact(gpytorch.models.ExactGP):  # type: ignore[misc, name-defined]
    """GPyTorch's own, with a given kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: object, kernel: object) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

    def forward(self, x: Tensor) -> object:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@torch.no_grad()
def test_one_unit_with_inducing_inputs_at_its_data_is_gpytorchs_exact_gp() -> None:
    x = torch.linspace(-2, 2, 15, dtype=DTYPE)[:, None]
    y = (2 * x[:, 0]).sin() + 0.1 * draw(15)
    gp = ConvolvedGP(
        x, Coregionalisation(gpytorch.kernels.RBFKernel(batch_shape=torch.Size([1])).to(DTYPE), 1), jitter=1e-10
    )
    gp.kernel.kernel.lengthscale = 0.5
    gp.kernel.weight.data.fill_(1.3)
    gp.likelihood.noise = 0.04
    gp.condition(x, y)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).to(DTYPE)
    kernel.base_kernel.lengthscale, kernel.outputscale = 0.5, 1.3**2
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(DTYPE)
    likelihood.noise = 0.04
    exact = Exact(x, y, likelihood, kernel)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, exact)(exact.train()(x), y) * len(x)
    assert abs(float(gp.bound(x, y) - marginal)) < 1e-6
    new = torch.linspace(-3, 3, 9, dtype=DTYPE)[:, None]
    theirs, ours = likelihood(exact.eval()(new)), gp.predict(new)
    assert isinstance(ours, gpytorch.distributions.MultivariateNormal)
    assert torch.allclose(ours.mean, theirs.mean, rtol=0, atol=1e-6)
    assert torch.allclose(ours.covariance_matrix, theirs.covariance_matrix, rtol=0, atol=1e-6)


def test_the_gradient_of_the_bound() -> None:
    gp, (x, y) = model(learn_inducing=True, mean=True), data()
    parameters = [p for p in gp.parameters() if p.requires_grad]
    found = torch.autograd.grad(gp.bound(x, y, MASK), parameters)
    for parameter, gradient in zip(parameters, found):
        direction = draw(*parameter.shape)
        values = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                parameter.add_(step * direction)
                values.append(float(gp.bound(x, y, MASK)))
                parameter.sub_(step * direction)
        slope = (values[0] - values[1]) / 2e-4
        assert float((gradient * direction).sum()) == pytest.approx(
            slope, rel=1e-5, abs=1e-5
        )  # third derivatives × 1e-8


def test_the_envelope_theorem() -> None:
    """At the best q the gradient at fixed q(g) is that of the bound, also for what q(g) itself depends on."""
    gp, (x, y) = model(), data()
    gp.condition(x, y, MASK)
    parameters = [p for p in gp.parameters() if p.requires_grad]
    collapsed = torch.autograd.grad(gp.bound(x, y, MASK), parameters)
    fixed = gp.expected_log_likelihood(x, y, MASK).sum() - gp.divergence()
    for one, two in zip(collapsed, torch.autograd.grad(fixed, parameters)):
        assert torch.allclose(one, two, rtol=1e-7, atol=1e-7)  # of sums of 1e3


@torch.no_grad()
def test_units_may_be_permuted() -> None:
    gp, (x, y) = model(), data()
    order, own = torch.tensor([2, 0, 3, 1]), {**dict(gp.named_parameters()), **dict(gp.named_buffers())}
    before = gp.bound(x, y, MASK)
    for name in gp.unit_names:
        own[name].data = own[name].data[order]
    assert abs(float(gp.bound(x[order], y[order], MASK[order]) - before)) < 1e-9


@torch.no_grad()
def test_stacked_is_one_by_one() -> None:
    gp, (x, y) = model(), data()
    sites = gp.site(x, y, MASK)
    own = {**dict(gp.named_parameters()), **dict(gp.named_buffers())}
    for k in range(UNITS):
        one = model(units=0)
        single = {**dict(one.named_parameters()), **dict(one.named_buffers())}
        for name in gp.unit_names:
            single[name].data = own[name][k].clone()
        rows = slice(0, int(COUNTS[k]))
        found = one.site(x[k, rows], y[k, rows])
        for a, b in zip(found, sites):
            assert torch.allclose(a, b[k], rtol=1e-11, atol=1e-11)


def test_fitting_reaches_a_stationary_point_and_predicts() -> None:
    x = torch.linspace(-1, 1, 40, dtype=DTYPE)[None, :, None].repeat(3, 1, 1)
    clean = torch.tensor([[1.0], [3.0], [-2.0]]) * (5 * x[..., 0]).sin()
    y = clean + 0.1 * draw(3, 40)
    mask = torch.ones_like(y)
    mask[0, 20:] = 0  # unit 0 has lost its second half
    gp = ConvolvedGP(torch.linspace(-1, 1, 12, dtype=DTYPE)[:, None], batch_shape=torch.Size([3]))
    bound = fit(gp, x, y, mask)
    gradients = torch.autograd.grad(gp.bound(x, y, mask), [p for p in gp.parameters() if p.requires_grad])
    assert max(float(g.abs().max()) for g in gradients) < 0.5  # of a bound of 1e2; L-BFGS stops on small steps
    assert math.isfinite(float(bound))
    with torch.no_grad():
        gap = (gp.marginals(x)[0] - clean)[0, 20:].abs()
        low, high = gp.interval(x, 0.99)
    assert float(gap.max()) < 0.3
    assert float(((y > low) & (y < high))[0, 20:].double().mean()) >= 0.9


def mixtures(latents: int, seed: int, units: int = 16) -> tuple[ConvolvedGP, Tensor, Tensor, Tensor]:
    """Units that mix curves with weights of either sign: (model, x, y, weights `(units, latents)`)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(units, 16, 1, generator=generator, dtype=DTYPE)
    weights = torch.randn(units, latents, generator=generator, dtype=DTYPE)
    t = x[..., 0]
    curves = torch.stack([(9 * t).cos(), (3 * t).sin() + (22 * t).sin(), (15 * t).sin()][:latents], -1)
    noise = 0.1 * torch.randn(units, 16, generator=generator, dtype=DTYPE)
    inducing = torch.linspace(0, 1, 12, dtype=DTYPE)[:, None]
    gp = ConvolvedGP(inducing, latents=latents, batch_shape=torch.Size([units]))
    return gp, x, (curves @ weights[..., None])[..., 0] + noise, weights


@pytest.mark.parametrize("seed", [2, 4])
def test_weights_start_where_training_finds_the_latent_processes(seed: int) -> None:
    """The bound is that of training which starts at the truth; from equal weights it ends 20 and 300 below."""
    gp, x, y, weights = mixtures(3, seed)
    found = fit(gp, x, y, iterations=80)
    told, *_ = mixtures(3, seed)
    told.start(y)
    told.kernel.weight.data = weights / told.kernel.scale[:, None]
    assert float(found) > float(fit(told, x, y, iterations=80, start=False)) - 5


def test_initial_weights_are_what_outputs_suggest() -> None:
    """Of a q that knows curves, ridge regression on them; mirrored with the outputs, and the same in other units."""
    gp, x, y, weights = mixtures(2, 0)
    gp.start(y)
    gp.kernel.weight.data = weights / gp.kernel.scale[:, None]
    gp.condition(x, y)
    with torch.no_grad():
        latent = gp.basis @ gp.posterior_mean.reshape(2, -1, 1)  # (I, J, 1) means at the inducing inputs
        solved = torch.linalg.solve(gp.basis @ gp.basis.mT, latent)
        curves = (gp.kernel.cross(x, gp.inducing) / gp.kernel.weight[..., None, None] @ solved)[..., 0].mT
        noise = gp.likelihood.noise[..., None]
        ridge = torch.linalg.solve(torch.eye(2) + curves.mT @ curves / noise, curves.mT @ y[..., None] / noise)
    assert torch.allclose(gp.initial_weights(x, y), ridge[..., 0], rtol=1e-6)
    gp.rebase()
    first = gp.initial_weights(x, y)
    assert torch.allclose(gp.initial_weights(x, -y), -first)
    gp.kernel.rescale(1e6 * gp.kernel.scale)
    gp.likelihood.noise = 1e12 * gp.likelihood.noise.detach()
    assert torch.allclose(gp.initial_weights(x, 1e6 * y), first, rtol=1e-6)
    gp.kernel.weight.requires_grad_(False)
    assert not gp.chooses_weights


def test_a_new_unit_joins_with_a_handful_of_points() -> None:
    x = torch.linspace(-1, 1, 40, dtype=DTYPE)[:, None]
    wave = (5 * x[:, 0]).sin()
    gp = ConvolvedGP(torch.linspace(-1, 1, 12, dtype=DTYPE)[:, None], batch_shape=torch.Size([2]))
    fit(gp, x.expand(2, -1, -1), torch.stack([wave, 2 * wave]) + 0.05 * draw(2, 40))
    known = ConvolvedGP(torch.linspace(-1, 1, 12, dtype=DTYPE)[:, None])
    values = {**dict(known.named_parameters()), **dict(known.named_buffers())}
    for name, value in [*gp.named_parameters(), *gp.named_buffers()]:
        values[name].data = (value[0] if name in gp.unit_names else value).detach().clone()
    few = torch.tensor([3, 9, 17, 24, 33])
    new = join(known, x[few], -3 * wave[few] + 0.05 * draw(5, seed=1))
    with torch.no_grad():
        mean, variance = new.marginals(x)
        assert float((mean + 3 * wave).abs().max()) < 0.5
        assert bool((variance < 0.1).all())
    assert torch.equal(known.posterior_mean, gp.posterior_mean)  # a copy


def test_categories_and_a_deep_kernel() -> None:
    x = torch.stack([draw(UNITS, ROWS), torch.arange(ROWS).expand(UNITS, -1) % 3], -1).to(DTYPE)
    y = x[..., 0].sin() * (1 + x[..., 1])
    inducing = torch.cartesian_prod(torch.linspace(-2, 2, 4), torch.arange(3.0)).to(DTYPE)
    embed = EmbedCategories(2, {1: 3}).to(DTYPE)
    gp = ConvolvedGP(inducing, features=embed, batch_shape=torch.Size([UNITS]))
    assert {"features.points.0", "kernel.raw_lengthscale", "kernel.raw_variance"} == set(gp.shared_names)
    assert float(fit(gp, x, y + 0.1 * draw(UNITS, ROWS), iterations=20)) > -60
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(2, 5, dtype=DTYPE), torch.nn.Tanh(), torch.nn.Linear(5, 2, dtype=DTYPE)
    )
    deep = ConvolvedGP(inducing, features=network, batch_shape=torch.Size([UNITS]))
    deep.bound(x, y).backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in network.parameters() if p.ndim == 2)


@pytest.mark.parametrize("units", [False, True])
def test_priors_are_counted_once(units: bool) -> None:
    prior = gpytorch.priors.LogNormalPrior(-1.0, 0.5)
    kernel = ConvolutionProcess(1, 2, torch.Size([UNITS]), lengthscale_prior=prior, smoothing_prior=prior)
    gp = ConvolvedGP(torch.linspace(0, 1, 5, dtype=DTYPE)[:, None], kernel, batch_shape=torch.Size([UNITS]))
    value = gp.kernel.smoothing if units else gp.kernel.lengthscale
    expected = prior.log_prob(value).sum((-1, -2))
    assert torch.allclose(gp.log_prior(units), expected)
    assert gp.log_prior(units).shape == ((UNITS,) if units else ())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_bad_input_has_finite_answers(scale: float) -> None:
    """Duplicate inputs, constant outputs, a single point, and units of wildly different scales."""
    x, y = data()
    x[0, 1:4] = x[0, 0]
    y[1] = MASK[1] * 7.0
    y = y * torch.tensor([[1.0], [1.0], [1.0], [scale]])
    gp = ConvolvedGP(torch.tensor([[0.0], [0.0], [1.0], [-1.0]], dtype=DTYPE), batch_shape=torch.Size([UNITS]))
    assert math.isfinite(float(fit(gp, x, y, MASK, iterations=30)))
    mean, variance = gp.marginals(x)
    assert bool(mean.isfinite().all())
    assert bool((variance >= 0).all())


def test_jitter_grows_only_where_it_is_needed() -> None:
    good, rank_one = torch.eye(3, dtype=DTYPE), torch.ones(3, 3, dtype=DTYPE)
    found = stable_cholesky(torch.stack([good, rank_one]), 0.0)
    assert torch.equal(found[0], good)
    assert float((found[1] @ found[1].mT - rank_one).abs().max()) < 1e-6
    with pytest.raises(ValueError, match=r"number \[1\] of the batch that is not with a jitter of 1e-02"):
        stable_cholesky(torch.stack([good, -good]), 1e-8)


def test_expected_log_likelihoods_of_laplace_noise_are_those_of_a_fine_grid() -> None:
    """Where quadrature at 20 nodes errs by a tenth: at the kink."""
    likelihood = gpytorch.likelihoods.LaplaceLikelihood().to(DTYPE)
    likelihood.noise = 0.3
    y, mean = torch.tensor([0.0, 0.5, -3.0], dtype=DTYPE), torch.tensor([0.0, 0.2, 1.0], dtype=DTYPE)
    variance = torch.tensor([1.0, 0.04, 2.0], dtype=DTYPE)
    z = torch.linspace(-9, 9, 2_000_001, dtype=DTYPE)[:, None]
    density = torch.distributions.Laplace(mean + variance.sqrt() * z, likelihood.noise.sqrt()).log_prob(y)
    weight = (-0.5 * z.square()).exp()
    expected = (weight * density).sum(0) / weight.sum(0)
    found = row_fit(likelihood, y, mean, variance, torch.ones_like(y), ())
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)  # the step is 1e-5, the error at a kink its square


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"Expected finite inducing inputs \(J, d\), but got shape \(3,\)"):
        ConvolvedGP(torch.zeros(3))
    with pytest.raises(ValueError, match="Expected a kernel of 2 dimensions, but got one of 1"):
        ConvolvedGP(torch.zeros(3, 2), ConvolutionProcess(1))
    with pytest.raises(ValueError, match="Expected a level between 0 and 1"):
        model().interval(data()[0], 1.5)
    gp = model(likelihood=gpytorch.likelihoods.BernoulliLikelihood())
    with pytest.raises(TypeError, match="GaussianLikelihood for exact units, but got BernoulliLikelihood"):
        gp.site(*data(), MASK, exact_units=True)
    two = torch.Size([2])
    with pytest.raises(ValueError, match=r"a kernel of batch shape \(2,\), but got \(\)"):
        ConvolvedGP(torch.zeros(3, 1), ConvolutionProcess(1), batch_shape=two)
    with pytest.raises(ValueError, match=r"likelihood of batch shape \(2,\), but its noise_covar.raw_noise has shape"):
        ConvolvedGP(torch.zeros(3, 1), likelihood=gpytorch.likelihoods.GaussianLikelihood(), batch_shape=two)


@pytest.mark.parametrize("make", [gpytorch.likelihoods.LaplaceLikelihood, gpytorch.likelihoods.StudentTLikelihood])
def test_closed_forms_refuse_likelihoods_that_have_a_noise_but_are_not_gaussian(make: Any) -> None:
    gp, (x, y) = model(units=0, likelihood=make()), (part[0] for part in data())
    for function in (gp.bound, gp.condition, lambda *rows: fit(gp, *rows), lambda *rows: join(gp, *rows)):
        with pytest.raises(TypeError, match=r"Expected a GaussianLikelihood for .* in closed form"):
            function(x, y)
    with pytest.raises(TypeError, match="Expected a GaussianLikelihood for normal intervals"):
        gp.interval(x)


def test_rows_that_do_not_fit_the_model() -> None:
    x, y = data()
    for wrong in ((x[0], y[0]), (x, y[..., None]), (x[..., 0], y), (x.expand(-1, -1, 2), y)):
        with pytest.raises(ValueError, match=r"Expected inputs \(4, N, 1\) and outputs \(4, N\), but got"):
            fit(model(), *wrong)
    with pytest.raises(ValueError, match=r"in the model's torch.float64, but got torch.float32"):
        fit(model(), x.float(), y.float())
    with pytest.raises(ValueError, match="Expected finite inputs and outputs, but got NaN or Inf"):
        fit(model(), x, y / 0)
    with pytest.raises(ValueError, match=r"Expected a model of one unit, but got batch_shape=\(4,\)"):
        join(model(), x[0], y[0])
    with pytest.raises(ValueError, match=r"Expected inputs \(N, 1\) and outputs \(N,\)"):
        join(model(units=0), x[0], y[0, 1:])
    gp = ConvolvedGP(torch.zeros(3, 1, dtype=DTYPE), features=EmbedCategories(1, {0: 3}))
    with pytest.raises(ValueError, match="Expected codes 0…2 in column 0, but got 7"):
        fit(gp, torch.full((2, 1), 7.0, dtype=DTYPE), torch.ones(2, dtype=DTYPE))


def test_features_and_observed_rows_follow_the_dtype() -> None:
    inducing = torch.linspace(-1, 1, 4, dtype=DTYPE)[:, None]
    gp = ConvolvedGP(inducing, features=torch.nn.Linear(1, 2))
    x = torch.linspace(-1, 1, 6, dtype=DTYPE)[:, None]
    gp.condition(x, x[:, 0].sin(), exact_units=True)
    expected = gp(x).mean
    found = gp.float()(x.float()).mean
    assert float((found - expected).detach().abs().max()) < 1e-2  # single precision, a noise of 1e-8 to 1


def test_a_common_scale_and_a_prior_on_weights() -> None:
    y = torch.tensor([[1.0, 2.0, -3.0], [0.1, 0.0, 0.2]], dtype=torch.float64)
    prior = gpytorch.priors.NormalPrior(torch.tensor(0.5, dtype=y.dtype), torch.tensor(0.3, dtype=y.dtype))
    kernel = ConvolutionProcess(1, 2, torch.Size([2]), weight_prior=prior)
    inducing = torch.linspace(-1, 1, 4, dtype=y.dtype)[:, None]
    gp = ConvolvedGP(inducing, kernel, batch_shape=torch.Size([2]), scale=1.5)
    gp.start(y)
    assert torch.equal(gp.kernel.scale, torch.full((2,), 1.5, dtype=y.dtype))
    assert torch.allclose(gp.likelihood.noise[:, 0], torch.full((2,), (0.3 * 1.5) ** 2, dtype=y.dtype))
    gp.kernel.weight.data = torch.tensor([[0.5, 0.8], [-0.1, 0.5]], dtype=y.dtype)
    flat = -2 * math.log(0.3 * math.sqrt(2 * math.pi))
    expected = flat - 0.5 * torch.tensor([1.0, 4.0], dtype=y.dtype)
    assert torch.allclose(gp.log_prior(True), expected)
    assert float(gp.log_prior(False)) == 0
    with pytest.raises(ValueError, match=r"Expected a positive scale of the outputs, or None .*, but got 0\.0"):
        ConvolvedGP(inducing, scale=0.0)


@pytest.mark.parametrize("call", ["__call__", "marginals", "predict", "interval"])
def test_inputs_of_another_dtype_or_shape_are_refused(call: str) -> None:
    model = ConvolvedGP(torch.linspace(0, 1, 4, dtype=torch.float64)[:, None])
    for wrong in (torch.zeros(3, 1), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"Expected inputs \(..., N, 1\) in the model's torch.float64, but got"):
            getattr(model, call)(wrong)
