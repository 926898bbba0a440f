r"""Statistics of units' rows for latent Gaussian processes at inducing inputs: B'ΩB and B'Ωy, without storing B.

.. math:: V_{nij} = v_i \exp\Big(-\tfrac12 \sum_c \frac{(x_{nc} - w_{jc})^2}{s_{ic}}\Big), \qquad
    B_{n,iJ+j} = \sum_k W_{ijk} V_{nik},

V the covariances of a convolution process's outputs with its latent processes, and W the inverse of a root of the
latter's own covariance, under which values are white. B is N × I J numbers a unit; a program builds some of its rows in
registers and multiplies them into the sums, so that rows are read and sums are written. Turning V'ΩV afterwards would
square the condition number of W. Rows of weight zero are not looked at.

Source: Chung and Al Kontar, "Federated multi-output Gaussian processes", Technometrics 66, 2024, equation (17), and the
sums of their section 4; Álvarez and Lawrence, "Computationally efficient convolved multiple output Gaussian processes",
JMLR 12, 2011. Bound: arithmetic, N (I J)² + 2 N I J² float64 operations a unit and N I J exponentials. Not measured
yet.

Differentiable in all floating-point arguments: the derivative makes B anew, some rows at a time. Programs know float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch.dispatch.choice import installed, possible, program
from fedtorch.dispatch.launch import launch, power_of_two

MOST_POINTS, MOST_DIMS = 32, 16  # inducing inputs J, of which Triton 3.6 has registers for, and their dimensions
_ROWS = 4096  # of B that the derivative makes at a time
_TILE = 32  # rows of B that a program makes at a time


def runs(tensors: Sequence[Tensor]) -> bool:
    """Return whether a program takes these arguments of `gp_statistics`: on the CPU none."""
    x, inducing = tensors[0], tensors[3]
    fits = 0 < inducing.shape[-2] <= MOST_POINTS and 0 < x.shape[-1] <= MOST_DIMS
    return possible(x.device) and installed() and fits and {part.dtype for part in tensors} == {torch.float64}


def gp_statistics(
    x: Tensor, y: Tensor, weight: Tensor, inducing: Tensor, width: Tensor, height: Tensor, whiten: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (B'ΩB `(K, P, P)`, B'Ωy `(K, P)`), P = I J.

    Args:
        x: inputs `(K, N, d)`.
        y: outputs `(K, N)`.
        weight: Ω of rows `(K, N)`: precisions of the noise, 0 for rows that are not there.
        inducing: w, `(J, d)` or each unit's own `(K, J, d)`.
        width: s, squared lengths, `(K, I, d)`.
        height: v, `(K, I)`.
        whiten: W, `(I, J, J)` or each unit's own `(K, I, J, J)`.

    Raises:
        ValueError: shapes that do not fit together.
    """
    tensors = (x, y, weight, inducing, width, height, whiten)
    _check(*tensors)
    if (
        not runs(tensors)
        or program("fedtorch.kernels.programs.gp_statistics", tensors, (torch.float64,), differentiable=True) is None
    ):
        return _reference(*tensors)
    return _Statistics.apply(*tensors)


def _check(
    x: Tensor, y: Tensor, weight: Tensor, inducing: Tensor, width: Tensor, height: Tensor, whiten: Tensor
) -> None:
    clients, rows, dims = x.shape
    latents, points = height.shape[-1], inducing.shape[-2]
    found = [y.shape, weight.shape, width.shape, height.shape, inducing.shape[-2:], whiten.shape[-3:]]
    wanted = [(clients, rows), (clients, rows), (clients, latents, dims), (clients, latents), (points, dims)]
    wanted.append((latents, points, points))
    shared = all(own in ((), (1,), (clients,)) for own in (inducing.shape[:-2], whiten.shape[:-3]))
    if [tuple(shape) for shape in found] != wanted or not shared:
        shapes = [tuple(part.shape) for part in (x, y, weight, inducing, width, height, whiten)]
        raise ValueError(
            "Expected x (K, N, d), y (K, N), weight (K, N), inducing (J, d), width (K, I, d), height (K, I) and "
            f"whiten (I, J, J), but got {shapes}"
        )


def _rows(x: Tensor, inducing: Tensor, width: Tensor, height: Tensor, whiten: Tensor) -> Tensor:
    """Return B, `(K, N, P)`."""
    gap = (x[:, :, None] - inducing[..., None, :, :]).square()
    distance = (gap[:, None] / width[:, :, None, None]).sum(-1)
    return (height[..., None, None] * (-0.5 * distance).exp() @ whiten.mT).movedim(1, 2).flatten(2)


def _reference(x: Tensor, y: Tensor, weight: Tensor, *model: Tensor) -> tuple[Tensor, Tensor]:
    there = weight != 0
    basis = _rows(torch.where(there[..., None], x, 0.0), *model)
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
    x: Tensor, y: Tensor, weight: Tensor, inducing: Tensor, width: Tensor, height: Tensor, whiten: Tensor
) -> tuple[Tensor, Tensor]:
    programs = program("fedtorch.kernels.programs.gp_statistics", (x,), (torch.float64,))
    (clients, rows, dims), latents, points = x.shape, height.shape[1], inducing.shape[-2]
    size = latents * points
    gram, cross = x.new_empty(clients, size, size), x.new_empty(clients, size)
    tensors = (gram, cross, x, y, weight, inducing, width, height, whiten)
    steps = (_step(inducing, 2), _step(whiten, 3))
    tile = {"ROWS": _TILE, "POINTS": max(power_of_two(points), 16)}
    launch(programs.statistics, clients * latents**2, *tensors, rows, points, dims, latents, *steps, **tile, warps=8)
    return gram, cross


def _step(tensor: Tensor, dims: int) -> int:
    """Return the stride from one unit's numbers to the next one's; 0 if all have the same."""
    return tensor[0].numel() if tensor.ndim > dims and len(tensor) > 1 else 0
