"""Pooled training: the rows of all clients in one place. The reference that a federation is measured against."""

from __future__ import annotations

import dataclasses

from fedtorch.federation.algorithm import Algorithm, LocalSolver
from fedtorch.federation.algorithms.separate import separate
from fedtorch.tree import Tree


def pooled(local: LocalSolver) -> Algorithm:
    """Build ordinary training on `data.pool()`: one client with everybody's rows. Nothing is sent.

    Args:
        local: how the pooled problem is worked on; a round is one call.

    Example:
        >>> import torch, fedtorch as ft
        >>> local = ft.least_squares(torch.nn.Linear(1, 1))
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1)), (torch.zeros(1, 1), torch.zeros(1))])
        >>> population = ft.InProcess(data.pool())
        >>> round = ft.Run(ft.pooled(local), population).step()
        >>> ft.run(ft.pooled(local), ft.InProcess(data)).__next__()
        Traceback (most recent call last):
        ValueError: Expected one client with all rows, but got 2; pool them with data.pool()
    """
    alone = separate(local)

    def init(parameters: Tree, clients: int) -> tuple[Tree, Tree]:
        if clients != 1:
            raise ValueError(f"Expected one client with all rows, but got {clients}; pool them with data.pool()")
        return alone.init(parameters, clients)

    return dataclasses.replace(alone, init=init)
