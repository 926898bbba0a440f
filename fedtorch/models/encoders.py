r"""Amortised encoders: functions from a row to the parameters of its latent variable.

One small network serves all rows, so its size does not grow with them; many networks, one for each element of a batch
(folds × models × seeds), are one stack of weights. With

.. math:: f(v) = A v + c + V \tanh(W v + b), \qquad v \in R^F .

The linear part is exact for Gaussian models; the rest starts at zero, so that a new encoder returns zero. A family q(z
| θ) gets a function that makes an encoder for given numbers of inputs and outputs, and calls it with its own weights
through `encoded`.

>>> from fedtorch import random
>>> make = perceptron(hidden=8)
>>> weights = make(2, 3).start(random.key(0), 5)
>>> encoded(make, weights, torch.zeros(5, 4, 2, 100), 3).shape
torch.Size([5, 4, 3, 100])
>>> sum(w[0].numel() for w in weights.values())
57
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedtorch import functional, random
from fedtorch._lazy import only

__all__ = ("perceptron",)
__dir__ = only(__all__)


class Encoder(nn.Module):
    """One hidden layer of hyperbolic tangents beside a linear part.

    Its parameters may be a stack, with `(B, 1)` in front.

    Args:
        inputs: F.
        outputs: O.
        hidden: width of the hidden layer; 0 leaves the linear part alone.
    """

    def __init__(self, inputs: int, outputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.skip, self.shift = nn.Parameter(torch.zeros(outputs, inputs)), nn.Parameter(torch.zeros(outputs, 1))
        if hidden:
            self.first, self.bias = nn.Parameter(torch.zeros(hidden, inputs)), nn.Parameter(torch.zeros(hidden, 1))
            self.second = nn.Parameter(torch.zeros(outputs, hidden))

    def start(self, key: Tensor, batch: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return weights `(B, 1, ...)` of a stack with output zero: equal for one key, different for keys `(B,)`."""
        shapes = {name: (batch, 1, *value.shape) for name, value in self.named_parameters()}
        weights = {name: torch.zeros(shape, dtype=dtype, device=key.device) for name, shape in shapes.items()}
        if self.hidden:
            inputs = self.first.shape[1]
            drawn = random.normal(key.reshape(-1), (1, self.hidden, inputs + 1), dtype)
            drawn = drawn.expand(batch, 1, self.hidden, inputs + 1)
            weights |= {"first": drawn[..., :-1] / inputs**0.5, "bias": drawn[..., -1:].clone()}
        return weights

    def forward(self, features: Tensor) -> Tensor:
        """Encode features of rows `(B, M, F, n)` to `(B, M, O, n)`."""
        parameters: Any = self._parameters  # a faster `__getattr__`
        if not self.hidden:
            return _affine(parameters["skip"], features, parameters["shift"])
        # tanh(v) = 2σ(2v) − 1, whose σ costs a tenth of tanh on a CPU; the twos go to the weights, which are small.
        inner = _affine(2 * parameters["first"], features, 2 * parameters["bias"]).sigmoid()
        shift = parameters["shift"] - parameters["second"].sum(-1, True)
        return _affine(2 * parameters["second"], inner, _affine(parameters["skip"], features, shift))


EncoderFactory = Callable[[int, int], Encoder]  # (inputs, outputs) -> an encoder


def affine() -> EncoderFactory:
    """Build encoders with the linear part alone, `A v + c`: exact for Gaussian models."""
    return partial(Encoder, hidden=0)


def perceptron(hidden: int = 16) -> EncoderFactory:
    """Make encoders with a hidden layer of this width.

    Raises:
        ValueError: no hidden unit.
    """
    if hidden < 1:
        raise ValueError(f"Expected at least 1 hidden unit, but got {hidden}; see `affine` for none")
    return partial(Encoder, hidden=hidden)


def encoded(make: EncoderFactory, weights: dict[str, Tensor], features: Tensor, outputs: int) -> Any:
    """Return the outputs of an encoder with these weights, `(B, M, outputs, n)`, or a user's `own_encoders.Laws`.

    Args:
        make: makes the encoder.
        weights: `(B, 1, ...)` each, as from `Encoder.start`.
        features: `(B, M, F, n)`.
        outputs: O.
    """
    module, names, swap = _template(make, features.shape[-2], outputs, threading.get_ident())
    with swap([weights[name] for name in names]):
        return module.forward(features)


@lru_cache(maxsize=256)
def _template(
    make: EncoderFactory, inputs: int, outputs: int, thread: int
) -> tuple[Encoder, list[str], functional.Swap]:
    """Return a module to put weights into; one a thread, because nodes may run side by side."""
    module = make(inputs, outputs)
    names = [name for name, _ in module.named_parameters()]
    return module, names, functional.Swap(module, names)


def _affine(weight: Tensor, features: Tensor, shift: Tensor) -> Tensor:
    """Multiply weights `(B, 1, O, F)` and features `(B, M, F, n)`, and add `(B, 1 or M, O, 1 or n)`, by one product."""
    lead = features.shape[:2]
    stack = lambda value: value.expand(*lead, *value.shape[-2:]).flatten(0, 1)
    return torch.baddbmm(stack(shift), stack(weight), stack(features)).unflatten(0, lead)
