"""FedBN: federated averaging that leaves batch normalisation with its client.

The scale, shift and running statistics of every BatchNorm layer are the client's own, so that features of different
distribution are normalised where they arise; all other parameters are averaged.

Source: Li et al. (2021), "FedBN: federated learning on non-IID features via local batch normalization", Algorithm 1.
"""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm

from fedtorch.federation.algorithm import Algorithm, LocalSolver, check_solver
from fedtorch.federation.algorithms.fedavg import Weight, rows_weight
from fedtorch.federation.algorithms.personal import personal_layers


def fedbn(local: LocalSolver, *, mu: float = 0.0, lr: float = 1.0, weight: Weight = rows_weight) -> Algorithm:
    """Build FedAvg with personal BatchNorm layers: `personal_layers` with the names of their parameters.

    Args:
        local: solver of a client's own problem; `gradient_descent(..., buffers="local")`, so that running statistics
            stay with the client as well.
        mu: weight of a proximal term; see `personal_layers`.
        lr: the server's step.
        weight: data -> `(K,)` positive weights; default: the number of rows.

    Shapes: server state and outbox are the shared parameters; client state has the personal ones, `(K, ...)`.

    Raises:
        ValueError: the module has no BatchNorm layer, or its statistics are averaged.

    Example:
        >>> import torch, fedtorch as ft
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        >>> local = ft.gradient_descent(module, epochs=1, batch_size=8, loss=torch.nn.functional.cross_entropy,
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), buffers="local")
        >>> sorted(ft.fedbn(local).init(local.parameters, 2)[0])
        ['0.bias', '0.weight', '2.bias', '2.weight']
    """
    check_solver(local)
    layers = {name: part for name, part in local.module.named_modules() if isinstance(part, _BatchNorm)}
    if not layers:
        raise ValueError(
            f"Expected a module with BatchNorm layers, but {type(local.module).__name__} has none; use ft.fedavg or "
            "ft.personal_layers"
        )
    prefixes = [(f"{name}." if name else "", part) for name, part in layers.items()]
    averaged = [f"{at}{n}" for at, part in prefixes for n, _ in part.named_buffers() if f"{at}{n}" in local.parameters]
    if averaged:
        raise ValueError(
            f"Expected the statistics of BatchNorm to stay with the client, but {averaged[0]!r} is averaged; use "
            'gradient_descent(..., buffers="local")'
        )
    personal = [
        f"{at}{n}" for at, part in prefixes for n, _ in part.named_parameters() if f"{at}{n}" in local.parameters
    ]
    return personal_layers(local, personal, mu=mu, lr=lr, weight=weight)
