"""Count what is behind the numbers that leave a site, and hold them to the least that its policy names.

What adds up leaves a site as the sum of the clients that were asked, and the rows of all of them are behind it. What
goes client by client has the client's own rows behind it. Nothing at all tells nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch.sites.rounds.configuration import SiteConfiguration
from fedtorch.sites.rounds.policy import Policy, Refusal

_LOG = logging.getLogger(__name__)
_NAMED = 10  # clients that a line names at most
_ALLOWED = "its side would allow it by a smaller Policy(minimum=)"


class Behind:
    """Holds what a site says of its clients to the least number of rows.

    Args:
        policy: of the site.
        counts: rows of each of its clients `(K,)`.
        names: theirs, which its own log alone has.
        first: the number of the first of them, as the server counts.
        persons: whose rows each client has, by name, where these count in place of rows.
        rows: what they are called.
    """

    def __init__(
        self,
        policy: Policy,
        counts: Tensor,
        names: Sequence[str],
        first: int,
        persons: Mapping[str, frozenset[Any]] | None = None,
        rows: str = "rows",
    ) -> None:
        self.least, self._names, self._first, self._persons = policy.minimum, names, first, persons
        self._told = counts
        self._counts = counts if persons is None else torch.tensor([len(persons[name]) for name in names])
        self._numbers = {name: number for number, name in enumerate(names, first)}
        self._what = rows if persons is None else policy.counted

    def each(self, ids: Tensor) -> Tensor:
        """Return how many rows are behind each of some clients `(M,)`."""
        return self._counts[ids - self._first]

    def all(self, ids: Tensor) -> int:
        """Return how many rows are behind the sum of some clients."""
        if self._persons is None:
            return int(self.each(ids).sum())
        return len(frozenset().union(*(self._persons[self._names[k - self._first]] for k in ids.tolist())))

    def named(self, names: Iterable[str]) -> int:
        """Return how many rows are behind the sum of some clients, by name."""
        return self.all(torch.tensor([self._numbers[name] for name in names], dtype=torch.int64))

    def is_enough(self, ids: Tensor) -> bool:
        """Return whether a sum of some clients may leave."""
        return not 0 < self.all(ids) < self.least

    def few(self, ids: Tensor, taken: int | None = None) -> Tensor:
        """Return those of some clients of which no number of their own may leave; see `check_taken` for `taken`."""
        rows = self._of(ids, taken)
        return ids[(rows > 0) & (rows < self.least)]

    def _of(self, ids: Tensor, taken: int | None) -> Tensor:
        """Return how many rows of each of some clients are in a number of its own `(M,)`."""
        return self.each(ids) if taken is None else self.each(ids).clamp(max=taken)

    def _together(self, ids: Tensor, taken: int) -> int:
        """Return how many rows are surely in a number of some clients that have taken so many of theirs.

        Where persons count, those of one client are not added to those of another, who may be the same.
        """
        each = self._of(ids, taken)
        return 0 if len(each) == 0 else int(each.sum() if self._persons is None else each.max())

    @property
    def everybody(self) -> Tensor:
        """Return the numbers of all clients `(K,)`."""
        return torch.arange(self._first, self._first + len(self._names))

    def counts_told(self) -> list[int]:
        """Return how many rows clients have, as the server hears it: those of few are told their mean.

        Where even their sum is of few rows, it is the mean of them and of the clients with the next fewest. So the sum
        over all clients is right, to the row.
        """
        counts, few = self._told.clone(), self.few(self.everybody)
        if len(few) == 0:
            return counts.tolist()
        order = self.everybody[counts.argsort(stable=True)]
        order = order[(counts[order - self._first] > 0) & ~torch.isin(order, few)]
        while not self.is_enough(few) and len(order):
            few, order = torch.cat([few, order[:1]]), order[1:]
        places = few.sort().values - self._first
        total = int(counts[places].sum())
        counts[places] = (total + torch.arange(len(places)).flip(0)) // len(places)
        return counts.tolist()

    def check(self, ids: Tensor, additive: bool) -> None:
        """Refuse an answer of some clients.

        Args:
            ids: theirs `(M,)`, as the server counts.
            additive: whether their sum leaves the site, and no message of a single one.

        Raises:
            Refusal: fewer rows are behind a number than the policy wants. The server hears a client's number, the
                site's log has its name.
        """
        if additive and not self.is_enough(ids):
            self.note("no sum", ids)
            raise Refusal(
                f"the site answers with sums of at least {self.least} {self._what}, and those of the {len(ids)} of its "
                f"clients that were asked, or have answered, are fewer; ask more of them together; {_ALLOWED}"
            )
        if not additive and len(few := self.few(ids)):
            self.note("no messages of single clients", few)
            raise Refusal(
                f"each client's own message would leave the site, and client {int(few[0])} has fewer than "
                f"{self.least} {self._what}, as have {len(few)} of the {len(ids)} that were asked; leave them out, or "
                f"take an algorithm whose messages add up; {_ALLOWED}"
            )

    def check_taken(self, ids: Tensor, additive: bool, taken: int) -> None:
        """Refuse an answer of some clients that have taken so few of their rows each, as of one small batch.

        Args:
            ids: theirs `(M,)`.
            additive: whether their sum leaves the site.
            taken: rows that each has taken at least; with persons, persons that so many rows are of at least.
        """
        few = self._together(ids, taken) < self.least if additive else len(self.few(ids, taken)) > 0
        if few and bool((self._of(ids, taken) > 0).any()):
            raise Refusal(
                f"the site answers with numbers of at least {self.least} {self._what}, and a round's batches have as "
                f"few as {taken} of a client; take larger batches, more steps, or epochs; {_ALLOWED}"
            )

    def check_first(self, ids: Tensor) -> None:
        """Refuse an answer of which some clients, too few together, would tell for good for the first time."""
        if not self.is_enough(ids):
            self.note("no first sum", ids)
            raise Refusal(
                f"clients tell for good for the first time in groups of at least {self.least} {self._what}, and the "
                f"{len(ids)} that would do so now, client {int(ids[0])} among them, have fewer; ask all clients in the "
                f"first round; {_ALLOWED}"
            )

    def joined(self, values: Tensor, ids: Tensor, taken: int | None = None) -> Tensor:
        """Return a diagnostic of clients `(M,)`, the mean in the place of each; NaN where one has none.

        The memory of cohorts counts the rows of all of them, so that the mean has to be one of all.

        Args:
            values: of each client.
            ids: of the clients `(M,)`.
            taken: rows of each that are in its own value at least, see `check_taken`; None for all that it has.
        """
        there = ids[self.each(ids) > 0]
        enough = self.is_enough(there) and (taken is None or self._together(there, taken) >= self.least)
        whole = enough and not bool(values[self.each(ids) > 0].isnan().any())
        one = values.nanmean() if whole else torch.full_like(values[:1].sum(), torch.nan)
        return one.expand(len(values)).clone()

    def note(self, what: str, ids: Tensor, why: str = "") -> None:
        """Write to the site's own log, by name, which clients have too few rows, or what else is with them."""
        names = [self._names[client - self._first] for client in ids[:_NAMED].tolist()]
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        _LOG.warning("%s: clients %s%s %s", what, names, more, why or f"have fewer than {self.least} {self._what}")


def behind(configuration: SiteConfiguration, first: int = 0) -> Behind:
    """Return what is behind the numbers of a site's clients, the first of which the server counts as `first`."""
    data = configuration.data
    return Behind(configuration.policy, data.counts, data.names, first, configuration.persons())
