"""Disclosed fields of each node in a conversation, derived from its half's messages.

Owner, exactness and worst inference of a field are declared with the message's type by `fedtorch.learns.tells`; a
message without a declaration counts as "a client's exact values".

>>> import torch
>>> from fedtorch.protocol.halves import Receive, Send, together
>>> from fedtorch.vfl.rows.alignment import Holder
>>> halves = {"registry": Holder(["ann", "bob"], "registry").leading(["clinic"])}
>>> halves["clinic"] = Holder(["bob"], "clinic").following("registry")
>>> fields: list[Field] = []
>>> rows, _ = together(overheard(halves, {"registry": "the leader", "clinic": "a member"}, fields))
>>> [(field.message, field.field, field.shape, field.of, field.reader) for field in fields][-2:]
[('Points', 'x', (2, 32), 'a member', 'the leader'), ('Positions', 'rows', (1,), 'the leader', 'a member')]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedtorch.learns import UNDECLARED, Field, as_frame, declared, in_brief, told
from fedtorch.protocol.halves import Half, Name, Receive, Send, together, wrapped
from fedtorch.tree import flatten

if TYPE_CHECKING:
    import pandas as pd


def overheard(halves: Mapping[Any, Half], called: Mapping[Any, str], fields: list[Field]) -> dict[Any, Half]:
    """Wrap the halves of a conversation to record each disclosed field of a node, once.

    Args:
        halves: by the nodes' names, for any driver.
        called: terms for the nodes in the disclosure, such as "a party"; nodes with the same term are merged.
        fields: list to which they are added.
    """

    def note(sender: Name, step: Send | Receive) -> Half:
        if isinstance(step, Send):
            fields.extend(field for field in _of(step, called[sender], called[step.to]) if field not in fields)
        return (yield step)

    return {name: wrapped(half, partial(note, name)) for name, half in halves.items()}


def disclosure(halves: Mapping[Any, Half], called: Mapping[Any, str], brief: bool = False) -> pd.DataFrame:
    """Run a conversation in this process and return its nodes' disclosed fields, as `ft.Run.disclosure` does for a run.

    Args:
        halves: by the nodes' names; the first is that of the server or leader.
        called: terms for the nodes; nodes with the same term are merged.
        brief: whether similar fields share a row, with the first of them in `fields`.

    Example:
        >>> import fedtorch as ft
        >>> from fedtorch.protocol import disclosure
        >>> halves = {"registry": ft.vfl.Holder(["ann", "bob"], "registry").leading(["clinic"])}
        >>> halves["clinic"] = ft.vfl.Holder(["bob"], "clinic").following("registry")
        >>> disclosure(halves, {"registry": "the leader", "clinic": "a member"})[["message", "of", "reader"]]
             message          of      reader
        0     Points  the leader    a member
        1     Points    a member  the leader
        2  Positions  the leader    a member
    """
    fields: list[Field] = []
    together(overheard(halves, called, fields))
    table = as_frame(fields).drop_duplicates(["message", "field", "of", "reader"], ignore_index=True)
    return in_brief(table) if brief else table


def _of(step: Send, sender: str, reader: str) -> Iterator[Field]:
    kind = type(step.message)
    named = {"": step.message} if isinstance(step.message, Tensor | bytes) else flatten(step.message)
    of, exactness = told(kind, sender)
    for path, leaf in named.items():
        shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else (len(leaf),)
        yield Field(kind.__name__, path, shape, of, exactness, reader, declared(kind, UNDECLARED))
