"""A site's memory of the sums under masks and the agreements that it has taken part in, across runs and restarts.

Two sums of the same messages, with and without one site, differ by that site's message. So a site takes part in sums
over one start with one set of sites only, and with the same clients of its own: the start is what clients were sent and
the settings of the algorithm, without keys, numbers of rounds and names of runs. A set counts from the moment at which
the site confirms it, before it opens any share: whether the server has come to the sum, no site can know.

*Why nothing less.* A site sees the sums that it takes part in, the server all of them. The sets {a, b, c}, {d, e, f}
and {a, ..., g} differ by four sites wherever one site can compare two of them, and the third less the other two is what
g has said. Of sets that are the same wherever they have a member in common no combination is of fewer members than the
smallest of them has: they are disjoint.

*Agreements.* A design follows from what all of its sites tell of a column, and all of them read it. Two designs of one
column, with and without a site, show what that site has told: a level that it alone has, or its mean. The adversary is
another site, or whoever reads both designs; the server is none, for it has each site's answers. So a site is behind
designs of one column with one set of sites only, as behind sums over one start, whatever the formulas.

What clients tell for good is the sum over rounds of what they have told in each. A site adds it up only with all the
sites that it has ever added up with in the run, and only while it has gone back behind none of these sums: else the
rounds' sums less the total would be what one of them has told.

The memory is `sums.jsonl` in the folder of states, a chained log with an entry for each sum, which only grows. To let a
sum through and to remember it is one step under the log's lock, whatever else works in the folder. Nothing but `begin`
makes the log, so that a site whose memory is lost or damaged refuses sums under masks.
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
MOST = 200_000  # sums; a file of about 60 MB
_KIND = "sums under masks"
_NAMED = 20  # sites that a refusal names at most
_BEGIN = "`fedtorch states DIR --begin-sums`"


def begin(folder: Path | str) -> None:
    """Create the memory of a site that has taken part in no sum under masks and no agreement.

    Args:
        folder: of the site's states.

    Raises:
        FileExistsError: there is one. To begin anew on purpose move it away: what it knows is then refused no more.
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
    """Holds what is known of the sums over one start."""

    clients: str  # a digest of the names of the site's own clients in them
    sites: int  # which of the sets
    at: str  # when, in UTC


class Step(NamedTuple):
    """Locates a sum in a run whose clients tell something for good."""

    run: str
    base: int  # the version of the site's states from which the round began
    version: int  # and with which it ends


class _Told(NamedTuple):
    """Holds what is known of what clients have told for good in a run."""

    sites: frozenset[str]  # of all sums
    version: int  # of the site's states with the last of them
    behind: bool  # whether the site has gone back behind one


class PastSums:
    """The sums that a site has taken part in.

    Args:
        folder: of states; None if the site has none.
        lasting: whether the memory is the folder's; else it is this object's.

    Attributes:
        cohorts: which of the site's clients were added up where the server reads the sum.
    """

    def __init__(self, folder: Path | None, lasting: bool = True) -> None:
        self._facts = Facts(folder / FILE if folder is not None and lasting else None, _KIND, self._know, _damaged)
        self.cohorts = PastCohorts(folder if lasting else None)
        self._lasting, self._opened = lasting, False
        self._sets: list[frozenset[str]] = []
        self._places: dict[frozenset[str], int] = {}
        self._starts: dict[bytes, _Sum] = {}
        self._runs: dict[str, _Told] = {}

    def open(self) -> None:
        """Read the memory, once.

        Raises:
            Refusal: it is not there, or damaged.
        """
        if self._opened:
            return
        if self._lasting and self._facts.path is None:
            raise Refusal(
                "the site has no folder in which it remembers the sums under masks that it takes part in; start it "
                "with a folder of states, or with Policy(remember_sums=False) if it is to forget them"
            )
        if self._facts.path is not None and not self._facts.path.exists():
            raise Refusal(
                f"the site has no {FILE} in its folder of states, the memory of the sums under masks and of the "
                "agreements that it has taken part in; a site that has taken part in some looks for it, another begins "
                f"one by {_BEGIN}"
            )
        self._facts.open()
        self._opened = True

    def of_round(
        self, start: bytes, clients: Sequence[str], step: Step | None, sites: frozenset[str], *, confirmed: bool
    ) -> None:
        """Refuse a sum over a start that was added up by other sites; remember one that is confirmed.

        Args:
            start: `digest_of_start(...)`.
            clients: the site's own in the sum.
            step: of clients that tell something for good, else None.
            sites: whose sum it is, or as long as it is not confirmed, may become.
            confirmed: whether this site is about to say that it takes part.

        Raises:
            Refusal: other sites, or other clients of this one, or there is no room for another sum.
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
                    f"the site remembers {MOST} sums under masks, and no more; move {FILE} away and {_BEGIN} if it is "
                    "to forget them"
                )
            if known is None:
                self._add({"start": key.hex(), "clients": of_clients}, sites)
            if step is not None:
                self.advance(step, sites)

    def of_agreement(self, columns: Iterable[str], sites: frozenset[str], *, confirmed: bool) -> None:
        """Refuse that a design of some columns follows from these sites where others were behind one of a column.

        One that is confirmed is remembered; by a site without a folder as long as its process runs, as its answers are.

        Args:
            columns: of which the site has told, histograms or levels.
            sites: from whose answers the design follows, or as long as it is not confirmed, may follow.
            confirmed: whether this site is about to say that it agrees.

        Raises:
            Refusal: other sites, or there is no memory of sums in the site's folder.
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
                        "only: the designs' difference would be what those have told that are in one of them; ask the "
                        "same sites again, and let others make rows by their design, sites.agree(host, names, design)"
                    )
            for start in starts.values():
                self.of_round(start, (), None, sites, confirmed=confirmed)

    def advance(self, step: Step, sites: frozenset[str] = frozenset()) -> None:
        """Remember that a site's states have gone on, with a sum of some sites or without one."""
        with self._facts.alone():
            account = self._told(step.run)
            behind = account.behind or account.version != step.base
            self._add({"run": step.run, "version": step.version, "behind": behind}, account.sites | sites)

    def of_total(self, step: Step, sites: frozenset[str], *, confirmed: bool) -> None:
        """Refuse to add up what clients have told for good where that would be without a part of an earlier sum.

        Args:
            step: whose version is its base.
            sites: whose sum it is, or may become.
            confirmed: whether this site is about to say that it takes part.

        Raises:
            Refusal: a site of an earlier sum is missing, or this one has gone back behind one.
        """
        with self._facts.alone():
            account = self._told(step.run)
            if account.behind or account.version != step.base:
                raise Refusal(
                    "the site has gone back behind a sum, and does not add up what it has told for good any more"
                )
            if missing := account.sites - sites:
                raise Refusal(
                    "the site adds up what clients have told for good only with all sites that it has added up with in "
                    f"the run, and {_named(missing)} are missing"
                )
            if confirmed and sites != account.sites:
                self.advance(step, sites)

    def _difference(self, known: _Sum, own: str) -> str:
        """Return why a site takes part in no sum over a start."""
        whose = "sites" if own == known.clients else "of its own clients"
        return (
            f"the site has taken part in a sum over the same start {self._when(known)}, and takes part in others with "
            f"the same {whose} only: the sums' difference would be what those have said that are in one of them; ask "
            "the same again, or begin from other parameters"
        )

    def _differs(self, known: _Sum, clients: str, sites: frozenset[str]) -> bool:
        return known[:2] != (clients, self._places.get(sites))

    def _when(self, known: _Sum) -> str:
        return f"on {datetime.fromisoformat(known.at):%Y-%m-%d at %H:%M} UTC with {_named(self._sets[known.sites])}"

    def _told(self, run: str) -> _Told:
        return self._runs.get(run, _Told(frozenset(), FIRST, behind=False))

    def _add(self, entry: Mapping[str, Any], sites: frozenset[str]) -> None:
        """Write an entry of a set of sites, and then know it; a set that is new goes before it."""
        if sites not in self._places:
            self._facts.add({"names": sorted(sites)})
        self._facts.add({**entry, "sites": self._places[sites]})

    def _know(self, fact: Mapping[str, Any]) -> None:
        if "start" in fact:
            self._starts[bytes.fromhex(fact["start"])] = _Sum(fact["clients"], fact["sites"], fact["time"])
        elif "run" in fact:
            self._runs[fact["run"]] = _Told(self._sets[fact["sites"]], fact["version"], fact["behind"])
        else:
            self._places[sites := frozenset(fact["names"])] = len(self._sets)
            self._sets.append(sites)


def digest_of_start(content: Tree, settings: Mapping[str, str]) -> bytes:
    """Return a digest of what one client is sent, and of the settings of the algorithm.

    Args:
        content: what one client hears, `(...)`.
        settings: by name, as sites and server compare them; {} for those of one run.

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
    """Return what stands for the start of a sum where sites agree on a column."""
    return hashlib.sha256(json.dumps(["agreement", column]).encode()).digest()


def _damaged(error: ValueError) -> Refusal:
    return Refusal(
        f"the site's {FILE} is damaged or lost ({type(error).__name__}), so that it does not know which sums under "
        f"masks it has taken part in; bring back a copy, or move it away and {_BEGIN}"
    )


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:32]


def _named(sites: frozenset[str]) -> str:
    """Return some sites by name, and how many there are."""
    names = sorted(sites)
    return f"{names[:_NAMED]} ({len(names)} in all)"
