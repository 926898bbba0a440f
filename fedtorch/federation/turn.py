"""A client's part in a round, besides its inbox, state and data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtorch import random


class Turn:
    """A client's part in a round: its random key, the federation's clock, and a Trainer's settings.

    Args:
        key: `(K,)` random keys, one for each client; or a function that computes them on first use.
        round: rounds done before this one, in which a client may have been away.
        rates: learning rate of each parameter group, in place of the schedule's.
        limit: most minibatches of an epoch for an int, or a share of them for a float.
        share: share of the round's work of each client, `(K,)` in (0, 1], rounded up to whole epochs, or steps; or a
            function of the clients' ids; None for all of it. See `ft.partial_work`.
        refused: ways of sharing steps that the round's clients must not use, "padded" or "stacked", because a solver
            has found that they differ from clients' own steps, here or on another rank. Solvers add to it; it is one
            set for all blocks of the round.
        taken: least number of rows used by a client of the round, under "", if it does not use all, as in some steps on
            minibatches; and by name, rows in a value about one of its batches, such as the last. Solvers add to it; it
            is one dictionary for all blocks of the round.
        goal: rounds in all that the run is to do, None if that is not known.
        names: `(K,)` the numbers of all clients' names, from which random draws derive, see `fedtorch.random.named`;
            None if these are the clients' ids.

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
        """Return the clients' keys; closed forms never need them."""
        if not isinstance(self._key, Tensor):
            self._key = self._key()
        return self._key

    @property
    def share(self) -> Tensor | None:
        """Return the share of the round's work of each client, `(K,)`; None for all of it."""
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
        """Record that clients use fewer rows than they have, in their message or in one reported value.

        Args:
            rows: `(K,)` at least.
            count: `(K,)` that they have.
            name: of the reported value, as in `Reply.info`; "" for the message.

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
        """Return the random keys of clients with these ids, `(M,)`, from a turn of all clients."""
        return random.fold_in(self.key, ids if self.names is None else self.names[ids])

    def __repr__(self) -> str:
        return f"Turn(round={self.round})"
