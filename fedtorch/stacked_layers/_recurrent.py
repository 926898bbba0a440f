"""Rules for recurrent layers under `torch.vmap`: the layers, directions and dropout of `torch.gru` and its like."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.autograd_function import VmapInfo

from fedtorch.stacked_layers import _cells
from fedtorch.stacked_layers._cells import Cell
from fedtorch.stacked_layers._rules import all_in_front, in_front, register

aten = torch.ops.aten
_CACHED = 5 * 2**18  # bytes of weights, about what a core's second cache holds
_FUSED = 192  # units
_CELLS: dict[Any, Cell] = {
    aten.gru.input: _cells.gru,
    aten.lstm.input: _cells.lstm,
    aten.rnn_tanh.input: _cells.rnn,
    aten.rnn_relu.input: partial(_cells.rnn, relu=True),
}


def _rule(operation: Any, info: VmapInfo, dims: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return (outputs, last states...) of clients, whose sequences may differ, and their weights, too."""
    inputs, before, weights, biases, layers, dropout, train, bidirectional, batch_first = arguments
    several = isinstance(before, (list, tuple))  # an LSTM has two states
    states, at = (before, dims[1]) if several else ([before], [dims[1]])
    inputs, states = in_front(info, inputs, dims[0]), all_in_front(info, states, at)
    settings = biases, layers, dropout, train, bidirectional
    draws = dropout and train and layers > 1
    if not any(dim is not None for dim in dims[2]):
        if draws:  # time comes first in a mask, so that it would depend on how many rows of padding there are
            raise NotImplementedError(
                f"Expected {operation} without dropout between its layers under a torch.vmap over examples, but got "
                f"dropout={dropout}; set it to zero, or put layers of one into a torch.nn.Sequential with Dropout"
            )
        joined = [state.movedim(0, 1).flatten(1, 2) for state in states]
        rows = inputs.flatten(0, 1) if batch_first else inputs.movedim(0, 1).flatten(1, 2)
        outputs, *last = operation(rows, joined if several else joined[0], weights, *settings, batch_first)
        sizes = (info.batch_size, -1)
        outputs = outputs.unflatten(0, sizes) if batch_first else outputs.unflatten(1, sizes).movedim(1, 0)
        return outputs, *(state.unflatten(1, sizes).movedim(1, 0) for state in last)
    if draws and info.randomness != "different":
        raise RuntimeError(
            f"Expected randomness='different' for {operation} with dropout={dropout} under torch.vmap, but got "
            f"randomness={info.randomness!r}"
        )
    if batch_first:
        inputs = inputs.transpose(1, 2)
    weights = all_in_front(info, weights, dims[2])
    outputs, *last = layered(_CELLS[operation], inputs, states, weights, *settings)
    return outputs.transpose(1, 2) if batch_first else outputs, *last


def layered(
    cell: Cell,
    inputs: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Return (outputs `(K, T, B, H)`, last states `(K, layers, B, H)`) of inputs `(K, T, B, I)`."""
    each, directions = 4 if biases else 2, 2 if bidirectional else 1
    if len(weights) != each * layers * directions:
        raise NotImplementedError("proj_size is not supported on stacked clients; use batched=False")
    dtype, last, outputs = weights[0].dtype, [], inputs
    for layer in range(layers):
        sides = []
        for i in range(layer * directions, (layer + 1) * directions):
            back = i % directions == 1
            rows = (outputs.flip(1) if back else outputs).to(dtype)
            first = [state[:, i].to(dtype) for state in states]
            side, *ends = _in_blocks(cell, rows, first, weights[each * i : each * (i + 1)])
            sides.append(side.flip(1) if back else side)
            last.append(ends)
        outputs = torch.cat(sides, -1) if bidirectional else sides[0]
        if dropout and train and layer + 1 < layers:
            outputs = torch.dropout(outputs, dropout, True)
    return outputs, *(torch.stack(ends, 1) for ends in zip(*last))


def _in_blocks(cell: Cell, inputs: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run a cell on so many clients at a time that a processor's cache holds their weights from step to step."""
    size = max(2, _CACHED // (weights[1][0].numel() * weights[1].element_size()))
    if inputs.device.type != "cpu" or size >= len(inputs):
        return cell(inputs, states, *weights)
    blocks = zip(*(tensor.split(size) for tensor in (inputs, *states, *weights)))
    count = 1 + len(states)
    done = [cell(block[0], block[1:count], *block[count:]) for block in blocks]
    return [torch.cat(parts) for parts in zip(*done)]


def faster_alone(module: nn.Module) -> bool:
    """Return whether steps of one client after the other are faster than stacked ones, of a module on the CPU.

    The CPU's LSTM of one client is fused, and from this size on multiplies as fast as many clients together. It is a
    matter of sizes, not of timing, so that every run decides alike.

    Example:
        >>> faster_alone(nn.LSTM(8, 16)), faster_alone(nn.LSTM(8, 256))
        (False, True)
    """
    lstms = [part for part in module.modules() if isinstance(part, nn.LSTM)]
    weights = [p for lstm in lstms if lstm.hidden_size > _FUSED for p in lstm.parameters()]
    return any(p.device.type == "cpu" and p.dtype == torch.float32 for p in weights)


for _operation in _CELLS:
    register(_operation, partial(_rule, _operation))
