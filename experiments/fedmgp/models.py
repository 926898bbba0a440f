"""What the experiments on federated multi-output Gaussian processes share: signals, the federated fit, baselines.

Signals follow (19) of Chung and Al Kontar (2024): a Gaussian process with a lengthscale of 0.1, smoothed by each unit
with a width λ in samples of a grid of 500 on [−1, 1], times the unit's amplitude, plus noise of standard deviation 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.models.gaussian_process import ConvolutionProcess, ConvolvedGP, fit, fit_modules
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

DTYPE = torch.float64
GRID = 500
NOISE = 0.1
_MARGIN = 60  # samples beyond each end, six times the largest smoothing width


class Prediction(NamedTuple):
    """Of one unit's outputs."""

    mean: Tensor  # (N,)
    sd: Tensor | None  # (N,) of the outputs, noise included


class Signals(NamedTuple):
    """Units' inputs and noisy outputs, and their curves without noise."""

    x: list[Tensor]  # (N_m,) each
    y: list[Tensor]
    grid: Tensor  # (GRID,)
    curves: Tensor  # (M, GRID)


def latent_root() -> Tensor:
    """A root of the covariance of the latent signal on the grid and its margins, `(L, L)`."""
    step = 2 / (GRID - 1)
    long = torch.arange(-_MARGIN, GRID + _MARGIN, dtype=DTYPE) * step
    covariance = (-0.5 * ((long[:, None] - long) / 0.1).square()).exp()
    return torch.linalg.cholesky(covariance + 1e-9 * torch.eye(len(long), dtype=DTYPE))


def smoothing(units: int, width: tuple[float, float], seed: int) -> tuple[Tensor, Tensor]:
    """Draws (amplitudes `(M,)`, smoothing windows `(M, W)`) of units of (19)."""
    key = ft.random.fold_in(ft.random.key(seed), torch.arange(5))
    amplitude = 0.5 + 2.5 * ft.random.uniform(key[1], (units,), DTYPE)
    sigma = width[0] + (width[1] - width[0]) * ft.random.uniform(key[2], (units,), DTYPE)
    window = (-0.5 * (torch.arange(-_MARGIN, _MARGIN + 1, dtype=DTYPE) / sigma[:, None]).square()).exp()
    return amplitude, window / window.sum(1, keepdim=True)


def signals(units: int, points: int, width: tuple[float, float], seed: int) -> Signals:
    """Draws units from (19) with amplitudes U(0.5, 3) and smoothing widths U(width).

    Up to `GRID` points per unit are distinct points of the grid; more are uniform, with the curve interpolated.
    """
    key = ft.random.fold_in(ft.random.key(seed), torch.arange(5))
    grid = torch.linspace(-1, 1, GRID, dtype=DTYPE)
    step = float(grid[1] - grid[0])
    root = latent_root()
    latent = root @ ft.random.normal(key[0], (len(root),), DTYPE)
    amplitude, window = smoothing(units, width, seed)
    curves = amplitude[:, None] * nn.functional.conv1d(latent[None, None], window[:, None])[0]
    keys = ft.random.fold_in(key[3], torch.arange(units))
    if points <= GRID:
        chosen = torch.stack([ft.random.choice(k, GRID, points) for k in keys])
        x, clean = grid[chosen], curves.gather(1, chosen)
    else:
        place = (ft.random.uniform(keys, (points,), DTYPE) * (GRID - 1)).sort().values
        below = place.long().clamp(max=GRID - 2)
        part = place - below
        x = -1 + place * step
        clean = (1 - part) * curves.gather(1, below) + part * curves.gather(1, below + 1)
    noise = NOISE * ft.random.normal(ft.random.fold_in(key[4], torch.arange(units)), (points,), DTYPE)
    return Signals(list(x), list(clean + noise), grid, curves)


def inducing() -> Tensor:
    """Thirty inducing inputs on and about [−1, 1], `(30,)`."""
    return torch.linspace(-1.1, 1.1, 30, dtype=DTYPE)


def federated(x: Sequence[Tensor], y: Sequence[Tensor]) -> ft.data.FederatedData:
    """Units' rows as federated data."""
    return ft.data.from_tensors([(a[:, None], b) for a, b in zip(x, y)])


def kernel(latents: int = 1, units: int | None = None, weight_sd: float | None = None) -> ConvolutionProcess:
    """The convolution process with a weak prior on the units' smoothing widths.

    Without it the width of a unit with half a signal may shrink to nothing, which the likelihood hardly minds and the
    extrapolation does. `weight_sd` is that of a normal prior of units' weights about those that they start from.
    """
    shape = torch.Size() if units is None else torch.Size([units])
    smoothing = gpytorch.priors.LogNormalPrior(math.log(0.05), 1.0)
    weight = None
    if weight_sd is not None:
        usual, sd = torch.tensor([latents**-0.5, weight_sd], dtype=DTYPE)
        weight = gpytorch.priors.NormalPrior(usual, sd)
    return ConvolutionProcess(1, latents, shape, smoothing_prior=smoothing, weight_prior=weight)


def model(
    inducing: Tensor,
    latents: int = 1,
    units: int | None = None,
    scale: float | None = None,
    weight_sd: float | None = None,
    own_kernel: object | None = None,
) -> ConvolvedGP:
    """The model of all experiments, of one unit or of several at once; units share the size of their own processes."""
    shape = torch.Size() if units is None else torch.Size([units])
    return ConvolvedGP(
        inducing[:, None],
        kernel(latents, units, weight_sd),
        batch_shape=shape,
        scale=scale,
        own_kernel=own_kernel,
        share_own_kernel=own_kernel is not None,
    )


def published(
    inducing: Tensor, latents: int = 1, scale: float | None = None, lengthscale: float | None = None
) -> ConvolvedGP:
    """The model as the source averages it: latent processes of unit variance, which units' weights make up for.

    Averages hardly move a lengthscale away from where it begins, for q(g) holds it: it may begin elsewhere than at a
    tenth of the range.
    """
    found = model(inducing, latents, scale=scale)
    found.kernel.raw_variance.requires_grad_(False)
    if lengthscale is not None:
        raw = found.kernel.raw_lengthscale
        wanted = found.kernel.raw_lengthscale_constraint.inverse_transform(torch.full_like(raw, lengthscale))
        found.kernel.initialize(raw_lengthscale=wanted)
    return found


def spacing(inducing: Tensor) -> float:
    """The mean distance of neighbouring inducing inputs, where averages begin with the lengthscale."""
    return float((inducing.max() - inducing.min()) / (len(inducing) - 1))


def averaged(data: ft.data.FederatedData, module: ConvolvedGP, rounds: int, batch_size: int | None = None) -> ft.Run:
    """The source's Algorithm 2: rounds of twenty Adam steps of rate 0.01 each, whose changes are averaged."""
    algorithm = ft.fedmgp_average(module, units=len(data), steps=20, lr=0.01, batch_size=batch_size)
    return ft.run(algorithm, ft.InProcess(data), rounds=rounds)


def pooled_scale(y: Sequence[Tensor]) -> float:
    """The root of the mean square of all units' outputs, from two sums over units."""
    return math.sqrt(sum(float(b.square().sum()) for b in y) / sum(len(b) for b in y))


def fedmgp(
    data: ft.data.FederatedData,
    module: ConvolvedGP,
    rounds: int,
    **settings: object,
) -> tuple[list[ConvolvedGP], ft.Run]:
    """Each unit's model after some rounds of `ft.fedmgp`, and the run."""
    algorithm = ft.fedmgp(module, accept_disclosure=True, **settings)  # type: ignore[arg-type]
    run = ft.run(algorithm, ft.InProcess(data), rounds=rounds)
    models = [unit_model(run, k) for k in range(len(data))]
    for unit, rows in zip(models, data):
        unit.observe(*rows)
    return models, run


def unit_model(run: ft.Run, number: int) -> ConvolvedGP:
    """Return the model of one unit of a run."""
    model = run.client_module(number)
    assert isinstance(model, ConvolvedGP)
    return model


def predict(unit: ConvolvedGP, x: Tensor) -> Prediction:
    """A unit's predictive means and standard deviations at x `(N,)`."""
    with torch.no_grad():
        mean, variance = unit.marginals(x[:, None])
        return Prediction(mean, (variance + unit.likelihood.noise).sqrt())


def cover(found: Prediction, truth: Tensor, level: float) -> float:
    """The share of outputs within `level` standard deviations of what is predicted."""
    assert found.sd is not None
    return float(((found.mean - truth).abs() < level * found.sd).double().mean())


def band(axis: Axes, x: Tensor, found: Prediction, level: float, **style: Any) -> None:
    """Fill `level` standard deviations on either side of what is predicted at x `(N,)`."""
    assert found.sd is not None
    axis.fill_between(x, found.mean - level * found.sd, found.mean + level * found.sd, linewidth=0, **style)


def central(x: Sequence[Tensor], y: Sequence[Tensor], whole: ConvolvedGP, at: Tensor) -> Prediction:
    """CenMGP: the same model, of all units, fitted centrally by L-BFGS; predictions of unit 0 at `at` `(N,)`."""
    block = federated(x, y).stack(range(len(x)))
    fit(whole, block.batch[0], block.batch[1], block.mask)
    with torch.no_grad():
        mean, variance = whole.marginals(at[None, :, None].expand(len(x), -1, -1))
        return Prediction(mean[0], (variance + whole.likelihood.noise).sqrt()[0])


class _Exact(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: object) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> object:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def exact_gp(x: Tensor, y: Tensor) -> _Exact:
    """IndGP: a GPyTorch exact GP with an RBF kernel, fitted by L-BFGS to one unit's points."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-8))
    gp = _Exact(x[:, None], y, likelihood).to(DTYPE)
    scale = float(y.square().mean())
    gp.covar_module.outputscale = scale
    gp.covar_module.base_kernel.lengthscale = 0.2
    likelihood.noise = 0.05 * scale + 1e-6
    gp.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    optimizer = torch.optim.LBFGS(gp.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -objective(gp(x[:, None]), y)
        value.backward()
        return value

    optimizer.step(loss)
    return gp.eval()


def alone(x: Tensor, y: Tensor, at: Tensor) -> Prediction:
    """IndGP's prediction at `at` `(N,)`."""
    gp = exact_gp(x, y)
    with torch.no_grad():
        found = gp.likelihood(gp(at[:, None]))
        return Prediction(found.mean, found.variance.sqrt())


def polynomial(
    x: Sequence[Tensor], y: Sequence[Tensor], at: Tensor, degrees: Sequence[int] = range(2, 41), pull: float = 0.1
) -> Prediction:
    """FedPoly: a shared polynomial by federated sums, then unit 0's own, held to the shared one by ω‖θ* − θ‖².

    The degree is chosen by five-fold cross-validation of the shared polynomial. Polynomials are written in Chebyshev's
    on the range of all inputs, whose sums of squares can be inverted at any degree tried. The source prints the
    penalty with a minus sign, which would push θ away.
    """
    low, high = min(float(a.min()) for a in x), max(float(a.max()) for a in x)

    def features(inputs: Tensor, degree: int) -> Tensor:
        place = (2 * inputs - low - high) / (high - low)
        return torch.stack([torch.special.chebyshev_polynomial_t(place, k) for k in range(degree + 1)], -1)

    def shared(parts: Sequence[tuple[Tensor, Tensor]], degree: int) -> Tensor:
        designs = [(features(a, degree), b) for a, b in parts]
        gram = torch.stack([d.T @ d for d, _ in designs]).sum(0)
        cross = torch.stack([d.T @ b for d, b in designs]).sum(0)
        return torch.linalg.solve(gram + 1e-9 * torch.eye(degree + 1, dtype=DTYPE), cross)

    def error(degree: int) -> float:
        total = 0.0
        for fold in range(5):
            keep = [torch.arange(len(a)) % 5 != fold for a in x]
            theta = shared([(a[k], b[k]) for a, b, k in zip(x, y, keep)], degree)
            total += sum(float((features(a[~k], degree) @ theta - b[~k]).square().sum()) for a, b, k in zip(x, y, keep))
        return total

    degree = min(degrees, key=error)
    theta = shared(list(zip(x, y)), degree)
    own = features(x[0], degree)
    matrix = own.T @ own / len(own) + pull * torch.eye(degree + 1, dtype=DTYPE)
    theta = torch.linalg.solve(matrix, own.T @ y[0] / len(own) + pull * theta)
    return Prediction(features(at, degree) @ theta, None)


def modular(x: Sequence[Tensor], y: Sequence[Tensor], whole: ConvolvedGP, pseudo: int, at: Tensor) -> Prediction:
    """ModularGP: units fit processes alone and send what these say of their pseudo-targets; predictions of unit 0."""
    modules, places, noises = [], [], []
    for a, b in zip(x, y):
        gp = exact_gp(a, b)
        z = torch.linspace(float(a.min()), float(a.max()), pseudo, dtype=DTYPE)
        modules.append(pseudo_targets(gp, a, b, z))
        noises.append(gp.likelihood.noise.detach())
        places.append(z)
    block = federated(x, y).stack(range(len(x)))
    whole.start(block.batch[1], block.mask)
    precision, shift = (torch.stack(part) for part in zip(*modules))
    fit_modules(whole, torch.stack(places)[..., None], (precision, shift, torch.zeros(len(x), dtype=DTYPE)))
    with torch.no_grad():
        mean, variance = whole.marginals(at[None, :, None].expand(len(x), -1, -1))
        return Prediction(mean[0], (variance[0] + noises[0]).sqrt())


def pseudo_targets(gp: _Exact, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """A unit's module at pseudo-inputs z `(J,)`: (B, a) of q(u) / p(u) ∝ exp(a'u − ½ u'B u), q the best of its rows."""
    with torch.no_grad():
        kzz = gp.covar_module(z[:, None]).to_dense()
        kzz = kzz + 1e-6 * kzz.diagonal().mean() * torch.eye(len(z), dtype=DTYPE)
        weights = torch.linalg.solve(kzz, gp.covar_module(z[:, None], x[:, None]).to_dense())
        return weights @ weights.T / gp.likelihood.noise, weights @ y / gp.likelihood.noise
