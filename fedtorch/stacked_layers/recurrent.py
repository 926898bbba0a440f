"""Recurrent layers in the mode: the layers, directions and dropout of `torch.gru` and similar functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch.stacked_layers import _cells
from fedtorch.stacked_layers._cells import Cell
from fedtorch.stacked_layers._linear import linear
from fedtorch.stacked_layers._transforms import belongs_to_clients


def _run(function: Callable[..., Any], cell: Cell, input: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return (outputs, last states...) of a torch function with some arguments that belong to clients."""
    tensors = [input, *(each for value in args for each in (value if isinstance(value, (list, tuple)) else (value,)))]
    if len(args) != 8 or not any(isinstance(each, Tensor) and belongs_to_clients(each) for each in tensors):
        return function(input, *args)  # also for packed sequences, whose sizes come second
    before, weights, biases, layers, dropout, train, bidirectional, batch_first = args
    if dropout and train and layers > 1:
        _refuse_examples(function, weights, dropout)
    states = list(before) if isinstance(before, (list, tuple)) else [before]
    rows = input.transpose(0, 1) if batch_first else input
    outputs, *last = _layered(cell, rows, states, weights, biases, layers, dropout if train else 0.0, bidirectional)
    return outputs.transpose(0, 1) if batch_first else outputs, *last


def _refuse_examples(function: Callable[..., Any], weights: Sequence[Tensor], dropout: float) -> None:
    """Refuse dropout in a `vmap` over examples within one over clients.

    Time comes first in a mask, so a mask would depend on the number of padded rows.
    """
    maps = torch._C._functorch
    if len(maps.get_interpreter_stack() or ()) > 1 and maps.maybe_get_level(weights[0]) != maps.maybe_current_level():
        raise NotImplementedError(
            f"Expected torch.{function.__name__} without dropout between its layers under a torch.vmap over examples, "
            f"but got dropout={dropout}; set it to zero, or put layers of one into a torch.nn.Sequential with Dropout"
        )


def _layered(
    cell: Cell,
    inputs: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Return (outputs `(T, B, H)`, last states `(layers, B, H)`) of inputs `(T, B, I)`."""
    each, directions = 4 if biases else 2, 2 if bidirectional else 1
    if len(weights) != each * layers * directions:
        raise NotImplementedError("proj_size is not supported on stacked clients; use batched=False")
    dtype, last, outputs = weights[0].dtype, [], inputs
    for layer in range(layers):
        sides = []
        for i in range(layer * directions, (layer + 1) * directions):
            back = i % directions == 1
            rows = (outputs.flip(0) if back else outputs).to(dtype)
            side, *ends = cell(rows, [state[i].to(dtype) for state in states], *weights[each * i : each * (i + 1)])
            sides.append(side.flip(0) if back else side)
            last.append(ends)
        outputs = torch.cat(sides, -1) if bidirectional else sides[0]
        if dropout and layer + 1 < layers:
            outputs = torch.dropout(outputs, dropout, True)
    return outputs, *(torch.stack(ends) for ends in zip(*last))


def _gates(
    input: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the part of a step's gates from inputs `(B, I)` and states `(B, H)`."""
    return linear(input, w_ih, b_ih), linear(h, w_hh, b_hh)


def _gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Compute `torch.gru_cell`."""
    added, product = _gates(input, hx, w_ih, w_hh, b_ih, b_hh)
    (resets, updates, news), (reset, update, new) = added.chunk(3, -1), product.chunk(3, -1)
    new = (news + (resets + reset).sigmoid() * new).tanh()
    return torch.lerp(new, hx, (updates + update).sigmoid())


def _lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `torch.lstm_cell`."""
    added, product = _gates(input, hx[0], w_ih, w_hh, b_ih, b_hh)
    write, keep, new, show = (added + product).chunk(4, -1)
    c = keep.sigmoid() * hx[1] + write.sigmoid() * new.tanh()
    return show.sigmoid() * c.tanh(), c


def _rnn_cell(
    activation: Callable[[Tensor], Tensor],
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Compute `torch.rnn_tanh_cell` or `torch.rnn_relu_cell`."""
    added, product = _gates(input, hx, w_ih, w_hh, b_ih, b_hh)
    return activation(added + product)


CELLS: dict[Any, Callable[..., Any]] = {
    torch.gru_cell: _gru_cell,
    torch.lstm_cell: _lstm_cell,
    torch.rnn_relu_cell: partial(_rnn_cell, torch.relu),
    torch.rnn_tanh_cell: partial(_rnn_cell, torch.tanh),
}
REPLACED: dict[Any, Callable[..., Any]] = {
    **CELLS,
    torch.gru: partial(_run, torch.gru, _cells.gru),
    torch.lstm: partial(_run, torch.lstm, _cells.lstm),
    torch.rnn_tanh: partial(_run, torch.rnn_tanh, _cells.rnn),
    torch.rnn_relu: partial(_run, torch.rnn_relu, partial(_cells.rnn, relu=True)),
}
