"""Rows of stacked tensors as parameters of their own, in the optimiser that steps them.

An optimiser passes over a parameter without a gradient: it is not decayed, and its moments and its count of steps do
not move. In a stack this is a matter of each client's rows, and so is a client that has taken all of its steps. Rows
are therefore divided into several parameters, or left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer


class Piece(NamedTuple):
    """Rows of a stacked tensor.

    Attributes:
        rows: `(M,)` their places in the stack.
        tensor: `(M, ...)`, which the optimiser steps.
    """

    rows: Tensor
    tensor: Tensor


def divide(optimizer: Optimizer, tensor: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Put rows of a stacked tensor, with their state, in its place in the optimiser; return them.

    Args:
        optimizer: holds the tensor.
        tensor: `(K, ...)`.
        parts: `(M,)` places of rows, of each new tensor.
    """
    state, count = optimizer.state.pop(tensor, {}), len(tensor)
    each = [tensor.index_select(0, at.to(tensor.device)) for at in parts]
    for group in optimizer.param_groups:
        if any(held is tensor for held in group["params"]):
            group["params"] = [new for held in group["params"] for new in (each if held is tensor else [held])]
    for new, at in zip(each, parts) if state else ():
        optimizer.state[new] = {name: _rows(value, at, count) for name, value in state.items()}
    return each


def split(optimizer: Optimizer, piece: Piece, mask: Tensor) -> list[Piece]:
    """Return the rows of a piece outside and inside of a mask `(M,)` as pieces of the optimiser's own."""
    parts = [(~mask).nonzero()[:, 0], mask.nonzero()[:, 0]]
    each = divide(optimizer, piece.tensor, parts)
    return [Piece(piece.rows[at], tensor) for at, tensor in zip(parts, each)]


def _rows(value: Any, at: Tensor, count: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.index_select(0, at.to(value.device)) if value.ndim and len(value) == count else value.clone()
