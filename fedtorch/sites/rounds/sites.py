"""The sites as their server meets them: who is here, what they bring, and the driver of the server's halves.

A site may be away, come back, answer late or answer anything. The driver asks all sites of a `Receive` at once, again
where one connects anew, and goes on when as many have answered as the half says, or its time is up.
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
_LOOK = 0.25  # seconds after which it is seen that a site has gone


Begin = Callable[[str], bytes]


class Brings(NamedTuple):
    """Holds what a site has said that it brings."""

    clients: tuple[str, ...]
    rows: tuple[int, ...]  # zeros where some are left out that lack a cell, before it is known of which columns
    schema: Any  # of its rows, as JSON
    design: str | None = None  # a digest of that by which its frame's rows are made, empty before; None for no frame
    joined: bool = False  # whether clients of few rows are said to have as many as these have on average
    missing: str = ""  # what it does with missing cells of its frame: "refuse", "drop" or "impute"

    @property
    def keeps_missing(self) -> bool:
        """Return whether rows of a frame keep their missing cells, with a mask that says which they are."""
        fields = self.schema.get("fields") if isinstance(self.schema, dict) else None
        masked = isinstance(fields, list) and len(fields) == 2 and fields[1].get("dtype") == "bool"
        return self.design is not None and masked

    @property
    def form(self) -> str:
        """Return in words what rows it brings: where these differ, sites are in no run together."""
        if self.design is None:
            return f"rows like {self.schema}"
        if not self.design:
            return "a frame, of which no rows are made yet"
        cells = "kept missing cells" if self.keeps_missing else "complete rows"
        return f"{cells} by the design {self.design[:8]}"


class Question:
    """Hold what some sites are asked, and what they have answered so far.

    Args:
        run: the identity of the run.
        begin: site -> the frame that begins the run there; None where there is none.
        requests: by site, all of one number.
        wanted: how the answers are read, how many are waited for, and how long.

    Attributes:
        asked: the sites that have the request on their stream.
        waiting: the sites that have neither answered nor refused, in their order.
        heard: their answers, in the order in which they came, and why others have none.
        bytes_up: of the answers that were taken.
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
        """Take in a site's frame, if it belongs to the question."""
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
        """Return all that was heard, in the order of the sites; `gone` are those not waited for any more, and why."""
        messages, missing = self.heard
        return Heard({name: messages[name] for name in self.requests if name in messages}, {**missing, **gone})


Ask = Callable[[Question], Heard]


class Sites:
    """Some sites of a hub, in an order that is theirs for good.

    Args:
        host: over which they come.
        names: of the sites, as their certificates call them.
        agreed: how many rows a site may have at most, by name, where that was agreed.
        alike: whether all have to bring rows of one kind, as they do not before they agree on a design.

    Attributes:
        bring: what each brings, once it has been here.
        met: whether all have been here, so that what they bring stays as it is.
        troubles: the last reason why a site did not do what it was asked.
        tally: how often, and when last.
        on_look: called whenever a site is waited for, and once for each frame.
        on_drop: told of every site that is disconnected, and why.
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
        self._dropped: dict[str, str] = {}  # why sites were disconnected that have not come back
        self._begun: dict[str, str] = {}  # the run that a site's stream has begun
        self._here: set[str] = set()  # sites whose stream has said hello
        self._owes: dict[str, int] = {}  # the request that a site has not answered yet: it gets no other meanwhile
        self._strays: Counter[str] = Counter()  # frames on a site's stream that nobody asked for
        self._sequence = secrets.randbits(61)  # no number is used again, also after a restart

    def meet(self, seconds: float, least: int | None = None) -> None:
        """Wait until every site has been here; what each says last counts as long as others are waited for.

        Args:
            seconds: the longest wait.
            least: so many sites are enough when it is over; None for all.

        Raises:
            TimeoutError: some were not in time, and too many; the message names them.
            ValueError: all are here, and do not bring rows of one kind. The message names those that differ from more
                than half of them, or else says who has what; these hear it, and wait for another meeting.
        """
        ends = time.monotonic() + seconds
        for _ in range(2 * len(self.names)):  # what they have said before
            self._next(0.0)
        connected = self.host.connected - self._here
        for name in self.names:
            if name in connected:
                with suppress(ConnectionError, TimeoutError):  # it says hello when it is back
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
                f"whoever was not in the agreement makes rows by its design, sites.agree(host, {without}, design), and "
                "tells nothing of its columns for it"
            )
        elif any(each.design is not None for each in brings):
            remedy = (
                "let all of them make rows by one design, sites.agree(host, names, design); where some keep missing "
                "cells, missing='impute' in the files of all"
            )
        try:
            check_alike("rows of one form", {name: self.bring[name].form for name in self.names}, remedy)
        except Unlike as error:
            self.turn_away(error.odd, str(error))
            raise

    def turn_away(self, names: Iterable[str], why: str) -> None:
        """Tell sites that they are in no run now, and why; they stay for another."""
        for name in names:
            with suppress(ConnectionError, TimeoutError):  # it is told when it is back
                self.host.send(name, frames.encode("wait", reason=why), answers=0)

    def next_sequence(self) -> int:
        """Return a number that no other request has."""
        self._sequence += 1
        return self._sequence

    def drive(self, half: Half, run: str, begin: Begin | None, ask: Ask | None = None) -> tuple[Any, Traffic]:
        """Run a half of the server, whose messages are requests; return its result, and the bytes that it moved.

        Args:
            half: of the server; it waits for all whom it has sent something together.
            run: the identity of the run.
            begin: site -> the frame that begins the run there; None where there is none.
            ask: in the place of the method, such as one that keeps a record too.
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
        """Ask sites, and return once all that are here have answered, and `least` of them at least, or time is up.

        A site that connects anew meanwhile is asked again; one that still works on an earlier request is asked once it
        has answered that.
        """
        wanted, waiting = question.wanted, question.waiting
        ends, frame = time.monotonic() + (math.inf if wanted.seconds is None else wanted.seconds), None
        while True:
            if frame is None:  # at first, and when none came for a while, a look at all of them
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
        """Return whether a site is connected and has said what it brings."""
        return name in self._here and name in self.host.connected

    def look(self, ends: float) -> None:
        """Take in who comes, for a moment that ends at this time at the latest."""
        self._next(max(0.0, min(_LOOK, ends - time.monotonic())))

    def tell(self, name: str, run: str, begin: Callable[[str], bytes], frame: bytes) -> bool:
        """Send a frame that wants no answer, if the site is here."""
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
        """Return the next frame of one of the sites; a `hello` has been taken in."""
        self.on_look()
        try:
            peer, payload = self.host.receive(seconds)
        except TimeoutError:
            return None
        try:
            frame = frames.read(payload, peer)
            if frame.kind == "hello" and peer not in self.names:
                _LOG.warning("site %r has connected, but the run is of %s; it waits", peer, list(self.names))
                others = f"the server's run is of other sites than {peer!r}"
                self.turn_away([peer], f"{others}; ask its side whether this site is to be in it")
                return None
            if frame.kind == "hello" and frame.about.get("again") is True and peer in self._here:
                return None  # on the stream with which it came, where all stands as it stood
            if frame.kind == "hello":
                if not self._greet(frame):
                    return None
            elif peer not in self._here:
                return None  # what it said to an earlier population
            elif peer in self._owes and self._owes[peer] == frame.about.get("sequence"):
                del self._owes[peer]
            else:
                self._strays[peer] += 1
                if self._strays[peer] > _MOST_STRAYS:
                    raise frame.refused("answers to what was asked", f"{_MOST_STRAYS} frames that were none")
        except (PayloadError, ValueError) as error:
            self._note({peer: str(error)})
            self._forget(peer)
            self._dropped[peer] = str(error)
            self.host.drop(peer, str(error))
            self.on_drop(peer, str(error))
            return None
        return frame

    def _greet(self, frame: Frame) -> bool:
        """Take in what a site says that it brings; return whether it may take part.

        One that was in the run with other rows waits for another.
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
            raise ValueError(f"Expected at most {most} rows, as agreed, but {name!r} says that it has {sum(rows)}")
        if self.met and self.bring[name] != brings:
            why = f"Expected the clients and rows with which {name!r} first came, but got others; run anew"
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
        """Return of each site where it is now and its troubles so far, as JSON."""
        said = {}
        for name in self.names:
            here = "connected" if self.is_here(name) else self._dropped.get(name, "not connected")
            here += ", and works on an answer" * (self.is_here(name) and name in self._owes)
            said[name] = {"is": here, **self.tally.get(name, Trouble())._asdict()}
        return said


def _single(wanted: Receive) -> Any:
    raise AssertionError(f"Expected to hear all sites that were asked together, but got {wanted}")


def at_least(least: int, asked: int) -> str:
    """Return how many sites are wanted of those that are asked, in words."""
    return f"all {asked} sites" if least == asked else f"at least {least} of {asked} sites"


def reasons(missing: Mapping[str, str]) -> str:
    """Return why sites did not answer, by name, in a line."""
    return "; ".join(f"{site!r}: {why}" for site, why in missing.items())
