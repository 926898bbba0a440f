r"""Amortised encoders: what is seen of a row gives the parameters of its latent variable.

One small network serves all rows, so its size does not grow with them; many networks, one for each element of a batch
(folds × models × seeds), are one stack of weights. With activation a,

.. math:: f(v) = A v + c + V a(W v + b), \qquad v \in R^F .

The linear part is exact for Gaussian models; the rest starts at zero, so that a new encoder answers zero.

>>> from fedtorch import random
>>> encoder = perceptron(hidden=8)
>>> weights = encoder.init(random.key(0), 5, 2, 3)
>>> encoder.forward(weights, torch.zeros(5, 4, 2, 100)).shape
torch.Size([5, 4, 3, 100])
>>> sum(w[0].numel() for w in weights.values())
57
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtorch import random

__all__ = ["Encoder", "linear", "perceptron"]


@dataclass(frozen=True)
class Encoder:
    """A network as two functions.

    Attributes:
        init: (key, batch size, inputs F, outputs O, dtype) -> weights by name, `(B, ...)` each.
        forward: (weights, features `(B, M, F, n)`) -> `(B, M, O, n)`.
    """

    init: Callable[..., dict[str, Tensor]]
    forward: Callable[[dict[str, Tensor], Tensor], Tensor]


def linear() -> Encoder:
    """The linear part alone, `A v + c`: exact where the model is Gaussian."""

    def init(
        key: Tensor, batch: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        zeros = torch.zeros(batch, 1, outputs, inputs + 1, dtype=dtype, device=key.device)
        return {"skip": zeros[..., :-1].clone(), "shift": zeros[..., -1:].clone()}

    return Encoder(init, lambda weights, features: _affine(weights["skip"], features, weights["shift"]))


def perceptron(hidden: int = 16, activation: Callable[[Tensor], Tensor] = torch.tanh) -> Encoder:
    """One hidden layer beside the linear part.

    Args:
        hidden: its width.
        activation: elementwise.

    Raises:
        ValueError: no hidden unit.
    """
    if hidden < 1:
        raise ValueError(f"Expected at least 1 hidden unit, but got {hidden}; see `linear` for none")
    straight = linear()

    def init(
        key: Tensor, batch: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        drawn = random.normal(key.reshape(-1), (1, hidden, inputs + 1), dtype).expand(batch, 1, hidden, inputs + 1)
        return {
            **straight.init(key, batch, inputs, outputs, dtype),
            "first": drawn[..., :-1] / inputs**0.5,
            "bias": drawn[..., -1:].clone(),
            "second": torch.zeros(batch, 1, outputs, hidden, dtype=dtype, device=key.device),
        }

    def forward(weights: dict[str, Tensor], features: Tensor) -> Tensor:
        inner = activation(_affine(weights["first"], features, weights["bias"]))
        return straight.forward(weights, features) + weights["second"] @ inner

    return Encoder(init, forward)


def _affine(weight: Tensor, features: Tensor, shift: Tensor) -> Tensor:
    return weight @ features + shift
