"""Searches by L-BFGS for rows that reproduce an observed message."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.progress import Progress

_NOTHING = 1e-12  # relative squared distance that counts as zero


class Optimum(NamedTuple):
    """The end of a search."""

    point: Tensor
    value: float  # of the objective there


def least(
    objective: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    restarts: int,
    iterations: int,
    seed: int,
) -> Optimum:
    """Return the best result of several searches from normal draws, stopping at the first exact one."""
    lowest = Optimum(torch.zeros(shape, dtype=dtype), torch.inf)
    for restart in range(restarts):
        start = random.normal(random.fold_in(random.key(seed), restart), shape, torch.float64).to(dtype)
        lowest = min(lowest, descended(objective, start, iterations), key=lambda point: point.value)
        if lowest.value < _NOTHING:
            break
    return lowest


def descended(objective: Callable[[Tensor], Tensor], start: Tensor, iterations: int) -> Optimum:
    """Minimise an objective by L-BFGS from `start`, and return the best point."""
    point = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([point], max_iter=iterations, line_search_fn="strong_wolfe",
                                  tolerance_grad=1e-14, tolerance_change=1e-16, history_size=50)  # fmt: skip
    lowest = Optimum(start, torch.inf)

    def evaluate() -> Tensor:
        nonlocal lowest
        optimizer.zero_grad()
        value = objective(point)
        value.backward()
        if float(value.detach()) < lowest.value:
            lowest = Optimum(point.detach().clone(), float(value.detach()))
        shown.update()
        return value

    with Progress("Inversion", unit="evaluation") as shown:
        optimizer.step(evaluate)
    return lowest
