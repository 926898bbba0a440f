r"""Nodes without rows, for any local solver: with L_i = 0 a node takes the mean of its neighbours.

The minimiser of :math:`\frac{\lambda}{2}\|w\|^2 - \langle h, w\rangle` alone is h/λ, in GTV minimisation the weighted
mean of the neighbours' parameters. Parameters with λ = 0, personal ones or those of a node without neighbours, do not
change.

Source: Jung, "Federated learning: from theory to practice", section 6.4.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import ClientData
from fedtorch.federation.algorithm import Local, LocalSolver, Quadratic, check_solver
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree


class _Prepared(NamedTuple):
    """A block's data; leaves `(K, ...)`."""

    data: Tree  # prepared by the local solver, with a row of zeros for a node without rows
    empty: Tensor  # (K,) bool, which nodes have none


def unlabelled(local: LocalSolver) -> LocalSolver:
    """Build a local solver that also accepts nodes without rows, whose parameters are their neighbours' mean.

    Args:
        local: solver of a node with rows. Its result for a row of zeros, which stands for a node without rows, is not
            used, but it must accept one.

    Example:
        >>> import torch, fedtorch as ft
        >>> rows = torch.ones(2, 1), torch.tensor([1.0, 3.0])
        >>> data = ft.data.FederatedData(rows, counts=torch.tensor([1, 0, 1]), allow_empty=True)
        >>> local = unlabelled(ft.gradient_descent(
        ...     torch.nn.Linear(1, 1, bias=False), steps=1, loss=lambda output, y: (output[:, 0] - y).square().mean(),
        ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)))
        >>> algorithm = ft.gtv(local, ft.Network.from_edges([(0, 1), (1, 2)]), alpha=0.5)
        >>> final = ft.run(algorithm, ft.InProcess(data), rounds=200)
        >>> final.tensors()["weight"].flatten().round(decimals=4)
        tensor([1.3333, 2.0000, 2.6667])
    """

    check_solver(local)
    return dataclasses.replace(local, solve=partial(_solve, local), prepare=partial(_prepare, local))


def _prepare(local: LocalSolver, data: ClientData) -> _Prepared:
    batch = tree.map(lambda leaf: leaf if leaf.shape[1] else leaf.new_zeros(len(leaf), 1, *leaf.shape[2:]), data.batch)
    return _Prepared(local.prepare(ClientData(batch, data.count.clamp(min=1))), data.count == 0)


def _solve(
    local: LocalSolver, start: Tree, state: Tree, data: _Prepared, quadratic: Quadratic | None, turn: Turn
) -> Local:
    solved = local.solve(start, state, data.data, quadratic, turn)

    def of_empty(new: Tensor, instead: Tensor) -> Tensor:
        return torch.where(tree.along(data.empty, new), instead, new)

    drawn = start if quadratic is None else _minimiser(start, quadratic)
    return Local(
        tree.map(of_empty, solved.parameters, drawn),
        tree.map(of_empty, solved.state, state),
        solved.lr_sum.masked_fill(data.empty, 0),
        {name: value.masked_fill(data.empty, 0) for name, value in solved.info.items()},
    )


def _minimiser(start: Tree, quadratic: Quadratic) -> Tree:
    """Return h/λ of every parameter, the start where λ is zero."""
    minimisers = {}
    for name, leaf in start.items():
        precision = tree.along(quadratic.precision_of(name), leaf).to(leaf.dtype)
        minimisers[name] = torch.where(precision > 0, quadratic.shift[name] / precision, leaf)
    return minimisers
