"""Disclosure of messages: fields, exactness and the worst inference, declared with the message's type.

`fedtorch.federation.disclosure` covers rounds, `fedtorch.protocol.disclosure` conversations.

>>> from typing import Any
>>> @tells(Learns("the rows, where there are fewer than columns", helps="sums under masks"))
... class Message(NamedTuple):
...     total: Any
>>> declared(Message, UNDECLARED).worst
'the rows, where there are fewer than columns'
>>> declared(tuple, UNDECLARED).worst
"a client's exact values"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import pandas as pd

_Class = TypeVar("_Class", bound=type)
_NAME, _EXACTNESS, _OF = "_learns", "_exactness", "_of"
EXACT, NOISED = "exact", "noised"


class Learns(NamedTuple):
    """The worst inference from a message, the attack of `fedtorch.trust` for it, and protections.

    Example:
        >>> Learns("membership of rows", attack="attacks.membership").helps
        ''
    """

    worst: str
    attack: str = ""
    helps: str = ""


UNDECLARED = Learns("a client's exact values")


class Field(NamedTuple):
    """One disclosed field of a message: its owner, exactness, reader, and the worst inference."""

    message: str  # name of the message
    field: str  # its path
    shape: tuple[int, ...]  # of one client's, or of the sum
    of: str
    exactness: str
    reader: str
    learns: Learns


def tells(learns: Learns, exactness: str = EXACT, of: str = "") -> Callable[[_Class], _Class]:
    """Return a decorator of a message's `NamedTuple` that declares its worst inference.

    Args:
        learns: the declaration.
        exactness: for a conversation's message, if its sender has rounded or noised it.
        of: owner of the numbers in a conversation's message, if not its sender.
    """

    def declare(kind: _Class) -> _Class:
        setattr(kind, _NAME, learns)
        setattr(kind, _EXACTNESS, exactness)
        setattr(kind, _OF, of)
        return kind

    return declare


def told(kind: type[Any], sender: str) -> tuple[str, str]:
    """Return the owner and exactness of a conversation's message type."""
    return getattr(kind, _OF, "") or sender, getattr(kind, _EXACTNESS, EXACT)


def declared(kind: type[Any], otherwise: Learns) -> Learns:
    """Return a type's declaration."""
    return getattr(kind, _NAME, otherwise)


def as_frame(fields: Iterable[Field]) -> pd.DataFrame:
    """Return fields as a table: `message`, `field`, `shape`, `of`, `exactness`, `reader`, `learns`, `helps`."""
    import pandas as pd  # imported at first use, because it is slow to import

    rows = [(*each[:-1], each.learns.worst, each.learns.attack, each.learns.helps) for each in fields]
    return pd.DataFrame(rows, columns=[*Field._fields[:-1], "learns", "attack", "helps"])


def in_brief(table: pd.DataFrame, most: int = 3) -> pd.DataFrame:
    """Return a disclosure with a row for all fields that are alike, of which `most` are named.

    Example:
        >>> import torch, fedtorch as ft
        >>> data = ft.data.from_tensors([(torch.eye(2), torch.ones(2))] * 3)
        >>> run = ft.Run(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1))), ft.InProcess(data))
        >>> in_brief(run.disclosure())["fields"].tolist()
        ['change.value.weight, change.value.bias', 'change.weight', 'info.loss']
    """
    alike = [name for name in table.columns if name not in ("field", "shape")]

    def named(fields: pd.Series) -> str:
        more = len(fields) - most
        return ", ".join(fields[:most]) + (f" and {more} more" if more > 0 else "")

    brief = table.groupby(alike, sort=False)["field"].agg(named).rename("fields").reset_index()
    return brief[["message", "fields", *alike[1:]]]
