"""Minibatches of stacked clients: a client's t-th step is its own t-th minibatch, in any epoch.

Each epoch of client k is a random permutation of its rows, cut into batches of `batch_size` with a smaller last one or
without it, as by a shuffling `DataLoader`. The permutation depends on (client key, epoch) only, and not on the other
clients.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import BadClients
from fedtorch.tree import Tree

_LOG = logging.getLogger(__name__)
_MANY = 10_000  # rows of a step that suggest a forgotten batch size
_DRAWN = 2**20  # integers of permutations that are drawn at a time
_GATHERED = 2**16  # most numbers of rows looked up at a time, unless one step has more
_ROUNDING = 1e-6  # of an epoch: a third of 3 epochs is one, despite rounding
# Purposes of a client's key: the order of its rows, the draws of its module and of its optimiser.
PERMUTATIONS, MODULE, OPTIMIZER = 0, 1, 2


class Batch:
    """One step's minibatch of the clients that still train.

    Attributes:
        rows: a tree of leaves `(K, B, ...)`.
        size: `(K,)` on the CPU: number of rows that count, out of B; they come first.
        leaves: the leaves of `rows`.
        weights: `(K, B)` summing to one over the rows that count, where the others are weighted out; None otherwise.

    Args:
        rows, size: see above.
        full: whether all rows are known to count.
        padded: whether rows that do not count are weighted out, and not left out.
    """

    def __init__(self, rows: Tree, size: Tensor, full: bool = False, padded: bool = False) -> None:
        self.rows, self.size = rows, size
        self.leaves = tree.leaves(rows)
        first = self.leaves[0]
        self.weights: Tensor | None = None
        self._parts: tuple[int, list[tuple[Tensor | None, Batch]]] | None = None
        self._whole = full or bool((size == first.shape[1]).all())
        if padded and not self._whole:
            counts = torch.arange(first.shape[1]) < size[:, None]
            self.weights = (counts / size[:, None].to(torch.float64)).to(first.device)

    def parts(self, fewest: int) -> list[tuple[Tensor | None, Batch]]:
        """Return batches of clients whose rows have the same shapes, each with their places `(M,)`; None for all.

        Args:
            fewest: least number of clients in a part; smaller ones are left out. Padded clients form one part of any
                size.
        """
        if self._whole or self.weights is not None:
            return [(None, self)] if len(self.size) >= fewest or self.weights is not None else []
        if self._parts is None or self._parts[0] != fewest:
            sizes, many = self.size.unique(sorted=True, return_counts=True)
            places = [((self.size == size).nonzero()[:, 0], size) for size in sizes[many >= fewest].tolist()]
            self._parts = fewest, [(at, self.of(at, size)) for at, size in places]
        return self._parts[1]

    def of(self, clients: Tensor, size: int | None = None) -> Batch:
        """Return the batch of some clients, by their places `(M,)` on the CPU; of their first `size` rows."""
        rows = tree.map(lambda leaf: leaf[:, :size], self.rows)
        full = size is not None or self._whole
        return Batch(tree.take(rows, clients), self.size[clients], full, self.weights is not None)

    def alone(self, client: int) -> Tree:
        """Return the rows of one client that count."""
        size, *leaves = self._each[client]
        return tree.refill(self.rows, leaves if self._whole else [leaf[:size] for leaf in leaves])

    as_rows = alone  # for loaders the two differ

    @functools.cached_property
    def _each(self) -> list[tuple[Any, ...]]:
        """Return (size, leaves) of each client."""
        return list(zip(self.size.tolist(), *(leaf.unbind() for leaf in self.leaves)))


class Batches:
    """The minibatches of a group of clients.

    Args:
        rows: stacked data, leaves `(K, N, ...)`.
        count: `(K,)` rows of each client, on the CPU.
        batch_size: rows of a batch, None for all of a client's rows.
        epochs: passes over the data, or None.
        steps: number of batches if `epochs` is None.
        key: `(K,)` the clients' keys, or a function that makes them when they are needed.
        drop_last: whether a smaller last batch of an epoch is left out.
        limit: limit on the batches of an epoch; see `Turn`.
        share: `(K,)` share of the epochs, or steps, of each client; see `Turn`.
        padded: whether clients of unequal size share padded steps, whose rows are weighted.

    Attributes:
        total, per_epoch: `(K,)` batches of each client, and of an epoch of its.
        planned: `(K,)` the same, had each client all of its epochs.
        round: the most batches that a client has in a round with all of its epochs.
        known: whether the steps are known before the first.
        alike: whether all clients have as many rows, so that all batches of a step are alike.
        longest: the most batches that a client has.
        count: `(K,)` rows of each client.
    """

    known = True

    def __init__(
        self,
        rows: Tree,
        count: Tensor,
        batch_size: int | None,
        epochs: int | None,
        steps: int | None,
        key: Tensor | Callable[[], Tensor],
        drop_last: bool = False,
        limit: float | None = None,
        share: Tensor | None = None,
        padded: bool = False,
    ) -> None:
        self._rows, self._count, self._padded = rows, count, padded
        self.count = count
        least, most = (int(each) for each in count.aminmax()) if len(count) else (0, 0)
        self._most, self._even = most, least == most
        self.alike = self._even and share is None
        self._size = most if batch_size is None else batch_size
        self.per_epoch = limited(batches_of(count, batch_size, drop_last), limit)
        self._steps = int(self.per_epoch.max()) if len(count) else 0  # steps in an epoch of the largest client
        self.round = self.longest = (steps or 0) if epochs is None else epochs * self._steps
        self.total = torch.full_like(count, self.longest) if self._even or epochs is None else self.per_epoch * epochs
        self.planned = self.total
        if share is not None:
            self.total = part_of(share, steps) if epochs is None else self.per_epoch * part_of(share, epochs)
            self.longest = int(self.total.max()) if len(count) else 0
        self._full, self._whole = batch_size is None, self._even or drop_last
        self._ends: set[int] | None = None  # numbers of steps at which some clients finish
        first = tree.leaves(rows)[0]
        self._device, self._width = first.device, first.shape[1]
        self._everything: Batch | None = None
        if not self._full:
            self._flat = [leaf.flatten(0, 1) for leaf in tree.leaves(rows)]
            self._gathered, self._coming = 0, list[tuple[list[Tensor], Tensor]]()  # the first step looked up; of each
            self._permutations = random.fold_in(key() if callable(key) else key, PERMUTATIONS)
            passes = -(-self.longest // max(1, int(self.per_epoch.min()))) if epochs is None else epochs
            self._planned = 0  # the first step whose rows are chosen
            self._widths: list[int] = []
            self._ahead = min(passes, max(1, _DRAWN // max(1, len(count) * self._width)))
            self._first = torch.full_like(count, -self._ahead)  # (K,) the first epoch that is drawn
            self._order = torch.zeros(
                len(count), self._ahead * self._width, dtype=torch.int64, device=self._permutations.device
            )

    @functools.cached_property
    def _client(self) -> Tensor:
        """Return the clients' places, `(K, 1)`."""
        return torch.arange(len(self._count), device=self._device)[:, None]

    @functools.cached_property
    def _all(self) -> Tensor:
        """Return that all clients train, `(K,)`."""
        return torch.ones_like(self._count, dtype=torch.bool)

    @property
    def taken(self) -> Tensor:
        """Return how many of its rows each client takes in all its steps, at least, `(K,)`."""
        return (torch.minimum(self.total, self.per_epoch) * self._size).minimum(self._count)

    @property
    def together(self) -> bool:
        """Return whether all clients have as many steps."""
        return self.alike or bool((self.total == self.longest).all())

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over all steps."""
        return (self[step] for step in range(self.longest))

    def __getitem__(self, step: int) -> Batch:
        """Return the batches of step `step`, of the clients that have one."""
        if self._full:
            return self._all_rows(step)
        if not 0 <= step - self._gathered < len(self._coming):
            self._gather(step)
        rows, size = self._coming[step - self._gathered]
        return Batch(tree.refill(self._rows, rows), size, self._whole, self._padded)

    def _gather(self, step: int) -> None:
        """Look up the rows of a step, and of following steps with the same clients while they are few numbers."""
        end = self.longest if self.alike else int(self.total[self.total > step].min())
        numbers = sum(math.prod(leaf.shape[1:]) for leaf in self._flat) * len(self._count) * self._size
        chosen, sizes = self._run(step, max(1, min(end - step, _GATHERED // max(1, numbers))))
        assert chosen is not None, "there are permutations"
        here = self._here(step, step < self.total)
        client = self._client
        if here is not None:
            chosen, sizes, client = chosen[:, here.to(chosen.device)], sizes[:, here], client[here.to(self._device)]
        at, shape = (chosen + client * self._width).flatten(), chosen.shape
        steps = zip(*(leaf.index_select(0, at).unflatten(0, shape).unbind() for leaf in self._flat))
        widths = [shape[2]] * len(sizes) if self.alike else sizes.amax(1).tolist()
        self._gathered, self._coming = (
            step,
            [
                ([(leaf if width == shape[2] else leaf[:, :width]).detach() for leaf in rows], size)
                for rows, width, size in zip(steps, widths, sizes.unbind())
            ],
        )

    def _here(self, step: int, active: Tensor) -> Tensor | None:
        """Return the places of the clients that still train, `(M,)`; None for all."""
        if self.alike or step < self._least:
            return None
        return active.nonzero()[:, 0]

    @functools.cached_property
    def _least(self) -> int:
        """Return the fewest batches of a client."""
        return int(self.total.min())

    def runs(self, numbers: int | None) -> Iterator[tuple[Tensor | None, Tensor]]:
        """Iterate over runs of steps in which no client ends: rows `(S, K, B)`, None for all rows; sizes `(S, K)`.

        Without a given number, runs have any number of rows; in memory are those whose permutations are drawn ahead.
        """
        step, most = 0, self.longest
        if numbers is not None:
            most = max(1, numbers // max(1, len(self._count) * min(self._size, self._width)))
        for end in [self.longest] if self.alike else self.total.unique().tolist():
            while step < end:
                yield (chosen := self._run(step, min(most, end - step)))
                step += len(chosen[1])

    def _run(self, step: int, most: int) -> tuple[Tensor | None, Tensor]:
        """Return the rows and sizes of at most this many steps from `step`, whose batches have one shape."""
        if self._full:
            return None, self._count.expand(most, -1)
        if not self.alike:
            self._chosen(step)
            ahead = slice(step - self._planned, step - self._planned + most)
            return self._places[:, ahead, : max(self._widths[ahead])].transpose(0, 1), self._counts[ahead]
        first, left = self._alike_from(step)
        many = min(most, left // self._size, self._steps - step % self._steps) or 1
        rows = self._order[:, first : first + min(left, many * self._size)].unflatten(1, (many, -1))
        return rows.transpose(0, 1), self._count.clamp(max=rows.shape[2]).expand(many, -1)

    def ended(self, step: int) -> Tensor | None:
        """Return which clients took their last step just before this one, None if none did."""
        if self._ends is None:
            self._ends = set() if self.alike else set(self.total.unique().tolist())
        return self.total == step if step in self._ends else None

    def chosen(self) -> Tensor | None:
        """Return the rows of all batches, `(K, T, B)`, −1 where one has no more; None if every batch has all rows."""
        if self._full or self._size >= self._width:
            return None
        shape = (len(self._count), self.longest, self._size)
        whole = torch.full(shape, -1, dtype=torch.int64, device=self._device)
        for step in range(self.longest):
            chosen, size, active = self._chosen(step)
            there = (torch.arange(chosen.shape[1]) < size[:, None]) & active[:, None]
            whole[:, step, : chosen.shape[1]] = torch.where(there.to(self._device), chosen, -1)
        return whole

    def _chosen(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (rows `(K, B)` of a step's batches, how many of them count, which clients still train)."""
        if self.alike:
            return self._chosen_alike(step)
        if not 0 <= step - self._planned < len(self._widths):
            self._plan(step)
        at = step - self._planned
        return self._places[:, at, : self._widths[at]], self._sizes[at], self._active[at]

    def _plan(self, step: int) -> None:
        """Choose the rows of a step, and of following steps whose permutations are drawn, in one pass."""
        wide = min(self._size, self._width)
        training = step < self.total
        self._shuffle(step // self.per_epoch, training)
        drawn = (self._first + self._ahead) * self.per_epoch  # steps whose permutations are there
        last = min(drawn[training & (drawn < self.total)].tolist(), default=self.longest)
        many = min(last - step, max(1, _DRAWN // max(1, len(self._count) * wide)))
        steps = torch.arange(step, step + many)[:, None]  # (S, 1)
        epoch, active = steps // self.per_epoch, steps < self.total
        start = steps % self.per_epoch * self._size
        size = (self._count - start).clamp(max=self._size)
        # Padding repeats a row of the batch: the gradient of a loss that is infinite on a row of zeros would be NaN.
        columns = (start[..., None] + torch.arange(wide)).minimum((start + size - 1)[..., None])
        columns += (epoch - self._first).clamp(0, self._ahead - 1)[..., None] * self._width
        places = columns.transpose(0, 1).flatten(1).to(self._device)
        self._places = self._order.gather(1, places).unflatten(1, (len(steps), wide))
        some = torch.where(active.any(1, keepdim=True), active, True)
        self._widths = torch.where(some, size, 0).amax(1).tolist()
        self._planned, self._counts, self._sizes, self._active = step, size, size.unbind(), active.unbind()

    def _chosen_alike(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return `_chosen` for clients with equal numbers of rows, whose batches start and end together."""
        first, left = self._alike_from(step)
        size = min(self._size, left)
        return self._order[:, first : first + size], self._count.clamp(max=size), self._all

    def _alike_from(self, step: int) -> tuple[int, int]:
        """Return where a step's rows start among the drawn ones, and how many the epoch has from there."""
        epoch, within = divmod(step, self._steps)
        if epoch >= int(self._first[0]) + self._ahead:
            self._shuffle(torch.full_like(self._count, epoch), self._all)
        return (epoch - int(self._first[0])) * self._width + within * self._size, self._most - within * self._size

    def _all_rows(self, step: int) -> Batch:
        if self._everything is None:
            width, rows = self._size, self._rows
            if not self._even and self._padded:  # a row of zeros may have an infinite gradient
                columns = torch.arange(width).minimum(self._count[:, None] - 1).to(self._device)
                rows = tree.map(lambda leaf: leaf[self._client, columns], rows)
            else:
                rows = tree.map(lambda leaf: leaf[:, :width], rows)
            self._everything = Batch(rows, self._count, self._even, self._padded)
        here = self._here(step, step < self.total)
        return self._everything if here is None else self._everything.of(here)

    def _shuffle(self, epoch: Tensor, active: Tensor) -> None:
        """Draw the next epochs' permutations for clients at the end of theirs."""
        some = (active & (epoch >= self._first + self._ahead)).nonzero()[:, 0]
        if len(some) == 0:
            return
        self._first[some] = epoch[some]
        at = some.to(self._order.device)
        epochs = (epoch[some, None] + torch.arange(self._ahead)).to(at.device)
        keys = random.fold_in(self._permutations[at, None], epochs)
        counts = self._count[some, None].to(at.device).expand(-1, self._ahead)
        self._order[at] = random.permutation(keys, self._width, counts).flatten(1)


def check_drop_last(drop_last: bool, batch_size: int | None) -> None:
    """Raise ValueError unless `drop_last` is a bool, and false without a batch size."""
    if not isinstance(drop_last, bool):
        raise ValueError(f"Expected drop_last=True or False, but got {drop_last!r}")
    if drop_last and batch_size is None:
        raise ValueError("Expected batch_size= with drop_last=True, but got none: every batch has all rows of a client")


def check_last_batches(
    count: Tensor,
    batch_size: int | None,
    drop_last: bool,
    steps: int | None,
    failure: Callable[[Tensor], Exception | None] | None,
) -> None:
    """Raise BadClients for clients without any batch after `drop_last`, or with a refused batch of one row.

    It also logs once the effect of a missing batch size, see `note_whole_batches`.

    Args:
        count: `(K,)` rows of each client.
        batch_size, drop_last, steps: settings of a round; None for all rows, and for epochs.
        failure: a client `(1,)` -> the error of a batch of one row, as of BatchNorm; None where that is not known.
    """
    note_whole_batches(batch_size, count)
    few = (count < (batch_size or 0)).nonzero()[:, 0] if drop_last else count[:0]
    if len(few):
        raise BadClients(
            few.cpu(),
            f"Expected at least the {batch_size} rows of a batch with drop_last=True, but got {int(count[few[0]])}, of "
            "which nothing would be left; leave the client out, or take a smaller batch_size",
        )
    per_epoch = batches_of(count, batch_size)
    last = count - (per_epoch - 1) * (batch_size or 0)
    client = ((last == 1) & (per_epoch <= (steps or per_epoch))).nonzero()[:, 0]
    if not drop_last and failure is not None and len(client) and (error := failure(client[:1])) is not None:
        raise BadClients(
            client.cpu(),
            f"Expected more than one row in a batch, but got one in the last of {int(count[client[0]])} rows "
            f"with batch_size={batch_size}: {error}; pass drop_last=True, or leave a client of one row out",
        ) from error


def is_ragged(count: Tensor) -> bool:
    """Return whether clients of these numbers of rows `(K,)` ever have batches of different sizes."""
    return len(count) > 0 and bool((count != count[0]).any())


def note_whole_batches(batch_size: int | None, count: Tensor) -> None:
    """Log that steps without a batch size use all of a client's rows, as a warning if these are many."""
    if batch_size is None and len(count):
        most = int(count.max())
        level = logging.WARNING if most > _MANY else logging.INFO
        _LOG.log(level, "batch_size= is not given: a step takes all of a client's rows, up to %d", most)


def batches_of(count: Tensor, batch_size: int | None, drop_last: bool = False) -> Tensor:
    """Return the minibatches of an epoch for clients with these numbers of rows `(K,)`; None for all rows at once.

    Example:
        >>> count = torch.tensor([4, 9, 12])
        >>> batches_of(count, 4), batches_of(count, 4, drop_last=True)
        (tensor([1, 3, 3]), tensor([1, 2, 3]))
    """
    if batch_size is None:
        return torch.ones_like(count)
    return count // batch_size if drop_last else (count + batch_size - 1) // batch_size


def limited(batches: Tensor, limit: float | None) -> Tensor:
    """Return the minibatches used of an epoch `(K,)`: at most `limit`, or this share for a float.

    Raises:
        BadClients: a share leaves none of the minibatches of some clients.

    Example:
        >>> import torch
        >>> limited(torch.tensor([2, 5]), 3), limited(torch.tensor([2, 5]), 0.5)  # as limit_train_batches of a Trainer
        (tensor([2, 3]), tensor([1, 2]))
    """
    if limit is None:
        return batches
    taken = batches.clamp(max=limit) if isinstance(limit, int) else (batches.double() * limit).to(batches.dtype)
    none = ((taken < 1) & (batches > 0)).nonzero()[:, 0].cpu()
    if len(none):
        raise BadClients(
            none,
            f"Expected at least one minibatch of an epoch, but a limit of {limit} leaves none of "
            f"{int(batches[none[0]])}; take a larger limit, or a smaller batch_size",
        )
    return taken


def part_of(share: Tensor, whole: int | None) -> Tensor:
    """Return the epochs, or steps, of a round for clients with these shares of it `(K,)`, at least one.

    Example:
        >>> import torch
        >>> part_of(torch.tensor([0.01, 0.35, 1.0]), 20)
        tensor([ 1,  7, 20])
    """
    return (share * (whole or 0) - _ROUNDING).ceil().clamp(min=1).to(torch.int64)
