"""A ledger: releases about a group of people, in memory and in an append-only file.

A file is a `fedtorch.chained_log` with an entry for the claim and one for every round that began, written and flushed
to disk before any computation of the round; each entry has the hash of the previous one, so that no entry in between
can go missing. Several runs on the same people share a file, one after the other or at once, and their releases add up.
Returning to an earlier checkpoint spends again and refunds nothing. If a checkpoint, or the file `LEDGER.head` beside
the ledger, has entries that the ledger lacks, an error is raised: without the ledger the releases are unknown. An
incomplete last line, as after a kill or on a full disk, belongs to a round that never began, and is moved to
`LEDGER.partial`.

A ledger's claim is fixed when it is created. Secret sampling amplifies privacy only against an adversary who does not
know the cohort (`UNSEEN`). A ledger whose claim excludes such knowledge counts rounds with all clients and sampled
rounds as they are, together; otherwise a sampled round counts like one with all clients.

>>> from fedtorch.trust.privacy.accounting.accountant import Release
>>> from fedtorch.trust.privacy.accounting.ledger import Claim, Ledger
>>> claim = Claim("client", "one client's message against a message of zeros", "all but the server", "of the system")
>>> ledger = Ledger(None, claim, delta=1e-5, budget=5.0)
>>> ledger.spend(0, Release(1.0))
>>> round(ledger.epsilon, 3), ledger.allows(Release(1.0))
(4.377, False)
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedtorch import _files as files
from fedtorch.chained_log import REPAIRED, ChainedLog, Entry
from fedtorch.trust.privacy._checks import check_delta
from fedtorch.trust.privacy.accounting.accountant import COARSE, Release, spent
from fedtorch.trust.privacy.noise import MECHANISMS

SYSTEM = "of the operating system"
UNSEEN = ", and nobody who knows which clients were asked"  # end of an adversary's description
NO_GUARANTEE = "no guarantee: the noise comes from a seed, and whoever knows it can subtract it"
_LOG = logging.getLogger(__name__)


class Claim(NamedTuple):
    """The claim: who is protected, and from whom."""

    unit: str  # "client", "example"
    adjacency: str  # difference of two neighbouring federations
    adversary: str  # what the adversary sees, and does not see
    entropy: str  # source of the noise: `SYSTEM`, or `NO_GUARANTEE` of a seed


class Ledger:
    """Record of releases.

    Args:
        path: of the file; None keeps the ledger in memory, so that a checkpoint cannot be resumed in another process
            unless the noise comes from a seed.
        claim: who is protected, and from whom.
        delta: the δ of all its ε.
        budget: the largest ε; None sets no bound.

    Attributes:
        claim: that of the file, whose adversary may know more, or less, about the cohorts.
        identity: 16 bytes that no other ledger has.
        entries: number of rounds that have begun.
        releases: counts of each kind of release.

    Raises:
        ValueError: a budget or δ out of range, or a file that is damaged or of another claim or δ.
    """

    def __init__(self, path: Path | str | None, claim: Claim, delta: float, budget: float | None = None) -> None:
        check_delta(delta)
        if budget is not None and not budget > 0:
            raise ValueError(f"Expected a positive budget, but got {budget}")
        self.path = None if path is None else Path(path).resolve()
        self.claim, self.delta, self.budget = claim, delta, budget
        self.identity, self.entries = secrets.token_bytes(16), 0
        self.releases: Counter[Release] = Counter()
        self._digests: list[str] = []  # of the entries
        self._unamplified = False  # whether the claim's adversary knows which clients were asked
        self._known: dict[frozenset[tuple[Release, int]], float] = {}
        self._log = None if self.path is None else self._opened(self.path)

    def _opened(self, path: Path) -> ChainedLog:
        """Open the log of the file, and read its entries."""
        _check_not_lost(path)
        _refuse_earlier_form(path)
        first = {"ledger": self.identity.hex(), "delta": self.delta, **self.claim._asdict()}
        log = ChainedLog(path, first, take=self._take, durable=True)
        with log.exclusive():
            _check_head(path, self.identity, self._digests)
        return log

    @property
    def epsilon(self) -> float:
        """Return the ε of everything released so far."""
        return self._epsilon(self.releases)

    def after(self, release: Release, count: int = 1) -> float:
        """Return ε after `count` further releases."""
        return self._epsilon(self.releases + Counter({self._counted(release): count}))

    def with_all(self, releases: Counter[Release]) -> float:
        """Return ε after further releases of several kinds."""
        counted: Counter[Release] = Counter()
        for release, count in releases.items():
            counted[self._counted(release)] += count
        return self._epsilon(self.releases + counted)

    def allows(self, release: Release, count: int = 1) -> bool:
        """Return whether the budget has room for `count` further releases."""
        return self.budget is None or self.after(release, count) <= self.budget

    def spend(self, round: int, release: Release, count: int = 1) -> None:
        """Record a round with `count` releases that is about to begin.

        Raises:
            RuntimeError: it would exceed the budget.
            ValueError: the file is missing, or has been changed.
        """
        if self._log is None:
            self._check_budget(round, release, count)
            self._count(self._counted(release), count, "")
            return
        with self._log.exclusive():
            self._check_budget(round, release, count)
            counted = self._counted(release)
            row = {
                "round": round,
                "mechanism": release.mechanism.name,
                "noise": release.noise,
                "rate": counted.sampling_rate,
            }
            row |= {"sampled": release.sampling_rate} if counted.sampling_rate != release.sampling_rate else {}
            row |= {"excess": release.excess} if release.excess else {}
            self._log.append({**row, "releases": count, "epsilon": self.after(release, count)})
            _write_head(self._log.path, self.identity, self._digests)

    @property
    def last(self) -> str:
        """Return the digest of the last entry, "" if there is none or the ledger is in memory."""
        return self._digests[-1] if self._digests else ""

    def expect(self, identity: bytes, entries: int, release: Release, count: int, last: str = "") -> None:
        """Check that the ledger contains all entries known to a checkpoint.

        Args:
            identity: identity of the checkpoint's ledger.
            entries: its least number of entries.
            release: release of its rounds; in memory and without a guarantee the entries are recreated from it.
            count: releases per round.
            last: digest of the last of these entries, "" if unknown.

        Raises:
            ValueError: another ledger, or one with fewer entries or with others.
        """
        if self.path is None and self.claim.entropy == NO_GUARANTEE:
            missing = max(0, entries - self.entries)
            self.entries += missing
            self.releases[release] += missing * count
            return
        place = "in memory" if self.path is None else str(self.path)
        if identity != self.identity:
            raise ValueError(
                f"Expected the ledger {identity.hex()}, from which the checkpoint's run has spent, but got "
                f"{self.identity.hex()} ({place}); pass the file that belongs to it as ledger="
            )
        _check_entries(self._digests, entries, last, f"{place}, as the checkpoint knows it")

    def _check_budget(self, round: int, release: Release, count: int) -> None:
        if not self.allows(release, count):
            raise RuntimeError(
                f"Round {round + 1} would bring epsilon from {self.epsilon:.4g} to {self.after(release, count):.4g} at "
                f"delta {self.delta}, above the budget of {self.budget}; end before it, as run.rounds(...) does"
            )

    def _count(self, release: Release, count: int, digest: str) -> None:
        self.entries += 1
        self.releases[release] += count
        self._digests.append(digest)

    def _counted(self, release: Release) -> Release:
        """Return a release with the sampling rate that counts against the claim's adversary."""
        return release._replace(sampling_rate=1.0) if self._unamplified else release

    def _epsilon(self, releases: Counter[Release]) -> float:
        key = frozenset(releases.items())
        if key not in self._known:
            self._known = {**dict(list(self._known.items())[-1:]), key: spent(releases, self.delta, COARSE)}
        return self._known[key]

    def _take(self, entry: Entry) -> None:
        """Read an entry of the file."""
        row = entry.content
        if entry.number == 1:
            self._begin(row)
        elif row.get("event") != REPAIRED:
            release = Release(row["noise"], row["rate"], MECHANISMS[row["mechanism"]], row.get("excess", 0.0))
            self._count(release, row["releases"], entry.digest)

    def _begin(self, row: dict[str, Any]) -> None:
        """Read the entry of the claim."""
        mine = {"delta": self.delta, **self.claim._asdict()}
        theirs = {name: row[name] for name in mine}
        adversaries = mine["adversary"], theirs["adversary"]
        self._unamplified = adversaries[0] == adversaries[1] + UNSEEN
        if self._unamplified or adversaries[1] == adversaries[0] + UNSEEN:
            self.claim = self.claim._replace(adversary=adversaries[1])
            mine["adversary"] = adversaries[1]
        for name, value in mine.items():
            if theirs[name] != value:
                raise ValueError(
                    f"expected {name} {value!r}, but it has {theirs[name]!r}; a ledger has one claim, so use a ledger "
                    "for each claim; against an adversary of both claims, their epsilons and deltas add up"
                )
        self.identity = bytes.fromhex(row["ledger"])


def _refuse_earlier_form(path: Path) -> None:
    """Raise ValueError if a file is a ledger of a version before chained logs."""
    if not path.exists():
        return
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        first, last = json.loads(lines[0]), json.loads(lines[-1])
        earlier = "ledger" in first and "entry" not in first
    except (IndexError, TypeError, ValueError):
        return  # which the log refuses, or repairs
    if earlier:
        raise ValueError(
            f"Expected a ledger of this version in {path}, but got one of an earlier version, which has spent epsilon "
            f"{last.get('epsilon', 0.0)} at delta {first['delta']} in {len(lines) - 1} entries. Keep it, begin a "
            "ledger in another file, and subtract what was spent, epsilon and delta, from the budget"
        )


def _write_head(ledger: Path, identity: bytes, digests: Sequence[str]) -> None:
    """Write how many entries a ledger has, and the digest of the last one, into the file beside it.

    It is written after every entry: a kill may leave the ledger one entry ahead of it, and never behind. If both are
    restored together, as from a backup, only a later checkpoint of the run reveals it, see `Ledger.expect`.
    """
    content = {"ledger": identity.hex(), "entries": len(digests), "last": digests[-1] if digests else ""}
    files.write_json(_head(ledger), content)


def _check_head(ledger: Path, identity: bytes, digests: Sequence[str]) -> None:
    """Raise ValueError unless the ledger has the entries in its head file; create a missing head file."""
    head = _head(ledger)
    if not head.exists():
        if digests:
            _LOG.warning("no %s beside the ledger: its %d entries are taken to be complete", head, len(digests))
        _write_head(ledger, identity, digests)
        return
    known = files.read_json(head)
    if known["ledger"] != identity.hex():
        raise ValueError(
            f"Expected the ledger {known['ledger']} in {ledger}, by {head.name} beside it, but got {identity.hex()}; "
            f"bring back the file that belongs there, or remove {head.name} if another ledger was put there on purpose"
        )
    _check_entries(digests, known["entries"], known["last"], f"{ledger}, by {head.name} beside it")


def _check_entries(digests: Sequence[str], entries: int, last: str, where: str) -> None:
    """Raise ValueError unless a ledger has this many entries, and this digest at that position."""
    if len(digests) < entries:
        raise ValueError(
            f"Expected a ledger of at least {entries} rounds in {where}, but got one of {len(digests)}: it was cut, or "
            "an old copy was put in its place. Without the other rounds it is unknown what was released; restore the "
            "newest copy, and count missing rounds as spent"
        )
    if entries and last and digests[entries - 1] != last:
        raise ValueError(
            f"Expected round {entries} of the ledger in {where} to be the one that was written, but got another: two "
            "copies of one ledger have grown apart, and what was released is the sum of both. Keep to one file, and "
            "make a new ledger with a budget that leaves out what both have spent"
        )


def _check_not_lost(ledger: Path) -> None:
    """Raise ValueError if a ledger with entries is missing."""
    head = _head(ledger)
    if not ledger.exists() and head.exists() and (known := files.read_json(head))["entries"]:
        raise ValueError(
            f"Expected the ledger {ledger} with the {known['entries']} rounds of {head.name}, but it is lost; restore "
            f"it, or remove {head.name} to start a ledger without these rounds"
        )


def _head(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.head")
