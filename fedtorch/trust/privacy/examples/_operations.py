"""Operations whose gradients of single examples `torch.vmap(torch.vmap(torch.func.grad(…)))` cannot compute.

Torch's recurrent layers write gates in place, which fails if the examples share a state but not the gates. Its
derivative of `prelu` confuses the dimensions of two nested maps over weights. Inside `ExampleOperations` both are
replaced by formulas of elementwise operations and products; modules and `torch.vmap` are not changed.

>>> import torch
>>> weights, x = torch.tensor([[0.5], [0.25]]), -torch.ones(2, 3, 1)  # of two clients, with three examples each
>>> one = lambda weight, row: torch.prelu(row[None], weight).sum()
>>> with ExampleOperations():
...     torch.vmap(torch.vmap(torch.func.grad(one), (None, 0)))(weights, x).squeeze(-1)
tensor([[-1., -1., -1.],
        [-1., -1., -1.]])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedtorch.stacked_layers.recurrent import CELLS

# (inputs' part of the gates (B, GH), states (B, H) each, w_hh, b_hh, a projection or None) -> states
Cell = Callable[[Tensor, Sequence[Tensor], Tensor, Tensor | None, Tensor | None], Sequence[Tensor]]


class ExampleOperations(TorchFunctionMode):
    """A context in which recurrent layers, their cells and `prelu` have gradients under several `torch.vmap`.

    Packed sequences use torch's own operation.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """Compute `torch.prelu`: x where it is positive, and the weight of its channel times x elsewhere."""
    channels = input.shape[1] if input.ndim > 1 else 1
    if weight.numel() not in (1, channels):
        return torch.prelu(input, weight)  # raises torch's own error
    weight = weight.reshape(-1, *[1] * (input.ndim - 2)) if weight.numel() > 1 else weight.reshape(())
    positive = input > 0
    return torch.where(positive, input, weight * torch.where(positive, 0.0, input))  # no product with infinity


def _gru(gates: Tensor, states: Sequence[Tensor], w: Tensor, b: Tensor | None, _: Tensor | None) -> list[Tensor]:
    (h,) = states
    resets, updates, news = gates.chunk(3, -1)
    reset, update, new = F.linear(h, w, b).chunk(3, -1)
    new = torch.tanh(news + torch.sigmoid(resets + reset) * new)
    return [new + torch.sigmoid(updates + update) * (h - new)]


def _lstm(
    gates: Tensor, states: Sequence[Tensor], w: Tensor, b: Tensor | None, projection: Tensor | None
) -> list[Tensor]:
    h, c = states
    let_in, forget, new, let_out = (gates + F.linear(h, w, b)).chunk(4, -1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(let_in) * torch.tanh(new)
    h = torch.sigmoid(let_out) * torch.tanh(c)
    return [h if projection is None else F.linear(h, projection), c]


def _rnn(
    activation: Callable[[Tensor], Tensor],
    gates: Tensor,
    states: Sequence[Tensor],
    w: Tensor,
    b: Tensor | None,
    _: Tensor | None,
) -> list[Tensor]:
    return [activation(gates + F.linear(states[0], w, b))]


def _layers(
    cell: Cell,
    original: Callable[..., Any],
    input: Tensor,
    before: Any,
    weights: Any,
    biases: Any,
    *settings: Any,
) -> tuple[Tensor, ...]:
    """Return (outputs, last states...) of layers and directions, like `torch.gru`."""
    if isinstance(weights, Tensor):  # packed sequences, whose second argument is the batch sizes
        result: tuple[Tensor, ...] = original(input, before, weights, biases, *settings)
        return result
    layers, dropout, train, bidirectional, batch_first = settings
    states = [before] if isinstance(before, Tensor) else before  # (layers, B, H) each
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    last, outputs = [], input.transpose(0, 1) if batch_first else input
    for layer in range(layers):
        sides = []
        for i in range(layer * directions, (layer + 1) * directions):
            w_ih, w_hh, *others = weights[each * i : each * (i + 1)]
            b_ih, b_hh = others[:2] if biases else (None, None)
            projection = others[-1] if each % 2 else None
            gates, side = F.linear(outputs, w_ih, b_ih), []
            now: Sequence[Tensor] = [state[i] for state in states]
            for gate in gates.flip(0) if i % directions else gates:
                now = cell(gate, now, w_hh, b_hh, projection)
                side.append(now[0])
            sides.append(torch.stack(side[::-1] if i % directions else side))
            last.append(now)
        outputs = torch.cat(sides, -1)
        if dropout and train and layer + 1 < layers:  # an example's mask is the same in a batch and alone
            outputs = torch.dropout(outputs.transpose(0, 1), dropout, True).transpose(0, 1)
    return outputs.transpose(0, 1) if batch_first else outputs, *(torch.stack(ends) for ends in zip(*last))


_CELLS: dict[str, Cell] = {
    "gru": _gru,
    "lstm": _lstm,
    "rnn_tanh": partial(_rnn, torch.tanh),
    "rnn_relu": partial(_rnn, torch.relu),
}
_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.prelu: prelu,
    Tensor.prelu: prelu,
    **{getattr(torch, name): partial(_layers, cell, getattr(torch, name)) for name, cell in _CELLS.items()},
    **CELLS,
}
