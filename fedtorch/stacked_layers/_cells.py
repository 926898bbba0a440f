"""Recurrent cells of many clients over whole sequences, with their derivatives through time written out.

A step multiplies the states of all clients with their weights in one product. Going back, the derivatives of the gates
are made for all steps at once, so that a step of the backward pass is a product and a few sums; the gradients of the
weights are one product over all steps. Each pass is one operation to torch: modes that intercept operations, such as
`KeyedRandomness`, and captured steps see nothing of its steps.

Shapes: states `(K, B, H)`, what the inputs add to the gates `(K, T, B, GH)`, weights `(K, GH, H)`, biases `(K, GH)`,
for `K` clients, `T` steps, `B` sequences and `G` gates in torch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch.stacked_layers import _cells_program

# (inputs `(K, T, B, I)`, states before, w_ih, w_hh, b_ih, b_hh) -> (outputs `(K, T, B, H)`, states after...)
Cell = Callable[..., Sequence[Tensor]]
# (what inputs add, states before, w_hh, b_hh) -> (outputs, ...)
Steps = Callable[..., Sequence[Tensor]]


def gru(
    inputs: Tensor,
    states: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    steps: Steps | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of `torch.gru` of one layer and direction, and the last of them.

    `steps` takes all steps of what the inputs add, by default as one operation to torch.
    """
    bias = w_hh.new_zeros(w_hh.shape[:2]) if b_hh is None else b_hh
    take = _gru if steps is None else steps
    outputs, *_ = take(projected(inputs, w_ih, b_ih), *states, w_hh, bias)
    return outputs, outputs[:, -1]


def lstm(
    inputs: Tensor,
    states: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of `torch.lstm` of one layer and direction, the last of them and the last cell state."""
    bias = None if b_ih is None or b_hh is None else b_ih + b_hh
    outputs, cells, *_ = _lstm(projected(inputs, w_ih, bias), *states, w_hh)
    return outputs, outputs[:, -1], cells[:, -1]


def rnn(
    inputs: Tensor,
    states: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of `torch.rnn_tanh` or `torch.rnn_relu` of one layer and direction, and the last of them."""
    bias = None if b_ih is None or b_hh is None else b_ih + b_hh
    outputs = _rnn(projected(inputs, w_ih, bias), *states, w_hh, relu)
    return outputs, outputs[:, -1]


@torch.library.custom_op("fedtorch::gru", mutates_args=())
def _gru(added: Tensor, h: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (outputs, gates, what the reset gate multiplies)."""
    if (program := _cells_program.library(added, h, w, bias)) is not None:
        return _cells_program.gru(program, added, h, w, bias)
    size, gates = h.shape[-1], torch.empty_like(added)
    outputs, hidden = (added.new_empty(*added.shape[:-1], size) for _ in range(2))
    before = h
    for add, gate, kept, after in _steps(added, gates, hidden, outputs):
        product = torch.baddbmm(bias[:, None], before, w.mT)
        decisions, new = gate.split((2 * size, size), -1)
        torch.add(add[..., : 2 * size], product[..., : 2 * size], out=decisions).sigmoid_()
        kept.copy_(product[..., 2 * size :])
        torch.addcmul(add[..., 2 * size :], decisions[..., :size], kept, out=new)
        _tanh(new, new)
        before = torch.lerp(new, before, decisions[..., size:], out=after)
    return outputs, gates, hidden


@torch.library.custom_op("fedtorch::gru_backward", mutates_args=())
def _gru_backward(
    d_outputs: Tensor, h: Tensor, w: Tensor, outputs: Tensor, gates: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of what `_gru` takes."""
    if (program := _cells_program.library(d_outputs, h, w, gates)) is not None:
        return gru_gradients(program, d_outputs, h, w, outputs, gates, hidden)
    size, before = h.shape[-1], _shifted(h, outputs)
    reset, update, new = gates.split(size, -1)
    slope = (1 - new.square()).mul_(1 - update)
    d_gates = torch.empty_like(gates)  # first the derivatives of the state by the gates, then those of the loss
    d_reset, d_update, d_new = d_gates.split(size, -1)
    torch.mul(slope, reset, out=d_new)
    torch.mul(d_new, hidden, out=d_reset).mul_(1 - reset)
    torch.sub(before, new, out=d_update).mul_(update).mul_(1 - update)
    d_states, d_before = d_outputs.clone(memory_format=torch.contiguous_format), torch.zeros_like(h)
    for d, d_gate, z in _steps(d_states, d_gates, update, back=True):
        d.add_(d_before)
        d_gate.unflatten(-1, (3, size)).mul_(d.unsqueeze(-2))
        d_before = torch.baddbmm(d * z, d_gate, w)
    d_w, d_bias = _weight_gradient(d_gates, before), d_gates.sum((1, 2))
    torch.mul(slope, d_states, out=d_new)
    return d_gates, d_before, d_w, d_bias


@torch.library.custom_op("fedtorch::lstm", mutates_args=())
def _lstm(added: Tensor, h: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (outputs, cells, gates, tanh of the cells)."""
    if (program := _cells_program.library(added, h, c, w)) is not None:
        return _cells_program.lstm(program, added, h, c, w)
    size, gates = h.shape[-1], torch.empty_like(added)
    outputs, cells, squashed = (added.new_empty(*added.shape[:-1], size) for _ in range(3))
    for add, gate, h_after, c_after, tanh_c in _steps(added, gates, outputs, cells, squashed):
        torch.add(add, torch.bmm(h, w.mT), out=gate)
        write, keep, new, show = gate.split(size, -1)
        new.mul_(2)
        gate.sigmoid_()
        new.mul_(2).sub_(1)  # the tanh
        c = torch.mul(keep, c, out=c_after).addcmul_(write, new)
        h = torch.mul(show, _tanh(c, tanh_c), out=h_after)
    return outputs, cells, gates, squashed


@torch.library.custom_op("fedtorch::lstm_backward", mutates_args=())
def _lstm_backward(
    d_outputs: Tensor,
    d_cells: Tensor | None,
    h: Tensor,
    c: Tensor,
    w: Tensor,
    outputs: Tensor,
    cells: Tensor,
    gates: Tensor,
    squashed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of what `_lstm` takes; cells without one of their own have none."""
    if (program := _cells_program.library(d_outputs, h, c, w, gates)) is not None:
        back = _cells_program.lstm_backward(program, d_outputs, d_cells, h, c, w, cells, gates, squashed)
        return *back, _weight_gradient(back[0], _shifted(h, outputs))
    size, d_cells = h.shape[-1], torch.zeros_like(cells) if d_cells is None else d_cells
    write, keep, new, show = gates.split(size, -1)
    d_gates = torch.empty_like(gates)  # first the derivatives of cells and states, then those of the loss
    d_write, d_keep, d_new, d_show = d_gates.split(size, -1)
    torch.mul(write, new, out=d_write).mul_(1 - write)
    torch.mul(_shifted(c, cells), keep, out=d_keep).mul_(1 - keep)
    torch.mul(write, 1 - new.square(), out=d_new)
    torch.mul(squashed, show, out=d_show).mul_(1 - show)
    slope = (1 - squashed.square()).mul_(show)
    d_h, d_c = torch.zeros_like(h), torch.zeros_like(c)
    for d_output, d_cell, d_gate, slope_c, kept in _steps(d_outputs, d_cells, d_gates, slope, keep, back=True):
        d = d_output + d_h
        d_c.add_(d_cell).addcmul_(d, slope_c)
        d_gate[..., : 3 * size].unflatten(-1, (3, size)).mul_(d_c.unsqueeze(-2))
        d_gate[..., 3 * size :].mul_(d)
        d_c.mul_(kept)
        d_h = torch.bmm(d_gate, w)
    return d_gates, d_h, d_c, _weight_gradient(d_gates, _shifted(h, outputs))


@torch.library.custom_op("fedtorch::rnn", mutates_args=())
def _rnn(added: Tensor, h: Tensor, w: Tensor, relu: bool) -> Tensor:
    """Return the outputs."""
    outputs = torch.empty_like(added)
    for add, output in _steps(added, outputs):
        torch.add(add, torch.bmm(h, w.mT), out=output)
        h = output.relu_() if relu else _tanh(output, output)
    return outputs


@torch.library.custom_op("fedtorch::rnn_backward", mutates_args=())
def _rnn_backward(
    d_outputs: Tensor, h: Tensor, w: Tensor, relu: bool, outputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of what `_rnn` takes."""
    d_gates = (outputs > 0).to(outputs.dtype) if relu else 1 - outputs.square()
    d_h = torch.zeros_like(h)
    for d_output, d_gate in _steps(d_outputs, d_gates, back=True):
        d_gate.mul_(d_output + d_h)
        d_h = torch.bmm(d_gate, w)
    return d_gates, d_h, _weight_gradient(d_gates, _shifted(h, outputs))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save all that the backward pass of an operation takes besides the gradients of its results."""
    _, *rest = inputs
    ctx.set_materialize_grads(False)
    results = output if isinstance(output, tuple) else (output,)
    ctx.plain = [value for value in rest if not isinstance(value, Tensor)]
    ctx.save_for_backward(*(value for value in rest if isinstance(value, Tensor)), *results)


def _gru_gradients(ctx: Any, d_outputs: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    h, w, _, outputs, gates, hidden = ctx.saved_tensors
    return _gru_backward(_or_zeros(d_outputs, outputs), h, w, outputs, gates, hidden)


def _lstm_gradients(ctx: Any, d_outputs: Tensor | None, d_cells: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    h, c, w, outputs, *others = ctx.saved_tensors
    return _lstm_backward(_or_zeros(d_outputs, outputs), d_cells, h, c, w, outputs, *others)


def _rnn_gradients(ctx: Any, d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    h, w, outputs = ctx.saved_tensors
    return *_rnn_backward(_or_zeros(d_outputs, outputs), h, w, *ctx.plain, outputs), None


_gru.register_autograd(_gru_gradients, setup_context=_keep)
_lstm.register_autograd(_lstm_gradients, setup_context=_keep)
_rnn.register_autograd(_rnn_gradients, setup_context=_keep)


def projected(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what inputs `(K, T, B, I)` add to the gates of all steps, `(K, T, B, GH)`."""
    rows = inputs.flatten(1, 2)
    product = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
    return product.unflatten(1, inputs.shape[1:3]).to(weight.dtype)


def _tanh(values: Tensor, out: Tensor) -> Tensor:
    """The tanh by way of the sigmoid, which torch evaluates ten times as fast; it rounds as a number near one."""
    return torch.mul(values, 2, out=out).sigmoid_().mul_(2).sub_(1)


def _steps(*each: Tensor, back: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """Return the steps of tensors `(K, T, ...)`."""
    return zip(*(tensor.unbind(1)[:: -1 if back else 1] for tensor in each))


def _shifted(first: Tensor, after: Tensor) -> Tensor:
    """Return the states `(K, T, B, H)` before each step."""
    return torch.cat([first[:, None], after[:, :-1]], 1)


def _weight_gradient(d_gates: Tensor, rows: Tensor) -> Tensor:
    """Return the gradient of weights that multiply `rows` of all steps."""
    return torch.bmm(d_gates.flatten(1, 2).mT, rows.flatten(1, 2))


def gru_gradients(
    program: Any, d_outputs: Tensor, h: Tensor, w: Tensor, outputs: Tensor, gates: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `_gru_backward` does, by the program."""
    d_gates, d_new, d_h = _cells_program.gru_backward(program, d_outputs, h, w, outputs, gates, hidden)
    d_w, d_bias = _weight_gradient(d_gates, _shifted(h, outputs)), d_gates.sum((1, 2))
    d_gates[..., 2 * h.shape[-1] :] = d_new
    return d_gates, d_h, d_w, d_bias


def _or_zeros(gradient: Tensor | None, value: Tensor) -> Tensor:
    return torch.zeros_like(value) if gradient is None else gradient
