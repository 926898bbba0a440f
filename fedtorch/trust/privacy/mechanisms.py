"""Noise on sums: what it is, and which norm of one unit's part has to be bounded for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Mechanism(NamedTuple):
    """A kind of noise."""

    name: str  # in ledgers
    norm: Callable[[Tensor], Tensor]  # numbers (K, D) -> (K,), in which one unit's part is clipped
    draw: Callable[[Tensor], Tensor]  # uniform numbers (2, D) of (0, 1) -> noise (D,) of unit scale
    join: Callable[[int], float]  # how many times the noise of one part each of several parts needs
    losses: Callable[[Any, float, float, float], Any]  # (library, noise, rate, interval) -> privacy-loss distribution


def _box_muller(uniforms: Tensor) -> Tensor:
    return (-2 * uniforms[0].log()).sqrt() * (2 * math.pi * uniforms[1]).cos()


def _laplace(uniforms: Tensor) -> Tensor:
    return torch.where(uniforms[1] < 0.5, uniforms[0].log(), -uniforms[0].log())


def _gaussian_losses(library: Any, noise: float, rate: float, interval: float) -> Any:
    return library.from_gaussian_mechanism(noise, value_discretization_interval=interval, sampling_prob=rate)


def _laplace_losses(library: Any, noise: float, rate: float, interval: float) -> Any:
    return library.from_laplace_mechanism(noise, value_discretization_interval=interval, sampling_prob=rate)


gaussian = Mechanism("gaussian", lambda rows: rows.norm(dim=1), _box_muller, math.sqrt, _gaussian_losses)
laplace = Mechanism("laplace", lambda rows: rows.abs().sum(1), _laplace, float, _laplace_losses)
MECHANISMS = {each.name: each for each in (gaussian, laplace)}
