"""Privacy budget, which a run checks before every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Need(NamedTuple):
    """Transport of messages that a guarantee needs."""

    clients: int  # least number of clients in every sum that anybody can see
    noise: float  # the size of a share of noise, which rounding under masks must not coarsen
    what: str  # needs it


class Budget(Protocol):
    """Privacy budget: permitted and spent disclosure, checked before every round and never refunded.

    A run also treats it as a recorder, so that a checkpoint contains the amount spent when it was written.
    """

    @property
    def quorum(self) -> int | None:
        """Return how many clients of a sum the noise is counted over: 1 for each one's own, None for a server's."""
        ...

    @property
    def need(self) -> Need | None:
        """Return the transport that the guarantee needs; None if any will do."""
        ...

    @property
    def lasting(self) -> bool:
        """Return whether the record survives the process and the noise is unpredictable."""
        ...

    def cohort(self, cohort: Any, clients: int) -> Any:
        """Return the cohort for a run with `cohort`; raise if that one cannot be accounted for."""
        ...

    def allows(self) -> bool:
        """Return whether the budget has room for another round; otherwise the run ends."""
        ...

    def spend(self, round: int, asked: Tensor | None, keys: Tensor) -> None:
        """Record a round before any of it is computed; raise if it exceeds the budget.

        Args:
            round: rounds done before.
            asked: ids of the clients asked, None for all.
            keys: `(M,)` that they draw with in this round.
        """
        ...

    def join(self, others: Sequence[Budget], rounds: int) -> None:
        """Have the budgets of a search's other settings spend from this one's ledger, where all releases add up.

        Raises:
            ValueError: the epsilons do not add up in one ledger, or the rounds of all together cost more than the
                budget.
        """
        ...

    def report(self) -> Mapping[str, float]:
        """Return the values for the history after every round."""
        ...

    def record(self, round: Any) -> None:
        """Record a finished round."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of spending, flat."""
        ...

    def load_state_dict(self, flat: Mapping[str, Tensor]) -> None:
        """Refuse a checkpoint that contains more spending than the record."""
        ...


def exhausted(budget: Budget | None) -> bool:
    """Return whether a budget allows no further round."""
    return budget is not None and not budget.allows()
