"""Parts of kernels: squared exponentials, the constraint of positive parameters, the extent of inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch


def gaussian(x: Tensor, z: Tensor, square: Tensor) -> Tensor:
    """Return exp(−½ Σ_d (x_d − z_d)²/square_d) `(*b, I, N, Z)`: x `(*b, N, d)`, z `(*b, Z, d)`, square `(*b, I, d)`."""
    centre = z.detach().mean(-2, keepdim=True)
    width = square.rsqrt()[..., None, :]
    one, two = (x - centre)[..., None, :, :] * width, (z - centre)[..., None, :, :] * width
    # One product of matrices gives −½‖·‖², so the gradient needs no further array of size N × Z.
    half_one, half_two = -0.5 * one.square().sum(-1, keepdim=True), -0.5 * two.square().sum(-1, keepdim=True)
    left = torch.cat([one, half_one, torch.ones_like(half_one)], -1)
    right = torch.cat([two, torch.ones_like(half_two), half_two], -1)
    return (left @ right.mT).clamp(max=0).exp()


def matern(x: Tensor, z: Tensor, square: Tensor, smoothness: float) -> Tensor:
    """Return Matérn kernels of variance 1 and smoothness 0.5, 1.5 or 2.5; arguments and shapes as those of `gaussian`.

    >>> matern(torch.zeros(1, 1), torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0]]), 0.5).log()
    tensor([[[ 0., -1.]]])
    """
    width = square.rsqrt()[..., None, :]
    one, two = x[..., None, :, :] * width, z[..., None, :, :] * width
    gap = (one[..., :, None, :] - two[..., None, :, :]).square().sum(-1)
    r = (2 * smoothness * gap.clamp(min=1e-30)).sqrt()  # gives derivative 0 at equal inputs
    return {0.5: torch.ones_like(r), 1.5: 1 + r, 2.5: 1 + r + r.square() / 3}[smoothness] * (-r).exp()


def positive(lower: float = 0.0) -> Any:
    """Build the constraint of a parameter above a limit without a scale of its own: the logarithm of the excess is
    free.
    """
    return gpytorch.constraints.GreaterThan(lower, transform=torch.exp, inv_transform=torch.log)


def extent_of(x: Tensor) -> Tensor:
    """Return the range of each column of x `(..., N, d)`, 1 for constant columns: `(d,)`.

    >>> extent_of(torch.tensor([[2.0, 7.0], [5.0, 7.0]]))
    tensor([3., 1.])
    """
    rows: Any = x.reshape(-1, x.shape[-1])
    width = rows.amax(0) - rows.amin(0)
    return torch.where(width > 0, width, torch.ones_like(width))
