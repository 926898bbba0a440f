r"""FedSGD: every client of the cohort sends the gradient of its loss over all its rows; the server takes one step.

.. math:: \theta \leftarrow \theta - \eta \sum_{k \in S} \frac{w_k}{\sum_{j \in S} w_j} \nabla L_k(\theta).

With all clients and w_k the number of rows this is gradient descent on the pooled rows. It is federated averaging with
one local step of learning rate 1, so a change is minus the gradient and the server's step is the learning rate.

Source: McMahan et al. (2017), section 2 ("FedSGD", C-fraction of clients, E = 1 and B = ∞).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import nn

from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.algorithms.fedavg import Weight, fedavg, rows_weight
from fedtorch.federation.solvers.gradient_descent import gradient_descent
from fedtorch.federation.solvers.objective import Loss


def fedsgd(
    module: nn.Module,
    *,
    lr: float,
    loss: Loss | None = None,
    weight: Weight = rows_weight,
    buffers: Literal["refuse", "local", "average"] = "refuse",
    batched: bool | Literal["auto"] = "auto",
) -> Algorithm:
    """Build federated gradient descent: one full-batch gradient per client and round, one step of the server.

    For another server optimiser use `fedopt` on `gradient_descent(..., steps=1)` with SGD of learning rate 1.

    Args:
        module: an unmodified LightningModule, whose own optimiser is not used, or an `nn.Module` with `loss`.
        lr: the learning rate η.
        loss: `(output, target) -> mean loss` of a batch `(input, target)`, for a plain `nn.Module`.
        weight: data -> `(K,)` positive weights w_k; default: the number of rows.
        buffers: treatment of buffers that a forward pass changes; see `gradient_descent`.
        batched: False evaluates the loss client by client; see `gradient_descent`.

    Shapes: server state and outbox are the parameters; client state is the solver's, `(K, ...)`.

    Raises:
        ValueError: `lr` is not positive.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.ones(1, 1), torch.ones(1, 1)), (torch.ones(3, 1), torch.zeros(3, 1))])
        >>> module = torch.nn.Linear(1, 1, bias=False)
        >>> algorithm = ft.fedsgd(module, lr=0.5, loss=torch.nn.functional.mse_loss)
        >>> final = ft.Run(algorithm, ft.InProcess(data)).step()
        >>> round(float(final.server["weight"]), 4)  # half the curvature is 1: one step reaches the mean
        0.25
    """
    local = gradient_descent(
        module,
        steps=1,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        buffers=buffers,
        batched=batched,
    )
    return dataclasses.replace(fedavg(local, lr=lr, weight=weight), schedule=None)  # the rate is the server's
