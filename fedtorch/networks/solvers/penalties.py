r"""Penalties on the difference of two neighbours' parameters, and their proximal steps.

The proximal operator of a penalty φ with strength t is :math:`\arg\min_s t\,\phi(s) + \tfrac12 \|s - v\|^2`.

>>> import torch
>>> from fedtorch.networks.solvers import norm1, squared
>>> from fedtorch.networks.solvers.penalties import huber, norm2
>>> v, t = torch.tensor([[3.0, 4.0]]), torch.tensor([2.5])
>>> norm2.prox(v, t), norm1.prox(v, t), squared.prox(v, t)
(tensor([[1.5000, 2.0000]]), tensor([[0.5000, 1.5000]]), tensor([[0.5000, 0.6667]]))
>>> huber(1.0).value(torch.tensor([[0.5], [3.0]]))  # ½ 0.5², and 3 − ½
tensor([0.1250, 2.5000])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Penalty(NamedTuple):
    """A convex function of differences, even and zero at zero.

    >>> half = Penalty(value=lambda s: 0.5 * s.square().sum(1), prox=lambda v, t: v / (1 + t)[:, None])
    >>> half.prox(torch.tensor([[3.0]]), torch.tensor([0.5]))
    tensor([[2.]])
    """

    value: Callable[[Tensor], Tensor]  # differences (E, d) -> (E,)
    prox: Callable[[Tensor, Tensor], Tensor]  # (differences (E, d), strengths (E,)) -> (E, d)


def _shrink(v: Tensor, t: Tensor) -> Tensor:
    """Shorten vectors longer than t by t, and set the rest to zero."""
    length = v.norm(dim=1)
    return v * torch.where(length > t, 1 - t / length, 0.0)[:, None]


squared = Penalty(lambda s: s.square().sum(1), lambda v, t: v / (1 + 2 * t)[:, None])
"""‖s‖²: neighbours are alike."""

norm2 = Penalty(lambda s: s.norm(dim=1), _shrink)
"""‖s‖₂: neighbours are equal or not, in all parameters at once: clusters."""

norm1 = Penalty(lambda s: s.abs().sum(1), lambda v, t: v.sign() * (v.abs() - t[:, None]).clamp(min=0))
"""‖s‖₁: each parameter of neighbours is equal or not."""

equal = Penalty(lambda s: torch.where((s == 0).all(1), 0.0, torch.inf).to(s.dtype), lambda v, t: torch.zeros_like(v))
"""Infinite unless s = 0: one model per connected component, whatever the strength; ADMM with it is consensus ADMM."""


def huber(delta: float) -> Penalty:
    """Return ½s² up to |s| = δ and δ|s| − ½δ² beyond, elementwise: large residuals pull with a bounded force.

    Raises:
        ValueError: a δ that is not positive.
    """
    if not delta > 0:
        raise ValueError(f"Expected a positive delta, but got {delta}")

    def value(s: Tensor) -> Tensor:
        far = s.abs()
        return torch.where(far <= delta, 0.5 * s.square(), delta * (far - 0.5 * delta)).sum(1)

    return Penalty(value, lambda v, t: v - t[:, None] * (v / (1 + t[:, None])).clamp(-delta, delta))
