"""Rows read from a data set in every round, for any local solver."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import ClientData
from fedtorch.data.items import items, seeded
from fedtorch.federation.algorithm import Local, LocalSolver, Quadratic, check_solver
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree

_TRANSFORMS = 0x52656164  # purpose of a client's key: the draws of its transforms
_CLIENTS, _ROWS = 4, 8  # most clients and rows that are tried before the first round


def lazy_loading(local: LocalSolver, dataset: Any) -> LocalSolver:
    """Return a local solver for clients that have numbers of items, as `ft.data.partition(dataset, …)` gives them.

    The items of a block's clients are read at the start of its round, with torch's, NumPy's and Python's generators
    seeded from each client's key: a random transform draws again in every round, the same in every population. All
    epochs of one round have the same draw; for a draw in every epoch, use rounds of one epoch. Memory is that of a
    block, see `chunk=` of a population. For evaluation, use the rows of `ft.data.read(data, dataset)`.

    Args:
        local: solver of a client's own problem, given its rows.
        dataset: map-style, of items that `torch.utils.data.default_collate` can stack.

    Example:
        >>> import torch, fedtorch as ft
        >>> class Noisy(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 20
        ...     def __getitem__(self, i):
        ...         return torch.tensor([1.0]), torch.tensor(1.0) + 0.1 * torch.randn(())
        >>> local = ft.lazy_loading(ft.least_squares(torch.nn.Linear(1, 1, bias=False)), Noisy())
        >>> data = ft.data.partition(Noisy(), ft.data.iid(), clients=4)
        >>> run = ft.run(ft.fedavg(local), ft.InProcess(data), rounds=2)
        >>> bool((run.server["weight"] - 1).abs() < 0.1)
        True
    """
    check_solver(local)
    return dataclasses.replace(
        local,
        solve=partial(_solve, local, dataset),
        prepare=partial(_prepare, local, dataset),
        settings={**local.settings, "dataset": type(dataset)},
    )


def _prepare(local: LocalSolver, dataset: Any, data: ClientData) -> ClientData:
    """Return the item numbers unchanged, after a trial with a few of the items."""
    numbers = data.batch
    if not isinstance(numbers, Tensor) or numbers.ndim != 2 or numbers.dtype != torch.int64:
        raise ValueError(
            "Expected numbers of items as rows, but got rows of their own; make the data with "
            "ft.data.partition(dataset, …), or leave ft.lazy_loading away"
        )
    if len(data.count):
        few = ClientData(numbers[:_CLIENTS, :_ROWS], data.count[:_CLIENTS].clamp(max=_ROWS))
        local.prepare(_read(dataset, few, torch.arange(len(few.count))))
    return data


def _solve(
    local: LocalSolver,
    dataset: Any,
    start: Tree,
    state: Tree,
    data: ClientData,
    quadratic: Quadratic | None,
    turn: Turn,
) -> Local:
    rows = local.prepare(_read(dataset, data, random.fold_in(turn.key, _TRANSFORMS)))
    return local.solve(start, state, rows, quadratic, turn)


def _read(dataset: Any, data: ClientData, keys: Tensor) -> ClientData:
    """Return a block of rows for one of item numbers, zeros on padding."""
    device, width, read = data.count.device, data.batch.shape[1], []
    for numbers, count, key in zip(data.batch, data.count.tolist(), keys.tolist()):
        with seeded(key % 2**63):
            rows = items(dataset, numbers[:count])
        read.append(tree.map(lambda leaf: torch.cat([leaf, leaf.new_zeros(width - len(leaf), *leaf.shape[1:])]), rows))
    if not read:
        one = items(dataset, torch.tensor([0]))
        return ClientData(tree.map(lambda leaf: leaf.new_zeros(0, width, *leaf.shape[1:]), one), data.count)
    return ClientData(tree.to(tree.stack(read), device), data.count)
