"""Rules by which torch's optimisers turn slopes into steps, as values: for loops over steps, and for programs.

Plain SGD, θ − η s, is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Momentum(NamedTuple):
    """The momentum of `torch.optim.SGD`."""

    momentum: float
    dampening: float = 0.0
    nesterov: bool = False

    def step(self, theta: Tensor, slope: Tensor, moments: Sequence[Tensor], number: int, lr: float) -> None:
        """Take step number `number`, the first being 0, in place."""
        (mean,) = moments
        mean.mul_(self.momentum).add_(slope, alpha=1 - self.dampening if number else 1)
        theta.add_(slope.add(mean, alpha=self.momentum) if self.nesterov else mean, alpha=-lr)


class Adam(NamedTuple):
    """`torch.optim.Adam`, and with `decay` per unit of the learning rate `AdamW`."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.0

    def step(self, theta: Tensor, slope: Tensor, moments: Sequence[Tensor], number: int, lr: float) -> None:
        """Take step number `number`, the first being 0, in place."""
        size, root, keep = self.factors(torch.tensor([number]), lr)[0].tolist()
        mean, square = moments
        mean.lerp_(slope, 1 - self.betas[0])
        square.mul_(self.betas[1]).addcmul_(slope, slope, value=1 - self.betas[1])
        theta.mul_(keep).addcdiv_(mean, (square.sqrt() / root).add_(self.eps), value=-size)

    def factors(self, numbers: Tensor, lr: float) -> Tensor:
        """Return the step sizes `(T,)`, roots of the correction of squares and factors of θ, `(T, 3)`."""
        first, second = (1 - beta ** (numbers.double() + 1) for beta in self.betas)
        return torch.stack([lr / first, second.sqrt(), torch.full_like(first, 1 - lr * self.decay)], 1)


Rule = Momentum | Adam


def moments_of(rule: Rule | None) -> int:
    """Return the number of moments that a rule stores for every parameter."""
    return 0 if rule is None else 1 if isinstance(rule, Momentum) else 2


def rates_of(rule: Rule | None, lr: float, total: Tensor) -> Tensor:
    """Return `Adam.factors` of the most steps of a client, or one row `(1, 3)` of stride 0, which all steps share."""
    if isinstance(rule, Adam):
        return rule.factors(torch.arange(int(total.max()) if len(total) else 0), lr)
    return torch.tensor([lr, 1.0, 1.0], dtype=torch.float64).expand(1, 3).as_strided((1, 3), (0, 1))
