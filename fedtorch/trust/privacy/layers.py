"""Linear layers of a module, and what their examples' gradients are without making them.

A layer with inputs a and gradients g of its outputs has the gradient Σ_t g_t a_tᵀ over an example's positions t, of
norm ‖Σ_t g_t a_tᵀ‖² = Σ_st (a_s·a_t)(g_s·g_t); for one position Goodfellow (2015), "Efficient per-example gradient
computations".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Layer:
    """A linear layer, and the names of what is trained in it."""

    def __init__(self, module: nn.Linear, weight: str, bias: str | None) -> None:
        self.module, self.weight, self.bias = module, weight, bias


def linear_layers(module: nn.Module, tensors: Sequence[str]) -> list[Layer] | None:
    """The layers of which `tensors` are the weights and biases; None unless all are, and each in one layer only."""
    names = {id(tensor): name for name, tensor in zip(tensors, map(dict(module.named_parameters()).get, tensors))}
    found: list[Layer] = []
    for part in module.modules():
        own = [parameter for parameter in part.parameters(recurse=False) if id(parameter) in names]
        if type(part) is nn.Linear and len(own) == 1 + (part.bias is not None):
            found.append(Layer(part, names[id(part.weight)], None if part.bias is None else names[id(part.bias)]))
        elif own:
            return None
    covered = [name for layer in found for name in (layer.weight, layer.bias) if name is not None]
    return found if sorted(covered) == sorted(tensors) else None


@contextmanager
def recorded(layers: Sequence[Layer], moves: Sequence[Tensor] | None) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collects (inputs, outputs) of the layers, in their order; outputs are moved by `moves`.

    Raises:
        RuntimeError: on leaving, if a layer was not called exactly once.
    """
    calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]

    def hook(number: int) -> Callable[..., Any]:
        def see(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            calls[number].append((inputs[0], output))
            return output if moves is None else output + moves[number]

        return see

    handles = [layer.module.register_forward_hook(hook(i)) for i, layer in enumerate(layers)]
    seen: list[tuple[Tensor, Tensor]] = []
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    if any(len(each) != 1 for each in calls):
        raise RuntimeError("Expected every linear layer to be called once in a loss, but some are not")
    seen.extend(each[0] for each in calls)


def positions(value: Tensor) -> Tensor:
    """`(K, B, ..., d)` as `(K, B, T, d)`."""
    return value.flatten(2, -2) if value.ndim > 3 else value[:, :, None]


def ghost_squares(a: Tensor, g: Tensor, bias: bool) -> Tensor:
    """‖Σ_t g_t a_tᵀ‖², and that of the bias Σ_t g_t, of every example, `(K, B)` float64."""
    if a.shape[2] == 1:
        left, right = (x.square().sum((2, 3)).to(torch.float64) for x in (a, g))
        return (left + bias) * right
    a, g = a.to(torch.float64), g.to(torch.float64)  # positions may cancel
    squares = ((a @ a.mT) * (g @ g.mT)).sum((2, 3)).clamp(min=0)
    return squares + g.sum(2).square().sum(2) if bias else squares
