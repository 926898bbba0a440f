"""Clients that cannot take part."""

from __future__ import annotations

from torch import Tensor


class BadClients(ValueError):
    """Some clients of a block cannot take part; whoever knows the clients' names adds them to the message.

    Args:
        rows: their rows in the block, `(R,)`.
        message: what was expected and what came.

    Example:
        >>> import torch, fedtorch as ft
        >>> ft.BadClients(torch.tensor([2]), "Expected labels, but got none").rows
        [2]
    """

    def __init__(self, rows: Tensor, message: str) -> None:
        super().__init__(message)
        self.rows = rows.tolist()
