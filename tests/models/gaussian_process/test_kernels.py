"""Multi-output kernels against numerical integration, GPyTorch and each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.gaussian_process.kernels import ConvolutionProcess, Coregionalisation, EmbedCategories
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

DTYPE = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def convolution(dims: int = 1, latents: int = 1, units: int = 0, seed: int = 0) -> ConvolutionProcess:
    shape = torch.Size([units]) if units else torch.Size()
    kernel = ConvolutionProcess(dims, latents, shape).to(DTYPE)
    kernel.raw_variance.data = 0.3 * draw(latents, seed=seed + 3)
    kernel.raw_lengthscale.data = 0.4 * draw(latents, dims, seed=seed) - 0.5
    kernel.raw_smoothing.data = 0.4 * draw(*shape, latents, dims, seed=seed + 1) - 0.8
    kernel.weight.data = draw(*shape, latents, seed=seed + 2)
    return kernel


def smoothed(first: float, second: float, kernel: ConvolutionProcess, both: bool) -> float:
    """∫ h(x − s) k(s − w) ds, or with a second smoothing kernel ∬ h(x − s) h(w − t) k(s − t) ds dt, on a grid.

    Sums of Gaussians at equal steps converge faster than any power of the step: 1e-12 with 0.02.
    """
    length, width = float(kernel.lengthscale), float(kernel.smoothing)
    grid = torch.arange(-8, 8, 0.02, dtype=DTYPE)
    window = (-0.5 * (grid / width).square()).exp() / (width * math.sqrt(2 * math.pi)) * 0.02
    amplitude, size = float(kernel.amplitude), float(kernel.latent_variance)
    if not both:
        return amplitude * size * float((window * (-0.5 * ((first - grid - second) / length).square()).exp()).sum())
    gap = (first - grid)[:, None] - (second - grid)
    return amplitude**2 * size * float(window @ (-0.5 * (gap / length).square()).exp() @ window)


@pytest.mark.parametrize("seed", range(3))
def test_convolutions_are_those_of_quadrature(seed: int) -> None:
    kernel = convolution(seed=10 * seed)
    x, w = torch.tensor([[-0.7], [0.2]], dtype=DTYPE), torch.tensor([[0.1], [0.9], [-0.3]], dtype=DTYPE)
    with torch.no_grad():
        cross = [[smoothed(float(a), float(b), kernel, False) for b in w] for a in x]
        assert torch.allclose(kernel.cross(x, w)[0], torch.tensor(cross, dtype=DTYPE), rtol=0, atol=1e-11)
        whole = [[smoothed(float(a), float(b), kernel, True) for b in x] for a in x]
        assert torch.allclose(kernel.covariance(x, x), torch.tensor(whole, dtype=DTYPE), rtol=0, atol=1e-11)


def test_the_sign_of_an_amplitude_counts() -> None:
    kernel, x = convolution(), draw(4, 1)
    before = kernel.cross(x, x)
    kernel.weight.data.neg_()
    assert torch.equal(kernel.cross(x, x), -before)


def test_several_dimensions_and_latents_are_products_and_sums() -> None:
    kernel, x, w = convolution(3, 2, 4), draw(4, 5, 3), draw(6, 3, seed=1)
    latent, both = kernel.lengthscale.square(), kernel.lengthscale.square() + kernel.smoothing.square()
    for m in range(4):
        for i in range(2):
            expected = kernel.amplitude[m, i] * kernel.latent_variance[i] * torch.ones(5, 6, dtype=DTYPE)
            for d in range(3):
                gap = (x[m, :, None, d] - w[None, :, d]).square()
                expected = expected * (latent[i, d] / both[m, i, d]).sqrt() * (-0.5 * gap / both[m, i, d]).exp()
            assert torch.allclose(kernel.cross(x, w)[m, i], expected, rtol=0, atol=1e-13)
    assert torch.allclose(kernel.variance(x), kernel.covariance(x, x).diagonal(dim1=-2, dim2=-1), rtol=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_joint_covariance_is_positive_definite(seed: int) -> None:
    """Of the latent processes and of all units, whatever the parameters: one normalisation for all three."""
    kernel, x, w = convolution(2, 2, 3, seed), 2 * draw(3, 7, 2, seed=seed), 2 * draw(6, 2, seed=seed + 1)
    with torch.no_grad():
        latent, cross = kernel.latent(w), kernel.cross(x, w)
        basis = torch.linalg.solve_triangular(
            torch.linalg.cholesky(latent + 1e-10 * torch.eye(6)), cross.mT, upper=False
        )
        residual = kernel.covariance(x, x) - (basis.mT @ basis).sum(-3)
        assert float(torch.linalg.eigvalsh(residual).min()) > -1e-9


def test_mixed_normalisations_would_be_indefinite() -> None:
    """(18) beside a variance with a smaller normalisation, smoothed."""
    kernel, x = convolution(), torch.linspace(-1, 1, 8, dtype=DTYPE)[:, None]
    kernel.raw_smoothing.data.fill_(0.0)
    kernel.raw_lengthscale.data.fill_(0.0)
    with torch.no_grad():
        proper = kernel.covariance(x, x)
        wrong = proper * math.sqrt(1 / 3) * math.sqrt(1 / 2)  # a further factor below one
        latent = kernel.latent(x)[0] + 1e-10 * torch.eye(8, dtype=DTYPE)
        explained = kernel.cross(x, x)[0] @ torch.linalg.solve(latent, kernel.cross(x, x)[0].mT)
        assert float(torch.linalg.eigvalsh(proper - explained).min()) > -1e-6
        assert float(torch.linalg.eigvalsh(wrong - explained).min()) < -0.1


def test_without_smoothing_a_convolution_is_coregionalisation() -> None:
    smooth = convolution(2, 3, 4)
    smooth.raw_smoothing.data.fill_(-30.0)
    rbf = gpytorch.kernels.RBFKernel(ard_num_dims=2, batch_shape=torch.Size([3])).to(DTYPE)
    rbf.lengthscale = smooth.lengthscale[:, None, :].detach()
    scaled = gpytorch.kernels.ScaleKernel(rbf, batch_shape=torch.Size([3])).to(DTYPE)
    scaled.outputscale = smooth.latent_variance.detach()
    mixed = Coregionalisation(scaled, 2, torch.Size([4])).to(DTYPE)
    mixed.weight.data = smooth.weight.data
    x, w = draw(4, 5, 2), draw(6, 2, seed=1)
    for one, two in (
        (smooth.latent(w), mixed.latent(w)),
        (smooth.cross(x, w), mixed.cross(x, w)),
        (smooth.variance(x), mixed.variance(x)),
        (smooth.covariance(x, x), mixed.covariance(x, x)),
    ):
        assert torch.allclose(one, two, rtol=0, atol=1e-12)


def test_any_kernel_of_gpytorch_can_be_coregionalised() -> None:
    matern = gpytorch.kernels.MaternKernel(2.5, batch_shape=torch.Size([2])).to(DTYPE)
    kernel = Coregionalisation(matern, 1, torch.Size([3])).to(DTYPE)
    kernel.spread(torch.tensor([2.0]))
    assert kernel.kernel.lengthscale.flatten().tolist() == pytest.approx([0.2, 0.4])
    x = draw(3, 5, 1)
    assert kernel.cross(x, x[0]).shape == (3, 2, 5, 5)
    assert torch.allclose(kernel.variance(x), kernel.covariance(x, x).diagonal(dim1=-2, dim2=-1))
    one = Coregionalisation(gpytorch.kernels.RBFKernel().to(DTYPE), 1, torch.Size([3])).to(DTYPE)
    assert one.cross(x, x[0]).shape == (3, 1, 5, 5)
    with pytest.raises(ValueError, match="batch dimension, the latent processes"):
        Coregionalisation(gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2, 2])), 1)


def test_derivatives() -> None:
    kernel, x, w = convolution(2, 2, 3), draw(3, 4, 2), draw(5, 2, seed=1)

    names = ("raw_variance", "raw_lengthscale", "raw_smoothing", "weight")

    def values(*tensors: Tensor) -> tuple[Tensor, ...]:
        *own, places = tensors
        found = dict(zip(names, own))
        call = lambda name, *inputs: torch.func.functional_call(_Call(kernel, name), found_of(found), inputs)
        return call("cross", x, places), call("covariance", x, x), call("variance", x), call("latent", places)

    parameters = [getattr(kernel, name).detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(values, (*parameters, w.clone().requires_grad_()))


class _Call(torch.nn.Module):
    def __init__(self, kernel: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.kernel, self.name = kernel, name

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self.kernel, self.name)(*inputs)


def found_of(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"kernel.{name}": value for name, value in values.items()}


def test_categories_become_points() -> None:
    embed = EmbedCategories(3, {1: 4}, size=2).to(DTYPE)
    x = torch.tensor([[0.5, 2.0, -1.0], [0.1, 0.0, 3.0]], dtype=DTYPE)
    out = embed(x)
    assert out.shape == (2, 4)
    assert torch.equal(out[:, :2], x[:, [0, 2]])
    assert torch.equal(out[:, 2:], embed.points[0][[2, 0]])
    embed.check(x)
    with pytest.raises(ValueError, match=r"Expected codes 0…3 in column 1, but got 7, which has no point"):
        embed.check(torch.tensor([[0.0, 7.0, 0.0]]))
    with pytest.raises(ValueError, match="at least 2 levels, but got 1 levels for column 0"):
        EmbedCategories(2, {0: 1})


def test_a_category_without_a_point_is_named_at_prediction_and_with_its_client() -> None:
    gp = ConvolvedGP(torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=DTYPE), features=EmbedCategories(2, {1: 3}))
    known, unknown = (torch.tensor([[0.5, code]], dtype=DTYPE) for code in (2.0, 3.0))
    assert gp.predict(known).mean.shape == (1,)
    for ask in (gp, gp.predict, gp.marginals, gp.interval):
        with pytest.raises(ValueError, match=r"Expected codes 0…2 in column 1, but got 3, which has no point"):
            ask(unknown)
    y = torch.zeros(1, dtype=DTYPE)
    data = ft.data.from_tensors([(known, y), (unknown, y)])
    with pytest.raises(ValueError, match=r"Client '1': Expected codes 0…2 in column 1, but got 3"):
        ft.Run(ft.fedmgp(gp, accept_disclosure=True), ft.InProcess(data))
    run = ft.run(ft.fedmgp(gp, accept_disclosure=True), ft.InProcess(data.select([0])), rounds=1)
    with pytest.raises(ValueError, match="Expected codes 0…2 in column 1, but got 3"):
        ConvolvedGP(unknown, features=EmbedCategories(2, {1: 3}))
    with pytest.raises(ValueError, match="in column 1, but got 3"):
        run.evaluate(data.select([1]), {"error": ft.metrics.mean_squared_error()})


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="at least one dimension and one latent, but got 0 and 1"):
        ConvolutionProcess(0)


def test_a_kernel_of_gpytorch_is_enough() -> None:
    """As users of GPyTorch write it: the kernel itself, or several, in place of a coregionalisation of them."""
    inducing = torch.linspace(0, 1, 4, dtype=DTYPE)[:, None]
    rbf, periodic = gpytorch.kernels.RBFKernel(), gpytorch.kernels.PeriodicKernel()
    one = ConvolvedGP(inducing, rbf)
    two = ConvolvedGP(inducing, [rbf, periodic], batch_shape=torch.Size([3]))
    assert isinstance(one.kernel, Coregionalisation)
    assert (one.points, two.points, two.kernel.weight.shape) == (4, 8, (3, 2))
    with pytest.raises(TypeError, match="Expected a kernel of GPyTorch, but got Linear"):
        ConvolvedGP(inducing, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_unsupported_gpytorch_parts_are_refused() -> None:
    inducing, likelihoods = torch.linspace(0, 1, 4, dtype=DTYPE)[:, None], gpytorch.likelihoods
    with pytest.raises(TypeError, match=r"Expected mean=True or False, but got LinearMean; .* LinearKernel"):
        ConvolvedGP(inducing, mean=gpytorch.means.LinearMean(1))
    for likelihood, message in (
        (likelihoods.FixedNoiseGaussianLikelihood(torch.ones(5)), "belongs to rows by their place"),
        (likelihoods.MultitaskGaussianLikelihood(2), "units are the outputs"),
        (likelihoods.SoftmaxLikelihood(2, 3), "make every class a unit"),
    ):
        with pytest.raises(TypeError, match=message):
            ConvolvedGP(inducing, likelihood=likelihood)


def test_a_noise_that_its_constraint_excludes_starts_where_the_likelihood_does() -> None:
    """Outputs of two units suggest noise of 0.09 and 9e-4; of one it is outside."""
    inducing, units = torch.linspace(0, 1, 4, dtype=DTYPE)[:, None], torch.Size([2])
    within = gpytorch.constraints.Interval(1e-4, 0.01)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=within, batch_shape=units)
    gp = ConvolvedGP(inducing, likelihood=likelihood, batch_shape=units)
    before = gp.likelihood.noise[0].item()
    gp.start(torch.tensor([[1.0, -1.0], [0.1, -0.1]], dtype=DTYPE))
    assert gp.likelihood.noise.flatten().tolist() == [pytest.approx(before), pytest.approx(9e-4)]
