"""Hamiltonian Monte Carlo of many chains at once, an oracle that needs nothing but a log density.

Source: Neal (2011), "MCMC using Hamiltonian dynamics"; the masses are of the chains' own draws while they warm up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_ACCEPTED = 0.8  # what the length of steps aims at
_STEPS = (6, 24)  # fewest and most of a trajectory


class Draws(NamedTuple):
    """What chains have drawn, and how well they agree."""

    values: Tensor  # (T, C, p)

    @property
    def flat(self) -> Tensor:
        """Return the draws of all chains, `(T C, p)`."""
        return self.values.flatten(0, 1)

    @property
    def errors(self) -> Tensor:
        """Return the standard errors of the means, from how far chains' own means are apart, `(p,)`."""
        return self.values.mean(0).std(0) / self.values.shape[1] ** 0.5


def draws(log_density: Callable[[Tensor], Tensor], start: Tensor, *, warm: int, kept: int, seed: int = 0) -> Draws:
    """Return draws of chains that begin at `start` `(C, p)`, as many rounds `kept` after as many to warm up.

    >>> import torch
    >>> found = draws(lambda x: -0.5 * (x / torch.tensor([1.0, 5.0])).square().sum(1), torch.zeros(64, 2).double(),
    ...               warm=200, kept=200)
    >>> found.flat.std(0).round(decimals=0)
    tensor([1., 5.], dtype=torch.float64)
    """
    generator = torch.Generator().manual_seed(seed)
    at, (value, slope) = start.clone(), _sloped(log_density, start)
    size, spread, held = 0.1, torch.ones_like(start[0]), list[Tensor]()
    for i in range(warm + kept):
        steps = int(torch.randint(*_STEPS, (), generator=generator))
        push = torch.randn(start.shape, generator=generator, dtype=start.dtype)
        energy = value - 0.5 * push.square().sum(1)
        new, new_value, new_slope = at, value, slope
        for _ in range(steps):
            push = push + 0.5 * size * spread * new_slope
            new = new + size * spread * push
            new_value, new_slope = _sloped(log_density, new)
            push = push + 0.5 * size * spread * new_slope
        ratio = (new_value - 0.5 * push.square().sum(1) - energy).nan_to_num(nan=-torch.inf).clamp(max=0)
        taken = torch.rand(ratio.shape, generator=generator, dtype=ratio.dtype).log() < ratio
        at, slope = torch.where(taken[:, None], new, at), torch.where(taken[:, None], new_slope, slope)
        value = torch.where(taken, new_value, value)
        if i < warm:
            size *= float(torch.as_tensor((ratio.exp().mean() - _ACCEPTED) * min(1.0, 5 / (1 + i) ** 0.5)).exp())
            if i % 50 == 49:  # chains have spread over what their draws are masses of
                spread = at.std(0)
        else:
            held.append(at)
    return Draws(torch.stack(held))


def _sloped(log_density: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    at = at.detach().requires_grad_()
    value = log_density(at)
    (slope,) = torch.autograd.grad(value.sum(), at)
    return value.detach(), slope.nan_to_num(0.0)
