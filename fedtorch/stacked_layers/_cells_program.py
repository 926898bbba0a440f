"""Steps of recurrent cells by the program in C: of each, a product of all clients and one pass over what remains.

Functions take and return what the operations of `_cells` do, and agree with them up to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from fedtorch.dispatch import compiled

_SOURCE = Path(__file__).with_name("_cells.c")
_REAL = {torch.float64: "double", torch.float32: "float"}
_ADDED, _BEFORE, _AFTER = ("added", "product", "first"), ("outputs", "gates", "cells", "kept"), ("d_outputs", "d_cells")


class _Cells(ctypes.Structure):
    """`Cells` of the C file."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("steps", "rows", "size")),
        *((name, ctypes.c_void_p) for name in (*_ADDED, *_BEFORE, *_AFTER, "d_state", "d_cell", "d_gates", "d_new")),
    )


def library(like: Tensor, *others: Tensor) -> ctypes.CDLL | None:
    """Return the program for tensors on the CPU of one dtype that it knows, None where there is none."""
    known = like.device.type == "cpu" and like.dtype in _REAL and all(other.dtype == like.dtype for other in others)
    return compiled.library(_SOURCE, REAL=_REAL[like.dtype]) if known else None


def lstm(program: ctypes.CDLL, added: Tensor, h: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (outputs, cells, gates, tanh of the cells)."""
    added, c, states = added.contiguous(), c.contiguous(), w.mT
    outputs, cells, kept = (added.new_empty(*added.shape[:-1], h.shape[-1]) for _ in range(3))
    gates, product = torch.empty_like(added), torch.bmm(h, states)
    step = _step(program.lstm_step, outputs, added=added, product=product, first=c, outputs=outputs, gates=gates,
                 cells=cells, kept=kept)  # fmt: skip
    for t, output in enumerate(outputs.unbind(1)):
        if t:
            torch.bmm(h, states, out=product)
        step(t)
        h = output
    return outputs, cells, gates, kept


def lstm_backward(
    program: ctypes.CDLL,
    d_outputs: Tensor,
    d_cells: Tensor | None,
    h: Tensor,
    c: Tensor,
    w: Tensor,
    cells: Tensor,
    gates: Tensor,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gates, of the first state and of the first cell."""
    d_outputs, c, d_cells = d_outputs.contiguous(), c.contiguous(), None if d_cells is None else d_cells.contiguous()
    d_state, d_cell, d_gates = torch.zeros_like(c), torch.zeros_like(c), torch.empty_like(gates)
    step = _step(program.lstm_step_back, cells, first=c, gates=gates, cells=cells, kept=kept, d_outputs=d_outputs,
                 d_cells=d_cells, d_state=d_state, d_cell=d_cell, d_gates=d_gates)  # fmt: skip
    for t, d_gate in _backwards(d_gates):
        step(t)
        torch.bmm(d_gate, w, out=d_state)
    return d_gates, d_state, d_cell


def gru(program: ctypes.CDLL, added: Tensor, h: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (outputs, gates, what the reset gate multiplies)."""
    added, h, states = added.contiguous(), h.contiguous(), w.mT
    outputs, kept = (added.new_empty(*added.shape[:-1], h.shape[-1]) for _ in range(2))
    gates, product, before, first = torch.empty_like(added), added.new_empty(*h.shape[:2], w.shape[1]), h, bias[:, None]
    step = _step(program.gru_step, outputs, added=added, product=product, first=h, outputs=outputs, gates=gates,
                 kept=kept)  # fmt: skip
    for t, output in enumerate(outputs.unbind(1)):
        torch.baddbmm(first, before, states, out=product)
        step(t)
        before = output
    return outputs, gates, kept


def gru_backward(
    program: ctypes.CDLL, d_outputs: Tensor, h: Tensor, w: Tensor, outputs: Tensor, gates: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gates, of what inputs add to the last of them, and of the first state."""
    d_outputs, h = d_outputs.contiguous(), h.contiguous()
    d_state, d_gates, d_new = torch.zeros_like(h), torch.empty_like(gates), torch.empty_like(outputs)
    step = _step(program.gru_step_back, outputs, first=h, outputs=outputs, gates=gates, kept=kept, d_outputs=d_outputs,
                 d_state=d_state, d_gates=d_gates, d_new=d_new)  # fmt: skip
    for t, d_gate in _backwards(d_gates):
        step(t)
        d_state.baddbmm_(d_gate, w)
    return d_gates, d_new, d_state


def _step(program: Callable[..., None], like: Tensor, **tensors: Tensor | None) -> Callable[[int], None]:
    """Return the program's step t on contiguous tensors, which the caller keeps; `like` is `(K, T, B, H)`."""
    clients, *sizes = like.shape
    cells = _Cells(*sizes, **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None})
    place, number, size = ctypes.byref(cells), ctypes.c_int64, sizes[1] * sizes[2] * like.element_size()

    def step(t: int) -> None:
        call = lambda begin, end: program(place, number(t), number(begin), number(end))
        compiled.in_threads(call, clients, size)

    return step


def _backwards(steps: Tensor) -> Iterable[tuple[int, Tensor]]:
    """Return numbers and steps of `(K, T, ...)`, the last first."""
    return reversed(list(enumerate(steps.unbind(1))))
