r"""Ditto: a shared model, and for every client a personal one with a proximal term towards it.

The shared parameters θ are trained by federated averaging. In addition, a client of the cohort continues training its
personal v_k, which never leaves it, on

.. math:: \min_v L_k(v) + \frac{\lambda}{2} \|v - \theta\|^2,

with the θ it has received. λ = 0 is separate training, large λ is FedAvg. Predictions are made with v_k.

Source: Li et al. (2021), "Ditto: fair and robust federated learning through personalization", Algorithm 1 and
the objective called (Ditto).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from fedtorch import expected, random
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Reply
from fedtorch.federation.algorithms.fedavg import Weight, fedavg, proximal, rows_weight
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree

_PERSONAL = 0x44697474  # purpose of a client's key: the personal model's draws


class _State(NamedTuple):
    """State of a client; leaves `(K, ...)`."""

    personal: Tree  # v_k
    personal_solver: Tree
    solver: Tree  # state of the solver for the shared parameters


def ditto(
    local: LocalSolver,
    strength: float,
    *,
    mu: float = 0.0,
    lr: float = 1.0,
    weight: Weight = rows_weight,
) -> Algorithm:
    """Build Ditto; `Reply.info` has the shared training's values, and the personal one's as `personal_…`.

    Args:
        local: solver of a client's two problems.
        strength: weight λ of the pull of the personal parameters to the shared ones.
        mu: weight of a proximal term on the shared training, as in FedProx.
        lr: the server's step.
        weight: data -> `(K,)` positive weights; default: the number of rows.

    Shapes: server state and outbox are the shared parameters; client state, `(K, ...)`, has v_k.

    Raises:
        ValueError: `strength` or `mu` is negative, or `lr` is not positive.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2)), (torch.ones(2, 1), -torch.ones(2))])
        >>> local = ft.least_squares(torch.nn.Linear(1, 1, bias=False))
        >>> final = ft.run(ft.ditto(local, strength=2.0), ft.InProcess(data), rounds=2)
        >>> final.tensors()["weight"].flatten().round(decimals=2)  # ±2 / (2 + λ)
        tensor([ 0.5000, -0.5000])
    """
    shared = fedavg(local, mu=mu, lr=lr, weight=weight)
    expected.not_negative(strength=strength)

    def client(inbox: Tree, state: _State, data: Any, turn: Turn) -> Reply:
        averaged = shared.client(inbox, state.solver, data, turn)
        own_turn = turn.with_key(lambda: random.fold_in(turn.key, _PERSONAL))
        personal = local.solve(state.personal, state.personal_solver, data, proximal(inbox, strength), own_turn)
        info = {**averaged.info, **{f"personal_{name}": value for name, value in personal.info.items()}}
        return Reply(averaged.message, _State(personal.parameters, personal.state, averaged.state), info)

    def init(parameters: Tree, clients: int) -> tuple[Tree, _State]:
        return parameters, _State(parameters, local.init(parameters), local.init(parameters))

    return dataclasses.replace(
        shared,
        settings={**shared.settings, "algorithm": "ditto", "strength": strength},
        init=init,
        client=client,
        model=lambda inbox, state: local.tensors(state.personal, state.personal_solver),
    )
