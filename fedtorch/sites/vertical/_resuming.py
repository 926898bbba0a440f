"""Drivers of protocols between organisations that resume after cut connections and killed nodes.

    over_hub(half, hub, ["clinic", "laboratory"], folder)                         # the server
    over_link(half, lambda: connect(address, identity), folder)                   # a party

`half` is a function of a `Journal`, see there. When a node is lost, the server ends all streams, waits until all
parties have reconnected, and determines the last point that all nodes have stored. All resume from there, with the
numbers of an undisturbed run. Every wait is bounded: a party that does not return in time ends the protocol at all
nodes, which get its name. The same wait applies to a node that fails by itself, or has a full disk, so that its people
can repair and restart it.

The server makes the run's identity, by which a party finds its folder again. The end of the run is recorded before it
is announced. So a party that has missed the announcement gets it when it reconnects, even from a restarted server. A
party that is killed after the announcement and restarted finds no server; `fedtorch states` shows that its run is over.
A half processes its result before the run ends.
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
CLOSING = 10.0  # seconds for parties that may have missed the end of the run to return
_TRIES = 100  # most attempts from one point before the run is given up
_LOG = logging.getLogger(__name__)


def serve(
    begin: Begin, hub: Hub, parties: Sequence[str], folder: Path | str | None, seconds: float, timeout: float
) -> tuple[Any, Traffic]:
    """Run the server's half to its end; return (its result, the traffic of payloads in bytes)."""
    with alone_in(folder):
        server = _Server(begin, hub, Journal(None if folder is None else Path(folder)), seconds)
        server.journal.enter(_run_in(folder))
        result = server.until_done(parties, timeout)
        server.close_late_parties(parties, min(timeout, CLOSING))
    return result, server.traffic


def take_part(
    begin: Begin, dial: Callable[[], Link], folder: Path | str | None, seconds: float, timeout: float
) -> tuple[Any, Traffic]:
    """Run a party's half to its end; return (its result, the traffic of payloads in bytes, of this process)."""
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
                    _LOG.warning("connection lost, connecting again: %s", error)
                    waits.again(error)
            finally:
                link.close()
    return party.result, Traffic(*moved)


class _Party:
    """A party's attempts at a run.

    Args:
        begin: journal -> half.
        journal: journal of the run that the server names.

    Attributes:
        entered: whether the server has named the run in this attempt.
        done: whether all nodes are done, so that `result` is the half's result.
    """

    def __init__(self, begin: Begin, journal: Journal) -> None:
        self.begin, self.journal = begin, journal
        self.entered = self.done = False
        self.result: Any = None

    def half(self) -> Half:
        """Run the half from the point that the server names."""
        yield from rollback.enter_run(self.journal)
        self.entered = True
        point = yield from rollback.agree_with_server(self.journal)
        _LOG.info("run %s has begun with all parties, from point %d", self.journal.run[:8], point)
        result = yield from self.begin(self.journal)
        yield from rollback.end_with_server(self.journal)
        self.result, self.done = result, True
        _LOG.info("run %s is over", self.journal.run[:8])


class _Server:
    """The server's attempts at a run.

    Args:
        begin: journal -> half.
        hub: the hub to which the parties connect.
        journal: journal of the run.
        seconds: longest wait for a message.

    Attributes:
        sure: parties that have confirmed that all nodes are done.
        peers: parties of the current attempt, once all have connected.
        traffic: bytes of payloads so far.
    """

    def __init__(self, begin: Begin, hub: Hub, journal: Journal, seconds: float) -> None:
        self.begin, self.hub, self.journal, self.seconds = begin, hub, journal, seconds
        self.sure: set[str] = set()
        self.peers: dict[str, Peer] = {}
        self.traffic = Traffic(0, 0)

    def until_done(self, parties: Sequence[str], timeout: float) -> Any:
        """Run the protocol with all parties, and resume it after losses, until all are done."""
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
                _LOG.warning("waiting for all parties, to resume the run: %s", error)
            except ConnectionError as error:
                give_up(self.hub, parties, error)
                raise
            except OSError:
                raise  # such as a full disk: the parties wait until the server is restarted
            except Exception as error:
                give_up(self.hub, parties, error)
                raise
            finally:
                self._hang_up()
        return self.attempt([], timeout)

    def attempt(self, parties: Sequence[str], timeout: float) -> Any:
        """Run the protocol with these parties once; raise `PeerLost` if a node is lost."""
        self.peers = meet(self.hub, parties, self.seconds, timeout)
        result = drive_with(self.half(parties), self.peers)
        for name, peer in self.peers.items():
            with suppress(PeerLost):
                peer.receive_end()
                self.sure.add(name)
                peer.send_end()
        self._count()
        return result

    def half(self, parties: Sequence[str]) -> Half:
        """Run the half from the last point that the server and these parties have stored."""
        yield from rollback.agree_with_parties(self.journal, parties)
        result = yield from self.begin(self.journal)
        yield from rollback.end_with_parties(self.journal, parties)
        return result

    def close_late_parties(self, parties: Sequence[str], seconds: float) -> None:
        """Announce the end of the run to parties that reconnect because they have missed it."""
        ends = time.monotonic() + seconds
        while (unsure := [name for name in parties if name not in self.sure]) and time.monotonic() < ends:
            for name in unsure:
                try:
                    self.attempt([name], min(seconds, 0.25))
                except (ConnectionError, PayloadError):
                    self._hang_up()

    def _count(self) -> None:
        """Add the bytes of this attempt, and leave its streams open for another protocol."""
        for peer in self.peers.values():
            self.traffic = Traffic(self.traffic.up + peer.received, self.traffic.down + peer.sent)
        self.peers = {}

    def _hang_up(self) -> None:
        """End the streams of a failed attempt, so that the parties reconnect."""
        for peer in self.peers.values():
            peer.link.close()
        self._count()


def _run_in(folder: Path | str | None) -> str:
    """Return the identity of the folder's run, or a new one."""
    stored = [] if folder is None else runs(folder)
    if len(stored) > 1:
        raise ValueError(f"Expected the folder of one run, but {folder} has {[each.run for each in stored]}")
    return stored[0].run if stored else secrets.token_hex(16)
