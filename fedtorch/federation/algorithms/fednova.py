r"""FedNova: averages of normalised changes, where clients take different numbers of steps.

Under FedAvg a client that takes more steps counts for more: the fixed point weights the clients' gradients by their
rows times their steps. Here a client sends its change per step, and the server multiplies their weighted mean by the
clients' average number of steps:

.. math::
    \theta \leftarrow \theta + \eta\, \Big(\sum_k p_k s_k\Big) \sum_k p_k \frac{\theta_k - \theta}{s_k}, \qquad
    p_k = \frac{n_k}{\sum_{j} n_j},

s_k is the sum of the learning rates of client k's steps. For plain gradient steps this is the paper's normalised
gradient: τ_k steps of one rate have s_k = τ_k · rate.

Source: Wang, Liu, Liang, Joshi, Poor (2020), "Tackling the objective inconsistency problem in heterogeneous federated
optimization", equations (6) and (9), with τ_eff = Σ_k p_k τ_k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fedtorch import tree
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Reply, solved_by
from fedtorch.federation.algorithms.fedavg import (
    LEARNS,
    Message as Average,
    Weight,
    averaged_buffers,
    check_settings,
    checked_steps,
    checked_weight,
    message,
    rows_weight,
    stepped,
)
from fedtorch.federation.exchanges.exchange import Mean
from fedtorch.federation.turn import Turn
from fedtorch.learns import tells
from fedtorch.tree import Tree


@tells(LEARNS)
class Message(NamedTuple):
    """A client's message, or the server's aggregate."""

    direction: Mean  # change of the parameters by unit of learning rate
    steps: Mean  # s_k
    buffers: Mean | None = None  # values of the averaged buffers, None without any


def fednova(local: LocalSolver, *, lr: float = 1.0, weight: Weight = rows_weight) -> Algorithm:
    """Build FedNova.

    The local solver should take plain (stochastic) gradient steps, with or without schedule and weight decay: momentum
    and adaptive steps make θ_k − θ another multiple of the gradients than the sum of the learning rates.

    Args:
        local: solver of a client's own problem, by steps.
        lr: the server's step η.
        weight: data -> `(K,)` positive weights; default: the number of rows.

    Shapes: server state and outbox are the parameters; client state is the solver's, `(K, ...)`.

    Raises:
        ValueError: `lr` is not positive; or, in the first round, the local solver takes no steps, as the closed forms.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(2, 1), torch.ones(2)), (torch.ones(8, 1), -torch.ones(8))])
        >>> local = ft.gradient_descent(  # the second client takes four times as many steps
        ...     torch.nn.Linear(1, 1, bias=False), epochs=1, batch_size=2,
        ...     loss=lambda output, y: (output[:, 0] - y).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02))
        >>> [round(float(ft.run(make(local), ft.InProcess(data), rounds=60).server["weight"]), 1)
        ...  for make in (ft.fednova, ft.fedavg)]  # the mean of all rows is −0.6
        [-0.6, -0.9]
    """
    check_settings(local, 0.0, lr)
    averaged = averaged_buffers(local)

    def client(inbox: Tree, state: Tree, data: Any, turn: Turn) -> Reply:
        solved = local.solve(inbox, state, data, None, turn)
        steps, weights = checked_steps(solved.lr_sum, "FedNova", "ft.fedavg"), weight(data)
        sent = message(solved.parameters, inbox, averaged, weights)
        direction = Mean(tree.scale(sent.change.value, 1 / steps), weights)
        return Reply(Message(direction, Mean(steps, weights), sent.buffers), solved.state, solved.info)

    def server(parameters: Tree, aggregate: Message, key: Tensor) -> Tree:
        change = tree.map(lambda leaf: leaf * aggregate.steps.value.to(leaf.dtype), aggregate.direction.value)
        return stepped(parameters, Average(Mean(change, aggregate.direction.weight), aggregate.buffers), lr)

    return Algorithm(
        init=lambda parameters, clients: (parameters, local.init(parameters)),
        outbox=lambda parameters: parameters,
        client=client,
        server=server,
        model=local.tensors,
        prepare=lambda data: checked_weight(local.prepare(data), weight),
        **solved_by(local, algorithm="fednova", lr=lr, weight=weight),
    )
