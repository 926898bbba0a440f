"""The expected structure of sites' answers to a round, and a check for NaN and Inf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtorch import tree, wire
from fedtorch.federation.exchanges.exchange import Exchange
from fedtorch.sites.rounds._frame_header import Header
from fedtorch.sites.rounds.frames import EVERYBODY, Frame
from fedtorch.tree import Tree

_MOST = 8  # most structures in the cache, which a site could fill by new names of diagnostics


class Look(NamedTuple):
    """The structure of an answer, from its header."""

    clients: int  # number of clients that answered
    everybody: bool  # whether these are all clients of the site
    refused: dict[int, str]  # clients whose messages were left out, with the field at fault
    like: Tree  # structure of the tensors, or a `wire.Template` of it


class AnswerLooks:
    """The structures of answers to rounds of one algorithm.

    Args:
        exchange: the algorithm's exchange.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._partial: Tree = None  # a sum, whose structure does not depend on the number of clients
        self._known: dict[tuple[Header, int], Look] = {}

    def of(self, frame: Frame, message: Tree, most: int, hidden: bool) -> Look:
        """Return the structure of an answer; raise PayloadError for a header that is not of an answer.

        Args:
            frame: the answer, whose tensors are not read yet.
            message: structure of clients' messages `(0, ...)`, the same in all rounds.
            most: number of the site's clients.
            hidden: whether the answer is bytes by name that the server may not read.
        """
        if hidden:
            return self._look(frame, message, most, frame.room())
        known = self._known.get((frame.header, most))
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            look = self._look(frame, message, most)
            known = self._known[frame.header, most] = look._replace(like=wire.Template(look.like))
        return known

    def _look(self, frame: Frame, message: Tree, most: int, room: Mapping[str, Tensor] | None = None) -> Look:
        everybody = frame.about.get(EVERYBODY) is True
        count, names = frame.integer("clients", most if everybody else 0, most), frame.texts("info")
        refused = {
            int(k): str(field)[:200] for k, field in frame.names("refused").items() if len(k) < 20 and k.isdecimal()
        }
        partial: Tree = room
        if room is None:
            partial = self._aggregate(message, count) if count else None
        ids = None if everybody else torch.empty(count, dtype=torch.int64)
        info = {name: torch.empty(count, dtype=torch.float64) for name in names}
        return Look(count, everybody, refused, {"ids": ids, "info": info, "partial": partial})

    def _aggregate(self, message: Tree, count: int) -> Tree:
        """Return the structure of a partial aggregate of `count` clients."""
        if self._exchange.additive and self._partial is not None:
            return self._partial
        rows = 0 if self._exchange.additive else count
        messages = tree.map(lambda leaf: leaf.new_zeros(rows, *leaf.shape[1:]), message)
        self._partial = self._exchange.gather(messages, torch.arange(rows))
        return self._partial


def not_finite_in(partial: Tree) -> str | None:
    """Return the path of the first leaf with NaN or Inf; None if all numbers are finite.

    A partial aggregate has few numbers, which NumPy checks without the switches to other threads that every operation
    of torch allows.
    """
    if all(_is_finite(leaf) for leaf in tree.leaves(partial)):
        return None
    return next(path for path, leaf in tree.items(partial) if not _is_finite(leaf))


def _is_finite(leaf: Tensor) -> bool:
    if leaf.dtype in (torch.float64, torch.float32, torch.complex128, torch.complex64):
        return bool(np.isfinite(leaf.numpy()).all())
    return not leaf.is_floating_point() or bool(leaf.isfinite().all())
