"""Deep Gaussian processes beside GPyTorch's, quadrature and a plain loop."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.models.gaussian_process import DeepGP
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

DTYPE = torch.float64
JITTER = 1e-10
PLACES = torch.linspace(0, 1, 5, dtype=DTYPE)[:, None]


def draw(number: int, *shape: int) -> Tensor:
    return ft.random.normal(ft.random.fold_in(ft.random.key(3), number), shape, DTYPE)


def rows(units: int = 2, size: int = 7) -> ft.data.FederatedData:
    x = torch.linspace(0, 1, size, dtype=DTYPE)[:, None]
    return ft.data.from_tensors([(x + 0.01 * k, (5 * x[:, 0] + k).sin()) for k in range(units)])


def moved(layers: int, inducing: Tensor = PLACES, total: int = 14, draws: int = 10, **arguments: Any) -> DeepGP:
    """A process whose parameters are away from where they begin."""
    module = DeepGP(inducing, total, layers=layers, draws=draws, jitter=JITTER, **arguments)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.add_(0.2 * draw(number, *parameter.shape))
    return module


def sparse(layer: torch.nn.Module, smoothness: float | None = None) -> gpytorch.models.ApproximateGP:
    """GPyTorch's sparse process with the parameters of an outer layer."""
    size, variance = len(layer.inducing), layer.log_variance.detach().exp()[0]
    jitter = float(JITTER * variance)

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            posterior = gpytorch.variational.CholeskyVariationalDistribution(size)
            places = layer.inducing.detach()
            super().__init__(gpytorch.variational.VariationalStrategy(self, places, posterior, jitter_val=jitter))
            dims, kernels = layer.inducing.shape[1], gpytorch.kernels
            rbf, matern = (
                kernels.RBFKernel(ard_num_dims=dims),
                kernels.MaternKernel(smoothness or 2.5, ard_num_dims=dims),
            )
            self.kernel = kernels.ScaleKernel(matern if smoothness else rbf)

        def forward(self, x: Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(torch.zeros_like(x[..., 0]), self.kernel(x))

    process = Process().to(DTYPE)
    process.kernel.base_kernel.lengthscale = layer.log_lengthscale.detach().exp()
    process.kernel.outputscale = variance
    strategy = process.variational_strategy
    strategy.variational_params_initialized.fill_(1)
    posterior = strategy._variational_distribution
    posterior.variational_mean.data, posterior.chol_variational_covar.data = layer.mean[0].data, layer.root[0].data
    return process


def kernel(a: Tensor, b: Tensor, lengthscale: float, variance: float = 1.0) -> Tensor:
    return variance * (-0.5 * ((a[:, None] - b) / lengthscale).square().sum(-1)).exp()


def test_inducing_inputs_at_all_rows_are_the_exact_process() -> None:
    """At its best q the bound is log N(y; 0, K + σ²I), and predictions are those of the textbook."""
    x, at = torch.linspace(0, 1, 9, dtype=DTYPE)[:, None], torch.linspace(-0.1, 1.1, 7, dtype=DTYPE)[:, None]
    y = (6 * x[:, 0]).sin() + 0.1 * draw(80, 9)
    module = DeepGP(x, 9, layers=1, noise=0.1, jitter=JITTER)
    width = float(module.outer.log_lengthscale.detach().exp())
    prior = kernel(x, x, width) + 0.01 * torch.eye(9, dtype=DTYPE)
    factor = torch.linalg.cholesky(kernel(x, x, width) + JITTER * torch.eye(9, dtype=DTYPE))
    basis = torch.linalg.solve_triangular(factor, kernel(x, x, width), upper=False)
    covariance = torch.linalg.inv(torch.eye(9, dtype=DTYPE) + basis @ basis.T / 0.01)  # of v, u = L v, given y
    with torch.no_grad():
        module.outer.mean.copy_(covariance @ basis @ y / 0.01)
        module.outer.root.copy_(torch.linalg.cholesky(covariance))
    loss = DeepGP.loss(module(x), y)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(9, dtype=DTYPE), prior).log_prob(y)
    assert -9 * float(loss.detach()) == pytest.approx(float(evidence), abs=1e-6)
    for slope in torch.autograd.grad(loss, [module.outer.mean, module.outer.root]):
        assert float(slope.abs().max()) < 1e-6
    gain = torch.linalg.solve(prior, kernel(x, at, width))
    found = module.eval().predict(at)
    assert torch.allclose(found.mean, gain.T @ y, rtol=0, atol=1e-5)
    assert torch.allclose(found.variance, 1.01 - (kernel(x, at, width) * gain).sum(0), rtol=0, atol=1e-5)


def simulated(likelihood: str, units: int, size: int, more: int) -> tuple[Tensor, Tensor]:
    """Places `(K, size + more, 1)` and outputs of units' draws of one process."""
    keys = ft.random.split(ft.random.key(11), 4)
    grid = torch.linspace(0, 1, 201, dtype=DTYPE)[:, None]
    root = torch.linalg.cholesky(kernel(grid, grid, 0.2) + 1e-8 * torch.eye(201, dtype=DTYPE))
    f = (root @ ft.random.normal(keys[0], (201, units), DTYPE)).T
    each = ft.random.fold_in(keys[1], torch.arange(units))
    place = torch.stack([ft.random.choice(key, 201, size + more) for key in each])
    f = f.gather(1, place)
    if likelihood == "normal":
        return grid[place], f + 0.1 * ft.random.normal(keys[2], f.shape, DTYPE)
    if likelihood == "yes or no":
        return grid[place], (ft.random.uniform(keys[2], f.shape, DTYPE) < f.sigmoid()).to(DTYPE)
    return grid[place], torch.poisson((1 + f).exp(), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["normal", "yes or no", "counts"])
def test_intervals_of_new_outputs_have_nominal_coverage(likelihood: str) -> None:
    """Places of new outputs in their predictive distributions, broken at random where these have steps, are uniform.

    Kernel and noise are known, so that only q is learnt; of forty units with twelve rows and ten new outputs each.
    """
    units, size, more = 40, 12, 10
    x, y = simulated(likelihood, units, size, more)
    of = {
        "normal": None,
        "yes or no": lambda f: torch.distributions.Bernoulli(logits=f, validate_args=False),
        "counts": lambda f: torch.distributions.Poisson((1 + f).exp(), validate_args=False),
    }[likelihood]
    module = DeepGP(torch.linspace(0, 1, 12, dtype=DTYPE)[:, None], units * size, layers=1, likelihood=of)
    with torch.no_grad():
        module.outer.log_lengthscale.fill_(math.log(0.2))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in ("outer.mean", "outer.root"))
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.05)
    local = ft.gradient_descent(module, steps=250, loss=DeepGP.loss, optimizer=adam)
    data = ft.data.from_tensors([(x[k, :size], y[k, :size]) for k in range(units)])
    run = ft.run(ft.separate(local), ft.InProcess(data), rounds=1, progress=False)
    places = []
    for k in range(units):
        found, told = run.client_module(k).predict(x[k, size:]), y[k, size:]
        if of is None:
            places.append(found.cdf(told))
            continue
        steps = torch.arange(int(told.max()) + 1, dtype=DTYPE)[:, None].expand(-1, more)
        mass = found.log_prob(steps).exp()
        upper = mass.cumsum(0).gather(0, told.long()[None])[0]
        part = ft.random.uniform(ft.random.fold_in(ft.random.key(12), k), (more,), DTYPE)
        places.append(upper - part * mass.gather(0, told.long()[None])[0])
    place = torch.stack(places)
    inside = ((place > 0.025) & (place < 0.975)).to(DTYPE).mean(1)
    error = float(inside.std()) / math.sqrt(units)
    assert float(inside.mean()) == pytest.approx(0.95, abs=3 * error)
    assert error < math.sqrt(0.95 * 0.05 / units)  # what it is where a unit's outputs are all inside or all outside
    assert float(place.mean()) == pytest.approx(0.5, abs=3 * float(place.mean(1).std()) / math.sqrt(units))


@pytest.mark.slow
def test_intervals_of_two_layers_have_the_documented_coverage() -> None:
    """A warp that sixteen units share is drawn, too; kernels and noise are known, so that only q of both is learnt."""
    units, size, more, spread = 16, 12, 20, 0.02
    covered = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        drawn = lambda *shape, of=generator: torch.randn(*shape, generator=of, dtype=DTYPE)
        grid = torch.linspace(0, 1, 201, dtype=DTYPE)[:, None]
        eye = 1e-8 * torch.eye(201, dtype=DTYPE)
        warped = grid + torch.linalg.cholesky(kernel(grid, grid, 0.3, spread) + spread * eye) @ drawn(201, 1)
        f = (torch.linalg.cholesky(kernel(warped, warped, 0.2) + eye) @ drawn(201, units)).T
        place = torch.stack([torch.randperm(201, generator=generator)[: size + more] for _ in range(units)])
        x, y = grid[place], f.gather(1, place) + 0.1 * drawn(units, size + more)
        module = DeepGP(torch.linspace(0, 1, 12, dtype=DTYPE)[:, None], units * size)
        with torch.no_grad():
            module.outer.log_lengthscale.fill_(math.log(0.2))
            module.inner[0].log_lengthscale.fill_(math.log(0.3))
            module.inner[0].log_variance.fill_(math.log(spread))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.endswith(("mean", "root")))
        adam = lambda parameters: torch.optim.Adam(parameters, lr=0.1)
        local = ft.gradient_descent(module, steps=10, loss=DeepGP.loss, optimizer=adam, reset="never")
        data = ft.data.from_tensors([(x[k, :size], y[k, :size]) for k in range(units)])
        personal = ft.personal_layers(local, ("outer.mean", "outer.root"))
        run = ft.run(personal, ft.InProcess(data), rounds=60, progress=False)
        places = torch.stack([run.client_module(k).predict(x[k, size:]).cdf(y[k, size:]) for k in range(units)])
        covered.append(float(((places > 0.025) & (places < 0.975)).to(DTYPE).mean()))
    assert 0.80 < min(covered) <= max(covered) < 0.98
    assert sum(covered) / 3 < 0.94  # less than what they say


@pytest.mark.parametrize("inducing", [PLACES, torch.cat([PLACES, PLACES.flip(0).square()], 1)], ids=["one", "two"])
@torch.no_grad()
def test_one_layer_is_gpytorchs_sparse_process(inducing: Tensor) -> None:
    module = moved(1, inducing)
    x, y = 0.5 + 0.3 * draw(90, 7, inducing.shape[1]), draw(91, 7)
    process, likelihood = sparse(module.outer), gpytorch.likelihoods.GaussianLikelihood().to(DTYPE)
    likelihood.noise = (2 * module.log_noise.detach()).exp()
    bound = gpytorch.mlls.VariationalELBO(likelihood, process, num_data=7)(process(x), y)
    assert float(module.loss(module(x), y)) == pytest.approx(-float(bound), abs=1e-8)
    theirs, ours = likelihood(process.eval()(x)), module.eval().predict(x)
    assert torch.allclose(ours.mean, theirs.mean, rtol=0, atol=1e-8)
    assert torch.allclose(ours.variance, theirs.variance, rtol=0, atol=1e-8)
    assert torch.equal(module(x), ours.mean)


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5])
def test_matern_kernels_are_gpytorchs_and_have_slopes(smoothness: float) -> None:
    inducing = torch.cat([PLACES, PLACES.flip(0).square()], 1)
    module, x = moved(1, inducing, smoothness=smoothness), 0.5 + 0.3 * draw(90, 7, 2)
    theirs = sparse(module.outer, smoothness).eval()(x)
    mean, variance = module.outer(x)
    assert torch.allclose(mean[:, 0], theirs.mean, rtol=0, atol=1e-7)
    assert torch.allclose(variance[:, 0], theirs.variance, rtol=0, atol=1e-7)
    found = torch.autograd.grad(module.outer(module.outer.inducing)[0].sum(), [module.outer.inducing])[0]
    assert bool(found.isfinite().all())  # where inputs are the same, too


YES = lambda f: torch.distributions.Bernoulli(logits=f, validate_args=False)
COUNT = lambda f: torch.distributions.Poisson(f.exp(), validate_args=False)


def test_the_fit_of_a_likelihood_is_gpytorchs_and_a_round_is_a_step_up_the_bound() -> None:
    data, lr = ft.data.from_tensors([(x, (y > 0).double()) for x, y in (rows(1, 7)[0], rows(2, 4)[1])]), 0.01
    module = moved(1, total=11, likelihood=YES)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=lr)
    local = ft.gradient_descent(module, steps=1, loss=DeepGP.loss, optimizer=sgd)
    run = ft.run(ft.personal_layers(local, module.own), ft.InProcess(data), rounds=1)

    class Logistic(gpytorch.likelihoods._OneDimensionalLikelihood):
        def forward(self, f: Tensor) -> torch.distributions.Bernoulli:
            return torch.distributions.Bernoulli(logits=f)

    bound = torch.zeros(()).double()
    for x, y in data:
        mean, variance = module.outer(x)
        f = gpytorch.distributions.MultivariateNormal(mean[:, 0], variance[:, 0].diag_embed())
        bound = bound + Logistic().expected_log_prob(y, f).sum() - module.outer.divergence()
    shared = {n: p for n, p in module.named_parameters() if n not in module.own}
    assert "log_noise" not in shared
    for (name, parameter), gradient in zip(shared.items(), torch.autograd.grad(bound / 11, [*shared.values()])):
        assert torch.allclose(run.tensors()[name][0], parameter + lr * gradient, rtol=0, atol=1e-6), name
    # GPyTorch's nodes are float32


def test_predictions_of_yes_or_no_and_of_counts_average_over_what_is_not_known() -> None:
    x = rows()[0][0]
    for likelihood, high in ((YES, 1.0), (COUNT, math.inf)):
        module = moved(2, likelihood=likelihood).eval()
        found = module.predict(x)
        mean, variance = module._moments(x, module.nodes[:, None])
        f = mean + variance.sqrt() * draw(7, 2000, 1, len(x))  # over draws of f, by nodes of the inner layers
        wanted = likelihood(f).mean.mean((0, 1))
        assert torch.allclose(found.mean, wanted, rtol=0.1, atol=0.02)
        assert torch.equal(module(x), found.mean)
        assert bool(((found.mean > 0) & (found.mean < high)).all())
        total = found.log_prob(torch.arange(200.0 if high > 1 else 2.0).double()[:, None]).exp().sum(0)
        assert torch.allclose(total, torch.ones_like(total), atol=1e-3)


def quadrature(module: DeepGP, x: Tensor, y: Tensor) -> Tensor:
    """The fit of two layers: a row's inner value is normal, and its mean over it by 60 Gauss–Hermite nodes."""
    nodes, weights = (torch.from_numpy(part) for part in numpy.polynomial.hermite_e.hermegauss(60))
    mean, variance = module.inner[0](x)
    places = mean + variance.sqrt() * nodes  # (N, nodes)
    level, spread = module.outer(places.reshape(-1, 1))
    noise = (2 * module.log_noise).exp()
    gap = (y[:, None] - level.reshape(places.shape)).square() + spread.reshape(places.shape)
    return -0.5 * ((math.log(2 * math.pi) + noise.log() + gap / noise) * weights / weights.sum()).sum()


@torch.no_grad()
def test_the_bound_of_two_layers_is_that_of_quadrature() -> None:
    module, (x, y) = moved(2), rows()[0]
    exact = quadrature(module, x, y)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fits = torch.stack([module(x).fit(y) for _ in range(400)])
    assert abs(float(fits.mean() - exact)) < 4 * float(fits.std()) / 20
    assert float(fits.std()) > 0
    found = module.eval().predict(x)
    assert float((found.mean - module.train()(x).mean.mean(0)).abs().max()) < 0.2  # nodes, and ten draws


@torch.no_grad()
def test_a_second_layer_is_gpytorchs_deep_process() -> None:
    """What the outer process says at draws of the inner one, and both divergences."""
    module, (x, _) = moved(2), rows()[0]
    inner = sparse(module.inner[0])
    found = inner.train()(x)
    assert torch.allclose(module.warp(x)[:, 0], found.mean + x[:, 0], rtol=0, atol=1e-8)
    assert torch.allclose(module.inner[0](x)[1][:, 0], found.variance, rtol=0, atol=1e-8)
    posterior = module(x)
    assert float(posterior.shared) == pytest.approx(float(inner.variational_strategy.kl_divergence()), abs=1e-8)
    outer = sparse(module.outer).train()
    outer(x)
    assert float(posterior.own) == pytest.approx(float(outer.variational_strategy.kl_divergence()), abs=1e-8)


def test_a_round_is_a_step_up_the_bound_of_all_units() -> None:
    """Of one layer, whose bound has no draws: the shared parameters move by the gradient of the bound, by row."""
    data, lr = ft.data.from_tensors([rows(1, 7)[0], rows(1, 4)[0]]), 0.01
    module = moved(1, total=11)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=lr)
    local = ft.gradient_descent(module, steps=1, loss=DeepGP.loss, optimizer=sgd)
    run = ft.run(ft.personal_layers(local, DeepGP.own), ft.InProcess(data), rounds=1)
    found = [module(x) for x, _ in data]
    bound = sum(q.fit(y) - q.own for q, (_, y) in zip(found, data)) / 11
    shared = {n: p for n, p in module.named_parameters() if n not in DeepGP.own}
    for (name, parameter), gradient in zip(shared.items(), torch.autograd.grad(bound, [*shared.values()])):
        assert torch.allclose(run.tensors()[name][0], parameter + lr * gradient, rtol=0, atol=1e-12), name


def test_inner_layers_are_shared_and_the_outer_q_is_not() -> None:
    """Draws come from clients' keys: the same run twice, and torch's generator where it was."""
    before = torch.random.get_rng_state()
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.05)
    local = ft.gradient_descent(moved(2), steps=3, loss=DeepGP.loss, optimizer=adam, reset="never")
    first, again = (ft.run(ft.personal_layers(local, DeepGP.own), ft.InProcess(rows()), rounds=2) for _ in range(2))
    assert all(torch.equal(one, first.tensors()[name]) for name, one in again.tensors().items())
    assert torch.equal(before, torch.random.get_rng_state())
    one, two = (dict(first.client_module(k).named_parameters()) for k in range(2))
    assert {name for name in one if not torch.equal(one[name], two[name])} == set(DeepGP.own)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inducing": torch.zeros(3)}, "finite inducing inputs"),
        ({"inducing": torch.full((3, 1), torch.nan)}, "finite inducing inputs"),
        ({"rows": 0}, "rows to be a whole number"),
        ({"layers": 0}, "layers to be a whole number"),
        ({"draws": 1.5}, "draws to be a whole number"),
        ({"noise": 0.0}, "noise"),
        ({"smoothness": 2.0}, r"smoothness 0\.5, 1\.5 or 2\.5, or None for RBF"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepGP(**{"inducing": PLACES, "rows": 14, **arguments})
    with pytest.raises(TypeError, match="likelihood= as a function of f"):
        DeepGP(PLACES, 14, likelihood=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a distribution for each of 2 × 3 values of f, but got"):
        DeepGP(PLACES, 14, likelihood=torch.sigmoid)  # type: ignore[arg-type]


def test_units_whose_training_or_rows_go_wrong_are_named() -> None:
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.05)

    def train(data: ft.data.FederatedData, **arguments: Any) -> ft.Run:
        module = DeepGP(PLACES, 14, **arguments)
        local = ft.gradient_descent(module, steps=2, loss=DeepGP.loss, optimizer=adam)
        return ft.run(ft.personal_layers(local, module.own), ft.InProcess(data), rounds=1)

    (x, y), other = rows(1)[0], rows(2)[1]
    with pytest.raises(ValueError, match="Expected finite messages, but client 'large' sent NaN"):
        train(ft.data.from_tensors([other, (x, 1e200 * y)], ["small", "large"]))
    with pytest.raises(ValueError, match=r"Expected inputs \(N, 1\), but got \(\d+, 2\)"):
        train(ft.data.from_tensors([(torch.cat([x, x], 1), y)]))
    with pytest.raises(ValueError, match="Expected rows that DeepGP can train on"):
        train(ft.data.from_tensors([(x, y[:, None])]))
    holes = ft.data.FederatedData(rows(1).rows, torch.tensor([7, 0]), allow_empty=True)
    with pytest.raises(ValueError, match="Client '1': Expected at least one row to train on"):
        train(holes)


def test_minibatches_are_refused_for_the_loss_divides_by_the_rows_of_a_unit() -> None:
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.05)
    with pytest.raises(ValueError, match="the loss of DeepGP is one of all of them, but got batch_size=4"):
        ft.gradient_descent(DeepGP(PLACES, 14), steps=2, batch_size=4, loss=DeepGP.loss, optimizer=adam)
    whole = lambda k: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows()[k]), batch_size=7)
    loaders = {str(k): whole(k) for k in range(2)}
    local = ft.gradient_descent(DeepGP(PLACES, 14), steps=2, loss=DeepGP.loss, optimizer=adam)
    with pytest.raises(ValueError, match="the loss of DeepGP is one of all of them, but got loaders; leave"):
        ft.Run(ft.personal_layers(local, DeepGP.own), ft.InProcess(ft.data.from_loaders(loaders)))
