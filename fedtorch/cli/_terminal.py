"""Text from others for the terminal, without characters that move the cursor or hide other text."""

from __future__ import annotations

import logging


def printable(text: str) -> str:
    r"""Return a text with its unprintable characters replaced by their codes, except line ends.

    >>> printable("it is late\x1b[8m")
    'it is late\\u001b[8m'
    """
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log() -> None:
    """Log to the terminal, at level INFO and above."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
