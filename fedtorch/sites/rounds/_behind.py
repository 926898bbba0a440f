"""Count the rows behind numbers that leave a site, and enforce the minimum of its policy.

An additive message leaves a site as the sum over the clients that were asked: the rows of all of them are behind it.
Behind a client's own message are only the client's rows. An empty message discloses nothing.
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
_NAMED = 10  # most clients that a log message names
_ALLOWED = "its side would allow it by a smaller Policy(minimum=)"


class Behind:
    """Counts the rows behind a site's numbers, and refuses those with fewer than the policy's minimum.

    Args:
        policy: the site's policy.
        counts: row counts of its clients `(K,)`.
        names: names of the clients, which appear only in the site's log.
        first: number of the first client at the server.
        persons: persons of each client, by name, if these count in place of rows.
        rows: name of the rows in messages.
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
        self._row_counts = counts
        self._counts = counts if persons is None else torch.tensor([len(persons[name]) for name in names])
        self._numbers = {name: number for number, name in enumerate(names, first)}
        self._what = rows if persons is None else policy.counted

    def each(self, ids: Tensor) -> Tensor:
        """Return the number of rows behind each of some clients `(M,)`."""
        return self._counts[ids - self._first]

    def all(self, ids: Tensor) -> int:
        """Return the number of rows behind a sum of some clients."""
        if self._persons is None:
            return int(self.each(ids).sum())
        return len(frozenset().union(*(self._persons[self._names[k - self._first]] for k in ids.tolist())))

    def named(self, names: Iterable[str]) -> int:
        """Return the number of rows behind a sum of some clients, by name."""
        return self.all(torch.tensor([self._numbers[name] for name in names], dtype=torch.int64))

    def is_enough(self, ids: Tensor) -> bool:
        """Return whether a sum of some clients may leave."""
        return not 0 < self.all(ids) < self.least

    def few(self, ids: Tensor, taken: int | None = None) -> Tensor:
        """Return the clients of `ids` that have too few rows for a number of their own; `taken` as in `check_taken`."""
        rows = self._of(ids, taken)
        return ids[(rows > 0) & (rows < self.least)]

    def _of(self, ids: Tensor, taken: int | None) -> Tensor:
        """Return the number of rows in each client's own number `(M,)`."""
        return self.each(ids) if taken is None else self.each(ids).clamp(max=taken)

    def _together(self, ids: Tensor, taken: int) -> int:
        """Return a lower bound of the rows in a sum of clients, each of which used at least `taken` rows.

        Persons of two clients are not added up, because they may be the same.
        """
        each = self._of(ids, taken)
        return 0 if len(each) == 0 else int(each.sum() if self._persons is None else each.max())

    @property
    def everybody(self) -> Tensor:
        """Return the numbers of all clients `(K,)`."""
        return torch.arange(self._first, self._first + len(self._names))

    def reported_counts(self) -> list[int]:
        """Return clients' row counts for the server, in which clients with few rows are replaced by their mean.

        If these together have too few rows, the mean includes the clients with the next fewest. The sum over all
        clients stays exact.
        """
        counts, few = self._row_counts.clone(), self.few(self.everybody)
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
        """Refuse an answer of some clients if too few rows are behind it.

        Args:
            ids: numbers of the clients at the server `(M,)`.
            additive: whether only the clients' sum leaves the site, and no single message.

        Raises:
            Refusal: fewer rows are behind a number than the policy's minimum. The server gets a client's number, and
                the site's log its name.
        """
        if additive and not self.is_enough(ids):
            self.note("no sum", ids)
            raise Refusal(
                f"the site answers with sums of at least {self.least} {self._what}, and the {len(ids)} of its clients "
                f"that were asked, or have answered, have fewer; ask more of them together; {_ALLOWED}"
            )
        if not additive and len(few := self.few(ids)):
            self.note("no messages of single clients", few)
            raise Refusal(
                f"each client's own message would leave the site, and client {int(few[0])} has fewer than "
                f"{self.least} {self._what}, as have {len(few)} of the {len(ids)} that were asked; leave them out, or "
                f"take an algorithm whose messages add up; {_ALLOWED}"
            )

    def check_taken(self, ids: Tensor, additive: bool, taken: int) -> None:
        """Refuse an answer of clients that have used too few of their rows, such as one small batch.

        Args:
            ids: numbers of the clients `(M,)`.
            additive: whether their sum leaves the site.
            taken: least number of rows that each client has used, or of persons to whom these must belong.
        """
        few = self._together(ids, taken) < self.least if additive else len(self.few(ids, taken)) > 0
        if few and bool((self._of(ids, taken) > 0).any()):
            raise Refusal(
                f"the site answers with numbers of at least {self.least} {self._what}, and a round's batches have as "
                f"few as {taken} of a client; take larger batches, more steps, or epochs; {_ALLOWED}"
            )

    def check_first(self, ids: Tensor) -> None:
        """Refuse first contributions of clients that together have too few rows."""
        if not self.is_enough(ids):
            self.note("no first sum", ids)
            raise Refusal(
                f"clients contribute for the first time in groups of at least {self.least} {self._what}, and the "
                f"{len(ids)} that would do so now, client {int(ids[0])} among them, have fewer; ask all clients in the "
                f"first round; {_ALLOWED}"
            )

    def joined(self, values: Tensor, ids: Tensor, taken: int | None = None) -> Tensor:
        """Return a diagnostic of clients `(M,)`, each replaced by the mean; NaN if a client with rows has no value.

        The record of cohorts counts the rows of all these clients, so the mean must include all.

        Args:
            values: value of each client.
            ids: numbers of the clients `(M,)`.
            taken: least number of rows in each client's value, see `check_taken`; None for all its rows.
        """
        there = ids[self.each(ids) > 0]
        enough = self.is_enough(there) and (taken is None or self._together(there, taken) >= self.least)
        whole = enough and not bool(values[self.each(ids) > 0].isnan().any())
        one = values.nanmean() if whole else torch.full_like(values[:1].sum(), torch.nan)
        return one.expand(len(values)).clone()

    def note(self, what: str, ids: Tensor, why: str = "") -> None:
        """Log by name which clients have too few rows, or another reason `why`."""
        names = [self._names[client - self._first] for client in ids[:_NAMED].tolist()]
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        _LOG.warning("%s: clients %s%s %s", what, names, more, why or f"have fewer than {self.least} {self._what}")


def behind(configuration: SiteConfiguration, first: int = 0) -> Behind:
    """Return the counts behind a site's numbers; `first` is the number of its first client at the server."""
    data = configuration.data
    return Behind(configuration.policy, data.counts, data.names, first, configuration.persons())
