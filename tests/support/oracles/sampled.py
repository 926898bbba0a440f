"""A sampler that has followed a run."""

from __future__ import annotations

from typing import Any

import fedtorch as ft
from fedtorch.tree import Tree


def sampled(
    algorithm: ft.Algorithm,
    population: Any,
    start: Tree,
    *,
    rounds: int,
    seed: int = 0,
    faults: Any = None,
    **settings: Any,
) -> ft.Sampler:
    """The draws of a run of so many rounds, burn-in included."""
    sampler = ft.Sampler(**settings)
    ft.run(algorithm, population, start, rounds=rounds, seed=seed, faults=faults, record=sampler)
    return sampler
