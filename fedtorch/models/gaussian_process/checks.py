"""Checks of a model's parts at construction, and of rows at their entry.

>>> import gpytorch, torch
>>> from fedtorch.models.gaussian_process import ConvolvedGP, checks
>>> from fedtorch.models.gaussian_process.kernels import ConvolutionProcess
>>> model = ConvolvedGP(torch.zeros(3, 1))  # one unit, three inducing inputs of one dimension
>>> checks.check_rows(model, torch.zeros(5, 1), torch.zeros(4))
Traceback (most recent call last):
ValueError: Expected inputs (N, 1) and outputs (N,), but got (5, 1) and (4,); ...
>>> checks.check_gaussian(gpytorch.likelihoods.LaplaceLikelihood(), "exact units", "leave exact_units away")
Traceback (most recent call last):
TypeError: Expected a GaussianLikelihood for exact units, but got LaplaceLikelihood; leave exact_units away
>>> model.kernel = ConvolutionProcess(dims=1, batch_shape=torch.Size([2]))  # of two units
>>> checks.check_parts(model)
Traceback (most recent call last):
ValueError: Expected a kernel of batch shape (), but got (2,); make it with batch_shape= of the units
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch.models.gaussian_process._geometry import Geometry
from fedtorch.models.gaussian_process._gpytorch_kernels import check_kernel
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

GaussianLikelihood = gpytorch.likelihoods.GaussianLikelihood
_LIKELIHOODS = {
    gpytorch.likelihoods.FixedNoiseGaussianLikelihood: (
        "its noise belongs to rows by their place, and units have rows of their own; take a GaussianLikelihood, or a "
        "likelihood that reads the noise from a further column of the rows"
    ),
    gpytorch.likelihoods.MultitaskGaussianLikelihood: "units are the outputs; take a GaussianLikelihood",
    gpytorch.likelihoods.SoftmaxLikelihood: "it wants several functions of a unit; make every class a unit",
}


def check_gaussian(likelihood: Any, what: str, instead: str) -> None:
    """Raise TypeError unless the likelihood is Gaussian; Laplace and Student-t ones have a `noise` too."""
    if not isinstance(likelihood, GaussianLikelihood):
        raise TypeError(f"Expected a GaussianLikelihood for {what}, but got {type(likelihood).__name__}; {instead}")


def check_parts(model: Geometry, mean: bool = False) -> None:
    """Raise ValueError unless the kernels and the likelihood have the units' batch shape, TypeError for other parts.

    >>> from fedtorch.models.gaussian_process import ConvolvedGP
    >>> ConvolvedGP(torch.zeros(3, 1), mean=gpytorch.means.LinearMean(1))
    Traceback (most recent call last):
    TypeError: Expected mean=True or False, but got LinearMean; ...
    """
    if not isinstance(mean, bool):
        raise TypeError(
            f"Expected mean=True or False, but got {type(mean).__name__}; True is a constant of each unit, and for a "
            "trend give a list of kernels with a LinearKernel among them"
        )
    for kind, instead in _LIKELIHOODS.items():
        if isinstance(model.likelihood, kind):
            raise TypeError(
                f"Expected a likelihood for this model, but got {type(model.likelihood).__name__}: {instead}"
            )
    batch = tuple(model.batch_shape)
    if tuple(model.kernel.scale.shape) != batch:
        raise ValueError(
            f"Expected a kernel of batch shape {batch}, but got {tuple(model.kernel.scale.shape)}; make it with "
            "batch_shape= of the units"
        )
    for name, parameter in model.likelihood.named_parameters():
        if tuple(parameter.shape[: len(batch)]) != batch:
            raise ValueError(
                f"Expected a likelihood of batch shape {batch}, but its {name} has shape {tuple(parameter.shape)}; "
                "make it with batch_shape= of the units"
            )
    if model.own_kernel is None:
        return
    check_kernel(model.own_kernel)
    check_gaussian(model.likelihood, "an own kernel", "leave own_kernel away")
    expected = torch.Size() if model.share_own_kernel else model.batch_shape
    if model.own_kernel.batch_shape != expected:
        raise ValueError(
            f"Expected an own kernel of batch shape {tuple(expected)}, but got "
            f"{tuple(model.own_kernel.batch_shape)}; use no batch shape if units share its hyperparameters"
        )


def check_kernels(model: Geometry) -> None:
    """Raise ValueError unless the features accept the inducing inputs, and kernels have finite values with one diagonal
    there.

    A user-defined kernel may use its batch shape or `diag=True` in another way than GPyTorch's do.

    >>> import gpytorch
    >>> from fedtorch.models.gaussian_process import ConvolvedGP
    >>> from fedtorch.models.gaussian_process.kernels import Coregionalisation
    >>> class Wrong(gpytorch.kernels.RBFKernel):
    ...     def forward(self, x1, x2, diag=False, **params):
    ...         return 2 * x1[..., 0] if diag else super().forward(x1, x2, **params)
    >>> ConvolvedGP(torch.rand(3, 1), Coregionalisation(Wrong(), dims=1))
    Traceback (most recent call last):
    ValueError: Expected the diagonal of a kernel's matrix for diag=True, ...
    """
    _ask(model.features, model.inducing)
    with torch.no_grad():
        inducing, latents = model.embed(model.inducing), model.kernel.latents
        _check_kernels(model, inducing.expand(*model.batch_shape, *inducing.shape), latents)


def _check_kernels(model: Geometry, inducing: Tensor, latents: int) -> None:
    try:
        latent = model.kernel.latent(inducing)
        pairs = [(model.kernel.variance(inducing), model.kernel.covariance(inducing, inducing))]
        if model.own_kernel is not None:
            pairs.append(model.own_values(inducing))
    except (RuntimeError, ValueError, IndexError) as error:
        raise ValueError(
            f"Expected kernels of inputs (..., {inducing.shape[-1]}) with batch shapes that broadcast, but got: {error}"
        ) from error
    size = inducing.shape[-2]
    if latent.shape[-3:] != (latents, size, size):
        raise ValueError(
            f"Expected a kernel with values ({latents}, {size}, {size}) at {size} inputs, but got {tuple(latent.shape)}"
        )
    for diagonal, matrix in pairs:
        of_matrix = matrix.diagonal(dim1=-2, dim2=-1)
        if diagonal.shape != of_matrix.shape or not torch.allclose(diagonal, of_matrix, rtol=1e-3, atol=1e-5):
            raise ValueError(
                "Expected the diagonal of a kernel's matrix for diag=True, but got other values; mend its `forward`"
            )


def check_rows(model: Geometry, x: Tensor, y: Tensor, units: torch.Size | None = None) -> None:
    """Raise ValueError unless x is `(*b, N, d)` and y `(*b, N)`, finite and in the model's dtype.

    b is the batch shape of the model's units, or `units`.
    """
    batch, dims, dtype = (
        tuple(model.batch_shape if units is None else units),
        model.inducing.shape[-1],
        model.inducing.dtype,
    )
    if y.ndim != len(batch) + 1 or y.shape[:-1] != batch or x.shape[-2:] != (y.shape[-1], dims):
        raise ValueError(
            f"Expected inputs ({', '.join(map(str, (*batch, 'N', dims)))}) and outputs "
            f"({', '.join(map(str, (*batch, 'N')))}{',' * (not batch)}), but got {tuple(x.shape)} and "
            f"{tuple(y.shape)}; the model's batch_shape is that of its units"
        )
    if (x.dtype, y.dtype) != (dtype, dtype):
        raise ValueError(f"Expected rows in the model's {dtype}, but got {x.dtype} and {y.dtype}; use .to({dtype})")
    if not bool(x.isfinite().all() & y.isfinite().all()):
        raise ValueError("Expected finite inputs and outputs, but got NaN or Inf; put 0 there and in the mask")
    check_values(model, x)


def check_inputs(model: Geometry, x: Tensor) -> None:
    """Raise ValueError unless x is `(*b, N, d)` in the model's dtype and accepted by the features.

    >>> from fedtorch.models.gaussian_process import ConvolvedGP
    >>> check_inputs(ConvolvedGP(torch.zeros(3, 1)), torch.zeros(5))
    Traceback (most recent call last):
    ValueError: Expected inputs (..., N, 1) in the model's torch.float32, but got (5,) in torch.float32
    """
    dims, dtype = model.inducing.shape[-1], model.inducing.dtype
    if x.ndim < 2 or x.shape[-1] != dims or x.dtype != dtype:
        raise ValueError(
            f"Expected inputs (..., N, {dims}) in the model's {dtype}, but got {tuple(x.shape)} in {x.dtype}"
        )
    _ask(model.features, x)


def check_values(model: Geometry, x: Tensor, *extra: Tensor) -> None:
    """Call the `check` of the model's features with inputs and that of its likelihood with `extra`, if they have one.

    >>> from fedtorch.models.gaussian_process import ConvolvedGP
    >>> from fedtorch.models.gaussian_process.kernels import EmbedCategories
    >>> model = ConvolvedGP(torch.zeros(3, 1), features=EmbedCategories(dims=1, levels={0: 4}))
    >>> check_values(model, torch.tensor([[3.0], [4.0]]))
    Traceback (most recent call last):
    ValueError: Expected codes 0…3 in column 0, but got 4, which has no point; ...
    """
    _ask(model.features, x)
    _ask(model.likelihood, *extra)


def _ask(part: Any, *values: Tensor) -> None:
    """Call a part's `check` with values, if it has one."""
    check = getattr(part, "check", None)
    if check is not None:
        check(*values)
