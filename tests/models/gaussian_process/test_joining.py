"""Units that join: the learnt prior, the draws, and what intervals cover."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.models.gaussian_process import ConvolvedGP, _tempering, joining, unit_prior
from fedtorch.models.gaussian_process._units import Observed
from fedtorch.models.gaussian_process.joining import UnitMixture, join
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

DTYPE = torch.float64
GRID = torch.linspace(0, 1, 101, dtype=DTYPE)[:, None]
NOISE = 0.1


def draw(*shape: int, seed: int = 0) -> Tensor:
    return ft.random.normal(ft.random.key(seed), shape, DTYPE)


def model(units: int = 0, latents: int = 1) -> ConvolvedGP:
    """Of latent processes with lengthscales 0.15, 0.3, …, and noise of 0.1."""
    shape = torch.Size([units]) if units else torch.Size()
    kernels = [gpytorch.kernels.RBFKernel().initialize(lengthscale=0.15 * 2**i) for i in range(latents)]
    gp = ConvolvedGP(torch.linspace(0, 1, 15, dtype=DTYPE)[:, None], kernels, batch_shape=shape)
    gp.likelihood.noise = NOISE**2
    return gp.requires_grad_(False)


def one_of(gp: ConvolvedGP, number: int = 0) -> ConvolvedGP:
    """The model of one unit of a central model."""
    one = model(latents=gp.kernel.latents)
    values = ft.functional.tensors(one)
    for name, value in ft.functional.tensors(gp).items():
        values[name].data = (value[number] if name in gp.unit_names else value).detach().clone()
    one.kernel.weight.requires_grad_()
    one.likelihood.raw_noise.requires_grad_()
    return one


def known(latents: int, units: int = 40) -> tuple[ConvolvedGP, Tensor, Tensor, Tensor]:
    """A model whose q and prior come from units with their true parameters: (model, curves `(I, 101)`, x, y)."""
    gp, curves = model(units, latents), torch.stack([(5 * GRID[:, 0] + 1).sin(), (9 * GRID[:, 0]).cos()])[:latents]
    gp.kernel.weight.data = draw(units, latents, seed=1)
    for name in ("kernel.weight", "likelihood.noise_covar.raw_noise"):
        gp.get_parameter(name).requires_grad_()
    x, y = rows(gp.kernel.weight.detach(), curves, 24, seed=2)
    gp.condition(x, y)
    return one_of(gp), curves, x, y


def rows(weight: Tensor, curves: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    keys = ft.random.fold_in(ft.random.key(seed), torch.arange(len(weight)))
    place = torch.stack([ft.random.choice(key, len(GRID), count) for key in keys])
    y = (weight @ curves).gather(1, place) + NOISE * draw(len(weight), count, seed=seed + 100)
    return GRID[place], y


@pytest.mark.parametrize("latents", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_intervals_of_new_units_cover_what_they_say(latents: int) -> None:
    """One place of each of 40 units: counts inside are binomial. Points in place of draws cover 0.5 of 0.95."""
    gp, curves, *_ = known(latents)
    for size, level in ((3, 0.95), (8, 0.5)):
        weight = draw(40, latents, seed=3 + size)
        new = join(gp, *rows(weight, curves, size, seed=5 + size))
        place = (37 * torch.arange(40)) % len(GRID)
        f = (weight @ curves)[torch.arange(40), place][:, None]
        low, high = new.interval(GRID[place][:, None], level)
        output = f + NOISE * draw(40, 1, seed=7 + size)
        inside = float(((low < output) & (output < high)).double().mean())
        mean, variance = new.marginals(GRID[place][:, None])
        half = variance.sqrt() * float(torch.special.ndtri(torch.tensor(0.5 + level / 2)))
        of_f = float(((mean - f).abs() < half).double().mean())
        error = math.sqrt(level * (1 - level) / 40)
        assert abs(inside - level) < 3 * error, (size, level, inside)
        assert abs(of_f - level) < 3 * error, (size, level, of_f)


def test_draws_are_those_of_integrating_by_brute_force() -> None:
    """Mean and variance of f beside those of 50 000 weighted draws of the prior."""
    gp, curves, *_ = known(2)
    x, y = rows(draw(1, 2, seed=11), curves, 3, seed=12)
    new = join(gp, x, y)
    mean, variance = new.marginals(GRID[::10])
    prior = unit_prior.learnt(gp, gp.unit_moments)
    w = prior.draw(ft.random.key(99), 50_000)
    values = gp.unit_tensors(prior.vectors(w))
    many = Observed(*(part.expand(len(w), *part.shape[1:]) for part in (x, y, torch.ones_like(y))))
    with torch.no_grad(), ft.functional.Swap(gp, list(values))([*values.values()]):
        weight = joining._evidence(gp, many, False).softmax(0)
    chosen = torch.multinomial(weight, 2000, replacement=True, generator=torch.Generator().manual_seed(0))
    many_rows = Observed(*(part.expand(2000, *part.shape[1:]) for part in (x, y, torch.ones_like(y))))
    wide = UnitMixture(joining._conditioned(gp, prior.vectors(w[chosen]), many_rows, False), torch.Size([1]))
    exact_mean, exact_variance = wide.marginals(GRID[::10])
    assert float(1 / weight.square().sum()) > 300  # of the reference, so that its own error is some hundredths
    sd = exact_variance.sqrt()
    assert float(((mean - exact_mean) / sd).abs().max()) < 4 * math.sqrt(1 / 128 + 1 / 300)
    assert float((variance.sqrt() / sd).log().abs().max()) < 4 * math.sqrt(1 / 256 + 1 / 600)


def test_units_that_join_together_are_those_that_join_alone() -> None:
    gp, curves, *_ = known(1)
    x, y = rows(draw(3, 1, seed=13), curves, 5, seed=14)
    together, alone = join(gp, x, y), join(gp, x[1], y[1])
    padded = join(gp, torch.cat([x, x[:, :2]], 1), torch.cat([y, y[:, :2] + 9], 1), (torch.arange(7) < 5).expand(3, 7))
    for other in (together, padded):
        for ours, theirs in zip(other.marginals(GRID), alone.marginals(GRID)):
            assert torch.allclose(ours[1], theirs, rtol=1e-6, atol=1e-9)
    assert alone.marginals(GRID)[0].shape == (101,)
    found = alone.predict(GRID[::20])
    mean, variance = alone.marginals(GRID[::20])
    assert torch.allclose(found.mean, mean)
    noise = alone.components.likelihood.noise.mean()
    assert torch.allclose(found.variance, variance + noise)


def test_a_unit_of_the_run_is_taken_out_before_it_joins() -> None:
    """q without its rows is that of the other units, and rows that q has not heard of are refused."""
    gp, _, x, y = known(2)
    others = model(39, 2)
    others.kernel.weight.data = draw(40, 2, seed=1)[1:]
    others.condition(x[1:], y[1:])
    with torch.no_grad():
        joining._leave_out(gp, Observed(x[:1], y[:1], torch.ones_like(y[:1])), False)
    assert torch.allclose(gp.posterior_mean, others.posterior_mean, rtol=0, atol=1e-6)
    ours, theirs = (root @ root.mT for root in (gp.posterior_root, others.posterior_root))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
    gp.rebase()
    with pytest.raises(ValueError, match="Expected rows that q was fitted to"):
        join(gp, x[0], y[0], known=True)
    with pytest.raises(ValueError, match="Expected known rows of one unit"):
        join(gp, x, y, known=True)


def test_the_prior_is_that_of_units() -> None:
    """Of many units their mean and covariance; amplitudes of one unit lean to 0 from either side; units scale along."""
    gp = known(2)[0]
    vectors = draw(4000, 4, seed=15) * torch.tensor([0.2, 1.0, 2.0, 0.5]) + torch.tensor([0.1, 3.0, -1.0, -4.0])
    prior = unit_prior.learnt(gp, unit_prior.moments(vectors).sum(0))
    assert torch.allclose(prior.mean, vectors.mean(0), rtol=0, atol=2e-3)
    assert torch.allclose(prior.root @ prior.root.mT, vectors.T.cov(), rtol=0, atol=5e-3)
    few = unit_prior.learnt(gp, unit_prior.moments(vectors[:1])[0])
    assert few.freedom == 4
    assert torch.allclose(few.mean[1:3], vectors[0, 1:3] / 2)
    sd = ((few.root @ few.root.mT).diagonal() * few.freedom / (few.freedom - 2)).sqrt()
    assert bool((sd[[0, 3]] > 0.8).all())  # logarithms: after one unit anything within a factor of some
    # Outputs in other units: amplitudes by s, the logarithms of scale and of the noise's variance by log s, 2 log s.
    s = 1e6
    turned = torch.cat([vectors[:5, :1] + math.log(s), s * vectors[:5, 1:3], vectors[:5, 3:] + 2 * math.log(s)], 1)
    one, two = (unit_prior.learnt(gp, unit_prior.moments(each).sum(0)) for each in (vectors[:5], turned))
    w = draw(9, 4, seed=16)
    a, b = one.vectors(w), two.vectors(w)
    assert torch.allclose(b[:, 1:3], s * a[:, 1:3], rtol=1e-6, atol=1e-6 * s)
    assert torch.allclose(b[:, [0, 3]] - a[:, [0, 3]], math.log(s) * torch.tensor([1.0, 2.0], dtype=DTYPE), atol=1e-6)


def test_tempered_draws_have_two_modes() -> None:
    """A standard normal base and two narrow peaks of masses 1/4 and 3/4, four standard deviations of the base apart."""

    def gain(w: Tensor) -> Tensor:
        x = w[..., 0]
        peaks = torch.stack(
            [-0.5 * ((x + 2) / 0.05).square() + math.log(0.25), -0.5 * ((x - 2) / 0.05).square() + math.log(0.75)]
        )
        return peaks.logsumexp(0)

    found = torch.cat(
        [
            _tempering.draws(
                lambda w: -0.5 * w.square().sum(-1), gain, draw(256, 2, seed=seed), 1, ft.random.key(seed)
            )[0]
            for seed in range(8)
        ]
    )
    right = found[:, 0] > 0
    assert abs(float(right.double().mean()) - 0.75) < 0.1
    assert abs(float(found[right, 0].std()) / 0.05 - 1) < 0.15
    assert abs(float(found[:, 1].std()) - 1) < 0.1  # where there is no gain, the base
