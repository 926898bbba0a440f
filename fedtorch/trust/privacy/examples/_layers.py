r"""Linear layers and convolutions of a module, and norms of their examples' gradients without forming these.

A layer with inputs a and gradients g of its outputs has the gradient Σ_t g_t a_tᵀ over an example's positions t, of
norm ‖Σ_t g_t a_tᵀ‖² = Σ_st (a_s·a_t)(g_s·g_t). The positions of a convolution are those of its outputs, and a_t is the
patch of inputs at that position. With many positions T, if 2T² exceeds p·d, the gradient of p outputs by d inputs is
formed, and discarded again.

That is the gradient of the loss only if the weight and the bias reach the loss through one call of their layer.
Autograd verifies this in every evaluation. The module holds tensors that require gradients; in the recorded call, and
there only, the layer computes with detached copies of them, to which it adds a tensor of zeros, whose gradient is g. A
path from the tensors to the loss is therefore in the graph exactly if the loss reads them in any other way: a penalty,
a functional call, a view, a second call of the layer, a call inside `torch.func.grad`. The path does not depend on
values: a penalty that is flat here, or has zero gradient, has one. The computation of the recorded call is known,
because the layer is of these very types and computes with the given tensors; users' hooks on it run outside of the
recording, and inputs are copied, because they may be changed in place later.

Sources: Goodfellow (2015), "Efficient per-example gradient computations", for one position; Bu, Mao and Xu (2022),
"Scalable and efficient training of large convolutional neural networks with differential privacy", section 3, for
convolutions and the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import functional


class Layer:
    """A layer, the names of its trained tensors, and its parts by position.

    Args:
        module: the layer.
        names: names of its "weight" and, if it has one, its "bias".
        inputs: the layer's inputs `(K, B, ...)` -> a `(K, B, T, d)`.
        outputs: gradients of the layer's outputs `(K, B, ...)` -> g `(K, B, T, p)`.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[str, str],
        inputs: Callable[[Tensor], Tensor],
        outputs: Callable[[Tensor], Tensor],
    ) -> None:
        self.module, self.names, self.inputs, self.outputs = module, names, inputs, outputs
        self.weight, self.bias = names["weight"], names.get("bias")
        self.shape = module.get_parameter("weight").shape
        self._swap = functional.Swap(module, list(names))

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether these very tensors are its weight and bias now."""
        return all(self.module._parameters[place] is tensors[name] for place, name in self.names.items())

    def on(self, tensors: Mapping[str, Tensor], value: Tensor) -> Tensor:
        """Return the outputs with these tensors as weight and bias."""
        with self._swap([tensors[name] for name in self.names.values()]):
            return self.plain(value)

    def plain(self, value: Tensor) -> Tensor:
        """Return the outputs with the weight and the bias that it holds."""
        output: Tensor = type(self.module).forward(self.module, value)
        return output


def linear_layers(module: nn.Module, tensors: Sequence[str]) -> list[Layer] | None:
    """Return the layers whose weights and biases `tensors` are; None unless all are, each in one layer only."""
    names = {id(tensor): name for name, tensor in zip(tensors, map(dict(module.named_parameters()).get, tensors))}
    layers: list[Layer] = []
    for part in module.modules():
        places = {place: id(tensor) for place, tensor in part._parameters.items() if tensor is not None}
        ways = _ways(part)
        if (
            ways is not None
            and places.keys() in ({"weight"}, {"weight", "bias"})
            and names.keys() >= {*places.values()}
        ):
            layers.append(Layer(part, {place: names[number] for place, number in places.items()}, *ways))
        elif not names.keys().isdisjoint(places.values()):
            return None
    covered = [name for layer in layers for name in layer.names.values()]
    return layers if sorted(covered) == sorted(tensors) else None


def _ways(part: nn.Module) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None:
    """Return how to lay out a layer's inputs and outputs by position; None for other modules."""
    if not vars(part).keys().isdisjoint({"forward", "_conv_forward"}):
        return None
    if type(part) is nn.Linear:
        return positions, positions
    if isinstance(part, nn.Conv1d | nn.Conv2d) and type(part) in (nn.Conv1d, nn.Conv2d):
        plain = part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
        return (partial(patches, part), partial(pixels, len(part.kernel_size))) if plain else None
    return None


class LayerRecorder:
    """Record one call of each layer; all others compute with the tensors that the module holds.

    Args:
        layers: of the module.
        tensors: the module's tensors, which require gradients.
        detached: the same tensors without gradients.
        zeros: added to the outputs of the layers' calls, by layer index; a layer without zeros, or with zeros of
            another shape, is not recorded.

    Attributes:
        inputs: of the recorded calls, by the layers' indices.
        shapes: of the outputs of all layers' first calls.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        tensors: Mapping[str, Tensor],
        detached: Mapping[str, Tensor],
        zeros: Mapping[int, Tensor],
    ) -> None:
        self._layers, self._tensors, self._detached, self._zeros = layers, tensors, detached, zeros
        self.inputs: dict[int, Tensor] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self._depth = _transforms()

    def _forward(self, number: int, input: Tensor) -> Tensor:
        """Return the function that replaces a layer's `forward`."""
        layer = self._layers[number]
        # Inside a further transform, such as torch.func.grad, the loss depends on the weight by derivatives also.
        recordable = number not in self.shapes and layer.holds(self._tensors) and _transforms() == self._depth
        zeros = self._zeros.get(number)
        output = layer.on(self._detached, input) if recordable and zeros is not None else layer.plain(input)
        if recordable:
            self.shapes[number] = tuple(output.shape)
        if not recordable or zeros is None:
            return output
        if output.shape != zeros.shape:
            return layer.plain(input)
        self.inputs[number] = input.detach().clone()
        return output + zeros.to(output.dtype)

    def __enter__(self) -> LayerRecorder:
        for number, layer in enumerate(self._layers):
            vars(layer.module)["forward"] = partial(self._forward, number)
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self._layers:
            del vars(layer.module)["forward"]


def _transforms() -> int:
    """Return how many transforms of `torch.func` are active."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def positions(value: Tensor) -> Tensor:
    """Return `(K, B, ..., d)` as `(K, B, T, d)`."""
    return value.flatten(2, -2) if value.ndim > 3 else value[:, :, None]


def patches(layer: nn.Conv1d | nn.Conv2d, value: Tensor) -> Tensor:
    """Return the patches at each output position of a convolution's inputs `(K, B, ..., C, *size)`,
    `(K, B, T, C · kernel)`.
    """
    line = len(layer.kernel_size) == 1
    images = value.flatten(0, -3 if line else -4)
    settings: list[Any] = [layer.kernel_size, layer.dilation, layer.padding, layer.stride]
    if line:
        images, settings = images[:, :, None], [(leading, *side) for leading, side in zip((1, 1, 0, 1), settings)]
    seen = nn.functional.unfold(images, *settings).mT
    return seen.reshape(*value.shape[:2], -1, seen.shape[2])


def pixels(dimensions: int, value: Tensor) -> Tensor:
    """Return gradients of a convolution's outputs `(K, B, ..., C, *size)` as `(K, B, T, C)`."""
    flat = value.flatten(-dimensions).mT
    return flat.reshape(*value.shape[:2], -1, flat.shape[-1])


def ghost_squares(a: Tensor, g: Tensor, bias: bool) -> Tensor:
    """Return ‖Σ_t g_t a_tᵀ‖², and that of the bias Σ_t g_t, of every example, `(K, B)` float64.

    A sum over several positions may cancel: the norm then includes a bound on the rounding of that sum.
    """
    count, most = a.shape[2], a.shape[3] * g.shape[3]
    (a, inputs), (g, outputs) = _unit(a), _unit(g)
    of_inputs, of_outputs = (x.square().sum(3).to(torch.float64) for x in (a, g))  # (K, B, T)
    if count == 1:
        by_weight, by_bias = (of_inputs * of_outputs)[:, :, 0], of_outputs[:, :, 0]
    else:
        rounding, spread = count * torch.finfo(a.dtype).eps, (of_inputs * of_outputs).sqrt().sum(2)
        if 2 * count**2 > most:
            squares = (g.mT @ a).to(torch.float64).square().sum((2, 3))
        else:
            wide, high = a.to(torch.float64), g.to(torch.float64)
            squares = ((wide @ wide.mT) * (high @ high.mT)).sum((2, 3)).clamp(min=0)
            squares = squares + count * torch.finfo(torch.float64).eps * spread.square()
        by_weight = (squares.sqrt() + rounding * spread).square()
        by_bias = (g.sum(2).to(torch.float64).norm(dim=2) + rounding * of_outputs.sqrt().sum(2)).square()
    squares = by_weight * (inputs * outputs).square()
    return squares + by_bias * outputs.square() if bias else squares


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each example's numbers `(K, B, T, d)` by the largest, so that squares are in range; also return that."""
    size = x.abs().amax((2, 3))
    size = torch.where(size == 0, 1.0, size)
    return x / size[:, :, None, None], size.to(torch.float64)
