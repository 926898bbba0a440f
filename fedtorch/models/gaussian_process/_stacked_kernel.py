"""GPyTorch's kernels under hyperparameters that a federation has stacked.

A federation puts tensors `(S, ...)` in the places of a kernel's hyperparameters: S = 1 for all units, or one copy for
each. A kernel of GPyTorch stores its `batch_shape` separately, uses it for shapes, and may compute its values lazily,
after the tensors have been removed again. All kernels are therefore evaluated here, eagerly, with hyperparameters and
`batch_shape` that agree:

- one copy, or copies that are views of one, without the first axis;
- different copies of kernels that are known to follow `batch_shape` as one kernel of the batch shape `(S, ...)`;
- different copies of any other kernel one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch.functional import Swap
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch, linear_operator

Kernel: Any = gpytorch.kernels.Kernel


def parameter_dims(module: nn.Module) -> dict[str, int]:
    """Return the number of dimensions of each unstacked parameter."""
    return {name: parameter.ndim for name, parameter in module.named_parameters()}


def matrix(kernel: Any, dims: dict[str, int], x: Tensor, z: Tensor) -> Tensor:
    """Return k(x, z) of x `(*b, *i, N, d)` and z `(*b, *i, Z, d)`, i the kernel's batch shape: `(*b, *i, N, Z)`.

    Args:
        kernel: its hyperparameters may be stacked, `(S, ...)`; then b is one dimension of size S or 1, or S is 1.
        dims: `parameter_dims` of the kernel.
        x: inputs; dimensions of i may be 1.
        z: inputs.
    """
    return _evaluate(kernel, dims, lambda one, two: linear_operator.to_dense(kernel(one, two)), x, z)


def diagonal(kernel: Any, dims: dict[str, int], x: Tensor) -> Tensor:
    """Return the diagonal of k(x, x), `(*b, *i, N)`; arguments as those of `matrix`."""

    def call(inputs: Tensor) -> Tensor:
        batched = inputs if inputs.ndim > 2 else inputs[None]  # a vector is no linear operator to GPyTorch
        values = linear_operator.to_dense(kernel(batched, diag=True))
        # A kernel may ignore `diag`, and GPyTorch then takes the diagonal of kernels without batch shape only; or the
        # values of a constant diagonal lack the inputs' dimensions.
        values = values.diagonal(dim1=-1, dim2=-2) if values.ndim == batched.ndim else values
        values = values.expand(torch.broadcast_shapes(values.shape, batched.shape[:-1]))
        return values if inputs.ndim > 2 else values[0]

    return _evaluate(kernel, dims, call, x)


class SideBySide(Kernel):
    """One kernel for each latent process, as one kernel of the batch shape `(latents,)`.

    Args:
        kernels: without batch shapes.
    """

    def __init__(self, kernels: Sequence[Any]) -> None:
        super().__init__(batch_shape=torch.Size([len(kernels)]))
        self.kernels = nn.ModuleList(kernels)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Return the kernels' values side by side, `(..., latents, N, Z)`, or `(..., latents, N)` of the diagonal."""
        values = []
        for i, kernel in enumerate(self.kernels):
            one, two = (x if x.shape[-3] == 1 else x[..., i : i + 1, :, :] for x in (x1, x2))
            values.append(diagonal(kernel, {}, one) if diag else matrix(kernel, {}, one, two))
        return torch.cat(values, -2 if diag else -3)


def _evaluate(kernel: Any, dims: dict[str, int], call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `call(*inputs)` with consistent hyperparameters and batch shapes, as the module describes."""
    stacked = {n: value for n, value in kernel.named_parameters() if value.ndim > dims.get(n, value.ndim)}
    if not stacked:
        return call(*inputs)
    swap, depth = Swap(kernel, list(stacked)), len(kernel.batch_shape)
    units = len(next(iter(stacked.values())))
    has_units = max(x.ndim for x in inputs) > depth + 2
    if units == 0:  # the shape is that of one unit, such as zeros, since kernels need not take empty tensors
        one = [x.new_zeros(1, *x.shape[1:]) if x.ndim > depth + 2 else x for x in inputs]
        with swap([value.sum(0) for value in stacked.values()]):
            values = call(*one)
        return (values if has_units else values[None])[:0]
    if units == 1 or all(value.stride(0) == 0 for value in stacked.values()):
        with swap([value[0] for value in stacked.values()]):
            values = call(*inputs)
        # Where inputs have no unit's axis the result has one all the same, as of any stack of one.
        return values if has_units else values[None]
    if all(type(part) in _FOLLOW_BATCH_SHAPE for part in kernel.modules() if isinstance(part, Kernel)):
        with _batch_shapes(kernel, units) as fitted, swap([fitted(*item) for item in stacked.items()]):
            return call(*inputs)
    rows = [x.expand(units, *x.shape[-2 - depth :]) for x in inputs]
    parts = []
    for number in range(units):
        with swap([value[number] for value in stacked.values()]):
            parts.append(call(*(x[number] for x in rows)))
    return torch.stack(parts)


@contextmanager
def _batch_shapes(kernel: Any, units: int) -> Iterator[Callable[[str, Tensor], Tensor]]:
    """Set batch shapes for this many units in the kernel and its parts; return the unstacked form of parameters, by
    name.
    """
    parts = {name: part for name, part in kernel.named_modules() if isinstance(part, Kernel)}
    depth, shapes_before = len(kernel.batch_shape), {name: part._batch_shape for name, part in parts.items()}
    # With that of its parts, as a `ScaleKernel` makes its parameter.
    shapes = {name: part.batch_shape for name, part in parts.items()}

    def widened(name: str) -> torch.Size:
        return torch.Size((units, *(1,) * (depth - len(shapes[name])), *shapes[name]))

    def fitted(name: str, value: Tensor) -> Tensor:
        path = name.rpartition(".")[0]
        return value.reshape(*widened(path), *value.shape[1 + len(shapes[path]) :])

    try:
        for name, part in parts.items():
            part.batch_shape = widened(name)
        yield fitted
    finally:
        for name, part in parts.items():
            part.batch_shape = shapes_before[name]


_FOLLOW_BATCH_SHAPE = {
    SideBySide,
    gpytorch.kernels.AdditiveKernel,
    gpytorch.kernels.ConstantKernel,
    gpytorch.kernels.CosineKernel,
    gpytorch.kernels.IndexKernel,
    gpytorch.kernels.LinearKernel,
    gpytorch.kernels.MaternKernel,
    gpytorch.kernels.PeriodicKernel,
    gpytorch.kernels.PiecewisePolynomialKernel,
    gpytorch.kernels.PolynomialKernel,
    gpytorch.kernels.ProductKernel,
    gpytorch.kernels.RBFKernel,
    gpytorch.kernels.RQKernel,
    gpytorch.kernels.ScaleKernel,
    gpytorch.kernels.SpectralMixtureKernel,
}
