"""Train a block of clients by `gradient_descent` on the batches of their loaders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data import BadClients
from fedtorch.data.client_loaders import ClientLoaders
from fedtorch.data.padding import NotTensors
from fedtorch.federation.algorithm import Local, Quadratic
from fedtorch.federation.solvers.loaders.batches import LoadedBatch, LoadedBatches
from fedtorch.federation.solvers.stacked_loss import StackedLoss
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
Train = Callable[[Tree, Tree, LoadedBatches, Quadratic | None, Turn], Local]


class OneByOne(Exception):
    """Clients that have begun together train one by one: the first batch has shown that they cannot be stacked."""


@contextmanager
def one_by_one(loss: StackedLoss) -> Iterator[None]:
    """Raise OneByOne where a look at the first batch ends with `batched="auto"` taking clients one by one.

    Batches that are not of tensors, which raise NotTensors, are among what it takes one by one.
    """
    before = loss.batched
    try:
        yield
    except NotTensors as error:
        if not loss.automatic:
            raise
        loss.batched = False
        _LOG.info("batched='auto' evaluates clients one by one: %s", error)
    if loss.batched is not before:
        raise OneByOne


def check_settings(batch_size: int | None, **others: Any) -> None:
    """Raise ValueError for settings of how batches are made, which are the loaders' own."""
    given = {"batch_size": batch_size, **others}
    said = [f"{name}={value}" for name, value in given.items() if value is not None]
    if said:
        raise ValueError(
            "Expected no settings of batches for clients with loaders, whose batches are taken as they are, but got "
            f"{', '.join(said)}; give them to the loaders"
        )


def descend(
    train: Train,
    look: Callable[[LoadedBatch, torch.device], None],
    groups: list[Tensor],
    limits: tuple[int | None, int | None],
    start: Tree,
    state: Tree,
    data: ClientLoaders,
    quadratic: Quadratic | None,
    turn: Turn,
) -> list[Local]:
    """Return the solutions of groups of clients, whose loaders are open one group after the other.

    Args:
        train: takes all steps of a group.
        look: at the first batches, before the first step.
        groups: the places of clients in the block.
        limits: epochs and steps, one of them None.
        start, state, data, quadratic, turn: of the block; see `LocalSolver`.

    Raises:
        BadClients: a client's loader or its loss fails.
    """
    block = (start, state, data, quadratic, turn.key)
    done: list[Local] = []
    for rows in groups:
        first, old, loaders, pull, keys = tree.take(block, rows.to(turn.key.device))
        try:
            with LoadedBatches(loaders, *limits, keys, turn.limit) as batches:
                look(batches.first(), turn.key.device)
                done.append(_named(train, first, old, batches, pull, turn.with_key(keys)))
            turn.takes(batches.taken, loaders.count.cpu())
        except BadClients as error:
            if len(error.rows) == len(rows) > 1:  # any of them: those that train alone are none of the bad
                alone = [row[None] for row in rows]
                descend(train, look, alone, limits, start, state, data, quadratic, turn)
            raise BadClients(rows[torch.tensor(error.rows)], str(error)) from error.__cause__
    return done


def _named(train: Train, start: Tree, state: Tree, batches: LoadedBatches, quadratic: Any, turn: Turn) -> Local:
    """Return the solution of a group; of whatever goes wrong say that it is theirs."""
    try:
        return train(start, state, batches, quadratic, turn)
    except BadClients:
        raise
    except Exception as error:
        everybody = torch.arange(len(turn.key))
        raise BadClients(everybody, f"its training raised {type(error).__name__}: {error}") from error
