"""Draws from densities that have a base density to start from: tempered sequential Monte Carlo, many densities at once.

Draws of the base are weighted by gain^δ, resampled and moved, until the exponents δ add up to one. Moves go along
differences of two other draws (ter Braak 2006, "A Markov chain Monte Carlo version of the genetic algorithm
differential evolution"), so they have the density's own scales and lead from one mode to another. Every density has its
own exponents and the same random numbers, so that its draws do not depend on the others'.

Source: Del Moral, Doucet and Jasra (2006), "Sequential Monte Carlo samplers"; exponents by bisection as in Jasra et
al. (2011), "Inference for Lévy-driven stochastic volatility models via adaptive sequential Monte Carlo".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtorch import random

_LEFT = 0.5  # part of the draws that a step's weights leave effective
_MOVES, _LAST_MOVES = 4, 12


def draws(
    base: Callable[[Tensor], Tensor], gain: Callable[[Tensor], Tensor], start: Tensor, densities: int, key: Tensor
) -> Tensor:
    """Return equally weighted draws `(K, S, D)` from each density proportional to base · exp(gain).

    Args:
        base: `(K, S, D)` -> log-density up to a constant, `(K, S)`.
        gain: `(K, S, D)` -> `(K, S)`; values that are not finite count as −∞.
        start: draws of the base `(S, D)`.
        densities: the number K.
        key: random key of the numbers.
    """
    place = start.expand(densities, *start.shape)
    value = _finite(gain(place))
    exponent, step = value.new_zeros(densities), 0
    key, last_key = random.split(key, 2)
    while bool((exponent < 1).any()):
        moving = exponent < 1
        rise = _rise(value, exponent)
        chosen = _resample((rise[:, None] * value).softmax(-1))
        place, value = _take(place, chosen), value.gather(1, chosen)
        exponent = exponent + rise
        place, value = _moved(base, gain, place, value, exponent, moving, random.fold_in(key, step), _MOVES)
        step += 1
    every = torch.ones_like(exponent, dtype=torch.bool)
    return _moved(base, gain, place, value, exponent, every, last_key, _LAST_MOVES)[0]


def _finite(value: Tensor) -> Tensor:
    """Return log-densities, with very small values in place of those that are not finite, so that no such draw
    survives.
    """
    return torch.where(value.isfinite(), value, torch.finfo(value.dtype).min / 4)


def _rise(value: Tensor, exponent: Tensor) -> Tensor:
    """Return by how much exponents rise, at most to one, `(K,)`."""
    high = 1 - exponent
    low, top = torch.zeros_like(exponent), high

    def left(rise: Tensor) -> Tensor:
        return 1 / (rise[:, None] * value).softmax(-1).square().sum(-1)

    least = _LEFT * value.shape[1]
    whole = left(high) >= least
    for _ in range(60):
        rise = (low + top) / 2
        fits = left(rise) >= least
        low, top = torch.where(fits, rise, low), torch.where(fits, top, rise)
    return torch.where(whole, high, low)


def _resample(weight: Tensor) -> Tensor:
    """Return places `(K, S)` of draws by systematic resampling."""
    size = weight.shape[1]
    at = (torch.arange(size, dtype=weight.dtype, device=weight.device) + 0.5) / size
    return torch.searchsorted(weight.cumsum(-1), at.expand_as(weight).contiguous()).clamp(max=size - 1)


def _take(place: Tensor, chosen: Tensor) -> Tensor:
    return place.gather(1, chosen[..., None].expand(-1, -1, place.shape[-1]))


def _moved(
    base: Callable[[Tensor], Tensor], gain: Callable[[Tensor], Tensor], place: Tensor, value: Tensor, exponent: Tensor,
    moving: Tensor, key: Tensor, moves: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return draws and their gains after Metropolis moves of the densities that are `moving`."""
    size, dims = place.shape[1:]
    density = base(place)
    for move in range(moves):
        pair_key, length_key, coin_key = random.split(random.fold_in(key, move), 3)
        order = random.permutation(pair_key, size).to(place.device)
        one, two = order.roll(1), order.roll(2)  # two other draws, each used once
        behind = torch.empty_like(order)
        behind[order] = torch.arange(size, device=order.device)
        # Half of the moves are long ones, of the length that suits normal densities; the others are shorter.
        length = 2.38 / (2 * dims) ** 0.5 * random.uniform(length_key, (size, 1), place.dtype).to(place.device).sqrt()
        proposal = place + length * (place[:, one[behind]] - place[:, two[behind]])
        new_value, new_density = _finite(gain(proposal)), base(proposal)
        gap = new_density - density + exponent[:, None] * (new_value - value)
        coin = random.uniform(coin_key, (size,), place.dtype).to(place.device).log()
        taken = (coin < gap) & moving[:, None]
        place = torch.where(taken[..., None], proposal, place)
        value, density = torch.where(taken, new_value, value), torch.where(taken, new_density, density)
    return place, value
