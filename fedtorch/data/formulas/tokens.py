"""The words of a formula; a character that no formula has is of the kind `other`, which no rule takes.

>>> [token.text for token in tokens("death ~ age + `body mass`")]
['death', '~', 'age', '+', 'body mass', '']
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple, NoReturn

LONGEST = 10_000  # characters

_WORDS = re.compile(
    r"(?P<space>[ \t\r\n]+)|(?P<name>[^\W\d]\w*)|`(?P<quoted>[^`]*)`|(?P<number>[0-9]+)|(?P<sign>\|\||[-~+:*()|,=])"
)
_WRITTEN = {"/": "a + a:b for a/b", "^": "a*b for (a + b)^2", "%": "a + a:b for a + b %in% a"}
_LISTED = "column names, + : * - 0 1, ( | ) and the functions C, bs, poly, log, center, scale, offset"


class Token(NamedTuple):
    """One word of a formula."""

    kind: str  # name, quoted, number, sign, other, end
    text: str
    at: int  # its first character


def tokens(text: str) -> list[Token]:
    """Return the words of a formula, and an empty one of kind `end`.

    Raises:
        TypeError: no string.
        ValueError: it is too long, or has a name that cannot be seen; the message names it.
    """
    if not isinstance(text, str):
        raise TypeError(f"Expected a formula as a string, but got {type(text).__name__}; write 'y ~ x'")
    if len(text) > LONGEST:
        raise ValueError(f"Expected a formula of at most {LONGEST} characters, but got {len(text)}")
    words, at = [], 0
    while at < len(text):
        match = _WORDS.match(text, at)
        if match is None:
            words.append(Token("other", text[at], at))
            at += 1
            continue
        kind, word = str(match.lastgroup), match[str(match.lastgroup)]
        if kind in ("name", "quoted"):
            _check_name(text, at, kind, word)
        if kind != "space":
            words.append(Token(kind, word, at))
        at = match.end()
    return [*words, Token("end", "", len(text))]


def refuse(text: str, at: int, got: str, remedy: str = "") -> NoReturn:
    """Raise the error that something in a formula is none of the things that formulas have."""
    near = text[max(0, at - 20) : at + 20].strip()
    raise ValueError(
        f"Expected {_LISTED}, but got {got} at character {at} of the formula, near {near!r}"
        + (f"; {remedy}" if remedy else "")
    )


def unquoted(character: str) -> str:
    """Return the remedy for a character that is no part of a name."""
    if character in _WRITTEN:
        return f"write {_WRITTEN[character]}, or a column name that has it in backquotes"
    return "write a column name that has it in backquotes" if character.isprintable() and character != "`" else ""


def _check_name(text: str, at: int, kind: str, word: str) -> None:
    if not word or not word.isprintable():
        refuse(text, at, f"the column name {word!r}", "rename the column, so that all its characters can be seen")
    if kind == "name" and unicodedata.normalize("NFKC", word) != word:
        refuse(text, at, f"{word!r}, another spelling of {unicodedata.normalize('NFKC', word)!r}", unquoted("."))
