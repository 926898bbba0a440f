"""Checks of GPyTorch's kernels, combinations of several, and the initial values of their lengthscales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch.models.gaussian_process._stacked_kernel import Kernel, SideBySide
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

_OUTPUTS = "it has several outputs for an input; units are the outputs here, and their weights say how they go together"
_GRID = "it approximates its base kernel on a grid; give the base kernel, which the inducing inputs already approximate"
_UNUSABLE = {
    gpytorch.kernels.MultitaskKernel: _OUTPUTS,
    gpytorch.kernels.LCMKernel: _OUTPUTS,
    gpytorch.kernels.RBFKernelGrad: _OUTPUTS,
    gpytorch.kernels.RBFKernelGradGrad: _OUTPUTS,
    gpytorch.kernels.Matern52KernelGrad: _OUTPUTS,
    gpytorch.kernels.PolynomialKernelGrad: _OUTPUTS,
    gpytorch.kernels.GridKernel: _GRID,  # and GridInterpolationKernel
    gpytorch.kernels.InducingPointKernel: "the model has inducing inputs; give the base kernel",
    gpytorch.kernels.NewtonGirardAdditiveKernel: "it computes in float32 in any case; add kernels of columns",
    gpytorch.kernels.MultiDeviceKernel: "units are spread over devices by ft.Distributed; give the base kernel",
}


def of_latents(kernel: Any) -> Any:
    """Return the kernel if its batch shape is that of latent processes, else one of a kernel without, or of several.

    Raises:
        TypeError: an unsupported kernel; see `check_kernel`.
        ValueError: no kernel, one with more batch dimensions than one, or several of which one has any.
    """
    kernels = list(kernel) if isinstance(kernel, (list, tuple)) else [kernel]
    for one in kernels:
        check_kernel(one)
    if isinstance(kernel, Kernel) and len(kernel.batch_shape) == 1:
        return kernel
    shapes = [tuple(one.batch_shape) for one in kernels]
    if not kernels or any(shapes):
        raise ValueError(
            "Expected a kernel with one batch dimension, the latent processes, or one without for each of them, but "
            f"got batch shapes {shapes}; make it with batch_shape=torch.Size([latents])"
        )
    return SideBySide(kernels)


def check_kernel(kernel: Any) -> None:
    """Raise TypeError, with the reason, for an object that is not a kernel, or has an unsupported part."""
    for part in [kernel, *getattr(kernel, "modules", list)()]:
        if part is kernel and not isinstance(part, Kernel):
            raise TypeError(f"Expected a kernel of GPyTorch, but got {type(kernel).__name__}")
        for kind, reason in _UNUSABLE.items():
            if isinstance(part, kind):
                raise TypeError(f"Expected a kernel for this model, but got {type(part).__name__}: {reason}")
        if isinstance(part, gpytorch.kernels.HammingIMQKernel) and part.batch_shape.numel() > 1:
            raise TypeError(
                "Expected HammingIMQKernel without batch_shape, which GPyTorch does not broadcast, but got "
                f"{tuple(part.batch_shape)}; give a list of kernels, one for each latent process"
            )


def spread_lengthscales(kernel: Any, extent: Tensor, latents: int) -> None:
    """Set lengthscales of the kernel's parts that suit inputs of an extent `(d,)`, a different one for each latent.

    The finest is a tenth of the extent, the next twice that, and so on. Lengthscales that have been set, that are
    frozen, or whose constraint excludes the value are not changed; unset ones have GPyTorch's default raw value of 0.
    """
    several = isinstance(kernel, SideBySide)
    for first, part in enumerate(kernel.kernels if several else [kernel]):
        numbers = torch.arange(first, first + 1 if several else latents)
        for one in part.modules():
            if isinstance(one, Kernel) and one.has_lengthscale and not one.raw_lengthscale.any():
                _spread(one, extent, numbers)


def _spread(kernel: Any, extent: Tensor, numbers: Tensor) -> None:
    """Return the lengthscale of one kernel, of latent processes of these numbers."""
    lengthscale = kernel.lengthscale  # (1, D) or (I, 1, D), D = 1 or the kernel's columns
    finest = extent.to(lengthscale) * len(extent) ** 0.5 / 10
    if kernel.active_dims is not None and int(kernel.active_dims.max()) < len(finest):
        finest = finest[kernel.active_dims]
    if lengthscale.shape[-1] != len(finest):
        finest = finest.mean(-1, keepdim=True).expand(lengthscale.shape[-1])
    value = finest * 2.0 ** numbers.to(lengthscale)[:, None, None]
    value = value if lengthscale.ndim == value.ndim else value[0]
    constraint = kernel.raw_lengthscale_constraint
    raw = constraint.inverse_transform(value)
    if kernel.raw_lengthscale.requires_grad and constraint.check(value) and bool(raw.isfinite().all()):
        kernel.initialize(raw_lengthscale=raw)
