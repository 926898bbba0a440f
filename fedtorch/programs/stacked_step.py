r"""One step of SGD, momentum, Adam or AdamW on a stack of clients' parameters `(K, ...)`, in one pass over memory.

Client k's gradient is

.. math:: g_k = \min(1, c / \|\nabla_k\|)\, \nabla_k, \qquad \nabla_k = \nabla f_k(x_k) + \lambda_k x_k - h_k,

with the gradient of a `Quadratic` and a bound c of the norm over all tensors. Steps are those of `torch.optim`: weight
decay comes after clipping, momentum's buffer starts as the first gradient, and Adam's corrections use each client's own
count of steps. Everything is changed in place.

Source: the formulas of `torch.optim.SGD` (without maximize), `Adam` (without amsgrad) and `AdamW`. Bound: bandwidth.
Adam in float32 reads parameter, gradient and two moments and writes three of them, 28 bytes a parameter; a shift is 4
more, and clipping reads the gradient twice, 4 more. Not measured yet.

Not differentiable. Programs support float32 and float64; rounding may differ from `torch.optim` in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.programs.choice import FLOATS, triton_programs
from fedtorch.programs.launch import launch, tile

_SIZE = 1024  # elements of a program


class ClientValues(NamedTuple):
    """The values of a step that differ between clients, of one tensor or of all."""

    taken: Tensor | int  # (K,) int64, steps before this one
    precision: Tensor | None = None  # (K,) λ, and
    shift: Tensor | None = None  # (K, ...) h; None: no quadratic
    share: Tensor | None = None  # (K,) that clipping leaves of the gradients


def fits(tensor: Tensor) -> bool:
    """Return whether a program supports a stack like this one."""
    return (
        triton_programs(
            "fedtorch.programs.triton.stacked_step", (tensor.detach(),), FLOATS, fits=tensor.is_contiguous()
        )
        is not None
    )


def clipped(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], clients: Sequence[ClientValues], most: float
) -> Tensor:
    """Return the share of each client's gradients that bounds their norm over all tensors by `most`, `(K,)`.

    Args:
        parameters: `(K, ...)` each.
        gradients: likewise.
        clients: of each tensor.
        most: c > 0.
    """
    total = torch.stack([_squares(*each) for each in zip(parameters, gradients, clients)]).sum(0)
    return (most / (total.sqrt() + 1e-6)).clamp(max=1)


def sgd(
    parameter: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    clients: ClientValues,
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Take a step of SGD, in place.

    Args:
        parameter: `(K, ...)`, contiguous.
        gradient: of each client's loss, `(K, ...)`.
        buffer: `(K, ...)`, contiguous; None without momentum.
        clients: see `ClientValues`.
        lr: a number, or a scalar on the device, which a captured graph rereads.
        momentum: as in `torch.optim.SGD`, like the next three.
        dampening: see there.
        weight_decay: see there.
        nesterov: see there.
    """
    programs = _program(parameter, gradient, buffer)
    if programs:
        held = parameter if buffer is None else buffer
        numbers = (momentum, dampening, weight_decay)
        flags = {"MOMENTUM": buffer is not None, "NESTEROV": nesterov}
        _launch(programs.sgd, (parameter, gradient, held), clients, lr, numbers, flags)
        return
    step = _share(parameter, gradient, clients)
    step = step + weight_decay * parameter
    if buffer is not None:
        begun = _rows(clients.taken, parameter) > 0
        after = torch.where(begun, momentum * buffer + (1 - dampening) * step, step)
        buffer.copy_(after)
        step = step + momentum * after if nesterov else after
    parameter.copy_(parameter - lr * step)


def adam(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    clients: ClientValues,
    *,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> None:
    """Take a step of Adam, or of AdamW with `decoupled`, in place.

    Args:
        parameter: `(K, ...)`, contiguous.
        gradient: of each client's loss, `(K, ...)`.
        first: the mean of gradients `(K, ...)`, contiguous.
        second: mean of the squares, likewise.
        clients: see `ClientValues`.
        lr: a number, or a scalar on the device, which a captured graph rereads.
        betas: as in `torch.optim.Adam`, like the next two.
        eps: see there.
        weight_decay: see there.
        decoupled: whether it acts on the parameters alone, as in `torch.optim.AdamW`.
    """
    programs = _program(parameter, gradient, first, second)
    if programs:
        logarithms = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
        tensors = (parameter, gradient, first, second)
        _launch(programs.adam, tensors, clients, lr, (*betas, *logarithms, eps, weight_decay), {"DECOUPLED": decoupled})
        return
    step = _share(parameter, gradient, clients)
    value = parameter
    if decoupled:
        value = value * (1 - lr * weight_decay)
    else:
        step = step + weight_decay * value
    count = (_rows(clients.taken, parameter) + 1).to(torch.float64)
    mean = first + (step - first) * (1 - betas[0])
    square = betas[1] * second + (1 - betas[1]) * step * step
    length = (lr / (1 - betas[0] ** count)).to(parameter.dtype)
    spread = (1 - betas[1] ** count).sqrt().to(parameter.dtype)
    first.copy_(mean)
    second.copy_(square)
    parameter.copy_(value - length * mean / (square.sqrt() / spread + eps))


def _program(parameter: Tensor, *others: Tensor | None) -> Any:
    rest = [other for other in others[1:] if other is not None]
    contiguous = parameter.is_contiguous() and all(other.is_contiguous() for other in rest)
    tensors = [tensor.detach() for tensor in (parameter, others[0], *rest) if tensor is not None]
    return triton_programs("fedtorch.programs.triton.stacked_step", tensors, FLOATS, fits=contiguous)


def _launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    clients: ClientValues,
    lr: float | Tensor,
    numbers: Sequence[float],
    flags: Mapping[str, bool],
) -> None:
    parameter = tensors[0]
    rows, columns, across = _tiling(parameter)
    operands = [parameter, tensors[1].contiguous(), *tensors[2:]]
    absent = lambda tensor: parameter if tensor is None else tensor.to(parameter.dtype).contiguous()
    launch(
        kernel,
        across * -(-len(parameter) // rows),
        *(tensor.detach() for tensor in operands),
        clients.taken,
        *map(absent, (clients.precision, clients.shift, clients.share)),
        len(parameter),
        parameter[0].numel() if len(parameter) else 0,
        across,
        *((0.0, lr) if isinstance(lr, Tensor) else (lr, parameter)),
        *numbers,
        **flags,
        PULL=clients.shift is not None,
        CLIP=clients.share is not None,
        RATE_HELD=isinstance(lr, Tensor),
        TAKEN_HELD=isinstance(clients.taken, Tensor),
        ROWS=rows,
        COLUMNS=columns,
    )


def _tiling(parameter: Tensor) -> tuple[int, int, int]:
    """Return (rows, columns) of a tile, and the number of tiles across."""
    size = parameter[0].numel() if len(parameter) else 0
    rows, columns = tile(size, _SIZE)
    return rows, columns, -(-size // columns)


def _squares(parameter: Tensor, gradient: Tensor, clients: ClientValues) -> Tensor:
    """Return ‖∇_k‖² of one tensor, `(K,)`."""
    programs = _program(parameter, gradient)
    if not programs:
        return _pulled(parameter, gradient, clients).reshape(len(parameter), -1).square().sum(1)
    rows, columns, across = _tiling(parameter)
    out = parameter.new_empty(len(parameter), across)
    pull = clients.shift is not None
    precision, shift = (clients.precision, clients.shift) if pull else (parameter, parameter)
    assert precision is not None
    assert shift is not None
    tensors = (
        parameter.detach(),
        gradient.contiguous(),
        precision.to(parameter.dtype).contiguous(),
        shift.contiguous(),
    )
    count = across * -(-len(parameter) // rows)
    sizes = (len(parameter), parameter[0].numel() if len(parameter) else 0, across)
    launch(programs.squares, count, out, *tensors, *sizes, PULL=pull, ROWS=rows, COLUMNS=columns)
    return out.sum(1)


def _pulled(parameter: Tensor, gradient: Tensor, clients: ClientValues) -> Tensor:
    if clients.shift is None or clients.precision is None:
        return gradient
    return gradient + (_rows(clients.precision.to(parameter.dtype), parameter) * parameter - clients.shift)


def _share(parameter: Tensor, gradient: Tensor, clients: ClientValues) -> Tensor:
    gradient = _pulled(parameter, gradient, clients)
    return gradient if clients.share is None else gradient * _rows(clients.share, parameter)


def _rows(value: Tensor | int, like: Tensor) -> Tensor:
    """Return `(K,)`, or a number, in a shape that broadcasts with `(K, ...)`."""
    value = torch.as_tensor(value, device=like.device)
    return value if value.ndim == 0 else value.reshape(-1, *(1,) * (like.ndim - 1))
