"""A client's part in a round, beside what it receives, its state and its data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtorch import random


class Turn:
    """Hold a client's part in a round: the key that it draws with, the federation's clock, what a Trainer asks for.

    Args:
        key: `(K,)` of randomness, one for each client; or a function that makes it when it is first asked for.
        round: rounds done before this one, in which a client may have been away.
        rates: learning rate of each parameter group, in place of the schedule's.
        limit: minibatches of an epoch, at most so many if it is an int, or this share of them.
        share: how much of the round's work each client does, `(K,)` in (0, 1], rounded up to whole epochs, or steps; or
            a function of the clients' ids that gives it; None for all of it. See `ft.partial_work`.
        refused: ways of sharing steps that no client of the round takes, "padded" or "stacked": a solver has found that
            they are not what clients alone do, here or on another rank. Solvers add to it; it is one set for all
            blocks of the round.
        taken: how many rows a client of the round takes at least, where it does not take all of its own, as in some
            steps on minibatches; and by name, how many are in what it tells of one of its batches, such as the last.
            The former is called "". Solvers add to it; it is one dictionary for all blocks of the round.
        goal: rounds in all that the run is to do, None where that is not known.
        names: `(K,)` the numbers of all clients' names, by which they draw, see `fedtorch.random.named`; None where
            these are the clients' ids.

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
        share: Tensor | Callable[[Tensor], Tensor] | None = None,
        refused: set[str] | None = None,
        names: Tensor | None = None,
        taken: dict[str, int] | None = None,
        goal: int | None = None,
    ) -> None:
        self._key, self.round, self.rates, self.limit, self._share = key, round, rates, limit, share
        self.refused: set[str] = set() if refused is None else refused
        self.taken: dict[str, int] = {} if taken is None else taken
        self.names, self.goal = names, goal

    @property
    def key(self) -> Tensor:
        """Return the clients' keys; closed forms never ask."""
        if not isinstance(self._key, Tensor):
            self._key = self._key()
        return self._key

    @property
    def share(self) -> Tensor | None:
        """Return how much of the round's work each client does, `(K,)`; None for all of it."""
        if callable(self._share):
            raise ValueError("Expected the shares of these clients, but the turn is that of all; see `of_clients`")
        return self._share

    @property
    def partial(self) -> bool:
        """Return whether some clients may do a part of the round's work only."""
        return self._share is not None

    def with_key(self, key: Tensor | Callable[[], Tensor]) -> Turn:
        """Return the turn with another key."""
        return Turn(key, self.round, self.rates, self.limit, self._share, self.refused, self.names, self.taken)

    def of_clients(self, ids: Callable[[], Tensor], device: torch.device) -> Turn:
        """Return the part of the clients with these ids; their keys are folded from the round's, by their names."""
        share = self._share(ids()) if callable(self._share) else self._share
        key = lambda: self.keys(ids()).to(device)
        return Turn(key, self.round, self.rates, self.limit, share, self.refused, taken=self.taken)

    def takes(self, rows: Tensor, count: Tensor, name: str = "") -> None:
        """Note that clients use fewer rows than they have, in all that they send or in one value that they tell.

        Args:
            rows: `(K,)` at least.
            count: `(K,)` that they have.
            name: of what they tell, as in `Reply.info`; "" for all that they send.

        Example:
            >>> import fedtorch as ft
            >>> turn = ft.Turn(ft.random.key(0), round=0)
            >>> turn.takes(torch.tensor([32, 9]), torch.tensor([97, 9]))
            >>> turn.takes(torch.tensor([1, 9]), torch.tensor([97, 9]), "accuracy")
            >>> turn.taken
            {'': 32, 'accuracy': 1}
        """
        some = rows[(rows > 0) & (rows < count)]
        if len(some):
            fewest = int(some.min())
            self.taken[name] = min(fewest, self.taken.get(name, fewest))

    def keys(self, ids: Tensor) -> Tensor:
        """Return what clients with these ids draw with, `(M,)`, of a turn that is that of all."""
        return random.fold_in(self.key, ids if self.names is None else self.names[ids])

    def __repr__(self) -> str:
        return f"Turn(round={self.round})"
