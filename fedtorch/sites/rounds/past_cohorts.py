"""A site's memory of which of its clients were added up over which start, where the server reads the site's sums.

Two sums over one start, with and without one client, differ by that client's message. Clients that were in the same
sums so far cannot be told from each other: they are a *cell*. All that can be computed of the sums is computed of the
sums over cells, whichever combination is taken. So a site adds up over one start only such clients that each cell has
enough rows. Sets that are equal or disjoint, or that differ and overlap by enough rows, are such.

The memory is `cohorts.jsonl` in the folder of states, a chained log that is begun with the first sum and only grows. A
site all of whose clients have enough rows needs none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtorch.chained_log import Facts
from fedtorch.sites.rounds.policy import Refusal

FILE = "cohorts.jsonl"
MOST = 200_000  # starts; a file of about 60 MB


class PastCohorts:
    """The sets of a site's clients that were added up.

    Args:
        folder: of states, in which they are remembered; None for as long as this object is there.
    """

    def __init__(self, folder: Path | None) -> None:
        self._facts = Facts(None if folder is None else folder / FILE, "sums of clients", self._know, _damaged)
        self._sets: list[frozenset[str]] = []
        self._places: dict[frozenset[str], int] = {}
        self._cells: dict[str, tuple[frozenset[str], ...]] = {}  # by start

    def add(
        self, start: bytes, clients: Sequence[str], names: Sequence[str], rows: Callable[[list[str]], int], least: int
    ) -> None:
        """Remember a sum over a start before it leaves.

        Args:
            start: `digest_of_start(...)`.
            clients: the names of those in the sum.
            names: of all the site's clients; one that is gone has no rows.
            rows: names of clients -> how many rows they have together, or persons.
            least: rows that have to be behind whatever the sums tell together.

        The rows of the first sum over a start are not looked at: they are those of all its clients.

        Raises:
            Refusal: the sums over the start would tell of fewer rows; or the memory is damaged.
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
                        f"would be of fewer than {least} rows, or persons; ask the same clients again, or others with "
                        "none in common, or begin from other parameters; its side would allow it by a smaller "
                        "Policy(minimum=)"
                    )
            if set(after) == set(before):
                return
            if key not in self._cells and len(self._cells) >= MOST:
                raise Refusal(f"the site remembers {MOST} sums, and no more; move {FILE} away if it is to forget them")
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
        "it has added up; bring back a copy, or move it away to begin anew"
    )


def _refined(cells: Sequence[frozenset[str]], asked: frozenset[str]) -> tuple[frozenset[str], ...]:
    """Return the cells of clients that are in the same sums, once `asked` are in one more.

    >>> sorted(sorted(cell) for cell in _refined([frozenset("abc")], frozenset("bcd")))
    [['a'], ['b', 'c'], ['d']]
    """
    if not cells:
        return (asked,)  # itself, of which there is one for all rounds
    rest = asked.difference(*cells)
    parts = [part for cell in cells for part in (cell & asked, cell - asked)]
    return tuple(part for part in (*parts, rest) if part)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]
