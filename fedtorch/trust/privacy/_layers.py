r"""Linear layers and convolutions of a module, and what their examples' gradients are without making them.

A layer with inputs a and gradients g of its outputs has the gradient Σ_t g_t a_tᵀ over an example's positions t, of
norm ‖Σ_t g_t a_tᵀ‖² = Σ_st (a_s·a_t)(g_s·g_t). The positions of a convolution are those of its outputs, and a_t is the
patch of the inputs that it sees from there. With many positions T the gradient of p outputs by d inputs is made after
all, where 2T² exceeds p·d, and thrown away again.

Sources: Goodfellow (2015), "Efficient per-example gradient computations", for one position; Bu, Mao and Xu (2022),
"Scalable and efficient training of large convolutional neural networks with differential privacy", section 3, for
convolutions and the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Layer:
    """A layer, the names of what is trained in it, and its parts by position.

    Args:
        module: the layer.
        weight: name.
        bias: name, None without one.
        inputs: what went in `(K, B, ...)` -> a `(K, B, T, d)`.
        outputs: gradients of what came out `(K, B, ...)` -> g `(K, B, T, p)`.
    """

    def __init__(
        self,
        module: nn.Module,
        weight: str,
        bias: str | None,
        inputs: Callable[[Tensor], Tensor],
        outputs: Callable[[Tensor], Tensor],
    ) -> None:
        self.module, self.weight, self.bias, self.inputs, self.outputs = module, weight, bias, inputs, outputs
        self.shape = module.get_parameter("weight").shape


def linear_layers(module: nn.Module, tensors: Sequence[str]) -> list[Layer] | None:
    """The layers of which `tensors` are the weights and biases; None unless all are, and each in one layer only."""
    names = {id(tensor): name for name, tensor in zip(tensors, map(dict(module.named_parameters()).get, tensors))}
    found: list[Layer] = []
    for part in module.modules():
        own = [parameter for parameter in part.parameters(recurse=False) if id(parameter) in names]
        ways = _ways(part)
        if ways is not None and len(own) == 1 + (part.bias is not None):
            bias = None if part.bias is None else names[id(part.bias)]
            found.append(Layer(part, names[id(part.weight)], bias, *ways))
        elif own:
            return None
    covered = [name for layer in found for name in (layer.weight, layer.bias) if name is not None]
    return found if sorted(covered) == sorted(tensors) else None


def _ways(part: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None:
    """How a layer's inputs and outputs go by position; None for other modules than these layers."""
    if type(part) is nn.Linear:
        return positions, positions
    if isinstance(part, nn.Conv1d | nn.Conv2d) and type(part) in (nn.Conv1d, nn.Conv2d):
        plain = part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
        return (partial(patches, part), pixels) if plain else None
    return None


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


def patches(layer: nn.Conv1d | nn.Conv2d, value: Tensor) -> Tensor:
    """Inputs `(K, B, C, ...)` of a convolution as what each of its outputs sees, `(K, B, T, C · kernel)`."""
    images, line = value.flatten(0, 1), len(layer.kernel_size) == 1
    settings: list[Any] = [layer.kernel_size, layer.dilation, layer.padding, layer.stride]
    if line:
        images, settings = images[:, :, None], [(own, *side) for own, side in zip((1, 1, 0, 1), settings)]
    return nn.functional.unfold(images, *settings).mT.unflatten(0, value.shape[:2])


def pixels(value: Tensor) -> Tensor:
    """Gradients of a convolution's outputs `(K, B, C, ...)` as `(K, B, T, C)`."""
    return value.flatten(3).mT


def ghost_squares(a: Tensor, g: Tensor, bias: bool) -> Tensor:
    """‖Σ_t g_t a_tᵀ‖², and that of the bias Σ_t g_t, of every example, `(K, B)` float64."""
    count = a.shape[2]
    if count == 1:
        left, right = (x.square().sum((2, 3)).to(torch.float64) for x in (a, g))
        return (left + bias) * right
    if 2 * count**2 > a.shape[3] * g.shape[3]:
        squares = (g.mT @ a).square().sum((2, 3)).to(torch.float64)
    else:
        a, g = a.to(torch.float64), g.to(torch.float64)  # products of positions may cancel
        squares = ((a @ a.mT) * (g @ g.mT)).sum((2, 3)).clamp(min=0)
    return squares + g.sum(2).square().sum(2) if bias else squares
