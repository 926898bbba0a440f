"""Call the C program of full-batch gradient steps in closed form; see `fedtorch.federation.solvers.least_squares`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedtorch.dispatch import choice, compiled

MOST = 64  # features; of more torch is faster
_SOURCE = Path(__file__).with_suffix(".c")
_NUMBER, _ADDRESS, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Problem(ctypes.Structure):
    """`Problem` of the C file."""

    _fields_ = (
        *((name, _NUMBER) for name in ("size", "outputs", "steps")),
        *((name, _REAL) for name in ("share", "lr")),
        *((name, _ADDRESS) for name in ("values", "basis", "spectral", "gram", "cross", "power")),
        *((name, _ADDRESS) for name in ("precision", "shift", "start", "end", "rates", "loss")),
    )


def program(size: int, tensors: Sequence[Tensor]) -> ctypes.CDLL | None:
    """Return the library where there is one and it knows models of this size and such tensors, else None."""
    if not 0 < size <= MOST or any(tensor.dtype != torch.float64 for tensor in tensors) or not choice.plain(tensors):
        return None
    return compiled.library(_SOURCE)


def descended(
    library: ctypes.CDLL,
    data: Sequence[Tensor],
    added: tuple[Tensor, Tensor] | None,
    start: Tensor,
    share: float,
    steps: int,
    lr: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the end of gradient steps `(K, p, o)`, the sum of their sizes `(K,)` and the loss at their end `(K,)`.

    Args:
        library: the program.
        data: eigenvalues `(K, p)`, eigenvectors `(K, p, p)` as columns and their products with X'y `(K, p, o)`, then
            X'X `(K, p, p)`, X'y `(K, p, o)` and y'y `(K,)`, all a row.
        added: the precision `(K, 1)` and the shift `(K, p, o)` of a quadratic.
        start: `(K, p, o)`.
        share: of X'X in the curvature.
        steps: how many.
        lr: their size; None for one over the largest curvature.

    Raises:
        MemoryError: there is not enough.
    """
    clients, size, outputs = start.shape
    values, vectors, *others = data
    kept = [values, vectors.mT, *others, *((None, None) if added is None else added), start]
    kept = [None if tensor is None else tensor.contiguous() for tensor in kept]
    end, rates, loss = torch.empty_like(kept[-1]), values.new_empty(clients), values.new_empty(clients)
    places = [None if tensor is None else tensor.data_ptr() for tensor in (*kept, end, rates, loss)]
    problem = _Problem(size, outputs, steps, share, float("nan") if lr is None else lr, *places)
    call = lambda begin, stop: library.descend(ctypes.byref(problem), _NUMBER(begin), _NUMBER(stop))
    if any(compiled.in_threads(call, clients, 32 * size * (size + outputs))):
        raise MemoryError(f"no memory for {size} coefficients of {outputs} outputs")
    return end, rates, loss
