"""Budget of releases, which a run asks before every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Need(NamedTuple):
    """Say how messages have to be carried for a guarantee to hold."""

    clients: int  # of every sum that anybody can see, at least
    noise: float  # the size of a share of noise, which rounding under masks must not coarsen
    what: str  # needs it


class Budget(Protocol):
    """Hold what may be told of the clients, and what has been: asked before every round, and never given back.

    A run also keeps it as a recorder, so that a checkpoint knows how much was spent when it was written.
    """

    @property
    def quorum(self) -> int | None:
        """Return how many clients of a sum the noise is counted over: 1 for each one's own, None for a server's."""
        ...

    @property
    def need(self) -> Need | None:
        """Return how messages have to be carried for what it counts to hold; None where that does not matter."""
        ...

    @property
    def lasting(self) -> bool:
        """Return whether what is spent outlives the process, of noise that nobody can compute."""
        ...

    def cohort(self, cohort: Any, clients: int) -> Any:
        """Return the cohort of a run that was given `cohort`; raise where that cannot be accounted for."""
        ...

    def allows(self) -> bool:
        """Return whether another round may begin; a loop over rounds ends where it may not."""
        ...

    def spend(self, round: int, asked: Tensor | None, keys: Tensor) -> None:
        """Count a round, before anything of it is computed; raise where it may not begin.

        Args:
            round: rounds done before.
            asked: ids of the clients that are asked, None for all.
            keys: `(M,)` that they draw with in this round.
        """
        ...

    def join(self, others: Sequence[Budget], rounds: int) -> None:
        """Have the budgets of a search's other settings spend from this one's ledger, where all releases add up.

        Raises:
            ValueError: their epsilons do not add up in one ledger, or so many rounds of all, this one too, cost more
                than the budget allows.
        """
        ...

    def report(self) -> Mapping[str, float]:
        """Return what the history tells of it after every round."""
        ...

    def record(self, round: Any) -> None:
        """Take in a round that is done."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return what has been spent, flat."""
        ...

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Refuse a checkpoint that knows of more than has been written down."""
        ...


def exhausted(budget: Budget | None) -> bool:
    """Return whether a budget allows no further round."""
    return budget is not None and not budget.allows()
