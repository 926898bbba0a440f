"""A site's record of the masked sums and the agreements in which it has taken part, across runs and restarts.

Two sums of the same messages, with and without one site, differ by that site's message. So a site takes part in sums
over one start only with one set of sites, and with the same clients of its own. The start is what clients were sent and
the settings of the algorithm, without keys, round numbers and identities of runs. A set counts once the site confirms
it, before the site opens any share, because no site can know whether the server has computed the sum.

*Why no weaker rule suffices.* A site sees only the sums in which it takes part, the server sees all. The sets
{a, b, c}, {d, e, f} and {a, ..., g} differ by four sites wherever one site can compare two of them, but the third sum
minus the other two is the message of g. If sets with a common member are equal, then all different sets are disjoint,
and a combination of their sums has at least as many members as the smallest set.

*Agreements.* A design follows from the answers of all its sites about a column, and all of them read it. Two designs of
one column, with and without a site, disclose that site's answer: a level that only it has, or its mean. The adversary
is another site, or anybody who reads both designs; the server is none, because it has each site's answers. So a site
takes part in designs of one column only with one set of sites, as in sums over one start, for any formulas.

Persistent contributions are the sum over rounds of a client's changes. A site adds its contributions up only with all
sites of its earlier sums in the run, and only if it has not returned to a state before one of these sums. Otherwise the
rounds' sums minus the total could be the message of one site.

The record is `sums.jsonl` in the folder of states, a chained log that only grows, with an entry for each sum. A sum is
checked and recorded in one step under the log's lock, even if other processes use the folder. Only `begin` creates the
log, so that a site whose record is lost or damaged refuses masked sums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedtorch import _files as files, tree, wire
from fedtorch.chained_log import Facts
from fedtorch.protocol.versions import FIRST
from fedtorch.sites.rounds.past_cohorts import PastCohorts
from fedtorch.sites.rounds.policy import Refusal
from fedtorch.tree import Tree

FILE = "sums.jsonl"
MOST = 200_000  # most sums, in a file of about 60 MB
_KIND = "sums under masks"
_NAMED = 20  # most sites that a refusal names
_BEGIN = "`fedtorch states DIR --begin-sums`"


def begin(folder: Path | str) -> None:
    """Create the record of a site that has not taken part in any masked sum or agreement.

    Args:
        folder: the folder of the site's states.

    Raises:
        FileExistsError: a record exists. To start a new one on purpose, move it away: its sums are then not refused
            any more.
    """
    path = Path(folder) / FILE
    if path.exists():
        raise FileExistsError(
            f"Expected a folder without {FILE}, but {folder} has one; keep it, or move it away if this site is to "
            "forget which sums it has taken part in"
        )
    files.private_folder(path.parent)
    Facts(path, _KIND, lambda fact: None).open()


class _Sum(NamedTuple):
    """The recorded sum over one start."""

    clients: str  # digest of the names of the site's own clients in it
    sites: int  # index of its set of sites
    at: str  # time of the record, in UTC


class Step(NamedTuple):
    """A round of a run with persistent contributions, by the versions of the site's states."""

    run: str
    base: int  # version at the beginning of the round
    version: int  # version at its end


class _History(NamedTuple):
    """The recorded sums of persistent contributions in a run."""

    sites: frozenset[str]  # sites of all sums
    version: int  # version of the site's states after the last sum
    behind: bool  # whether the site has returned to a state before one of the sums


class PastSums:
    """The record of the masked sums in which a site has taken part.

    Args:
        folder: the folder of states; None if the site has none.
        lasting: whether the record is a file of the folder; else it lasts as long as this object.

    Attributes:
        cohorts: record of the site's clients in sums that the server reads.
    """

    def __init__(self, folder: Path | None, lasting: bool = True) -> None:
        self._facts = Facts(folder / FILE if folder is not None and lasting else None, _KIND, self._know, _damaged)
        self.cohorts = PastCohorts(folder if lasting else None)
        self._lasting, self._opened = lasting, False
        self._sets: list[frozenset[str]] = []
        self._places: dict[frozenset[str], int] = {}
        self._starts: dict[bytes, _Sum] = {}
        self._runs: dict[str, _History] = {}

    def open(self) -> None:
        """Read the record, once.

        Raises:
            Refusal: the record is missing or damaged.
        """
        if self._opened:
            return
        if self._lasting and self._facts.path is None:
            raise Refusal(
                "the site has no folder to record the sums under masks in which it takes part; start it with a folder "
                "of states, or with Policy(remember_sums=False) if it is to forget them"
            )
        if self._facts.path is not None and not self._facts.path.exists():
            raise Refusal(
                f"the site has no {FILE} in its folder of states, the record of the sums under masks and of the "
                "agreements in which it has taken part; a site that has taken part in some restores the file, another "
                f"begins one by {_BEGIN}"
            )
        self._facts.open()
        self._opened = True

    def of_round(
        self, start: bytes, clients: Sequence[str], step: Step | None, sites: frozenset[str], *, confirmed: bool
    ) -> None:
        """Refuse a sum over a start that has been added up by other sites or clients; record a confirmed one.

        Args:
            start: `digest_of_start(...)`.
            clients: the site's own clients in the sum.
            step: the round, if clients have persistent contributions, else None.
            sites: the sum's sites; before confirmation, those that may be in it.
            confirmed: whether this site is about to confirm that it takes part.

        Raises:
            Refusal: other sites, other clients of this site, or no room for another sum.
        """
        key, of_clients = start[:16], _digest(sorted(clients))
        with self._facts.alone():
            known = self._starts.get(key)
            if known is not None and self._differs(known, of_clients, sites):
                raise Refusal(self._difference(known, of_clients))
            if not confirmed:
                return
            if known is None and len(self._starts) >= MOST:
                raise Refusal(
                    f"the site records at most {MOST} sums under masks; move {FILE} away and {_BEGIN} if it is to "
                    "forget them"
                )
            if known is None:
                self._add({"start": key.hex(), "clients": of_clients}, sites)
            if step is not None:
                self.advance(step, sites)

    def of_agreement(self, columns: Iterable[str], sites: frozenset[str], *, confirmed: bool) -> None:
        """Refuse a design of some columns if an earlier design of one of them was from other sites.

        A confirmed design is recorded; without a folder, as long as the process runs, like the site's answers.

        Args:
            columns: columns that the site has described by histograms or levels.
            sites: sites whose answers determine the design; before confirmation, those that may be in it.
            confirmed: whether this site is about to confirm that it agrees.

        Raises:
            Refusal: other sites, or there is no record in the site's folder.
        """
        if self._facts.path is not None:
            self.open()
        starts, nobody = {column: _start_of_column(column) for column in sorted(columns)}, _digest(())
        with self._facts.alone():
            for column, start in starts.items():
                known = self._starts.get(start[:16])
                if known is not None and self._differs(known, nobody, sites):
                    raise Refusal(
                        f"the site has agreed on {column!r} {self._when(known)}, and agrees on it with the same sites "
                        "only: the designs' difference would disclose the answers of those that are in only one of "
                        "them; ask the same sites again, and let others make rows by their design, "
                        "sites.agree(host, names, design)"
                    )
            for start in starts.values():
                self.of_round(start, (), None, sites, confirmed=confirmed)

    def advance(self, step: Step, sites: frozenset[str] = frozenset()) -> None:
        """Record that a site's states have advanced, with or without a sum of some sites."""
        with self._facts.alone():
            account = self._history(step.run)
            behind = account.behind or account.version != step.base
            self._add({"run": step.run, "version": step.version, "behind": behind}, account.sites | sites)

    def of_total(self, step: Step, sites: frozenset[str], *, confirmed: bool) -> None:
        """Refuse a total of persistent contributions that would lack a part of an earlier sum.

        Args:
            step: a step whose version is its base.
            sites: the sum's sites; before confirmation, those that may be in it.
            confirmed: whether this site is about to confirm that it takes part.

        Raises:
            Refusal: a site of an earlier sum is missing, or this site has returned to a state before one.
        """
        with self._facts.alone():
            account = self._history(step.run)
            if account.behind or account.version != step.base:
                raise Refusal(
                    "the site has returned to a state before a sum, and does not add up its persistent contributions "
                    "any more"
                )
            if missing := account.sites - sites:
                raise Refusal(
                    "the site adds up persistent contributions only with all sites of its earlier sums in the run, and "
                    f"{_named(missing)} are missing"
                )
            if confirmed and sites != account.sites:
                self.advance(step, sites)

    def _difference(self, known: _Sum, clients: str) -> str:
        """Return the reason for refusing another sum over a start."""
        whose = "sites" if clients == known.clients else "of its own clients"
        return (
            f"the site has taken part in a sum over the same start {self._when(known)}, and takes part in others with "
            f"the same {whose} only: the sums' difference would be the messages of those that are in only one of them; "
            "ask the same again, or begin from other parameters"
        )

    def _differs(self, known: _Sum, clients: str, sites: frozenset[str]) -> bool:
        return known[:2] != (clients, self._places.get(sites))

    def _when(self, known: _Sum) -> str:
        return f"on {datetime.fromisoformat(known.at):%Y-%m-%d at %H:%M} UTC with {_named(self._sets[known.sites])}"

    def _history(self, run: str) -> _History:
        return self._runs.get(run, _History(frozenset(), FIRST, behind=False))

    def _add(self, entry: Mapping[str, Any], sites: frozenset[str]) -> None:
        """Append an entry with its set of sites; a new set is appended first."""
        if sites not in self._places:
            self._facts.add({"names": sorted(sites)})
        self._facts.add({**entry, "sites": self._places[sites]})

    def _know(self, fact: Mapping[str, Any]) -> None:
        if "start" in fact:
            self._starts[bytes.fromhex(fact["start"])] = _Sum(fact["clients"], fact["sites"], fact["time"])
        elif "run" in fact:
            self._runs[fact["run"]] = _History(self._sets[fact["sites"]], fact["version"], fact["behind"])
        else:
            self._places[sites := frozenset(fact["names"])] = len(self._sets)
            self._sets.append(sites)


def digest_of_start(content: Tree, settings: Mapping[str, str]) -> bytes:
    """Return a digest of one client's inbox and of the algorithm's settings.

    Args:
        content: one client's inbox, `(...)`.
        settings: settings by name, as sites and server compare them; {} within one run.

    Example:
        >>> import torch
        >>> settings = {"rate": "0.1"}
        >>> start = digest_of_start({"weight": torch.zeros(3)}, settings)
        >>> start == digest_of_start({"weight": -torch.zeros(3)}, settings)  # what is computed from them is the same
        True
        >>> start == digest_of_start({"weight": torch.full((3,), 1e-30)}, settings)  # which no site can refuse
        False
    """
    plain = tree.map(lambda leaf: leaf + 0.0 if leaf.is_floating_point() else leaf, content)
    about = json.dumps(dict(settings), sort_keys=True).encode()
    return hashlib.sha256(hashlib.sha256(about).digest() + wire.encode(tree.to(plain, "cpu"))).digest()


def _start_of_column(column: str) -> bytes:
    """Return the digest that replaces a sum's start for agreements on a column."""
    return hashlib.sha256(json.dumps(["agreement", column]).encode()).digest()


def _damaged(error: ValueError) -> Refusal:
    return Refusal(
        f"the site's {FILE} is damaged or lost ({type(error).__name__}), so that it does not know in which sums under "
        f"masks it has taken part; restore a copy, or move it away and {_BEGIN}"
    )


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:32]


def _named(sites: frozenset[str]) -> str:
    """Return the first names of some sites, and their number."""
    names = sorted(sites)
    return f"{names[:_NAMED]} ({len(names)} in all)"
