"""A site's limits on answers about its columns, and the log of its answers.

A site answers a repeated question about a column with its earlier answer, to the bit, and never with another minimum.
Two different answers, because of new rows, another minimum or other bins, would together disclose more than either
does, so the site stores its answers. It stores refusals, too, because the largest minimum with which a site answers
would disclose its number of rows.

>>> log = AnswerLog(None)
>>> log.once("bins of age", 10, lambda: [200, 61.5]), log.once("bins of age", 10, lambda: [201, 61.6])
([200, 61.5], [200, 61.5])
>>> log.once("bins of age", 20, lambda: [201, 61.6])
Traceback (most recent call last):
fedtorch.data.agreement.disclosure.Refused: the site has told its bins of age, or that it tells none, with a ...
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedtorch.chained_log import Facts

_LOG = logging.getLogger(__name__)
_FILE = "answers.jsonl"


class Refused(ValueError):
    """Raised if a site does not answer; its message goes to the server, so it contains nothing about single rows."""


class Disclosure(NamedTuple):
    """Limits on a site's answers about a formula."""

    minimum: int = 10  # least rows behind any number or name in an answer
    columns: tuple[str, ...] | None = None  # that a formula may read; None for all except those of clients and persons
    designs: int = 100  # most designs by which it makes rows; each could test whether a level is present
    person: str | None = None  # column whose distinct values count for the minimum in place of rows
    client: str | None = None  # the column of clients

    @property
    def counted(self) -> str:
        """Return what `minimum` counts: "rows" or "persons"."""
        return "rows" if self.person is None else "persons"

    def check(self, minimum: int, columns: tuple[str, ...]) -> None:
        """Raise `Refused` for a formula with other columns, and for a smaller minimum.

        The columns of clients and persons are refused, even if listed: a declared level would disclose whether somebody
        of that name is present.
        """
        if minimum < self.minimum:
            raise Refused(
                f"the site tells nothing of fewer than {self.minimum} {self.counted}, but was asked for {minimum}"
            )
        if names := [column for column in columns if column in (self.client, self.person)]:
            raise Refused(
                f"the site's column {names[0]!r} says whose rows are whose, and a formula reads that of clients in "
                "(… | …) alone, also where Policy(columns=...) names it; leave it out of other terms"
            )
        if self.columns is not None and (more := [column for column in columns if column not in self.columns]):
            raise Refused(f"the site's policy lets formulas read columns {list(self.columns)}, but not {more}")


class AnswerLog:
    """A site's answers, stored so that a repeated question gets the same answer, and its number of designs.

    Args:
        folder: of the site's states; None stores the answers in this object only.
    """

    def __init__(self, folder: Path | None) -> None:
        self._facts = Facts(None if folder is None else folder / _FILE, "answers", self._know)
        self._answers: dict[str, dict[str, Any]] = {}
        self._designs = set[str]()
        self._complete: dict[tuple[str, ...], bool] = {}  # columns -> whether complete rows were disclosed

    def once(self, what: str, minimum: int, tell: Callable[[], Any]) -> Any:
        """Return the earlier answer, which may be None, or compute and store it.

        Raises:
            Refused: the earlier answer used another minimum.
        """
        answer = json.loads(json.dumps(tell()))  # turns tuples into lists, as a file does
        with self._facts.alone():
            if what not in self._answers:
                self._facts.add({"what": what, "minimum": minimum, "answer": answer})
            before = self._answers[what]
        if before["minimum"] != minimum:
            raise Refused(
                f"the site has told its {what}, or that it tells none, with a minimum of {before['minimum']} rows, and "
                "answers with no other; ask with that"
            )
        if before["answer"] != answer:
            _LOG.warning(
                "the site reuses its stored %s, computed from other rows than its present ones; if its frame has "
                "changed, delete %s to compute them anew",
                *(what, self._facts.path or "the answers in memory, by a restart,"),
            )
        return before["answer"]

    def has_told(self, what: str) -> bool:
        """Return whether the site has an answer under this name."""
        with self._facts.alone():
            return self._answers.get(what, {"answer": None})["answer"] is not None

    def count(self, design: str, most: int) -> None:
        """Count a design by which rows are made; raise `Refused` above the limit."""
        with self._facts.alone():
            if (name := _digest(design)) in self._designs:
                return
            if len(self._designs) >= most:
                raise Refused(f"the site has made rows by {most} designs, and does not by more")
            self._facts.add({"design": name})

    def leave_out(self, columns: Sequence[str], most: int, check: Callable[[Sequence[tuple[str, ...]]], None]) -> None:
        """Remember for which columns rows that lack a cell are left out.

        Args:
            columns: that a formula reads.
            most: limit on sets of columns. Refused sets count too, because a refusal discloses something.
            check: refuses the columns, given those before.

        Raises:
            Refused: as `check` does, or a set of columns too many.
        """
        key = tuple(sorted(set(columns)))
        with self._facts.alone():
            if self._complete.get(key):
                return
            if key not in self._complete and len(self._complete) >= most:
                raise Refused(f"the site has left out rows for {most} sets of columns, and does not for more")
            try:
                check([each for each, told in self._complete.items() if told])
            except Refused:
                if key not in self._complete:
                    self._facts.add({"complete": list(key), "told": False})
                raise
            self._facts.add({"complete": list(key), "told": True})

    def has_counted(self, design: str) -> bool:
        """Return whether rows were made by a design."""
        with self._facts.alone():
            return _digest(design) in self._designs

    def _know(self, fact: Mapping[str, Any]) -> None:
        if "design" in fact:
            self._designs.add(fact["design"])
        elif "complete" in fact:
            self._complete[tuple(fact["complete"])] = fact["told"]
        else:
            self._answers[fact["what"]] = {"minimum": fact["minimum"], "answer": fact["answer"]}


def _digest(design: str) -> str:
    return hashlib.sha256(design.encode()).hexdigest()
