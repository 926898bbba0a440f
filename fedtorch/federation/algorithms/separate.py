"""Separate training: every client on its own, no exchange. The baseline that a federation has to beat."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fedtorch.federation.algorithm import Algorithm, LocalSolver, Reply, check_solver, solved_by
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree


class _State(NamedTuple):
    """Hold a client's own state; leaves `(K, ...)`."""

    parameters: dict[str, Tensor]
    solver: Tree


def separate(local: LocalSolver) -> Algorithm:
    """Build separate training: each client trains its own model from the common start; nothing is sent.

    Args:
        local: how a client works on its own problem; a round is one call.

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
