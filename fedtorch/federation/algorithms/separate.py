"""Training without exchange: every client on its own, the baseline, and all rows in one place, the reference."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from fedtorch.federation.algorithm import Algorithm, LocalSolver, Reply, check_solver, solved_by
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree


class _State(NamedTuple):
    """State of a client; leaves `(K, ...)`."""

    parameters: dict[str, Tensor]
    solver: Tree


def separate(local: LocalSolver) -> Algorithm:
    """Build separate training: each client trains its own model from the common start; nothing is sent.

    Args:
        local: solver of a client's own problem; a round is one call.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(1), torch.tensor([y])) for y in (1.0, 3.0)])
        >>> run = ft.run(ft.separate(ft.least_squares(torch.nn.Linear(1, 1, bias=False))), ft.InProcess(data), rounds=1)
        >>> run.tensors()["weight"].flatten().round(decimals=3), run.bytes_up
        (tensor([1., 3.]), 0)
    """

    check_solver(local)

    def client(inbox: Tree, state: _State, data: Any, turn: Turn) -> Reply:
        solved = local.solve(state.parameters, state.solver, data, None, turn)
        return Reply({}, _State(solved.parameters, solved.state), solved.info)

    return Algorithm(
        init=lambda parameters, clients: ({}, _State(parameters, local.init(parameters))),
        outbox=lambda server: server,
        client=client,
        server=lambda server, aggregate, key: server,
        model=lambda inbox, state: local.tensors(state.parameters, state.solver),
        prepare=local.prepare,
        **solved_by(local, algorithm="separate"),
    )


def pooled(local: LocalSolver) -> Algorithm:
    """Build ordinary training on `data.pool()`, one client with the rows of all. Nothing is sent.

    Args:
        local: solver of the pooled problem; a round is one call.

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
