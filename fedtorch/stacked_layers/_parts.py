"""Operations decomposed into basic ones, which `torch.vmap` batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch.stacked_layers._transforms import belongs_to_clients, inside


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return directions times their sizes over the norms of all dimensions but one, or of all."""
    over = [i for i in range(v.dim()) if dim == -1 or i != dim % v.dim()]
    norms = torch.linalg.vector_norm(v, dim=over, keepdim=True)
    return v * (g.reshape(norms.shape) / norms)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x' W_j y + b_j for each j."""
    outputs = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return outputs if bias is None else outputs + bias


def _group_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute `torch.nn.functional.group_norm` of inputs in any memory order."""
    return F.group_norm(input.contiguous(), *args, **kwargs)


def _contiguous(input: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return the clients' tensor in contiguous order, the only one that `torch.vmap` supports."""
    return input.contiguous() if belongs_to_clients(input) else input.contiguous(memory_format=memory_format)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """Compute `torch.prelu` with slopes of the channels `(C,)`, or one.

    The derivative that `torch.vmap` has is wrong for examples within clients.
    """
    if weight.numel() != 1 and (weight.dim() != 1 or input.dim() < 1 or weight.shape[0] != _channels(input)):
        return torch.prelu(input, weight)  # raises torch's own error
    channels = weight.reshape(-1, *(1 for _ in range(input.dim() - 2))) if input.dim() > 1 else weight.reshape(())
    return torch.where(input > 0, input, channels * input)


def _channels(input: Tensor) -> int:
    return input.shape[1] if input.dim() > 1 else 1


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """Compute `torch.nn.functional.rrelu`."""
    if training:
        return F.rrelu(input, lower, upper, training, inplace)
    return F.leaky_relu(input, (lower + upper) / 2, inplace)


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Compute `torch.bincount` of integers below `minlength`.

    Raises:
        RuntimeError: others, since all clients' counts have one length.
    """
    seen = inside(input)
    if seen is input:
        return torch.bincount(input, weights, minlength)
    if seen.numel() and not 0 <= int(seen.min()) <= int(seen.max()) < minlength:
        raise RuntimeError(
            f"Expected bincount under vmap to count integers from 0 to below minlength={minlength}, for all rows' "
            f"counts have one length, but got {int(seen.min())} to {int(seen.max())}."
        )
    each = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
    each = each if each.dtype in (torch.int64, torch.float32) else each.double()
    return torch.zeros(minlength, dtype=each.dtype, device=each.device).index_add(0, input.long(), each)


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """Return the points that maps `(N, d, d + 1)` make of a regular grid."""
    d = theta.shape[-2]
    same = torch.eye(d, d + 1, dtype=theta.dtype, device=theta.device).unsqueeze(0)
    grid = torch.affine_grid_generator(same, [1, *size[1:]], align_corners)
    points = torch.cat([grid, torch.ones_like(grid[..., :1])], -1)
    return torch.einsum("...i,nji->n...j", points[0], theta)


def _clamp(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Clamp a tensor in place."""
    return x.copy_(x.clone().clamp(*args, **kwargs))  # the derivative needs the input of the clamp


def _pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """Return the distances of all pairs of rows."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return torch.linalg.vector_norm(input[first] - input[second], p, -1)


def _unpool(dimensions: int, input: Tensor, indices: Tensor, output_size: Sequence[int], *_: Any) -> Tensor:
    """Return planes with values at the positions of their pooling, and zeros elsewhere."""
    values, places = input.flatten(-dimensions), indices.flatten(-dimensions)
    planes = values.new_zeros(*values.shape[:-1], math.prod(output_size)).scatter(-1, places, values)
    return planes.unflatten(-1, tuple(output_size))


def _set(x: Tensor, index: Any, value: Any) -> None:
    """Write into a tensor; where a mask is true, a number."""
    single = not isinstance(value, Tensor) or not value.dim()
    mask = isinstance(index, Tensor) and index.dtype == torch.bool
    if single and mask and any(isinstance(each, Tensor) and belongs_to_clients(each) for each in (x, index, value)):
        x.copy_(torch.where(index.reshape(index.shape + (1,) * (x.dim() - index.dim())), value, x))
    else:
        x[index] = value


REPLACED: dict[Any, Callable[..., Any]] = {
    F.bilinear: _bilinear,
    F.group_norm: _group_norm,
    F.rrelu: _rrelu,
    Tensor.prelu: _prelu,
    Tensor.__setitem__: _set,
    Tensor.bincount: _bincount,
    Tensor.clamp_: _clamp,
    Tensor.contiguous: _contiguous,
    torch._C._nn.max_unpool2d: partial(_unpool, 2),
    torch._C._nn.max_unpool3d: partial(_unpool, 3),
    torch._weight_norm: _weight_norm,
    torch.affine_grid_generator: _affine_grid,
    torch.bincount: _bincount,
    torch.pdist: _pdist,
    torch.prelu: _prelu,
}
