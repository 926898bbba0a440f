"""Sums over rows of kernel values that nobody stores are those of stored ones."""

from __future__ import annotations

import pytest
import torch
from support.programs import launches, reference
from torch import Tensor

from fedtorch import random
from fedtorch.kernels import gp_statistics as kernel
from fedtorch.kernels.gp_statistics import gp_statistics
from fedtorch.models.gaussian_process.kernels import ConvolutionProcess

SIZES = [(3, 7, 2, 5, 2), (1, 40, 1, 33, 1), (2, 1, 3, 1, 3), (2, 0, 1, 4, 1), (0, 3, 1, 2, 1)]  # K, N, d, J, I


def problem(clients: int, rows: int, dims: int, points: int, latents: int) -> tuple[Tensor, ...]:
    normal = lambda seed, *shape: random.normal(random.key(seed), shape, torch.float64)
    weight = random.uniform(random.key(3), (clients, rows), torch.float64) + 0.5
    weight[:, 2::5] = 0.0
    x, y = normal(1, clients, rows, dims), normal(2, clients, rows)
    x[weight == 0], y[weight == 0] = torch.nan, torch.nan  # rows that are not there
    width = normal(5, clients, latents, dims).square() + 0.3
    return x, y, weight, normal(4, points, dims), width, normal(6, clients, latents)


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


def test_it_is_the_convolution_process(device) -> None:
    process = ConvolutionProcess(2, 2, torch.Size([3])).double()
    process.spread(torch.tensor([3.0, 3.0], dtype=torch.float64))
    x, y, weight, inducing, _, _ = problem(3, 7, 2, 5, 2)
    x, y = x.nan_to_num(), y.nan_to_num()
    with torch.no_grad():
        basis = process.cross(x, inducing).movedim(-3, -2).flatten(-2)
        both = process.lengthscale.square() + process.smoothing.square()
        height = process._height(process.lengthscale.square(), both)
    tensors = (x, y, weight, inducing, both.expand(3, 2, 2), height.expand(3, 2))
    gram, cross = gp_statistics(*(part.to(device) for part in tensors))
    torch.testing.assert_close(gram.cpu(), basis.mT @ (basis * weight[..., None]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cross.cpu(), (basis.mT @ (weight * y)[..., None])[..., 0], rtol=1e-12, atol=1e-12)


def test_derivatives(device, monkeypatch) -> None:
    tensors = [part.nan_to_num().to(device).requires_grad_() for part in problem(2, 5, 2, 3, 2)]
    monkeypatch.setattr(kernel, "_ROWS", 2)
    with launches(monkeypatch):
        assert torch.autograd.gradcheck(gp_statistics, tensors, fast_mode=True)


def test_other_dtypes_and_sizes_go_to_the_reference(device, monkeypatch) -> None:
    single = [part.float().to(device) for part in problem(1, 3, 1, 2, 1)]
    wide = [part.to(device) for part in problem(1, 3, 17, 2, 1)]
    with launches(monkeypatch, at_least=0) as seen:
        gp_statistics(*single)
        gp_statistics(*wide)
    assert seen == []


def test_strides(device) -> None:
    tensors = [part.to(device) for part in problem(3, 7, 2, 5, 2)]
    strided = [
        tensors[0].mT.contiguous().mT,
        *tensors[1:4],
        tensors[4].movedim(0, -1).contiguous().movedim(-1, 0),
        tensors[5],
    ]
    for one, other in zip(gp_statistics(*strided), gp_statistics(*tensors)):
        assert torch.equal(one, other)


def test_shapes_that_do_not_fit() -> None:
    tensors = problem(2, 3, 1, 2, 1)
    with pytest.raises(ValueError, match="Expected x"):
        gp_statistics(tensors[0], tensors[1][:1], *tensors[2:])
