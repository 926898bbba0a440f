"""Recurrent layers of one client on the CPU, by the program in C that those of many take; see `_cells`.

Torch's GRU is a dozen operations a step and as many derivatives, each of which takes longer to call than to compute.
Here a step is a product and one call. Second derivatives are those of the same operations of torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch.dispatch import choice
from fedtorch.stacked_layers import _cells, _cells_program
from fedtorch.stacked_layers._recurrent import layered

_MOST = 192  # units, beyond which products take most of the time
_FEWEST = 2  # steps


class _Gru(torch.autograd.Function):
    """The outputs `(1, T, B, H)` of a layer; see `_cells`."""

    @staticmethod
    def forward(ctx: Any, added: Tensor, h: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor]:
        ctx.program = program = _cells_program.library(added, h, w, bias)
        if program is None:
            raise RuntimeError("Expected the program in C, which was there before, but got none")
        outputs, gates, kept = _cells_program.gru(program, added, h, w, bias)
        ctx.save_for_backward(added, h, w, bias, outputs, gates, kept)
        return (outputs,)

    @staticmethod
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        added, h, w, bias, outputs, gates, kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody asks for derivatives of these derivatives
            inputs = [value for value, needed in zip((added, h, w, bias), ctx.needs_input_grad) if needed]
            found = iter(torch.autograd.grad(_plain(added, h, w, bias), inputs, d_outputs, create_graph=True))
            return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
        return _cells.gru_gradients(ctx.program, d_outputs, h, w, outputs, gates, kept)


def _plain(added: Tensor, h: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Return the same outputs by operations that are differentiable as often as one likes."""
    outputs = []
    for add in added.unbind(1):
        resets, updates, news = add.chunk(3, -1)
        reset, update, new = torch.baddbmm(bias[:, None], h, w.mT).chunk(3, -1)
        new = (news + (resets + reset).sigmoid() * new).tanh()
        h = torch.lerp(new, h, (updates + update).sigmoid())
        outputs.append(h)
    return torch.stack(outputs, 1)


_cell = partial(_cells.gru, steps=_Gru.apply)


class CellGRU(nn.GRU):
    """A GRU whose steps are a product and a call of the program, where it knows them; else torch's."""

    def forward(self, input: Any, hx: Tensor | None = None) -> Any:
        """Return (outputs, last states), as `torch.nn.GRU` does."""
        if not self._known(input, hx):
            return super().forward(input, hx)
        rows = input.transpose(0, 1) if self.batch_first else input
        directions = 2 if self.bidirectional else 1
        first = rows.new_zeros(directions * self.num_layers, rows.shape[1], self.hidden_size) if hx is None else hx
        weights = [weight[None] for weight in self._tensors()]
        settings = self.bias, self.num_layers, 0.0, self.training, self.bidirectional
        outputs, last = layered(_cell, rows[None], [first[None]], weights, *settings)
        return (outputs[0].transpose(0, 1) if self.batch_first else outputs[0]), last[0]

    def _tensors(self) -> list[Tensor]:
        """Return the weights and biases as they are now, in torch's order."""
        self._update_flat_weights()
        return [weight for weight in self._flat_weights if weight is not None]

    def _known(self, input: Any, hx: Tensor | None) -> bool:
        """Return whether the program takes such inputs, of which nothing else wants to see torch's operations."""
        if self.hidden_size > _MOST or not isinstance(input, Tensor) or input.ndim != 3 or 0 in input.shape:
            return False
        if input.shape[int(self.batch_first)] < _FEWEST:
            return False
        if self.dropout and self.training and self.num_layers > 1:  # draws masks of other shapes
            return False
        tensors = [input, *self._tensors(), *(() if hx is None else (hx,))]
        size = self.num_layers * (2 if self.bidirectional else 1), input.shape[1 - self.batch_first], self.hidden_size
        if input.shape[2] != self.input_size or (hx is not None and hx.shape != size):
            return False
        if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or choice.traced(tensors):
            return False
        return _cells_program.library(*tensors) is not None
