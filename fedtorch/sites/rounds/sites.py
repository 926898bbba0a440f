"""The server's view of its sites: who is connected, their clients and rows, and the driver of the server's halves.

A site may disconnect, reconnect, answer late or send anything. The driver asks all sites of a `Receive` at once, asks
again after a reconnect, and continues when enough sites have answered or the time is up.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from fedtorch.data.agreement.alike import Unlike, check_alike
from fedtorch.protocol.halves import Half, Heard, Receive, Send, Traffic, drive, hear
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds.frames import PROTOCOL, Frame
from fedtorch.sites.rounds.status import Trouble
from fedtorch.sites.streams.hub import Hub
from fedtorch.wire import PayloadError

_LOG = logging.getLogger(__name__)
_MOST_STRAYS = 100
LATE = "it is late"
_LOOK = 0.25  # seconds between checks for sites that have disconnected


Begin = Callable[[str], bytes]


class Brings(NamedTuple):
    """A site's clients and rows, as it has announced them."""

    clients: tuple[str, ...]
    rows: tuple[int, ...]  # row counts; zeros if rows with missing cells are dropped and the columns are not known yet
    schema: Any  # structure of its rows, as JSON
    design: str | None = None  # digest of the design of its frame's rows, "" before there is one; None without a frame
    joined: bool = False  # whether clients with few rows report their mean count
    missing: str = ""  # treatment of missing cells in its frame: "refuse", "drop" or "impute"

    @property
    def keeps_missing(self) -> bool:
        """Return whether rows of a frame keep their missing cells, marked by a mask."""
        fields = self.schema.get("fields") if isinstance(self.schema, dict) else None
        masked = isinstance(fields, list) and len(fields) == 2 and fields[1].get("dtype") == "bool"
        return self.design is not None and masked

    @property
    def form(self) -> str:
        """Return the form of its rows in words; sites with different forms cannot share a run."""
        if self.design is None:
            return f"rows like {self.schema}"
        if not self.design:
            return "a frame without a design yet"
        cells = "kept missing cells" if self.keeps_missing else "complete rows"
        return f"{cells} by the design {self.design[:8]}"


class Question:
    """Requests to some sites, and their answers so far.

    Args:
        run: identity of the run.
        begin: site -> the frame that begins the run there; None if there is none.
        requests: requests by site, all with one number.
        wanted: how to read answers, how many to wait for, and for how long.

    Attributes:
        asked: sites that have been sent the request on their current stream.
        waiting: sites that have neither answered nor refused, in order.
        heard: answers in order of arrival, and reasons why others have none.
        bytes_up: bytes of the answers that were used.
    """

    def __init__(self, run: str, begin: Begin | None, requests: Mapping[str, Send], wanted: Receive) -> None:
        self.run, self.begin, self.requests, self.wanted = run, begin, requests, wanted
        self.asked: set[str] = set()
        self.waiting = dict.fromkeys(requests)
        self.heard, self.bytes_up = Heard({}, {}), 0

    @property
    def bytes_down(self) -> int:
        """Return the bytes of all requests."""
        return sum(len(request.message) for request in self.requests.values())

    def hear(self, frame: Frame) -> None:
        """Process a site's frame, if it belongs to the question."""
        name = frame.sender
        if frame.kind == "hello":
            self.asked.discard(name)
        elif name in self.asked and name in self.waiting:
            if frame.about.get("sequence") != self.requests[name].sequence:
                return
            del self.waiting[name]
            hear(self.heard, name, partial(self.wanted.like, name, frame))
            self.bytes_up += len(frame.payload) * (name in self.heard.messages)

    def end(self, gone: Mapping[str, str]) -> Heard:
        """Return all answers in the order of the sites; `gone` gives reasons for those not waited for any more."""
        messages, missing = self.heard
        return Heard({name: messages[name] for name in self.requests if name in messages}, {**missing, **gone})


Ask = Callable[[Question], Heard]


class Sites:
    """Sites of a hub, in a fixed order.

    Args:
        host: the hub to which they connect.
        names: names of the sites, as in their certificates.
        agreed: most rows that a site may have, by name, if that was agreed.
        alike: whether all sites must have rows of one form; not before they agree on a design.

    Attributes:
        bring: clients and rows of each site that has announced itself.
        met: whether all sites have announced themselves; after that, clients and rows must not change.
        troubles: last reason why a site did not answer, by site.
        tally: how often that happened, and when last, by site.
        on_look: called during every wait, and for each frame.
        on_drop: called with the name of every disconnected site and the reason.
    """

    def __init__(
        self, host: Hub, names: Sequence[str], agreed: Mapping[str, int | None] | None = None, alike: bool = True
    ) -> None:
        self.host, self.names, self._agreed, self._alike = host, tuple(names), dict(agreed or {}), alike
        self.bring: dict[str, Brings] = {}
        self.met = False
        self.troubles: dict[str, str] = {}
        self.tally: dict[str, Trouble] = {}
        self.on_look: Callable[[], None] = lambda: None
        self.on_drop: Callable[[str, str], None] = lambda name, reason: None
        self._dropped: dict[str, str] = {}  # why sites were disconnected that have not reconnected
        self._begun: dict[str, str] = {}  # the run begun on a site's stream
        self._here: set[str] = set()  # sites whose stream has sent hello
        self._owes: dict[str, int] = {}  # a site's unanswered request: meanwhile it gets no other
        self._strays: Counter[str] = Counter()  # unrequested frames on a site's stream
        self._sequence = secrets.randbits(61)  # a random start, so that numbers are not reused after a restart

    def meet(self, seconds: float, least: int | None = None) -> None:
        """Wait until every site has announced itself; a site's last announcement counts.

        Args:
            seconds: the longest wait.
            least: so many sites are enough when it is over; None for all.

        Raises:
            TimeoutError: fewer sites than wanted came in time; the message names the missing ones.
            ValueError: the sites' rows are not of one form. The message names the sites that differ from more than half
                of them, or else lists all forms; the sites concerned get it, and wait for another meeting.
        """
        ends = time.monotonic() + seconds
        for _ in range(2 * len(self.names)):  # frames that have arrived before
            self._next(0.0)
        connected = self.host.connected - self._here
        for name in self.names:
            if name in connected:
                with suppress(ConnectionError, TimeoutError):  # a lost site sends hello when it reconnects
                    self.host.send(name, frames.encode("who"))
        while len(self.bring) < len(self.names):
            if (left := ends - time.monotonic()) <= 0:
                if least is not None and len(self.bring) >= least:
                    break
                wanted = at_least(len(self.names) if least is None else least, len(self.names))
                raise TimeoutError(f"Expected {wanted} within {seconds:g} s, but got no {reasons(self.absent)}")
            self._next(min(left, _LOOK))
        if self._alike:
            self._check_alike()
            self.met = True

    @property
    def absent(self) -> dict[str, str]:
        """Return the sites that have not been here, and why."""
        return {name: self.troubles.get(name, "it did not connect") for name in self.names if name not in self.bring}

    def _check_alike(self) -> None:
        brings = [self.bring[name] for name in self.names]
        remedy = "bring the same fields in the same dtypes and shapes"
        without = [name for name in self.names if self.bring[name].design == ""]
        if without and any(each.design for each in brings):
            remedy = (
                f"sites that were not in the agreement make rows by its design, sites.agree(host, {without}, design), "
                "and disclose nothing of their columns for it"
            )
        elif any(each.design is not None for each in brings):
            remedy = (
                "let all of them make rows by one design, sites.agree(host, names, design); if some keep missing "
                "cells, set missing='impute' in the files of all"
            )
        try:
            check_alike("rows of one form", {name: self.bring[name].form for name in self.names}, remedy)
        except Unlike as error:
            self.turn_away(error.odd, str(error))
            raise

    def turn_away(self, names: Iterable[str], why: str) -> None:
        """Tell sites why they are in no run; they stay connected for another."""
        for name in names:
            with suppress(ConnectionError, TimeoutError):  # a lost site is told when it reconnects
                self.host.send(name, frames.encode("wait", reason=why), answers=0)

    def next_sequence(self) -> int:
        """Return a new number for a request."""
        self._sequence += 1
        return self._sequence

    def drive(self, half: Half, run: str, begin: Begin | None, ask: Ask | None = None) -> tuple[Any, Traffic]:
        """Run a half of the server, whose messages are requests; return (its result, its traffic in bytes).

        Args:
            half: the server's half; it waits for the sites of its requests all at once.
            run: identity of the run.
            begin: site -> the frame that begins the run there; None if there is none.
            ask: replaces the method `ask`, for example to keep a record.
        """
        requests, moved = dict[str, Send](), Traffic(0, 0)

        def send(step: Send) -> None:
            requests[str(step.to)] = step

        def several(wanted: Receive) -> Heard:
            nonlocal moved
            question = Question(run, begin, {name: requests.pop(name) for name in wanted.sender}, wanted)
            answers = (ask or self.ask)(question)
            moved = Traffic(moved.up + question.bytes_up, moved.down + question.bytes_down)
            return answers

        return drive(half, send, _single, several), moved

    def ask(self, question: Question) -> Heard:
        """Ask sites; return when all connected sites and at least `least` have answered, or when time is up.

        A site that reconnects is asked again; one that still works on an earlier request is asked after its answer.
        """
        wanted, waiting = question.wanted, question.waiting
        ends, frame = time.monotonic() + (math.inf if wanted.seconds is None else wanted.seconds), None
        while True:
            if frame is None:  # first, and after a wait without frames, check all sites
                question.asked &= self.host.connected
            for name in list(waiting) if frame is None else [frame.sender]:
                connected = name in waiting and name in self._here
                free = connected and name not in question.asked and name not in self._owes
                if free and self._send(name, question.run, question.begin, question.requests[name].message):
                    question.asked.add(name)
                    self._owes[name] = question.requests[name].sequence
            answered, left = len(question.heard.messages), ends - time.monotonic()
            alone = question.asked.isdisjoint(waiting)
            if (
                not waiting
                or (answered >= wanted.least and alone)
                or answered + len(waiting) < wanted.least
                or left <= 0
            ):
                break
            frame = self._next(min(left, _LOOK))
            if frame is not None:
                question.hear(frame)
        working, yet = self._owes.keys() & self.host.connected, LATE if left <= 0 else "it had not answered yet"
        gone = {name: yet if name in working else self._dropped.get(name, "it is not connected") for name in waiting}
        self._note(question.heard.missing | gone)
        return question.end(gone)

    def begin_anew(self) -> None:
        """Send the frame that begins a run with the next request to each site, whatever its stream has begun."""
        self._begun.clear()

    def is_here(self, name: str) -> bool:
        """Return whether a site is connected and has announced itself."""
        return name in self._here and name in self.host.connected

    def look(self, ends: float) -> None:
        """Process frames for a moment, until the time `ends` at the latest."""
        self._next(max(0.0, min(_LOOK, ends - time.monotonic())))

    def tell(self, name: str, run: str, begin: Callable[[str], bytes], frame: bytes) -> bool:
        """Send a frame that needs no answer; return whether the site was connected."""
        return name in self._here and self._send(name, run, begin, frame, answers=0)

    def _send(self, name: str, run: str, begin: Begin | None, request: bytes, answers: int = 1) -> bool:
        try:
            if begin is not None and self._begun.get(name) != run:
                self.host.send(name, begin(name), answers=0)
                self._begun[name] = run
            self.host.send(name, request, answers)
        except (ConnectionError, TimeoutError):
            self._forget(name)
            return False
        return True

    def _next(self, seconds: float) -> Frame | None:
        """Return the next frame of a site, None within `seconds`; a `hello` has been processed."""
        self.on_look()
        try:
            peer, payload = self.host.receive(seconds)
        except TimeoutError:
            return None
        try:
            frame = frames.read(payload, peer)
            if frame.kind == "hello" and peer not in self.names:
                _LOG.warning("site %r waits, because the run is of other sites: %s", peer, list(self.names))
                others = f"the server's run does not include {peer!r}"
                self.turn_away([peer], f"{others}; ask the server's people whether this site is to take part")
                return None
            if frame.kind == "hello" and frame.about.get("again") is True and peer in self._here:
                return None  # a repeated hello on the same stream, which changes nothing
            if frame.kind == "hello":
                if not self._greet(frame):
                    return None
            elif peer not in self._here:
                return None  # a frame to an earlier population
            elif peer in self._owes and self._owes[peer] == frame.about.get("sequence"):
                del self._owes[peer]
            else:
                self._strays[peer] += 1
                if self._strays[peer] > _MOST_STRAYS:
                    raise frame.refused("answers to requests", f"more than {_MOST_STRAYS} other frames")
        except (PayloadError, ValueError) as error:
            self._note({peer: str(error)})
            self._forget(peer)
            self._dropped[peer] = str(error)
            self.host.drop(peer, str(error))
            self.on_drop(peer, str(error))
            return None
        return frame

    def _greet(self, frame: Frame) -> bool:
        """Process a site's announcement; return whether it may take part.

        A site that was in the run with other rows waits for another run.
        """
        name = frame.sender
        self._forget(name)
        if (protocol := frame.integer("protocol")) != PROTOCOL:
            raise ValueError(
                f"Expected a site that speaks protocol {PROTOCOL}, but {name!r} speaks {protocol}; install the same "
                "version of fedtorch on both sides"
            )
        clients, rows, schema = tuple(frame.texts("clients")), tuple(frame.integers("rows")), frame.about.get("schema")
        if not clients or len(rows) != len(clients):
            raise ValueError(f"Expected clients and as many numbers of rows, but got {len(clients)} and {len(rows)}")
        frames.no_rows(schema)
        design, joined = frame.text("design") if "design" in frame.about else None, frame.about.get("joined") is True
        missing = frame.text("missing") if "missing" in frame.about else ""
        brings = Brings(clients, rows, schema, design, joined, missing)
        most = self._agreed.get(name)
        if most is not None and sum(rows) > most:
            raise ValueError(f"Expected at most {most} rows, as agreed, but {name!r} reports {sum(rows)}")
        if self.met and self.bring[name] != brings:
            why = f"Expected the clients and rows that {name!r} first reported, but got others; begin a new run"
            self._dropped[name] = why
            self._note({name: why})
            self.turn_away([name], why)
            return False
        self.bring[name] = brings
        self._here.add(name)
        self._dropped.pop(name, None)
        return True

    def _forget(self, name: str) -> None:
        self._here.discard(name)
        for known in (self._begun, self._owes, self._strays):
            known.pop(name, None)

    def _note(self, troubles: Mapping[str, str]) -> None:
        for name, why in troubles.items():
            if self.troubles.get(name) != why:
                _LOG.warning("site %r: %s", name, why)
            self.troubles[name] = why
            self.tally[name] = self.tally.get(name, Trouble()).again(why, why == LATE)

    def described(self) -> dict[str, dict[str, Any]]:
        """Return each site's connection and troubles so far, as JSON."""
        described = {}
        for name in self.names:
            here = "connected" if self.is_here(name) else self._dropped.get(name, "not connected")
            here += ", and works on an answer" * (self.is_here(name) and name in self._owes)
            described[name] = {"is": here, **self.tally.get(name, Trouble())._asdict()}
        return described


def _single(wanted: Receive) -> Any:
    raise AssertionError(f"Expected to wait for all requested sites at once, but got {wanted}")


def at_least(least: int, asked: int) -> str:
    """Return how many sites are wanted of those that are asked, in words."""
    return f"all {asked} sites" if least == asked else f"at least {least} of {asked} sites"


def reasons(missing: Mapping[str, str]) -> str:
    """Return the reasons why sites did not answer, in one line."""
    return "; ".join(f"{site!r}: {why}" for site, why in missing.items())
