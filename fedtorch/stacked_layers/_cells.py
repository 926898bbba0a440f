"""Recurrent cells of many clients over whole sequences, with their derivatives through time written out.

A step multiplies the states of all clients by their weights in one product. In the backward pass, the derivatives of
the gates are computed for all steps at once, so that a step is a product and a few sums; the gradients of the weights
are one product over all steps. Each pass is one operation to torch: modes that intercept operations, such as
`KeyedRandomness`, and captured steps do not see its steps. Under `torch.vmap` the mapped dimension becomes further
clients, or, if the weights are not mapped over, further sequences.

Shapes of the operations: states `(K, B, H)`, the inputs' part of the gates `(K, T, B, GH)`, weights `(K, GH, H)`,
biases `(K, GH)`, for `K` clients, `T` steps, `B` sequences and `G` gates in torch's order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtorch.stacked_layers._transforms import differentiated

# (inputs `(T, B, I)`, states before, w_ih, w_hh, b_ih, b_hh) -> (outputs `(T, B, H)`, states after...)
Cell = Callable[..., Sequence[Tensor]]
_CACHED = 5 * 2**18  # bytes of weights, about the size of a core's second-level cache


def gru(
    inputs: Tensor,
    states: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of `torch.gru` of one layer and direction, and the last of them."""
    bias = torch.zeros_like(w_hh[:, 0]) if b_hh is None else b_hh
    steps = _gru_by_parts if differentiated() else _gru
    outputs = steps(*_one(projected(inputs, w_ih, b_ih), *states, w_hh, bias))[0][0]
    return outputs, outputs[-1]


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
    steps = _lstm_by_parts if differentiated() else _lstm
    outputs, cells, *_ = steps(*_one(projected(inputs, w_ih, bias), *states, w_hh))
    return outputs[0], outputs[0, -1], cells[0, -1]


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
    steps = _rnn_by_parts if differentiated() else _rnn
    added, state, w = _one(projected(inputs, w_ih, bias), *states, w_hh)
    outputs = steps(added, state, w, relu)[0]
    return outputs, outputs[-1]


def projected(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the inputs' `(T, B, I)` part of the gates of all steps, `(T, B, GH)`."""
    return F.linear(inputs, weight, bias).to(weight.dtype)


def _one(*tensors: Tensor) -> Iterator[Tensor]:
    """Return the tensors as those of one client `(1, ...)`; `torch.vmap` adds more."""
    return (tensor.unsqueeze(0) for tensor in tensors)


def _gru_by_parts(added: Tensor, h: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor]:
    """Return the outputs of `_gru` by differentiable operations, for higher derivatives."""
    outputs = []
    for add in added.unbind(1):
        (resets, updates, news), product = add.chunk(3, -1), h @ w.mT + bias.unsqueeze(1)
        reset, update, new = product.chunk(3, -1)
        new = (news + (resets + reset).sigmoid() * new).tanh()
        h = torch.lerp(new, h, (updates + update).sigmoid())
        outputs.append(h)
    return (torch.stack(outputs, 1),)


def _lstm_by_parts(added: Tensor, h: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs and cells of `_lstm` by differentiable operations, for higher derivatives."""
    outputs, cells = [], []
    for add in added.unbind(1):
        write, keep, new, show = (add + h @ w.mT).chunk(4, -1)
        c = keep.sigmoid() * c + write.sigmoid() * new.tanh()
        h = show.sigmoid() * c.tanh()
        outputs.append(h)
        cells.append(c)
    return torch.stack(outputs, 1), torch.stack(cells, 1)


def _rnn_by_parts(added: Tensor, h: Tensor, w: Tensor, relu: bool) -> Tensor:
    """Return the outputs of `_rnn` by differentiable operations, for higher derivatives."""
    outputs = []
    for add in added.unbind(1):
        h = add + h @ w.mT
        h = h.relu() if relu else h.tanh()
        outputs.append(h)
    return torch.stack(outputs, 1)


def _in_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run steps on as many clients at a time as a processor's cache can store weights `w` of."""
    place = list(inspect.signature(function).parameters).index("w")

    @wraps(function)
    def run(*arguments: Any) -> Any:
        w = arguments[place]
        size = max(2, _CACHED // (w[0].numel() * w.element_size())) if len(w) else 2
        if w.device.type != "cpu" or size >= len(w):
            return function(*arguments)
        count = -(-len(w) // size)
        split = (a.split(size) if isinstance(a, Tensor) else [a] * count for a in arguments)
        parts = [function(*block) for block in zip(*split)]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(torch.cat(each) for each in zip(*parts))

    return run


@torch.library.custom_op("fedtorch::gru", mutates_args=())
@_in_blocks
def _gru(added: Tensor, h: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (outputs, gates, inputs of the reset gate's product)."""
    size, gates = h.shape[-1], torch.empty_like(added)
    outputs, hidden = (added.new_empty(*added.shape[:-1], size) for _ in range(2))
    before = h
    for add, gate, candidate, after in _steps(added, gates, hidden, outputs):
        product = torch.baddbmm(bias[:, None], before, w.mT)
        decisions, new = gate.split((2 * size, size), -1)
        torch.add(add[..., : 2 * size], product[..., : 2 * size], out=decisions).sigmoid_()
        candidate.copy_(product[..., 2 * size :])
        torch.addcmul(add[..., 2 * size :], decisions[..., :size], candidate, out=new)
        _tanh(new, new)
        before = torch.lerp(new, before, decisions[..., size:], out=after)
    return outputs, gates, hidden


@torch.library.custom_op("fedtorch::gru_backward", mutates_args=())
@_in_blocks
def _gru_backward(
    d_outputs: Tensor, h: Tensor, w: Tensor, outputs: Tensor, gates: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the arguments of `_gru`."""
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
@_in_blocks
def _lstm(added: Tensor, h: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (outputs, cells, gates, tanh of the cells)."""
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
@_in_blocks
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
    """Return the gradients of the arguments of `_lstm`; None for cells without gradient."""
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
@_in_blocks
def _rnn(added: Tensor, h: Tensor, w: Tensor, relu: bool) -> Tensor:
    """Return the outputs."""
    outputs = torch.empty_like(added)
    for add, output in _steps(added, outputs):
        torch.add(add, torch.bmm(h, w.mT), out=output)
        h = output.relu_() if relu else _tanh(output, output)
    return outputs


@torch.library.custom_op("fedtorch::rnn_backward", mutates_args=())
@_in_blocks
def _rnn_backward(
    d_outputs: Tensor, h: Tensor, w: Tensor, relu: bool, outputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the arguments of `_rnn`."""
    d_gates = (outputs > 0).to(outputs.dtype) if relu else 1 - outputs.square()
    d_h = torch.zeros_like(h)
    for d_output, d_gate in _steps(d_outputs, d_gates, back=True):
        d_gate.mul_(d_output + d_h)
        d_h = torch.bmm(d_gate, w)
    return d_gates, d_h, _weight_gradient(d_gates, _shifted(h, outputs))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save an operation's inputs and outputs."""
    ctx.set_materialize_grads(False)
    results = output if isinstance(output, tuple) else (output,)
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    ctx.count, ctx.plain = len(tensors), [value for value in inputs if not isinstance(value, Tensor)]
    ctx.save_for_backward(*tensors, *results)


def _gru_gradients(ctx: Any, d_outputs: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    _, h, w, _, outputs, gates, hidden = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _again(ctx, _gru_by_parts, d_outputs)
    return _gru_backward(_or_zeros(d_outputs, outputs), h, w, outputs, gates, hidden)


def _lstm_gradients(ctx: Any, d_outputs: Tensor | None, d_cells: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    _, h, c, w, outputs, *others = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _again(ctx, _lstm_by_parts, d_outputs, d_cells)
    return _lstm_backward(_or_zeros(d_outputs, outputs), d_cells, h, c, w, outputs, *others)


def _rnn_gradients(ctx: Any, d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    _, h, w, outputs = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _again(ctx, lambda *each: (_rnn_by_parts(*each),), d_outputs)
    return *_rnn_backward(_or_zeros(d_outputs, outputs), h, w, *ctx.plain, outputs), None


def _again(ctx: Any, by_parts: Callable[..., tuple[Tensor, ...]], *gradients: Tensor | None) -> tuple[Any, ...]:
    """Return gradients that are differentiable themselves, for the gradient of a gradient."""
    tensors = ctx.saved_tensors[: ctx.count]
    asked = [tensor for tensor, needed in zip(tensors, ctx.needs_input_grad) if needed]
    results = by_parts(*tensors, *ctx.plain)
    given = [_or_zeros(gradient, result) for gradient, result in zip(gradients, results)]
    results_again = iter(torch.autograd.grad(results, asked, given, create_graph=True, allow_unused=True))
    return *(next(results_again) if needed else None for needed in ctx.needs_input_grad[: ctx.count]), *(
        None for _ in ctx.plain
    )


_gru.register_autograd(_gru_gradients, setup_context=_keep)
_lstm.register_autograd(_lstm_gradients, setup_context=_keep)
_rnn.register_autograd(_rnn_gradients, setup_context=_keep)

# Dimension of the sequences in an operation's tensors; None for weights, biases and other arguments.
_ADDED, _STATE = 2, 1
_SEQUENCES: dict[Any, tuple[tuple[int | None, ...], tuple[int | None, ...]]] = {
    _gru: ((_ADDED, _STATE, None, None), (_ADDED, _ADDED, _ADDED)),
    _gru_backward: ((_ADDED, _STATE, None, _ADDED, _ADDED, _ADDED), (_ADDED, _STATE, None, None)),
    _lstm: ((_ADDED, _STATE, _STATE, None), (_ADDED,) * 4),
    _lstm_backward: ((_ADDED, _ADDED, _STATE, _STATE, None, *(_ADDED,) * 4), (_ADDED, _STATE, _STATE, None)),
    _rnn: ((_ADDED, _STATE, None, None), (_ADDED,)),
    _rnn_backward: ((_ADDED, _STATE, None, None, _ADDED), (_ADDED, _STATE, None)),
}


def _mapped(operation: Any, info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    """Return the results of an operation under `torch.vmap`, and their mapped dimensions.

    The gradient of weights is the sum over sequences, so a mapped backward pass treats them as clients.
    """
    inputs, outputs = _SEQUENCES[operation]
    shared = all(dim is None for dim, place in zip(dims, inputs) if place is None) and None not in outputs
    size = info.batch_size
    places = inputs if shared else (0,) * len(inputs)

    def joined(value: Any, dim: int | None, place: int | None) -> Any:
        if not isinstance(value, Tensor) or place is None:
            return value
        whole = value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
        return whole.movedim(0, place).flatten(place, place + 1)

    results = operation(*map(joined, arguments, dims, places))
    where = outputs if shared else (0,) * len(outputs)
    if isinstance(results, Tensor):
        return results.unflatten(where[0], (size, -1)), where[0]
    return tuple(each.unflatten(at, (size, -1)) for each, at in zip(results, where)), where


for _operation in _SEQUENCES:
    _operation.register_vmap(partial(_mapped, _operation))


def _tanh(values: Tensor, out: Tensor) -> Tensor:
    """Compute tanh by the sigmoid, which torch evaluates ten times as fast; rounding is that of a number near one."""
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


def _or_zeros(gradient: Tensor | None, value: Tensor) -> Tensor:
    return torch.zeros_like(value) if gradient is None else gradient
