"""Errors for clients and cells that cannot take part, with messages for readers who may not see rows."""

from __future__ import annotations

from torch import Tensor


class BadClients(ValueError):
    """Some clients of a block cannot take part; the population adds the clients' names to the message.

    Args:
        rows: their rows in the block, `(R,)`.
        message: the expectation and the value found.
        told: the same without the value, for readers who may not see rows; None if nothing may be shown.

    Example:
        >>> import torch, fedtorch as ft
        >>> ft.BadClients(torch.tensor([2]), "Expected labels, but got none").rows
        [2]
    """

    def __init__(self, rows: Tensor, message: str, told: str | None = None) -> None:
        super().__init__(message)
        self.rows, self.told = rows.tolist(), told


class BadCells(ValueError):
    """Raised for cells that a formula cannot use.

    Args:
        message: the cells, with client, row and value.
        told: the same without these, for readers who may not see rows.

    >>> without_rows(BadCells("Expected finite numbers, but got inf in row 3", "its column 'age' has infinite numbers"))
    "its column 'age' has infinite numbers"
    """

    def __init__(self, message: str, told: str) -> None:
        super().__init__(message)
        self.told = told


class BadColumn(TypeError):
    """Raised for a column of another kind than a formula needs; arguments are those of `BadCells`."""

    def __init__(self, message: str, told: str) -> None:
        super().__init__(message)
        self.told = told


def without_rows(error: BaseException, doing: str = "") -> str:
    """Return the message without rows of an error or its causes, else only its kind.

    Args:
        error: its own message may contain rows.
        doing: prefix of the kind, such as "the site failed with ".

    >>> without_rows(ValueError("Expected finite numbers, but got inf in row 3"), "the site failed with ")
    'the site failed with ValueError; see what it says itself'
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(told := getattr(cause, "told", None), str):
            return told
        cause = cause.__cause__
    return f"{doing}{type(error).__name__}; see what it says itself"
