"""SOUL against the linear system of a Gaussian model, and its sampler against its own stationary law."""

from __future__ import annotations

import math

import pytest
import torch
from support.oracles.closed_forms import ROUNDING
from support.verticals import KEY, MODELS, SD, draw, gaussian_data, predictors, some_model

from fedtorch import vfl
from fedtorch.vfl.fit.soul import langevin, party_density, soul
from fedtorch.vfl.model import likelihoods
from fedtorch.vfl.model.checks import prepared

RHO, WIDTHS = 0.7, [2, 1]


def problem(name: str) -> tuple[vfl.VerticalModel, vfl.VerticalData]:
    data = gaussian_data(WIDTHS, 12)
    model = MODELS[name](likelihoods.gaussian(SD), predictors(WIDTHS), RHO, intercept=False)
    return model, data


def quadratic(model: vfl.VerticalModel, data: vfl.VerticalData) -> tuple[torch.Tensor, torch.Tensor]:
    """Precision and shift of log p(y, z, θ), which is quadratic in (z_1, z_2, θ_1, θ_2)."""
    batch, n = prepared(model, data), 12
    gamma = torch.zeros(1, 1, 0, dtype=torch.float64)

    def density(v: torch.Tensor) -> torch.Tensor:
        z1, z2, t1, t2 = v.split([n, n, *WIDTHS])
        z = [z1.reshape(1, 1, 1, n), z2.reshape(1, 1, 1, n)]
        parts = [party_density(model, batch, j, t.reshape(1, 1, -1), z, gamma) for j, t in enumerate((t1, t2))]
        if not model.power:
            parts.append(batch.weighted_sum(model.likelihood.log_prob(batch.y, z[0] + z[1], gamma)))
        return sum(parts[1:], parts[0]).sum()

    at = torch.zeros(2 * n + sum(WIDTHS), dtype=torch.float64)
    return -torch.autograd.functional.hessian(density, at), torch.func.grad(density)(at)


@pytest.mark.parametrize("name", MODELS)
def test_z_maximises_the_marginal_density(name: str) -> None:
    """Of a Gaussian, the mode of a marginal is that part of the joint mean; θ given ẑ has the conditional law."""
    model, data = problem(name)
    precision, shift = quadratic(model, data)
    mean = torch.linalg.solve(precision, shift)
    h, keep, chains, steps = 0.01, 150, 16, 400
    rate = lambda i: 0.5 / (1 + i / 50) ** 0.8
    found = soul(model, data, key=KEY, steps=steps, step=h, rate=rate, chains=chains, keep=keep)
    z = torch.cat([part.flatten() for part in found.z])
    # Stochastic approximation of rate a (times ρ²) on a gradient of variance 1/(ρ² chains) and more, for the chains are
    # correlated over iterations: a standard error of about ρ sqrt(a / chains).
    standard_error = RHO * math.sqrt(rate(steps) / chains)
    assert (z - mean[:24]).abs().max() < 4 * standard_error
    assert (z - mean[:24]).abs().mean() < standard_error
    theta = torch.cat(list(found.theta), -1)[0]
    conditional = torch.linalg.inv(precision[24:, 24:])
    expected = conditional @ (shift[24:] - precision[24:, :24] @ z)
    sd = conditional.diagonal().sqrt()
    effective = chains * keep * h / float(conditional.diagonal().max()) / 2
    assert ((theta.mean(0) - expected) / sd).abs().max() < 5 / math.sqrt(effective)


@pytest.mark.slow
def test_z_and_the_intercept_maximise_the_marginal_density_in_closed_form() -> None:
    """θ integrated out by hand: z_j ~ N(0, X_j X_j' + ρ²I), y ~ N(γ + Σ z_j, σ²I), γ ~ N(0, 1), a linear system."""
    data, eye = gaussian_data(WIDTHS, 12), torch.eye(12, dtype=torch.float64)
    model = vfl.augmented(likelihoods.gaussian(SD), predictors(WIDTHS), RHO)
    sums = torch.cat([eye, eye, torch.ones(12, 1, dtype=torch.float64)], 1)  # of (z_1, z_2, γ)
    priors = [torch.linalg.inv(x @ x.T + RHO**2 * eye) for x in data.features]
    precision = sums.T @ sums / SD**2 + torch.block_diag(*priors, torch.ones(1, 1, dtype=torch.float64))
    mode = torch.linalg.solve(precision, sums.T @ data.response / SD**2)
    rate = lambda i: 0.5 / (1 + i / 50) ** 0.8
    found = soul(model, data, key=KEY, steps=1500, step=0.01, rate=rate, chains=16, keep=1)
    z, standard_error = torch.cat([part.flatten() for part in found.z]), RHO * math.sqrt(rate(1500) / 16)
    assert (z - mode[:24]).abs().max() < 4 * standard_error
    assert abs(float(found.gamma) - float(mode[24])) < 4 * standard_error
    assert abs(float(mode[24])) > 8 * standard_error


def test_the_sampler_has_the_law_of_its_recursion() -> None:
    """Covariance of unadjusted Langevin on precision A: A⁻¹(I − hA/2)⁻¹, reached from anywhere."""
    model, data = problem("augmented")
    batch, gamma = prepared(model, data), torch.zeros(1, 1, 0, dtype=torch.float64)
    z = [draw(1, 1, 1, 1, 12), draw(2, 1, 1, 1, 12)]
    x = data.features[0]
    precision = x.T @ x / RHO**2 + torch.eye(2, dtype=torch.float64)
    h = 0.5 / float(torch.linalg.eigvalsh(precision).max())
    eye = torch.eye(2, dtype=torch.float64)
    # One step is affine: θ ← (I − hA)θ + hb + √(2h)ξ. Read off its matrices, and solve for the stationary law.
    at = lambda theta, noise: langevin(model, batch, 0, theta, z, gamma, h, noise)[0]
    nothing = torch.zeros(1, 2, 2, dtype=torch.float64)
    shift = at(nothing, nothing)
    drift, spread = at(eye[None], nothing) - shift, at(nothing, eye[None]) - shift
    torch.testing.assert_close(drift, eye - h * precision, rtol=ROUNDING, atol=ROUNDING)
    covariance = torch.linalg.solve(
        torch.eye(4, dtype=torch.float64) - torch.kron(drift, drift), (spread @ spread.T).flatten()
    ).reshape(2, 2)
    expected = torch.linalg.inv(precision) @ torch.linalg.inv(eye - h * precision / 2)
    torch.testing.assert_close(covariance, expected, rtol=ROUNDING, atol=ROUNDING)
    exact = torch.linalg.solve(precision, x.T @ z[0].flatten() / RHO**2)
    torch.testing.assert_close(torch.linalg.solve(eye - drift, shift[0]), exact, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("name", MODELS)
def test_density_increases_for_other_likelihoods(name: str) -> None:
    model, data = some_model(name, "poisson")
    found = soul(model, data, key=KEY, steps=150, step=2e-3, rate=lambda i: 0.02, chains=4, keep=2, size=2)
    batch = prepared(model, data)

    def fit(z: torch.Tensor) -> torch.Tensor:
        total = z + batch.offset + found.gamma[..., None]
        return model.likelihood.log_prob(batch.y, total, found.gamma).sum(-1)

    total = torch.stack(found.z).sum(0)
    assert (fit(total) > fit(torch.zeros_like(total)) + 1).all()
    assert found.theta[0].shape == (2, 8, 2)


def test_refusals() -> None:
    model, data = problem("augmented")
    with pytest.raises(ValueError, match="Expected positive steps"):
        soul(model, data, key=KEY, steps=0, step=0.1, rate=lambda i: 0.1)
    with pytest.raises(FloatingPointError, match=r"diverge; take step below 1000000\.0"):
        soul(model, data, key=KEY, steps=80, step=1e6, rate=lambda i: 0.1, keep=1)
