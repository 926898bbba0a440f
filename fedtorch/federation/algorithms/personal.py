r"""Personal layers: some parameters are shared by federated averaging, others never leave their client.

Both parts of θ_k = (shared, personal_k) are trained together; only the change of the shared part is sent.

Source: Arivazhagan et al. (2019), "Federated learning with personalization layers", with the parts chosen by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedtorch import functional
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Reply, solved_by
from fedtorch.federation.algorithms.fedavg import (
    Weight,
    averaged_buffers,
    check_settings,
    checked_weight,
    message,
    proximal,
    rows_weight,
    stepped,
)
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree


class _State(NamedTuple):
    """State of a client; leaves `(K, ...)`."""

    personal: dict[str, Tensor]
    solver: Tree


def personal_layers(
    local: LocalSolver,
    personal: str | Sequence[str],
    *,
    mu: float = 0.0,
    lr: float = 1.0,
    weight: Weight = rows_weight,
) -> Algorithm:
    """Build FedAvg on the shared parameters; parameters with names matching `personal` stay at their client.

    Args:
        local: solver of a client's own problem.
        personal: shell patterns of parameter names, such as `"head.*"`.
        mu: weight of a proximal term on the shared parameters' start and the client's own personal ones.
        lr: the server's step.
        weight: data -> `(K,)` positive weights; default: the number of rows.

    Raises:
        ValueError: a pattern matches no parameter, no shared parameter is left, or `mu` or `lr` is out of range.

    Example:
        >>> import torch, fedtorch as ft
        >>> x = torch.tensor([[-1.0], [1.0]])
        >>> data = ft.data.from_tensors([(x, 2 * x[:, 0] + level) for level in (5.0, -5.0)])
        >>> local = ft.least_squares(torch.nn.Linear(1, 1))
        >>> run = ft.run(ft.personal_layers(local, personal="bias"), ft.InProcess(data), rounds=2)
        >>> run.tensors()["bias"].flatten().round(decimals=3)  # the slope is shared, the level is not
        tensor([ 5., -5.])
    """
    check_settings(local, mu, lr)
    if not functional.split(local.parameters, personal)[1]:
        raise ValueError(f"Expected some parameters to remain shared, but {personal!r} matches all; use ft.separate")
    averaged = averaged_buffers(local)

    def client(inbox: Tree, state: _State, data: Any, turn: Turn) -> Reply:
        start = _in_order({**inbox, **state.personal}, local.parameters)
        solved = local.solve(start, state.solver, data, proximal(start, mu), turn)
        mine, shared = functional.split(solved.parameters, personal)
        return Reply(message(shared, inbox, averaged, weight(data)), _State(mine, solved.state), solved.info)

    def init(parameters: Tree, clients: int) -> tuple[Tree, _State]:
        mine, shared = functional.split(parameters, personal)
        return shared, _State(mine, local.init(parameters))

    return Algorithm(
        init=init,
        outbox=lambda shared: shared,
        client=client,
        server=lambda shared, aggregate, key: stepped(shared, aggregate, lr),
        model=lambda inbox, state: local.tensors({**inbox, **state.personal}, state.solver),
        prepare=lambda data: checked_weight(local.prepare(data), weight),
        **solved_by(local, algorithm="personal_layers", personal=personal, mu=mu, lr=lr, weight=weight),
    )


def _in_order(tensors: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in like}
