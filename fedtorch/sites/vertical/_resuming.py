"""Protocols between organisations that outlive cut connections and nodes that are killed and started again.

    over_hub(half, hub, ["clinic", "laboratory"], folder)                         # the server
    over_link(half, lambda: connect(address, identity), folder)                   # a party

`half` is a function of a `Journal`, see there. Whenever somebody is lost, the server ends all streams, waits until all
parties are back, and finds the last point that everybody has; from there all go on, with the numbers of a run that
nothing disturbed. Every wait is bounded: a party that does not come back in time ends the protocol at all nodes, and
everybody hears its name. A node that fails by itself, or finds its disk full, is waited for just as long, so that
whoever runs it can set it right and start it again.

The server makes the run's identity, by which a party finds its own folder again. When all are done, that is noted
before it is said, so that a party that misses the last word and comes back hears it, also from a server that has been
started again. A party that is killed after the last word and begun again finds no server; `fedtorch states` says that
its run is over, and what a half does with its result it does before.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedtorch.protocol import rollback
from fedtorch.protocol.halves import Half, Traffic
from fedtorch.protocol.journal import Journal
from fedtorch.protocol.versions import FIRST, alone_in, runs
from fedtorch.sites.streams.hub import Hub, Link
from fedtorch.sites.streams.timeout import Timeout
from fedtorch.sites.vertical import _once as once
from fedtorch.sites.vertical._peers import Peer, PeerLost, drive_with, give_up, meet
from fedtorch.wire import PayloadError

Begin = Callable[[Journal], Half]
CLOSING = 10.0  # seconds in which a party that may have missed the last word can come back
_TRIES = 100  # from one point, before it is said that it goes nowhere
_LOG = logging.getLogger(__name__)


def serve(
    begin: Begin, hub: Hub, parties: Sequence[str], folder: Path | str | None, seconds: float, timeout: float
) -> tuple[Any, Traffic]:
    """Run the server's half to its end; return its result, and the bytes of payloads."""
    with alone_in(folder):
        server = _Server(begin, hub, Journal(None if folder is None else Path(folder)), seconds)
        server.journal.enter(_run_in(folder))
        result = server.until_done(parties, timeout)
        server.close_late_parties(parties, min(timeout, CLOSING))
    return result, server.traffic


def take_part(
    begin: Begin, dial: Callable[[], Link], folder: Path | str | None, seconds: float, timeout: float
) -> tuple[Any, Traffic]:
    """Run a party's half to its end; return its result, and the bytes of payloads since this process began."""
    with alone_in(folder):
        party, waits = _Party(begin, Journal(None if folder is None else Path(folder))), Timeout(timeout)
        moved = [0, 0]
        while not party.done:
            try:
                link = dial()
            except (ConnectionError, TimeoutError) as error:
                waits.again(error)
                continue
            party.entered = False
            _LOG.info("connected; waiting for the server, and for all other parties")
            try:
                more = once.take_part(party.half(), link, seconds)[1]
                moved = [moved[0] + more.up, moved[1] + more.down]
            except PeerLost as error:
                if party.entered:
                    waits.heard(time.monotonic())
                if not party.done:
                    _LOG.warning("connecting again: %s", error)
                    waits.again(error)
            finally:
                link.close()
    return party.result, Traffic(*moved)


class _Party:
    """A party's attempts.

    Args:
        begin: makes the half.
        journal: of whatever run the server says.

    Attributes:
        entered: whether the server has said in this attempt which run it is.
        done: whether all are done, and `result` is what the half found.
    """

    def __init__(self, begin: Begin, journal: Journal) -> None:
        self.begin, self.journal = begin, journal
        self.entered = self.done = False
        self.result: Any = None

    def half(self) -> Half:
        """Take part from the point that the server names."""
        yield from rollback.enter_run(self.journal)
        self.entered = True
        point = yield from rollback.agree_with_server(self.journal)
        _LOG.info("run %s has begun with all parties, from point %d", self.journal.run[:8], point)
        result = yield from self.begin(self.journal)
        yield from rollback.end_with_server(self.journal)
        self.result, self.done = result, True
        _LOG.info("run %s is over", self.journal.run[:8])


class _Server:
    """The server's attempts.

    Args:
        begin: makes the half.
        hub: where the parties connect.
        journal: of the run.
        seconds: the longest wait for a message.

    Attributes:
        sure: the parties that have said that they know that all are done.
        peers: of this attempt, once all have come.
        traffic: bytes so far.
    """

    def __init__(self, begin: Begin, hub: Hub, journal: Journal, seconds: float) -> None:
        self.begin, self.hub, self.journal, self.seconds = begin, hub, journal, seconds
        self.sure: set[str] = set()
        self.peers: dict[str, Peer] = {}
        self.traffic = Traffic(0, 0)

    def until_done(self, parties: Sequence[str], timeout: float) -> Any:
        """Go through the protocol with all parties, again and again, until all are done."""
        tries, newest = 0, FIRST
        while not self.journal.versions.over:
            try:
                return self.attempt(parties, timeout)
            except PeerLost as error:
                now = max(self.journal.versions.numbers)
                tries, newest = 1 if now > newest else tries + 1, now
                if tries >= _TRIES or not self.peers:
                    give_up(self.hub, parties, error)
                    raise
                _LOG.warning("waiting for all parties, to go on from a point: %s", error)
            except ConnectionError as error:
                give_up(self.hub, parties, error)
                raise
            except OSError:
                raise  # such as a full disk: the parties wait until the server is started again
            except Exception as error:
                give_up(self.hub, parties, error)
                raise
            finally:
                self._hang_up()
        return self.attempt([], timeout)

    def attempt(self, parties: Sequence[str], timeout: float) -> Any:
        """Go through the protocol with these parties once; raise `PeerLost` where that ends too early."""
        self.peers = meet(self.hub, parties, self.seconds, timeout)
        result = drive_with(self.half(parties), self.peers)
        for name, peer in self.peers.items():
            with suppress(PeerLost):
                peer.hear_end()
                self.sure.add(name)
                peer.say_end()
        self._count()
        return result

    def half(self, parties: Sequence[str]) -> Half:
        """Go on from the last point that the server and these parties have."""
        yield from rollback.agree_with_parties(self.journal, parties)
        result = yield from self.begin(self.journal)
        yield from rollback.end_with_parties(self.journal, parties)
        return result

    def close_late_parties(self, parties: Sequence[str], seconds: float) -> None:
        """Say that all are done to parties that come back because they may not know it."""
        ends = time.monotonic() + seconds
        while (unsure := [name for name in parties if name not in self.sure]) and time.monotonic() < ends:
            for name in unsure:
                try:
                    self.attempt([name], min(seconds, 0.25))
                except (ConnectionError, PayloadError):
                    self._hang_up()

    def _count(self) -> None:
        """Add up the bytes of this attempt, which is over; its streams are left to whoever uses them next."""
        for peer in self.peers.values():
            self.traffic = Traffic(self.traffic.up + peer.received, self.traffic.down + peer.sent)
        self.peers = {}

    def _hang_up(self) -> None:
        """End the streams of an attempt that came to nothing, so that the parties connect again."""
        for peer in self.peers.values():
            peer.link.close()
        self._count()


def _run_in(folder: Path | str | None) -> str:
    """Return the run that a folder is of, or a new one."""
    kept = [] if folder is None else runs(folder)
    if len(kept) > 1:
        raise ValueError(f"Expected the folder of one run, but {folder} has {[each.run for each in kept]}")
    return kept[0].run if kept else secrets.token_hex(16)
