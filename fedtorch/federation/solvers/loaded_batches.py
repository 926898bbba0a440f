"""The batches of clients' loaders in turn: a client's t-th step is the t-th batch that its loader gives."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import BadClients
from fedtorch.data.client_loaders import ClientLoaders
from fedtorch.data.padding import NotTensors, alike
from fedtorch.federation.algorithm import Local, Quadratic
from fedtorch.federation.solvers.batches import MODULE, Batch, limited
from fedtorch.federation.turn import Turn
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)


class LoadedBatch:
    """One step's batch of every client that still trains; see `Batch`.

    Attributes:
        size: `(K,)` rows of each.
        weights: None, for all rows count.

    Args:
        batches: of each client.
        data: the block of clients.
    """

    weights = None

    def __init__(self, batches: Sequence[Any], data: ClientLoaders) -> None:
        self._batches, self._source = batches, data.source
        self.size = torch.tensor([rows_in(batch) for batch in batches])

    def alone(self, client: int) -> Any:
        """Return one client's batch as its loader has made it; with `pad=` as a batch of several clients would be."""
        return self._batches[client] if self._source.pad is None else self.as_rows(client)

    def as_rows(self, client: int) -> Tree:
        """Return one client's batch as tensors, in the form of a stack's rows."""
        (_, rows), *_ = alike([self._batches[client]], self._source.pad, self._source.mask)
        return tree.map(lambda leaf: leaf[0], rows)

    def parts(self, fewest: int) -> list[tuple[Tensor | None, Batch]]:
        """Return stacks of batches with the same shapes, at least `fewest` each, with their clients' positions; None
        for all.
        """
        return [(at, part) for at, part in self._alike if len(part.size) >= fewest]

    @functools.cached_property
    def _alike(self) -> list[tuple[Tensor | None, Batch]]:
        """Return all stacks of batches of the same shapes."""
        parts = [
            (torch.tensor(places), rows) for places, rows in alike(self._batches, self._source.pad, self._source.mask)
        ]
        count = len(self._batches)
        return [(at if len(at) < count else None, Batch(rows, self.size[at], full=True)) for at, rows in parts]


class LoadedBatches:
    """The batches of a group of clients, one step after the other; inside of `with`, for loaders are open meanwhile.

    Args:
        data: the block of clients.
        epochs: passes over each loader, or None.
        steps: number of batches if `epochs` is None.
        key: `(K,)` the clients' keys.
        limit: limit on the batches of a pass; see `Turn`.

    Attributes:
        total: `(K,)` batches of each client so far.
        taken: `(K,)` rows of these in each client's first pass.
        per_epoch: `(K,)` batches of a pass, as far as that is known.
        longest, round: the most batches that a client is known to have.
        device: of the batches.
        planned: `(K,)` batches of each client in all, as far as that is known.
        count: `(K,)` rows of each client.
        alike, known, together: as of `Batches`; clients may end at any step.
    """

    alike, known, together = False, False, True

    def __init__(
        self, data: ClientLoaders, epochs: int | None, steps: int | None, key: Tensor, limit: float | None = None
    ) -> None:
        self._data, self._epochs, self._steps, self._key, self.device = data, epochs, steps, key, key.device
        self._count = count = len(key)
        self.count = data.count.cpu()
        self.total, self.taken = (torch.zeros(count, dtype=torch.int64) for _ in range(2))
        self.per_epoch = limited(torch.tensor([data.steps(k) for k in range(count)]), limit)
        self._most = None if limit is None else self.per_epoch.tolist()
        self.planned = torch.full_like(self.total, steps or 0) if epochs is None else epochs * self.per_epoch
        self.longest = self.round = int(self.planned.max())
        self._ended: Tensor | None = None  # (K,) bool, clients that ended before this step
        self._ahead: tuple[LoadedBatch, list[bool]] | None = None
        self._open = ExitStack()

    def __enter__(self) -> LoadedBatches:
        several, seeds = self._count > 1, random.fold_in(self._key, MODULE).tolist()
        with ExitStack() as opening:  # closes all loaders if one cannot be opened
            opened = (self._data.opened(k, seed, several) for k, seed in enumerate(seeds))
            self._turns = [self._turn(k, opening.enter_context(each)) for k, each in enumerate(opened)]
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        for turn in self._turns:
            turn.close()
        self._open.__exit__(*error)

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Iterate over the steps until the last client has ended."""
        running = [True] * self._count
        while True:
            (batch, there), self._ahead = self._ahead or self._next(running), None
            active = torch.tensor(there)
            self._ended = torch.tensor(running) & ~active if there != running else None
            running = there
            if not any(running):
                return
            self.total += active
            yield batch

    def ended(self, step: int) -> Tensor | None:
        """Return which clients took their last step just before this one, None if none did."""
        return self._ended

    def first(self) -> LoadedBatch:
        """Return the first step's batches, which the first step will still take."""
        self._ahead = self._next([True] * self._count)
        return self._ahead[0]

    def _next(self, running: Sequence[bool]) -> tuple[LoadedBatch, list[bool]]:
        """Return the next batches, and of which clients they are."""
        over = object()
        batches = [next(turn, over) if there else over for turn, there in zip(self._turns, running)]
        taken = [batch for batch in batches if batch is not over]
        return LoadedBatch(taken, self._data), [batch is not over for batch in batches]

    def _turn(self, client: int, passes: Iterable[Any]) -> Generator[Any]:
        """Return the batches of one client's part in the round."""
        left, epoch = self._steps, 0
        while left != 0 and (self._epochs is None or epoch < self._epochs):
            for batch in passes if self._most is None else islice(passes, self._most[client]):
                if epoch == 0:
                    self.taken[client] += rows_in(batch)
                yield batch
                if left is not None:
                    left -= 1
                    if left == 0:
                        return
            epoch += 1


def rows_in(batch: Any) -> int:
    """Return the rows of a batch of any kind: the length of its first tensor, or else of its first list.

    >>> rows_in({"words": ["no tensor"], "label": [torch.ones(3), None]})
    3
    """
    sizes = list(_lengths(batch))
    return next((size for size, tensor in sizes if tensor), sizes[0][0] if sizes else 1)


def _lengths(node: Any) -> Iterator[tuple[int, bool]]:
    """Return lengths of the tensors and lists of a batch, and whether they are a tensor's."""
    if isinstance(node, Tensor):
        yield (len(node) if node.ndim else 1), True
    elif isinstance(node, Mapping):
        for child in node.values():
            yield from _lengths(child)
    elif isinstance(node, (list, tuple)):
        yield len(node), False
        for child in node:
            yield from _lengths(child)
    elif isinstance(size := getattr(node, "batch_size", getattr(node, "num_graphs", None)), int):
        yield size, True


Train = Callable[[Tree, Tree, LoadedBatches, Quadratic | None, Turn], Local]


class OneByOne(Exception):
    """Raised when the first batch shows that clients cannot be stacked, so that this group trains one by one."""


@contextmanager
def one_by_one(loss: Any) -> Iterator[None]:
    """Raise OneByOne if the trial of the first batch shows that `batched="auto"` must train clients one by one.

    This includes batches that are not of tensors, which raise NotTensors.

    Args:
        loss: a `StackedLoss`.
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
    settings = [f"{name}={value}" for name, value in given.items() if value is not None]
    if settings:
        raise ValueError(
            "Expected no settings of batches for clients with loaders, whose batches are taken as they are, but got "
            f"{', '.join(settings)}; give them to the loaders"
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
        look: called with the first batches, before the first step.
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
            if len(error.rows) == len(rows) > 1:  # the first client may be at fault: clients trained alone were not
                alone = [row[None] for row in rows]
                descend(train, look, alone, limits, start, state, data, quadratic, turn)
            raise BadClients(rows[torch.tensor(error.rows)], str(error)) from error.__cause__
    return done


def _named(train: Train, start: Tree, state: Tree, batches: LoadedBatches, quadratic: Any, turn: Turn) -> Local:
    """Return the solution of a group; attribute errors to its clients."""
    try:
        return train(start, state, batches, quadratic, turn)
    except BadClients:
        raise
    except Exception as error:
        everybody = torch.arange(len(turn.key))
        raise BadClients(everybody, f"its training raised {type(error).__name__}: {error}") from error
