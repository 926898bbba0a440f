"""Sums over rows of kernel values that nobody stores are those of stored ones."""

from __future__ import annotations

import copy

import pytest
import torch
from support.programs import launches, reference
from torch import Tensor

from fedtorch import random, tree
from fedtorch.kernels import gp_statistics as kernel
from fedtorch.kernels.gp_statistics import gp_statistics
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.gaussian_process.kernels import Coregionalisation

SIZES = [(3, 7, 2, 5, 2), (1, 40, 1, 29, 1), (2, 1, 3, 1, 3), (2, 0, 1, 4, 1), (0, 3, 1, 2, 1)]  # K, N, d, J, I


def problem(clients: int, rows: int, dims: int, points: int, latents: int) -> tuple[Tensor, ...]:
    normal = lambda seed, *shape: random.normal(random.key(seed), shape, torch.float64)
    weight = random.uniform(random.key(3), (clients, rows), torch.float64) + 0.5
    weight[:, 2::5] = 0.0
    x, y = normal(1, clients, rows, dims), normal(2, clients, rows)
    x[weight == 0], y[weight == 0] = torch.nan, torch.nan  # rows that are not there
    width = normal(5, clients, latents, dims).square() + 0.3
    whiten = normal(7, latents, points, points) / points**0.5
    return x, y, weight, normal(4, points, dims), width, normal(6, clients, latents), whiten


@pytest.mark.parametrize("size", SIZES)
def test_against_stored_rows(size, device, monkeypatch) -> None:
    tensors = problem(*size)
    with reference():
        wanted = gp_statistics(*tensors)
    with launches(monkeypatch):
        found = gp_statistics(*(part.to(device) for part in tensors))
    for one, other in zip(found, wanted):
        # Sums of 40 terms of a few units.
        torch.testing.assert_close(one.cpu(), other, rtol=1e-13, atol=1e-12)
    assert torch.equal(found[0], found[0].mT)


@pytest.mark.parametrize("own", [False, True])
def test_units_may_have_inducing_inputs_of_their_own(own, device, monkeypatch) -> None:
    *tensors, inducing, width, height, whiten = problem(3, 7, 2, 5, 2)
    many = 3 if own else 1
    inducing, whiten = inducing.repeat(many, 1, 1), whiten.repeat(many, 1, 1, 1)
    if own:
        inducing, whiten = inducing + torch.arange(3)[:, None, None], whiten * torch.arange(1, 4)[:, None, None, None]
    tensors = (*tensors, inducing, width, height, whiten)
    with launches(monkeypatch):
        found = gp_statistics(*(part.to(device) for part in tensors))
    for k in range(3):
        one = [part[k : k + 1] if len(part) == 3 else part for part in tensors]
        with reference():
            for part, wanted in zip(found, gp_statistics(*one)):
                torch.testing.assert_close(part[k].cpu(), wanted[0], rtol=1e-12, atol=1e-12)


def model_of(units: int, dims: int, noise: float) -> ConvolvedGP:
    """A process whose latent values at the inducing inputs are far from independent: jitter makes the root."""
    model = ConvolvedGP(
        torch.linspace(0, 1, 9 * dims, dtype=torch.float64).reshape(9, dims),
        latents=2,
        batch_shape=torch.Size([units]),
        mean=True,
    )
    model.kernel.raw_smoothing.data += torch.linspace(0, 1, units, dtype=torch.float64)[:, None, None]
    model.likelihood.initialize(noise=torch.full((units, 1), noise, dtype=torch.float64))
    return model


@pytest.mark.parametrize("noise", [1.0, 1e-6])
def test_sites_and_the_bound_of_the_convolution_process(noise, device, monkeypatch) -> None:
    model = model_of(3, 1, noise)
    x = random.uniform(random.key(1), (3, 37, 1), torch.float64)
    y = (9 * x[..., 0]).sin() + 3
    mask = (random.uniform(random.key(2), (3, 37)) < 0.8).to(torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def found(place: str):
        own = copy.deepcopy(model).to(place)
        rows = [part.to(place) for part in (x, y, mask)]
        bound = own.bound(*rows)
        moving = [p for p in own.parameters() if p.requires_grad]
        return tree.to((own.site(*rows), bound.detach(), torch.autograd.grad(bound, moving, allow_unused=True)), "cpu")

    with reference():
        site, bound, gradient = found("cpu")
    with launches(monkeypatch) as seen:
        own, other, slope = found(device)
    assert "gp_statistics" in seen
    assert len(slope) == len(parameters)
    # Sums of 37 terms over the noise, of rows of V times an inverse root of size 10⁴.
    close = {"rtol": 1e-9, "atol": 1e-9 / noise}
    for one, wanted in zip(own, site):
        torch.testing.assert_close(one, wanted, **close)
    torch.testing.assert_close(other, bound, rtol=1e-8, atol=1e-8)
    for one, wanted in zip(slope, gradient):
        assert (one is None) == (wanted is None)
        if one is not None:
            torch.testing.assert_close(one, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


def test_what_the_program_does_not_know_keeps_its_rows(device, monkeypatch) -> None:
    gpytorch = pytest.importorskip("gpytorch")
    x = torch.linspace(0, 1, 5, dtype=torch.float64)[None, :, None].expand(2, -1, -1).to(device)
    inducing, units = torch.linspace(0, 1, 3, dtype=torch.float64)[:, None], torch.Size([2])
    latent = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([1]))
    models = [
        ConvolvedGP(inducing, Coregionalisation(latent, 1, units), batch_shape=units),
        ConvolvedGP(inducing, batch_shape=units, likelihood=gpytorch.likelihoods.BernoulliLikelihood()),
        ConvolvedGP(inducing, batch_shape=units, own_kernel=gpytorch.kernels.RBFKernel(batch_shape=units)),
        ConvolvedGP(inducing.float(), batch_shape=units),
    ]
    with launches(monkeypatch, at_least=0) as seen:
        for model in models:
            rows = x.to(model.inducing.dtype)
            model.to(device).site(rows, (rows[..., 0] > 0.5).to(rows.dtype))
    assert "gp_statistics" not in seen


def test_derivatives(device, monkeypatch) -> None:
    tensors = [part.nan_to_num().to(device).requires_grad_() for part in problem(1, 3, 1, 2, 2)]
    monkeypatch.setattr(kernel, "_ROWS", 2)
    with launches(monkeypatch):
        assert torch.autograd.gradcheck(gp_statistics, tensors, fast_mode=True)


def test_other_dtypes_and_sizes_go_to_the_reference(device, monkeypatch) -> None:
    single = [part.float().to(device) for part in problem(1, 3, 1, 2, 1)]
    wide = [part.to(device) for part in problem(1, 3, 17, 2, 1)]
    many = [part.to(device) for part in problem(1, 3, 1, 33, 1)]
    with launches(monkeypatch, at_least=0) as seen:
        gp_statistics(*single)
        gp_statistics(*wide)
        gp_statistics(*many)
    assert seen == []


def test_strides(device) -> None:
    tensors = [part.to(device) for part in problem(3, 7, 2, 5, 2)]
    strided = [
        tensors[0].mT.contiguous().mT,
        *tensors[1:4],
        tensors[4].movedim(0, -1).contiguous().movedim(-1, 0),
        tensors[5],
        tensors[6].mT.contiguous().mT,
    ]
    for one, other in zip(gp_statistics(*strided), gp_statistics(*tensors)):
        assert torch.equal(one, other)


def test_shapes_that_do_not_fit() -> None:
    tensors = problem(2, 3, 1, 2, 1)
    with pytest.raises(ValueError, match="Expected x"):
        gp_statistics(tensors[0], tensors[1][:1], *tensors[2:])
