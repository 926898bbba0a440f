"""Names and lists as text for the page."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

_LONGEST = 60  # the most characters of a name that are shown
_JOINERS = "\u200c\u200d"  # the only invisible characters that are shown: Persian and emoji need these joiners
_WIDE, _CAPITAL, _OTHER = 15.0, 10.5, 8.2  # widths in pixels of letters of 15 pixels, as on a phone


class Words(NamedTuple):
    """A table of text."""

    title: str
    header: list[str]
    rows: list[list[str]]


def visible(text: Any, longest: int = _LONGEST) -> str:
    """Return a name that is safe to show: shortened, with codes for characters that are invisible or turn the text."""
    text = str(text)
    short = text if len(text) <= longest else text[: longest - 1] + "…"
    return "".join(c if c.isprintable() or c in _JOINERS else f"\\u{ord(c):04x}" for c in short)


def width(text: str) -> float:
    """Return an upper estimate of the width of a text in a chart, in pixels."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" or c in "mwMW@%—" for c in text)
    capital = sum(c.isupper() and c not in "MW" for c in text)
    return _WIDE * wide + _CAPITAL * capital + _OTHER * (len(text) - wide - capital)


def rounds(numbers: Sequence[int]) -> str:
    """Return the numbers of rounds as text.

    >>> rounds([3]), rounds([2, 3, 4, 7]), rounds([1, 2])
    ('round 3', 'rounds 2 to 4 and 7', 'rounds 1 and 2')
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts = [
        part
        for first, last in spans
        for part in (
            [f"{first}"] if first == last else [f"{first} to {last}"] if last > first + 1 else [f"{first}", f"{last}"]
        )
    ]
    if len(parts) > 8:
        parts = [*parts[:7], f"{len(parts) - 7} more ranges"]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"round{'s' * (len(numbers) > 1)} {text}"
