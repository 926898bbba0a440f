"""Units with a process of their own beside the shared ones, and exact units, against dense conditional normals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedtorch.models.gaussian_process import ConvolvedGP, fit
from fedtorch.models.gaussian_process.joining import join
from fedtorch.models.gaussian_process.kernels import ConvolutionProcess
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

DTYPE = torch.float64
UNITS, ROWS, NEW = 3, 9, 6
MASK = (torch.arange(ROWS) < torch.tensor([[9], [4], [1]])).to(DTYPE)
CLOSE = 1e-8
KINDS = ["exact units", "own", "shared own"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def own_kernel(units: int, **priors: Any) -> Any:
    shape = torch.Size([units]) if units else torch.Size()
    base = gpytorch.kernels.MaternKernel(2.5, batch_shape=shape)
    return gpytorch.kernels.ScaleKernel(base, batch_shape=shape, **priors)


def model(kind: str, units: int = UNITS) -> ConvolvedGP:
    shape = torch.Size([units]) if units else torch.Size()
    kernel = None if kind == "exact units" else own_kernel(units if kind == "own" else 0)
    inducing = torch.linspace(-2, 2, 5, dtype=DTYPE)[:, None]
    gp = ConvolvedGP(
        inducing, latents=2, batch_shape=shape, mean=True, own_kernel=kernel, share_own_kernel=kind == "shared own"
    )
    for number, parameter in enumerate(gp.parameters()):
        parameter.data = parameter.data + 0.3 * draw(*parameter.shape, seed=number)
    gp.kernel.rescale(torch.linspace(0.5, 2.0, units, dtype=DTYPE) if units else torch.tensor(1.5, dtype=DTYPE))
    gp.rebase()
    return gp


def data() -> tuple[Tensor, Tensor, Tensor]:
    x = draw(UNITS, ROWS, 1) * MASK[..., None]
    return x, (x[..., 0].sin() + 0.3 * draw(UNITS, ROWS, seed=1)) * MASK, draw(UNITS, NEW, 1, seed=2)


def dense(gp: ConvolvedGP, x: Tensor) -> Tensor:
    """The covariance of f at x `(M, N, 1)` of all units, V C_gf + bdiag(Ω_m + scale_m² k_m), `(MN, MN)`."""
    units, rows = x.shape[:2]
    latent = gp.kernel.latent(gp.inducing) + gp.jitter * torch.eye(len(gp.inducing), dtype=DTYPE)
    cross = gp.kernel.cross(x, gp.inducing).movedim(1, 0).reshape(gp.kernel.latents, units * rows, -1)
    shared = (cross @ torch.linalg.solve(latent, cross.mT)).sum(0)
    whole = gp.kernel.covariance(x, x)
    if gp.own_kernel is not None:
        whole = whole + gp.kernel.scale.square()[:, None, None] * gp.own_kernel(x, x).to_dense()
    for m in range(units):
        block = slice(m * rows, (m + 1) * rows)
        shared[block, block] = whole[m]
    return shared


def conditional(gp: ConvolvedGP, x: Tensor, y: Tensor, mask: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log p(y), means of f at new `(M, N)`, their covariance `(MN, MN)`) by the rules of normal distributions."""
    covariance = dense(gp, torch.cat([x, new], 1))
    units, rows, more = len(x), x.shape[1], new.shape[1]
    old = torch.cat([mask > 0, torch.zeros(units, more, dtype=torch.bool)], 1).flatten()
    ahead = torch.cat([torch.zeros(units, rows, dtype=torch.bool), torch.ones(units, more, dtype=torch.bool)], 1)
    ahead, level = ahead.flatten(), (gp.kernel.scale * gp.offset)[:, None]
    noise = gp.likelihood.noise.expand(units, rows)[mask > 0]
    known = covariance[old][:, old] + torch.diag(noise)
    gap, gain = (y - level)[mask > 0], covariance[ahead][:, old]
    density = MultivariateNormal(torch.zeros_like(gap), known).log_prob(gap)
    mean = (gain @ torch.linalg.solve(known, gap)).reshape(units, more) + level
    return density, mean, covariance[ahead][:, ahead] - gain @ torch.linalg.solve(known, gain.mT)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bound_and_predictions_are_the_dense_ones(kind: str) -> None:
    gp, (x, y, new), exact = model(kind), data(), kind == "exact units"
    density, mean, covariance = conditional(gp, x, y, MASK, new)
    assert abs(float(gp.bound(x, y, MASK, exact) - density)) < CLOSE
    gp.condition(x, y, MASK, exact)
    value = gp.expected_log_likelihood(x, y, MASK, exact_units=exact).sum() - gp.divergence()
    assert abs(float(value - density)) < CLOSE
    found = gp(new)
    assert torch.allclose(found.mean, mean, rtol=0, atol=CLOSE)
    for m in range(UNITS):
        block = covariance[m * NEW : (m + 1) * NEW, m * NEW : (m + 1) * NEW]
        assert torch.allclose(found.covariance_matrix[m], block, rtol=0, atol=CLOSE)
    marginal = gp.marginals(new)
    assert torch.allclose(marginal[0], mean, rtol=0, atol=CLOSE)
    assert torch.allclose(marginal[1].flatten(), covariance.diagonal(), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_unit_that_joins_is_predicted_as_if_it_had_been_there(kind: str) -> None:
    others, (x, y, new), exact = model(kind), data(), kind == "exact units"
    others.condition(x, y, MASK, exact)
    one = model(kind, units=0)
    values = {**dict(one.named_parameters()), **dict(one.named_buffers())}
    for name, value in [*others.named_parameters(), *others.named_buffers()]:
        values[name].data = (value[0] if name in others.unit_names else value).detach().clone()
    few, told = draw(4, 1, seed=7), draw(4, seed=8)
    joined = join(one, few, told, exact_units=exact).components  # one for each draw of what is the unit's own
    with torch.no_grad():
        whole = model(kind, units=UNITS + 1)
        all_values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        draws = {**dict(joined.named_parameters()), **dict(joined.named_buffers())}
        last = {name: draws[name][3] for name in others.unit_names}
        for name, value in [*others.named_parameters(), *others.named_buffers()]:
            mine = name in others.unit_names
            all_values[name].data = torch.cat([value, last[name][None]]) if mine else value.detach().clone()
        rows = torch.cat([x, torch.cat([few, torch.zeros(ROWS - 4, 1, dtype=DTYPE)])[None]])
        outputs = torch.cat([y, torch.cat([told, torch.zeros(ROWS - 4, dtype=DTYPE)])[None]])
        mask = torch.cat([MASK, (torch.arange(ROWS) < 4).to(DTYPE)[None]])
        _, mean, covariance = conditional(whole, rows, outputs, mask, new[:1].expand(UNITS + 1, -1, -1))
        found = joined(new[:1].expand(*joined.batch_shape, -1, -1))
    assert torch.allclose(found.mean[3], mean[-1], rtol=0, atol=CLOSE)
    assert torch.allclose(found.covariance_matrix[3], covariance[-NEW:, -NEW:], rtol=0, atol=CLOSE)


def test_units_own_tensors_and_priors() -> None:
    prior = gpytorch.priors.LogNormalPrior(-1.0, 0.5)
    for units in (True, False):
        kernel = own_kernel(UNITS if units else 0, outputscale_prior=prior)
        gp = ConvolvedGP(
            torch.linspace(0, 1, 4, dtype=DTYPE)[:, None],
            ConvolutionProcess(1, 1, torch.Size([UNITS])),
            batch_shape=torch.Size([UNITS]),
            own_kernel=kernel,
            share_own_kernel=not units,
        )
        names = {"own_kernel.raw_outputscale", "own_kernel.base_kernel.raw_lengthscale"}
        assert names <= set(gp.unit_names if units else gp.shared_names)
        assert not names & set(gp.shared_names if units else gp.unit_names)
        assert torch.allclose(gp.log_prior(units), prior.log_prob(gp.own_kernel.outputscale))
        assert float(gp.log_prior(not units).sum()) == 0


def test_what_units_do_not_share_is_not_taken_for_noise() -> None:
    """Units that agree but for smooth deviations: a process for these predicts better, and knows how well."""
    x = torch.linspace(-1, 1, 40, dtype=DTYPE)[None, :, None].repeat(6, 1, 1)
    deviation = torch.stack([0.3 * (3 * x[0, :, 0] + k).sin() for k in range(6)])
    y = (5 * x[..., 0]).sin() + deviation + 0.01 * draw(6, 40)
    mask = torch.ones_like(y)
    mask[0, 25:] = 0
    bounds, errors, inside = [], [], []
    for kernel in (None, own_kernel(0)):
        inducing, shape = torch.linspace(-1, 1, 12, dtype=DTYPE)[:, None], torch.Size([6])
        gp = ConvolvedGP(inducing, batch_shape=shape, own_kernel=kernel, share_own_kernel=True)
        bounds.append(float(fit(gp, x, y, mask, iterations=60)))
        with torch.no_grad():
            low, high = gp.interval(x, 0.95)
            errors.append(float((gp.marginals(x)[0] - y)[0, 25:].square().mean()))
        inside.append(float(((y > low) & (y < high))[0, 25:].double().mean()))
    assert bounds[1] > bounds[0] + 100
    assert errors[1] < 0.25 * errors[0]
    assert inside[0] < 0.75 < 0.95 <= inside[1]


def test_own_kernels_that_do_not_fit() -> None:
    inducing = torch.zeros(2, 1, dtype=DTYPE)
    with pytest.raises(ValueError, match=r"an own kernel of batch shape \(3,\), but got \(\)"):
        ConvolvedGP(inducing, batch_shape=torch.Size([3]), own_kernel=own_kernel(0))
    with pytest.raises(ValueError, match=r"an own kernel of batch shape \(\), but got \(3,\)"):
        ConvolvedGP(inducing, batch_shape=torch.Size([3]), own_kernel=own_kernel(3), share_own_kernel=True)
    with pytest.raises(TypeError, match="GaussianLikelihood for an own kernel, but got BernoulliLikelihood"):
        ConvolvedGP(inducing, likelihood=gpytorch.likelihoods.BernoulliLikelihood(), own_kernel=own_kernel(0))
