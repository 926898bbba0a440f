"""What others say, on a terminal: without characters that move its cursor, or hide what is shown before or after."""

from __future__ import annotations

import logging


def printable(text: str) -> str:
    r"""Return a text whose characters print; the others stand there as their codes, but for ends of lines.

    >>> printable("it is late\x1b[8m")
    'it is late\\u001b[8m'
    """
    return "".join(c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log() -> None:
    """Log on the terminal, from INFO on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
