"""The clients' states: a client gets a slot at its first commit, and shares the initial state until then.

States live in pages of stacked trees that are never copied when the table grows; memory is proportional to the clients
that have taken part. Updates are in place.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.tree import Rows, Tree

_MOST_PLACES = 256  # slices of clients whose positions are cached

Place = tuple[Tree, Tensor | None, Rows]  # a page, rows of a request in it, rows of the page; None for all of a request


class StateTable:
    """States of `clients` clients.

    Args:
        initial: one client's state before its first commit; its device is the table's.
        clients: number of clients.
    """

    def __init__(self, initial: Tree, clients: int) -> None:
        self.initial = initial
        self.clients = clients
        self._empty = not tree.leaves(initial)
        self._clear()

    def _clear(self) -> None:
        """Free all slots: every client is in the initial state."""
        self._slots = torch.full((self.clients,), -1)  # slot of each client's state, −1 before its first commit
        self._pages: list[Tree] = []
        self._starts: list[int] = []  # the first slot of each page
        self._capacity = self._used = 0
        # by slice of clients; cleared when further slots are assigned
        self._places: dict[tuple[int, int], list[Place]] = {}

    def touched(self) -> Tensor:
        """Return the clients that have committed, ascending, `(T,)`."""
        return (self._slots >= 0).nonzero()[:, 0]

    def read(self, ids: Rows) -> Tree:
        """Return the states of `ids`, `(K, ...)`: read only, a view where the states lie side by side."""
        parts = [] if self._empty or not self._pages else self._where(ids)
        count = ids.stop - ids.start if isinstance(ids, slice) else len(ids)
        if not parts:
            return tree.expand(self.initial, count)
        if len(parts) == 1 and parts[0][1] is None:
            page, _, inside = parts[0]
            return tree.take(page, inside)
        states = tree.map(lambda leaf: leaf.repeat(count, *[1] * leaf.ndim), self.initial)
        for page, rows, inside in parts:
            held = tree.take(page, inside)
            tree.map(lambda new, old, rows=rows: new.index_copy_(0, rows.to(new.device), old), states, held)
        return states

    def write(self, ids: Rows, states: Tree) -> None:
        """Store the states of `ids`, `(K, ...)`."""
        if self._empty:
            self._slots[ids] = 0
            return
        self.reserve(ids)
        for page, rows, inside in self._where(ids):
            new = states if rows is None else tree.take(states, rows)
            tree.map(lambda old, leaf, inside=inside: _store(old, inside, leaf), page, new)

    def reserve(self, ids: Rows) -> None:
        """Assign adjacent slots to those of `ids` without one."""
        if self._empty or self._are_together(ids):
            return
        indices = torch.arange(ids.start, ids.stop) if isinstance(ids, slice) else ids
        new = indices[self._slots[indices] < 0]
        if len(new) == 0:
            return
        if self._used + len(new) > self._capacity:
            size = max(len(new), min(self._used, self.clients - self._used - len(new)))
            self._starts.append(self._capacity)
            self._pages.append(tree.map(lambda leaf: leaf.new_empty(size, *leaf.shape), self.initial))
            self._used, self._capacity = self._capacity, self._capacity + size
        self._slots[new] = torch.arange(self._used, self._used + len(new))
        self._used += len(new)
        self._places.clear()

    def _are_together(self, ids: Rows) -> bool:
        """Return whether all of a slice of clients are known to have slots in one page."""
        known = self._places.get((ids.start, ids.stop)) if isinstance(ids, slice) else None
        return known is not None and len(known) == 1 and known[0][1] is None

    def _where(self, ids: Rows) -> list[Place]:
        """Return the positions of those of `ids` that have slots."""
        if not isinstance(ids, slice):
            return list(self._parts(self._slots[ids]))
        known = self._places.get((ids.start, ids.stop))
        if known is None:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            known = self._places[ids.start, ids.stop] = list(self._parts(self._slots[ids]))
        return known

    def _parts(self, slots: Tensor) -> Iterator[Place]:
        """Return the positions of slots page by page; negative ones have no slot."""
        ends = [*self._starts[1:], self._capacity]
        for page, start, end in zip(self._pages, self._starts, ends):
            rows = ((slots >= start) & (slots < end)).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            inside = slots[rows] - start
            first, last = int(inside[0]), int(inside[-1]) + 1
            together = last - first == len(inside) and bool((inside[1:] - inside[:-1] == 1).all())
            where: Rows = slice(first, last) if together else inside.to(tree.leaves(page)[0].device)
            yield page, None if len(rows) == len(slots) else rows, where

    def state_dict(self) -> dict[str, Tensor]:
        """Return the touched clients and their states, flat: `ids` and `state.…`."""
        ids = self.touched()
        first, last = (int(ids[0]), int(ids[-1]) + 1) if len(ids) else (0, 0)
        rows = slice(first, last) if last - first == len(ids) else ids
        return {"ids": ids, **tree.flatten(tree.to(self.read(rows), "cpu", copy=True), "state")}

    def load_state_dict(self, flat: dict[str, Tensor], keep: Tensor | None = None) -> None:
        """Load all states from `flat`; `keep` `(K,)` bool selects the clients here."""
        self._clear()
        ids = flat["ids"]
        rows = torch.arange(len(ids)) if keep is None else keep[ids].nonzero()[:, 0]
        like = tree.map(lambda leaf: leaf, self.initial)
        states = tree.unflatten(flat, like, "state")
        device = [leaf.device for leaf in tree.leaves(self.initial)]
        if len(rows):
            self.write(ids[rows], tree.to(tree.take(states, rows), device[0]) if device else states)


def _store(page: Tensor, inside: Rows, rows: Tensor) -> None:
    if rows.dtype != page.dtype or rows.shape[1:] != page.shape[1:]:
        raise ValueError(
            f"Expected states like the initial one, {page.dtype} of shape {tuple(page.shape[1:])}, but got "
            f"{rows.dtype} of shape {tuple(rows.shape[1:])}"
        )
    if isinstance(inside, slice):
        page[inside].copy_(rows)
    else:
        page.index_copy_(0, inside, rows)
