"""A client's part in a round, beside what it receives, its state and its data."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Turn:
    """Hold a client's part in a round: the key that it draws with, the federation's clock, what a Trainer asks for.

    Args:
        key: `(K,)` of randomness, one for each client; or a function that makes it when it is first asked for.
        round: rounds done before this one, in which a client may have been away.
        rates: learning rate of each parameter group, in place of the schedule's.
        limit: minibatches of an epoch, at most so many if it is an int, or this share of them.

    Example:
        >>> import fedtorch as ft
        >>> ft.Turn(ft.random.key(0), round=3).round
        3
    """

    def __init__(
        self,
        key: Tensor | Callable[[], Tensor],
        round: int,
        rates: tuple[float, ...] | None = None,
        limit: float | None = None,
    ) -> None:
        self._key, self.round, self.rates, self.limit = key, round, rates, limit

    @property
    def key(self) -> Tensor:
        """Return the clients' keys; closed forms never ask."""
        if not isinstance(self._key, Tensor):
            self._key = self._key()
        return self._key

    def with_key(self, key: Tensor | Callable[[], Tensor]) -> Turn:
        """Return the turn with another key."""
        return Turn(key, self.round, self.rates, self.limit)

    def __repr__(self) -> str:
        return f"Turn(round={self.round})"
