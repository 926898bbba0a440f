r"""What units' rows say of latent Gaussian processes at inducing inputs: V'WV and V'Wy, without storing V.

.. math:: V_{n,iJ+j} = v_i \exp\Big(-\tfrac12 \sum_c \frac{(x_{nc} - w_{jc})^2}{s_{ic}}\Big),

the covariances of a convolution process's outputs with its latent processes. V is N × I J numbers a unit; a program
builds a tile of it in registers and multiplies it into the sums, so that rows are read and sums are written. Rows of
weight zero are not looked at.

Source: Chung and Al Kontar, "Federated multi-output Gaussian processes", Technometrics 66, 2024, equation (17), and the
sums of their section 4; Álvarez and Lawrence, "Computationally efficient convolved multiple output Gaussian processes",
JMLR 12, 2011. Bound: arithmetic, N (I J)² float64 operations a unit and N I J exponentials. Not measured yet.

Differentiable in all floating-point arguments: the derivative makes V anew, some rows at a time. Programs know float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch.kernels.choice import launch, program

MOST_POINTS, MOST_DIMS = 1024, 16  # inducing values I J, and inputs' dimensions
_ROWS = 4096  # of V that the derivative makes at a time
_TILE = 32


def gp_statistics(
    x: Tensor, y: Tensor, weight: Tensor, inducing: Tensor, width: Tensor, height: Tensor
) -> tuple[Tensor, Tensor]:
    """(V'WV `(K, P, P)`, V'Wy `(K, P)`), P = I J.

    Args:
        x: inputs `(K, N, d)`.
        y: outputs `(K, N)`.
        weight: of rows `(K, N)`: precisions of the noise, 0 for rows that are not there.
        inducing: w, `(J, d)`.
        width: s, squared lengths, `(K, I, d)`.
        height: v, `(K, I)`.

    Raises:
        ValueError: shapes that do not fit together.
    """
    tensors = (x, y, weight, inducing, width, height)
    clients, rows, dims = x.shape
    expected = [(clients, rows), (clients, rows), (len(inducing), dims), (clients, height.shape[-1], dims)]
    if [tuple(part.shape) for part in tensors[1:5]] != expected or height.shape[:-1] != (clients,):
        raise ValueError(
            "Expected x (K, N, d), y (K, N), weight (K, N), inducing (J, d), width (K, I, d) and height (K, I), but "
            f"got {[tuple(part.shape) for part in tensors]}"
        )
    size = len(inducing) * height.shape[1]
    fits = 0 < size <= MOST_POINTS and 0 < dims <= MOST_DIMS and {part.dtype for part in tensors} == {torch.float64}
    if program("gp_statistics", tensors, (torch.float64,), fits=fits, differentiable=True) is None:
        return _reference(*tensors)
    return _Statistics.apply(*tensors)


def _rows(x: Tensor, inducing: Tensor, width: Tensor, height: Tensor) -> Tensor:
    """V, `(K, N, P)`."""
    gap = (x[:, :, None] - inducing).square()
    distance = (gap[:, :, None] / width[:, None, :, None]).sum(-1)
    return (height[:, None, :, None] * (-0.5 * distance).exp()).flatten(2)


def _reference(
    x: Tensor, y: Tensor, weight: Tensor, inducing: Tensor, width: Tensor, height: Tensor
) -> tuple[Tensor, Tensor]:
    there = weight != 0
    basis = _rows(torch.where(there[..., None], x, 0.0), inducing, width, height)
    weighted = basis * weight[..., None]
    return weighted.mT @ basis, (weighted.mT @ torch.where(there, y, 0.0)[..., None])[..., 0]


class _Statistics(torch.autograd.Function):
    """The sums by the program, and their derivative from some rows of V after the other."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.save_for_backward(*tensors)
        return _launched(*(part.detach().contiguous() for part in tensors))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tensors = ctx.saved_tensors
        totals = [torch.zeros_like(part) for part in tensors]
        for first in range(0, tensors[0].shape[1], _ROWS):
            part = slice(first, first + _ROWS)
            own = [tensor[:, part] if i < 3 else tensor for i, tensor in enumerate(tensors)]
            with torch.enable_grad():
                own = [tensor.detach().requires_grad_() for tensor in own]
                found = torch.autograd.grad(_reference(*own), own, gradients)
            for i, gradient in enumerate(found):
                (totals[i][:, part] if i < 3 else totals[i]).add_(gradient)
        return tuple(totals)


def _launched(
    x: Tensor, y: Tensor, weight: Tensor, inducing: Tensor, width: Tensor, height: Tensor
) -> tuple[Tensor, Tensor]:
    programs = program("gp_statistics", (x,), (torch.float64,))
    (clients, rows, dims), latents, points = x.shape, height.shape[1], len(inducing)
    size = latents * points
    gram, cross = x.new_empty(clients, size, size), x.new_empty(clients, size)
    across = -(-size // _TILE)
    tensors = (gram, cross, x, y, weight, inducing, width, height)
    sizes = (rows, points, dims, latents, across)
    launch(programs.statistics, clients * across**2, *tensors, *sizes, ROWS=_TILE, COLUMNS=_TILE)
    return gram, cross
