r"""Federated averaging.

Every client of the cohort starts from the server's parameters θ, solves its problem, and sends its change, weighted by
its rows; the server takes the weighted mean as a step:

.. math:: \theta \leftarrow \theta + \eta \sum_k \frac{n_k}{\sum_j n_j} (\theta_k - \theta).

Averaged buffers (`gradient_descent(buffers="average")`) have no gradient. Clients send their values, and the server's
new value is their weighted mean, whatever η is.

Source: McMahan et al. (2017), Algorithm 1, which is η = 1; with the proximal term of FedProx, Li et al. (2020),
Algorithm 2: the client's loss is L_k(x) + μ/2 ‖x − θ‖².
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import expected, tree
from fedtorch.data import BadClients
from fedtorch.federation.algorithm import Algorithm, LocalSolver, Quadratic, Reply, check_solver, solved_by
from fedtorch.federation.exchanges.exchange import Mean
from fedtorch.federation.turn import Turn
from fedtorch.learns import Learns, tells
from fedtorch.tree import Tree

Weight = Callable[[Any], Tensor]  # data -> (K,)


LEARNS = Learns(
    "membership of rows; with one step, on few rows or from weights that the server chooses, the rows; of a linear "
    "model, in d + 1 rounds, what sufficient statistics tell",
    "attacks.gradient_inversion",
    "privacy.client_level, privacy.example_level, sums under masks",
)


@tells(LEARNS)
class Message(NamedTuple):
    """A client's message, or the server's aggregate."""

    change: Mean  # change of the parameters
    buffers: Mean | None = None  # values of the averaged buffers, None without any


def rows_weight(data: Any) -> Tensor:
    """Return a client's number of rows, `(K,)`: the usual weight."""
    return data.count


def fedavg(local: LocalSolver, *, mu: float = 0.0, lr: float = 1.0, weight: Weight = rows_weight) -> Algorithm:
    """Build FedAvg, and FedProx for `mu` > 0.

    Args:
        local: solver of a client's own problem.
        mu: weight μ of the proximal term.
        lr: the server's step η.
        weight: data -> `(K,)` positive weights; default: the number of rows.

    Shapes: server state and outbox are the parameters; client state is the solver's, `(K, ...)`.

    Example:
        >>> import torch, fedtorch as ft
        >>> algorithm = ft.fedavg(ft.least_squares(torch.nn.Linear(3, 1)), mu=0.1)
        >>> ft.fedavg(ft.least_squares(torch.nn.Linear(3, 1)), mu=-1.0)
        Traceback (most recent call last):
        ValueError: Expected mu of at least 0, but got -1.0
    """
    check_settings(local, mu, lr)
    averaged = averaged_buffers(local)

    def client(inbox: Tree, state: Tree, data: Any, turn: Turn) -> Reply:
        solved = local.solve(inbox, state, data, proximal(inbox, mu), turn)
        return Reply(message(solved.parameters, inbox, averaged, weight(data)), solved.state, solved.info)

    return Algorithm(
        init=lambda parameters, clients: (parameters, local.init(parameters)),
        outbox=lambda parameters: parameters,
        client=client,
        server=lambda parameters, aggregate, key: stepped(parameters, aggregate, lr),
        model=local.tensors,
        prepare=lambda data: checked_weight(local.prepare(data), weight),
        **solved_by(local, algorithm="fedavg", mu=mu, lr=lr, weight=weight),
    )


def fedprox(local: LocalSolver, mu: float, *, lr: float = 1.0, weight: Weight = rows_weight) -> Algorithm:
    """Build FedProx: `fedavg` with the proximal term μ/2 ‖x − θ‖² in every client's problem (Li et al. 2020).

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(1), torch.tensor([2.0]))])
        >>> local = ft.least_squares(ft.LinearHead(1, intercept=False))
        >>> ft.run(ft.fedprox(local, mu=2.0), ft.InProcess(data), rounds=1).global_module().coefficients.detach()
        tensor([1.])
    """
    return fedavg(local, mu=mu, lr=lr, weight=weight)


def check_settings(local: LocalSolver, mu: float, lr: float) -> None:
    """Raise TypeError or ValueError unless `local` is a solver, μ at least 0 and the server's step positive.

    Example:
        >>> import torch, fedtorch as ft
        >>> check_settings(ft.least_squares(torch.nn.Linear(1, 1)), mu=0.0, lr=0.0)
        Traceback (most recent call last):
        ValueError: Expected a positive lr, but got 0.0
    """
    check_solver(local)
    expected.not_negative(mu=mu)
    expected.positive(lr=lr)


def proximal(centre: Tree, mu: float) -> Quadratic | None:
    """Return μ/2 ‖x − centre‖² up to a constant, for stacked centres `(K, ...)`; None without weight."""
    if mu == 0:
        return None
    first = tree.leaves(centre)[0]
    precision = torch.full((len(first),), mu, dtype=first.dtype.to_real(), device=first.device)
    return Quadratic(precision, tree.scale(centre, mu))


def averaged_buffers(local: LocalSolver) -> frozenset[str]:
    """Return the names of buffers among the parameters of `local`: they are averaged by value, and have no gradient.

    Example:
        >>> import torch, fedtorch as ft
        >>> module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        >>> local = ft.gradient_descent(
        ...     module, steps=1, loss=torch.nn.functional.mse_loss, buffers="average",
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        >>> sorted(averaged_buffers(local))
        ['0.num_batches_tracked', '0.running_mean', '0.running_var']
    """
    return frozenset(name for name, _ in local.module.named_buffers() if name in local.parameters)


def message(solved: Tree, start: Tree, averaged: Collection[str], weight: Tensor) -> Message:
    """Return the change of parameters from where they started, and the values of averaged buffers.

    Args:
        solved: parameters and averaged buffers after training, `(K, ...)`.
        start: the parameters before, with or without the buffers.
        averaged: names of the buffers.
        weight: `(K,)`.
    """
    parameters = trained(solved, averaged)
    change = tree.subtract(parameters, trained(start, averaged))
    buffers = {name: leaf for name, leaf in solved.items() if name in averaged}
    return Message(Mean(change, weight), Mean(buffers, weight) if buffers else None)


def stepped(parameters: Tree, aggregate: Message, lr: float = 1.0) -> Tree:
    """Return the server's parameters after a step along their mean change, and averaged buffers as their mean value."""
    change, buffers = aggregate.change.value, {} if aggregate.buffers is None else aggregate.buffers.value
    moved = tree.add_scaled(trained(parameters, buffers), change, lr)
    return {n: buffers[n].to(old.dtype) if n in buffers else moved[n] for n, old in parameters.items()}


def trained(parameters: Tree, averaged: Collection[str]) -> Tree:
    """Return the parameters without the averaged buffers."""
    return {name: leaf for name, leaf in parameters.items() if name not in averaged} if averaged else parameters


def checked_weight(data: Any, weight: Weight) -> Any:
    """Return `data`, if every client's weight is positive and finite.

    Raises:
        BadClients: some are not.

    Example:
        >>> import torch, fedtorch as ft
        >>> block = ft.data.from_tensors([torch.zeros(2, 1), torch.zeros(5, 1)]).stack([0, 1])
        >>> checked_weight(block, rows_weight) is block
        True
        >>> checked_weight(block, lambda data: data.count - 2)
        Traceback (most recent call last):
        fedtorch.data...BadClients: ...expected a positive weight, but got 0...
    """
    weights = weight(data)
    bad = ~((weights > 0) & torch.isfinite(weights)).to("cpu")
    if bool(bad.any()):
        rows = bad.nonzero()[:, 0]
        raise BadClients(
            rows,
            f"expected a positive weight, but got {weights[rows[0]].item()}; leave such clients out with data.select",
        )
    return data


def checked_steps(lr_sum: Tensor, name: str, instead: str) -> Tensor:
    """Return clients' sums of learning rates `(K,)`, if all are positive.

    Args:
        lr_sum: sums of learning rates over each client's steps.
        name: the algorithm's name.
        instead: the algorithm to take with an exact local solver.

    Raises:
        ValueError: a client took no steps.

    Example:
        >>> checked_steps(torch.tensor([0.1, 0.0]), "FedNova", "ft.fedavg")
        Traceback (most recent call last):
        ValueError: Expected a local solver that takes gradient steps, but got ... rates of 0.0; FedNova is not ...
    """
    if not bool((lr_sum > 0).all()):
        raise ValueError(
            f"Expected a local solver that takes gradient steps, but got a sum of learning rates of "
            f"{float(lr_sum.min())}; {name} is not defined for an exact local solver: use {instead}, or "
            "ft.gradient_descent"
        )
    return lr_sum
