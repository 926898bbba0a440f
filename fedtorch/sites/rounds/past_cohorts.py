"""A site's record of the clients that were added up over each start, for sums that the server reads.

Two sums over one start, with and without one client, differ by that client's message. Clients that are in exactly the
same sums form a *cell*: no combination of the sums separates them, and every combination is one of sums over cells. So
a site adds up clients over one start only if each resulting cell has enough rows. This holds for sets that are equal or
disjoint, and for sets whose differences and overlap have enough rows.

The record is `cohorts.jsonl` in the folder of states, a chained log that only grows and is created with the first sum.
A site whose clients all have enough rows needs none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtorch.chained_log import Facts
from fedtorch.sites.rounds.policy import Refusal

FILE = "cohorts.jsonl"
MOST = 200_000  # most starts, in a file of about 60 MB


class PastCohorts:
    """The record of the sets of a site's clients that were added up.

    Args:
        folder: the folder of states, for the record; None to keep it as long as this object exists.
    """

    def __init__(self, folder: Path | None) -> None:
        self._facts = Facts(None if folder is None else folder / FILE, "sums of clients", self._know, _damaged)
        self._sets: list[frozenset[str]] = []
        self._places: dict[frozenset[str], int] = {}
        self._cells: dict[str, tuple[frozenset[str], ...]] = {}  # by start

    def add(
        self, start: bytes, clients: Sequence[str], names: Sequence[str], rows: Callable[[list[str]], int], least: int
    ) -> None:
        """Record a sum over a start before it leaves.

        Args:
            start: `digest_of_start(...)`.
            clients: names of the clients in the sum.
            names: names of all the site's clients; a removed client has no rows.
            rows: names of clients -> number of their rows together, or of persons.
            least: least number of rows behind any combination of the sums.

        The first sum over a start is not checked here, because it has a single cell, the sum's own clients.

        Raises:
            Refusal: a combination of the sums over the start would disclose fewer rows; or the record is damaged.
        """
        key, asked = start[:16].hex(), frozenset(map(_digest, clients))
        with self._facts.alone():
            before = self._cells.get(key, ())
            after = _refined(before, asked)
            known = {_digest(name): name for name in names} if before else {}
            for cell in set(after) - set(before) if before else ():
                here = [known[client] for client in cell if client in known]
                behind = rows(here)
                if behind < least and (behind or len(here) < len(cell)):
                    raise Refusal(
                        "the site has added up others of its clients over the same start, and the sums' difference "
                        f"would come from fewer than {least} rows, or persons; ask the same clients again, or others "
                        "with none in common, or begin from other parameters; its side would allow it by a smaller "
                        "Policy(minimum=)"
                    )
            if set(after) == set(before):
                return
            if key not in self._cells and len(self._cells) >= MOST:
                raise Refusal(f"the site records at most {MOST} sums; move {FILE} away if it is to forget them")
            if asked not in self._places:
                self._facts.add({"clients": sorted(asked)})
            self._facts.add({"start": key, "set": self._places[asked]})

    def _know(self, fact: Mapping[str, Any]) -> None:
        if "start" in fact:
            self._cells[fact["start"]] = _refined(self._cells.get(fact["start"], ()), self._sets[fact["set"]])
        else:
            self._places[whole := frozenset(fact["clients"])] = len(self._sets)
            self._sets.append(whole)


def _damaged(error: ValueError) -> Refusal:
    return Refusal(
        f"the site's {FILE} is damaged or lost ({type(error).__name__}), so that it does not know which of its clients "
        "it has added up; restore a copy, or move it away to begin a new record"
    )


def _refined(cells: Sequence[frozenset[str]], asked: frozenset[str]) -> tuple[frozenset[str], ...]:
    """Return the cells, groups of clients in the same sums, after a further sum of `asked`.

    >>> sorted(sorted(cell) for cell in _refined([frozenset("abc")], frozenset("bcd")))
    [['a'], ['b', 'c'], ['d']]
    """
    if not cells:
        return (asked,)  # the same object, of which one exists for all rounds
    rest = asked.difference(*cells)
    parts = [part for cell in cells for part in (cell & asked, cell - asked)]
    return tuple(part for part in (*parts, rest) if part)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]
