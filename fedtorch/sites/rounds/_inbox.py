"""Encode the inboxes of a site's clients: rows for each, and what is the same for all of them once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.federation.exchanges.exchange import Exchange, indices
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.frames import Frame
from fedtorch.tree import Rows, Tree

_INBOX = "inbox"
_PREFIX = f"{_INBOX}."


class Inboxes(NamedTuple):
    """Holds the inboxes of some clients of a site; it takes the place of the server's outbox there."""

    ids: Tensor  # (K,) ascending
    inbox: Tree  # (K, ...)

    def of(self, ids: Rows) -> Tree:
        """Return the inboxes of some of them."""
        wanted = indices(ids)
        if len(wanted) == len(self.ids):
            return self.inbox
        rows = torch.searchsorted(self.ids, wanted)
        return tree.map(lambda leaf: _rows(leaf, rows), self.inbox)


def consecutive(ids: Tensor) -> Rows:
    """Return ascending ids as a slice, which is read as views, where it will do."""
    first, last = int(ids[0]), int(ids[-1]) + 1
    return slice(first, last) if last - first == len(ids) else ids


def at_site(exchange: Exchange) -> Exchange:
    """An exchange whose outbox is `Inboxes`; bytes are counted where they travel."""
    return exchange._replace(scatter=lambda outbox, ids: outbox.of(ids), traffic=lambda outbox, messages, ids: (0, 0))


def encode(kind: str, heard: Inboxes, more: Tree = None, **about: Any) -> bytes:
    """A frame with what clients hear, and tensors beside it."""
    once = [name for name, leaf in tree.items(heard.inbox) if _is_shared(leaf)]
    inbox = tree.map(lambda leaf: leaf[0] if _is_shared(leaf) else leaf, heard.inbox)
    return frames.encode(
        kind, {"ids": heard.ids, _INBOX: inbox, "more": more}, clients=len(heard.ids), once=once, **about
    )


def decode(frame: Frame, like: Tree, most: int, more: Tree = None) -> tuple[Inboxes, Tree]:
    """(what clients hear, the tensors beside it) of such a frame.

    Args:
        frame: of the server.
        like: what one client hears.
        most: clients, at most.
        more: the structure of the tensors beside it.

    Raises:
        PayloadError: they are something else.
    """
    count, once = frame.integer("clients", 0, most), set(frame.texts("once"))
    one = tree.flatten(like)
    if not once <= one.keys():
        raise frame.refused(f"values among {sorted(one)}", sorted(once - one.keys()))
    shared = {_PREFIX + name if name else _INBOX: name in once for name in one}
    rows = [leaf if same else leaf.expand(count, *leaf.shape) for leaf, same in zip(one.values(), shared.values())]
    came = frame.tree(
        {"ids": torch.empty(count, dtype=torch.int64), "more": more, **dict(zip(shared, rows))}, finite=False
    )
    ids = came["ids"]
    if not bool((ids[1:] > ids[:-1]).all()):
        raise frame.refused("ascending ids", ids.tolist())
    leaves = [came[name].expand(count, *came[name].shape) if same else came[name] for name, same in shared.items()]
    return Inboxes(ids, tree.refill(like, leaves)), came["more"]


def _is_shared(leaf: Tensor) -> bool:
    return len(leaf) > 1 and leaf.stride(0) == 0


def _rows(leaf: Tensor, rows: Tensor) -> Tensor:
    return (
        leaf[:1].expand(len(rows), *leaf.shape[1:]) if _is_shared(leaf) else leaf.index_select(0, rows.to(leaf.device))
    )
