r"""SCAFFOLD: control variates that correct the clients' drift in federated averaging.

A client's steps from the server's parameters θ are corrected by the difference of the server's control c and its own
c_k, which is the `Quadratic` with λ = 0 and h = c_k − c; then it renews its control (the paper's option II), s_k being
the sum of the learning rates it took:

.. math::
    x &\leftarrow x - \eta_l (\nabla L_k(x) - c_k + c), \qquad
    c_k^+ = c_k - c + (\theta - \theta_k) / s_k \\
    \theta &\leftarrow \theta + \eta \sum_{k \in S} \frac{w_k}{\sum_{j \in S} w_j} (\theta_k - \theta), \qquad
    c = \sum_k w_k c_k / \sum_k w_k.

Weights. At a fixed point no client moves, so c_k − c = ∇L_k(θ) for all k, and c_k⁺ = c_k gives c = 0. Hence Σ w_k c_k =
0 and Σ w_k ∇L_k(θ) = 0: with w_k the number of rows this is the optimum of the pooled rows, for any number of local
steps and any participation. The paper's c is the plain mean, that is w_k = 1.

The server keeps the running sum of all w_k c_k. It knows only the weights of clients that have answered, so it uses N
times their mean for Σ w_k, and counts the controls of the others as 0. With equal weights this is the paper's update c
← c + (|S|/N) · mean of the changes, and once all have answered it is exact.

Source: Karimireddy et al. (2020), "SCAFFOLD: stochastic controlled averaging for federated learning", Algorithm 1 with
option II, equations (3) to (5).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Quadratic, Reply, solved_by
from fedtorch.federation.algorithms._controls import Controls, State, mean_control, no_controls
from fedtorch.federation.algorithms.fedavg import (
    LEARNS,
    Message,
    Weight,
    averaged_buffers,
    check_settings,
    checked_steps,
    checked_weight,
    message,
    rows_weight,
    stepped,
    trained,
)
from fedtorch.federation.told import Averages, Told
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree


class ControlsServer(NamedTuple):
    """State of the server."""

    parameters: Tree  # θ
    population: Tensor  # () number of clients N
    total: Tree = None  # Σ w_k c_k, Σ w_k and their number as `weighted`, `weight` and `clients`, float64


class _Outbox(NamedTuple):
    """Broadcast of the server."""

    parameters: Tree  # θ
    control: Tree  # c


def scaffold(local: LocalSolver, *, lr: float = 1.0, weight: Weight = rows_weight) -> Algorithm:
    """Build SCAFFOLD.

    The local solver should take plain (stochastic) gradient steps, with or without schedule and weight decay: momentum
    and adaptive steps make θ − θ_k another multiple of the gradient than the sum of the learning rates.

    Args:
        local: solver of a client's own problem, by steps.
        lr: the server's step η.
        weight: data -> `(K,)` positive weights w_k; default: the number of rows.

    Shapes: server state is `ControlsServer`, the outbox has θ and c as `parameters` and `control`; client state has
    its control, `(K, ...)`.

    Raises:
        ValueError: `lr` is not positive; or, in the first round, the local solver takes no steps, as the closed forms
            do: an exact solution does not depend on where it starts, and has no mean gradient along the way.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1)), (2 * torch.ones(3, 1), -torch.ones(3))])
        >>> local = ft.gradient_descent(
        ...     torch.nn.Linear(1, 1, bias=False), steps=5, loss=lambda output, y: (output[:, 0] - y).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))
        >>> final = ft.run(ft.scaffold(local), ft.InProcess(data), rounds=100)
        >>> round(float(final.server.parameters["weight"]), 4)  # Σ x y / Σ x² = −5 / 13
        -0.3846
    """
    check_settings(local, 0.0, lr)
    averaged = averaged_buffers(local)

    def init(parameters: Tree, clients: int) -> tuple[ControlsServer, State]:
        controls = no_controls(trained(parameters, averaged))
        return ControlsServer(parameters, torch.tensor(clients)), State(controls, local.init(parameters))

    def outbox(server: ControlsServer) -> _Outbox:
        control, parameters = mean_control(server.total, server.population), trained(server.parameters, averaged)
        return _Outbox(server.parameters, tree.map(lambda c, p: c.to(p.dtype), control, parameters))

    def client(inbox: _Outbox, state: State, data: Any, turn: Turn) -> Reply:
        weights = weight(data).to(torch.float64)
        correction = tree.subtract(tree.scale(state.controls.weighted, 1 / weights), inbox.control)
        precision = torch.zeros_like(weights, dtype=tree.leaves(correction)[0].dtype.to_real())
        solved = local.solve(inbox.parameters, state.solver, data, Quadratic(precision, correction), turn)
        sent = message(solved.parameters, inbox.parameters, averaged, weight(data))
        control = tree.add_scaled(
            correction, sent.change.value, -1 / checked_steps(solved.lr_sum, "SCAFFOLD", "ft.feddyn")
        )
        controls = Controls(tree.scale(control, weights), weights, torch.ones_like(weights))
        return Reply(sent, State(controls, solved.state), solved.info)

    def server(state: ControlsServer, aggregate: Message, key: Tensor) -> ControlsServer:
        return state._replace(parameters=stepped(state.parameters, aggregate, lr))

    return Algorithm(
        init=init,
        outbox=outbox,
        client=client,
        server=server,
        model=lambda inbox, state: local.tensors(inbox.parameters, state.solver),
        prepare=lambda data: checked_weight(local.prepare(data), weight),
        **solved_by(local, algorithm="scaffold", lr=lr, weight=weight),
        told=Told(lambda state: state.controls, Averages.COORDINATEWISE, counts=("weight", "clients"), learns=LEARNS),
    )
