r"""Amortised encoders: what is seen of a row gives the parameters of its latent variable.

One small network serves all rows, so its size does not grow with them; many networks, one for each element of a batch
(folds × models × seeds), are one stack of weights. With

.. math:: f(v) = A v + c + V \tanh(W v + b), \qquad v \in R^F .

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


def perceptron(hidden: int = 16) -> Encoder:
    """One hidden layer of hyperbolic tangents beside the linear part.

    Args:
        hidden: its width.

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
        # tanh(v) = 2σ(2v) − 1, whose σ costs a tenth of tanh on a CPU; the twos go to the weights, which are small.
        inner = _affine(2 * weights["first"], features, 2 * weights["bias"]).sigmoid()
        shift = weights["shift"] - weights["second"].sum(-1, True)
        return _affine(2 * weights["second"], inner, _affine(weights["skip"], features, shift))

    return Encoder(init, forward)


def _affine(weight: Tensor, features: Tensor, shift: Tensor) -> Tensor:
    """Weights `(B, 1, O, F)` on features `(B, M, F, n)`, plus `(B, 1 or M, O, 1 or n)`: one product for all B·M."""
    lead = features.shape[:2]
    stack = lambda value: value.expand(*lead, *value.shape[2:]).flatten(0, 1)
    return torch.baddbmm(stack(shift), stack(weight), stack(features)).unflatten(0, lead)
