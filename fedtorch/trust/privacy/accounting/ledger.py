"""A ledger: what has been released about some people, in memory and in a file of its own that only grows.

A file has a line of JSON for the claim and one for every round that began, written and forced to the disk before
anything of the round is computed. Each line holds a digest of the one before, so that nothing in between goes missing.
Several runs on the same people share a file, one after the other or at once, and what they release adds up. Going
back to an earlier checkpoint spends again; it refunds nothing. What a checkpoint knows, or the file `LEDGER.head`
beside the ledger, and the ledger does not is an error: without the ledger nobody can say what was released. A last line
that is not whole, as after a kill or on a full disk, is of a round that never began, and is moved to `LEDGER.partial`.

What a ledger claims is said when it is begun. Secret sampling amplifies privacy only against somebody who does not know
who was asked (`UNSEEN`). A ledger whose claim excludes such a person counts rounds with everybody and sampled rounds as
they are, together; in one whose claim does not, a sampled round counts like one in which everybody takes part.

>>> from fedtorch.trust.privacy.accounting.accountant import Release
>>> from fedtorch.trust.privacy.accounting.ledger import Claim, Ledger
>>> claim = Claim("client", "one client's message against a message of zeros", "all but the server", "of the system")
>>> ledger = Ledger(None, claim, delta=1e-5, budget=5.0)
>>> ledger.spend(0, Release(1.0))
>>> round(ledger.epsilon, 3), ledger.allows(Release(1.0))
(4.377, False)
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from fedtorch import _files as files
from fedtorch.trust.privacy._checks import check_delta
from fedtorch.trust.privacy.accounting import _ledger_head
from fedtorch.trust.privacy.accounting.accountant import COARSE, Release, spent
from fedtorch.trust.privacy.noise import MECHANISMS

SYSTEM = "of the operating system"
UNSEEN = ", and nobody who knows which clients were asked"  # the end of an adversary's description
NO_GUARANTEE = "no guarantee: the noise comes from a seed, and whoever knows it can subtract it"


class Claim(NamedTuple):
    """What is protected, and from whom."""

    unit: str  # "client", "example"
    adjacency: str  # in what two neighbouring federations differ
    adversary: str  # whoever sees what, and what they are taken not to see
    entropy: str  # where the noise comes from: `SYSTEM`, or `NO_GUARANTEE` of a seed


class Ledger:
    """What has been released.

    Args:
        path: of the file; None keeps the ledger in memory, so that a checkpoint cannot be resumed in another process
            unless the noise comes from a seed.
        claim: what is protected.
        delta: the δ of all its ε.
        budget: the largest ε; None sets no bound.

    Attributes:
        claim: that of the file, which may hold against somebody who knows more, or less, about who was asked.
        identity: 16 bytes that no other ledger has.
        entries: how many rounds have begun.
        releases: how often each kind of release was made.

    Raises:
        ValueError: a budget or δ out of range, or a file that is damaged or of another claim or δ.
    """

    def __init__(self, path: Path | str | None, claim: Claim, delta: float, budget: float | None = None) -> None:
        check_delta(delta)
        if budget is not None and not budget > 0:
            raise ValueError(f"Expected a positive budget, but got {budget}")
        self.path = None if path is None else Path(path)
        self.claim, self.delta, self.budget = claim, delta, budget
        self.identity, self.entries = secrets.token_bytes(16), 0
        self.releases: Counter[Release] = Counter()
        self._digests: list[str] = []  # of the entries
        self._unamplified = False  # who knows which clients were asked is an adversary of the file's claim
        self._read, self._last = 0, ""  # bytes of the file that are taken in, and a digest of its last line
        self._known: dict[frozenset[tuple[Release, int]], float] = {}
        if self.path is not None:
            self.path = self.path.resolve()
            with self._lock():
                if not self.path.exists():
                    _ledger_head.check_not_lost(self.path)
                    self.path.touch()
                self._catch_up()
                if self._read == 0:
                    self._write({"ledger": self.identity.hex(), "delta": delta, **claim._asdict()})
                _ledger_head.check(self.path, self.identity, self._digests)

    @property
    def epsilon(self) -> float:
        """What everything released so far costs."""
        return self._epsilon(self.releases)

    def after(self, release: Release, count: int = 1) -> float:
        """What it would cost after `count` further releases."""
        return self._epsilon(self.releases + Counter({self._counted(release): count}))

    def allows(self, release: Release, count: int = 1) -> bool:
        """Whether the budget has room for `count` further releases."""
        return self.budget is None or self.after(release, count) <= self.budget

    def spend(self, round: int, release: Release, count: int = 1) -> None:
        """Writes down a round with `count` releases that is about to begin.

        Raises:
            RuntimeError: it would exceed the budget.
            ValueError: the file is gone, or not what it was.
        """
        if self.path is None:
            self._take(round, release, count)
            return
        with self._lock():
            if not self.path.exists():
                raise ValueError(f"Expected the ledger {self.path} that this run has spent from, but it is lost")
            self._catch_up()
            self._take(round, release, count)
            counted = self._counted(release)
            kind = {"mechanism": release.mechanism.name, "noise": release.noise, "rate": counted.rate}
            kind |= {"sampled": release.rate} if counted.rate != release.rate else {}
            kind |= {"excess": release.excess} if release.excess else {}
            row = {"entry": self.entries, "round": round, **kind, "releases": count, "epsilon": self.epsilon}
            self._write(row)
            self._digests.append(self._last)
            _ledger_head.note(self.path, self.identity, self._digests)

    @property
    def last(self) -> str:
        """Return the digest of the last entry, "" where there is none or the ledger is in memory."""
        return self._digests[-1] if self._digests else ""

    def expect(self, identity: bytes, entries: int, release: Release, count: int, last: str = "") -> None:
        """Checks that all is here that a checkpoint knows of.

        Args:
            identity: of the ledger from which was spent.
            entries: of it, at least.
            release: what its rounds released; in memory and without a guarantee the entries are then made up.
            count: how often in each round.
            last: digest of the last of these entries, "" if it is not known.

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
        digests = [""] * self.entries if self.path is None else self._digests
        _ledger_head.check_entries(digests, entries, last, f"{place}, as the checkpoint knows it")

    def _take(self, round: int, release: Release, count: int) -> None:
        if not self.allows(release, count):
            raise RuntimeError(
                f"Round {round + 1} would bring epsilon from {self.epsilon:.4g} to {self.after(release, count):.4g} at "
                f"delta {self.delta}, above the budget of {self.budget}; run.rounds(...) and ft.run stop before it"
            )
        self.entries += 1
        self.releases[self._counted(release)] += count

    def _counted(self, release: Release) -> Release:
        """Return what a release is to the claim's adversary."""
        return release._replace(rate=1.0) if self._unamplified else release

    def _epsilon(self, releases: Counter[Release]) -> float:
        key = frozenset(releases.items())
        if key not in self._known:
            self._known = {**dict(list(self._known.items())[-1:]), key: spent(releases, self.delta, COARSE)}
        return self._known[key]

    def _lock(self) -> FileLock:
        return FileLock(f"{self.path}.lock")

    def _write(self, row: dict[str, Any]) -> None:
        assert self.path is not None
        line = json.dumps({**row, "previous": self._last}).encode() + b"\n"
        files.append(self.path, line)
        self._read, self._last = self._read + len(line), _digest(line)

    def _catch_up(self) -> None:
        """Takes in what the file has beyond what is known: all of it at first, later what other runs have spent."""
        assert self.path is not None
        with self.path.open("rb") as file:
            file.seek(self._read)
            news = file.read()
            size = os.fstat(file.fileno()).st_size
        if size < self._read:
            raise ValueError(
                f"Expected the ledger {self.path} only to grow, but it has {size} bytes, and had {self._read}; bring "
                "back what was cut off"
            )
        whole = news.rfind(b"\n") + 1
        if begun := news[whole:]:
            _ledger_head.set_aside(self.path, begun)
            os.truncate(self.path, self._read + whole)
            news = news[:whole]
        for line in news.splitlines(keepends=True):
            self._check(line)

    def _check(self, line: bytes) -> None:
        """Takes in a line of the file."""
        try:
            row = json.loads(line)
            if row["previous"] != self._last:
                raise ValueError("it does not follow the line before")
            if self._read == 0:
                self._begin(row)
            else:
                release = Release(row["noise"], row["rate"], MECHANISMS[row["mechanism"]], row.get("excess", 0.0))
                self.entries += 1
                self.releases[release] += row["releases"]
        except (KeyError, TypeError, ValueError) as error:
            number = self.entries + 2 if self._read else 1
            raise ValueError(f"Line {number} of the ledger {self.path} cannot be used: {error}") from error
        self._digests += [_digest(line)] if self._read else []
        self._read, self._last = self._read + len(line), _digest(line)

    def _begin(self, row: dict[str, Any]) -> None:
        """Takes in the line of the claim."""
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
                    f"expected {name} {value!r}, but it says {theirs[name]!r}; one ledger has one claim, so give each "
                    "its own: against whom both claims hold, their epsilons and deltas add up"
                )
        self.identity = bytes.fromhex(row["ledger"])


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:32]
