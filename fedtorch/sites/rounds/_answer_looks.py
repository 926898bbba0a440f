"""Know how the answers of sites to a round have to look, and find numbers in them that are none."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.exchanges.exchange import Exchange
from fedtorch.tree import Tree

_MOST = 8  # structures that are kept: a site chooses the names of what it says besides


class AnswerLooks:
    """Return how answers look to a round of one algorithm.

    Args:
        exchange: of the algorithm.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._partial: Tree = None  # a sum, which looks alike of any number of clients
        self._known: dict[tuple[int, tuple[str, ...]], wire.Template] = {}

    def like(self, message: Tree, count: int, names: tuple[str, ...], room: Mapping[str, Tensor] | None) -> Tree:
        """Return the structure of an answer, or a `wire.Template` of it.

        Args:
            message: `(0, ...)` of the algorithm's clients, the same in all rounds.
            count: of the clients that answered.
            names: of what is said of each besides.
            room: for the bytes of an answer that the server may not read; None for others.
        """
        if room is not None:
            return self._structure(count, names, room)
        known = self._known.get((count, names))
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            partial = self._aggregate(message, count) if count else None
            known = self._known[count, names] = wire.Template(self._structure(count, names, partial))
        return known

    def _structure(self, count: int, names: tuple[str, ...], partial: Tree) -> Tree:
        info = {name: torch.empty(count, dtype=torch.float64) for name in names}
        return {"ids": torch.empty(count, dtype=torch.int64), "info": info, "partial": partial}

    def _aggregate(self, message: Tree, count: int) -> Tree:
        """Return a partial aggregate of so many clients."""
        if self._exchange.additive and self._partial is not None:
            return self._partial
        rows = 0 if self._exchange.additive else count
        messages = tree.map(lambda leaf: leaf.new_zeros(rows, *leaf.shape[1:]), message)
        self._partial = self._exchange.gather(messages, torch.arange(rows))
        return self._partial


def not_finite_in(partial: Tree) -> str | None:
    """Return the path of the first leaf with NaN or Inf, None where all are finite.

    A partial aggregate is a few numbers, which NumPy looks through without the turns that other threads are given at
    every operation of torch.
    """
    if all(_is_finite(leaf) for leaf in tree.leaves(partial)):
        return None
    return next(path for path, leaf in tree.items(partial) if not _is_finite(leaf))


def _is_finite(leaf: Tensor) -> bool:
    if leaf.dtype in (torch.float64, torch.float32):
        return bool(np.isfinite(leaf.numpy()).all())
    return not leaf.is_floating_point() or bool(leaf.isfinite().all())
