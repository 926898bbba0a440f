r"""FedDyn: a regulariser that follows the clients' gradients, so that their optima agree with the federation's.

A client solves its problem with a proximal term and a linear one, which is the `Quadratic` with λ = α and h = αθ + g_k,
and renews its gradient g_k, which starts at 0; the server keeps the mean g of the gradients:

.. math::
    \theta_k &= \arg\min_x L_k(x) - \langle g_k, x\rangle + \frac{\alpha}{2} \|x - \theta\|^2, \qquad
    g_k^+ = g_k - \alpha (\theta_k - \theta) \\
    \theta &\leftarrow \sum_{k \in S} \frac{w_k}{\sum_{j \in S} w_j} \theta_k - \frac{g}{\alpha}, \qquad
    g = \sum_k w_k g_k / \sum_k w_k.

By the first order condition of θ_k, g_k⁺ = ∇L_k(θ_k). Weights: at a fixed point θ_k = θ and g_k = ∇L_k(θ) for all k, so
θ = θ − g/α gives g = 0, that is Σ w_k ∇L_k(θ) = 0. With w_k the number of rows, that is the optimum of the pooled rows
under any participation. A local solver with a few gradient steps has the same fixed point. The paper has plain means,
w_k = 1; its server state h is g.

The server keeps the running sum of all w_k g_k; `scaffold` explains its value for Σ w_k before all clients have
answered. With equal weights that is the paper's update h ← h − α/N Σ_{k∈S} (θ_k − θ) at any participation.

Source: Acar et al. (2021), "Federated learning based on dynamic regularization", Algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Quadratic, Reply, check_solver, solved_by
from fedtorch.federation.algorithms._controls import Controls, State, mean_control, no_controls
from fedtorch.federation.algorithms.fedavg import (
    LEARNS,
    Message,
    Weight,
    averaged_buffers,
    checked_weight,
    message,
    rows_weight,
    stepped,
    trained,
)
from fedtorch.federation.algorithms.scaffold import ControlsServer
from fedtorch.federation.told import Averages, Told
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree


def feddyn(local: LocalSolver, alpha: float, *, weight: Weight = rows_weight) -> Algorithm:
    """Build FedDyn, with exact local solvers or a few steps of descent.

    Args:
        local: solver of a client's own problem.
        alpha: strength α of the regulariser, in units of the loss's curvature and best of its order. The server divides
            the mean gradient by it, so that small values overshoot, above all with small cohorts.
        weight: data -> `(K,)` positive weights w_k; default: the number of rows.

    Shapes: server state is `scaffold.ControlsServer`, outbox the parameters; client state has its mean
    gradient, `(K, ...)`.

    Raises:
        ValueError: `alpha` is not positive.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1)), (2 * torch.ones(3, 1), -torch.ones(3))])
        >>> local = ft.least_squares(torch.nn.Linear(1, 1, bias=False))
        >>> final = ft.run(ft.feddyn(local, alpha=2.0), ft.InProcess(data), rounds=50)
        >>> round(float(final.server.parameters["weight"]), 4)  # Σ x y / Σ x² = −5 / 13
        -0.3846
    """
    check_solver(local)
    expected.positive(alpha=alpha)
    averaged = averaged_buffers(local)

    def init(parameters: Tree, clients: int) -> tuple[ControlsServer, State]:
        controls = no_controls(trained(parameters, averaged))
        return ControlsServer(parameters, torch.tensor(clients)), State(controls, local.init(parameters))

    def client(inbox: Tree, state: State, data: Any, turn: Turn) -> Reply:
        weights = weight(data).to(torch.float64)
        gradient = tree.scale(state.controls.weighted, 1 / weights)
        precision = torch.full_like(weights, alpha, dtype=tree.leaves(gradient)[0].dtype.to_real())
        quadratic = Quadratic(precision, tree.add_scaled(gradient, trained(inbox, averaged), alpha))
        solved = local.solve(inbox, state.solver, data, quadratic, turn)
        sent = message(solved.parameters, inbox, averaged, weight(data))
        renewed = tree.add_scaled(gradient, sent.change.value, -alpha)
        controls = Controls(tree.scale(renewed, weights), weights, torch.ones_like(weights))
        return Reply(sent, State(controls, solved.state), solved.info)

    def server(state: ControlsServer, aggregate: Message, key: Tensor) -> ControlsServer:
        mean = stepped(state.parameters, aggregate)
        control = mean_control(state.total, state.population)
        moved = tree.add_scaled(trained(mean, averaged), control, -1 / alpha)
        return state._replace(parameters={name: moved.get(name, leaf) for name, leaf in mean.items()})

    return Algorithm(
        init=init,
        outbox=lambda server: server.parameters,
        client=client,
        server=server,
        model=lambda inbox, state: local.tensors(inbox, state.solver),
        prepare=lambda data: checked_weight(local.prepare(data), weight),
        **solved_by(local, algorithm="feddyn", alpha=alpha, weight=weight),
        told=Told(lambda state: state.controls, Averages.COORDINATEWISE, counts=("weight", "clients"), learns=LEARNS),
    )
