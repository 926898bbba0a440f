"""The worst that whoever reads a message can learn, as its type declares it; see `fedtorch.federation.disclosure`.

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

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

_Class = TypeVar("_Class", bound=type)
_NAME = "_learns"


class Learns(NamedTuple):
    """Say what a message tells at worst, by which attack of `fedtorch.trust`, and what helps.

    Example:
        >>> Learns("membership of rows", attack="attacks.membership").helps
        ''
    """

    worst: str
    attack: str = ""
    helps: str = ""


UNDECLARED = Learns("a client's exact values")


def tells(learns: Learns) -> Callable[[_Class], _Class]:
    """Return the decorator of a message's `NamedTuple` that declares what it tells at worst."""

    def declare(kind: _Class) -> _Class:
        setattr(kind, _NAME, learns)
        return kind

    return declare


def declared(kind: type[Any], otherwise: Learns) -> Learns:
    """Return what a type declares."""
    return getattr(kind, _NAME, otherwise)
