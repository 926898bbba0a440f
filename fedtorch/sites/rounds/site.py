"""Run a site: connect, say what it brings, and answer until the server says that the run is over.

A site whose connection breaks connects again; one that is killed and started anew goes on from its own files.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fedtorch import checkpoint
from fedtorch.data.bad_clients import without_rows
from fedtorch.federation.budget import Budget
from fedtorch.learns import Field
from fedtorch.protocol.halves import Half, Name, Receive, Send, drive, encode
from fedtorch.protocol.versions import alone_in
from fedtorch.sites.audit.audit import AuditRecord
from fedtorch.sites.audit.recording import SiteRecording
from fedtorch.sites.formulas.site_frame import SiteFrame, by_design, formula_of
from fedtorch.sites.identity.identity import Identity
from fedtorch.sites.rounds import frames as frames
from fedtorch.sites.rounds._behind import behind
from fedtorch.sites.rounds._consent import Ask, Consent, of_formula, of_run
from fedtorch.sites.rounds._pseudonyms import Pseudonyms
from fedtorch.sites.rounds._site_log import SHOWN, SiteLog, clients_of
from fedtorch.sites.rounds.configuration import SiteConfiguration
from fedtorch.sites.rounds.disclosed import agreement
from fedtorch.sites.rounds.frames import PROTOCOL, Frame, run_of
from fedtorch.sites.rounds.in_use import release, released
from fedtorch.sites.rounds.past_sums import PastSums
from fedtorch.sites.rounds.policy import Refusal, Watch
from fedtorch.sites.rounds.session import SiteSession, check_name
from fedtorch.sites.streams.hub import Link
from fedtorch.sites.streams.timeout import Timeout
from fedtorch.wire import PayloadError

TIMEOUT = 600.0  # seconds without a word from the server
_LONGEST = 1.0  # seconds that a site waits for its turn: one that is slow, or hangs, holds up no others for good
_LOG = logging.getLogger(__name__)


def join(
    dial: Callable[[], Link],
    configuration: SiteConfiguration,
    folder: Path | str | None = None,
    *,
    identity: Identity | None = None,
    timeout: float = TIMEOUT,
    record: AuditRecord | None = None,
    ask: Callable[[str], bool] | None = None,
) -> SiteSession:
    """Take part in what a server asks, until it says that a run is over; return the site's part in it.

    Args:
        dial: connects to the server, such as `lambda: transport.connect("server.example:9443", identity)`.
        configuration: what the site brings.
        folder: where the site keeps its clients' states, and which sums under masks it has taken part in, see
            `past_sums`; without one it cannot go on after it was killed, and refuses such sums unless its policy says
            otherwise.
        identity: of the site, with which it signs the keys of sums under masks and of sealed envelopes; without one it
            refuses them.
        timeout: the longest time without a word from the server, in seconds.
        record: what the site is asked and what it answers is appended to it; what cannot be recorded is not answered.
        ask: shows a text, of what leaves in a run or for a formula, and returns whether the site's people want that.
            Nothing is answered before; a server that waits for it has the site as late, and hears of a no.

    Raises:
        PermissionError: the server does not let the site take part, and says why.
        TimeoutError: the server was silent, or not there, for longer than the timeout.
        FileExistsError: another process works in the folder.
    """
    with alone_in(folder):
        site = Site(configuration, None if folder is None else Path(folder), identity, record, ask)
        site.log.minimum(configuration.policy, behind(site.configuration))
        with released(site.watch):
            return _join(dial, site, Timeout(timeout))


def deliver(
    configuration: SiteConfiguration, folder: Path | str, opens: bool, payloads: Sequence[bytes]
) -> tuple[list[bytes], SiteSession | None]:
    """Answer for a site whose process ends after every delivery of frames: all that it is lies in its folder.

    Args:
        configuration: what the site brings.
        folder: where the site keeps its clients' states, and the frame that began the run.
        opens: whether these are the first frames of a stream.
        payloads: frames of the server, in their order.

    Returns:
        (frames for the server, the site's part in the run if it is over now).

    Raises:
        FileExistsError: another process works in the folder.

    Example:
        >>> import tempfile, torch, fedtorch as ft
        >>> from fedtorch import wire
        >>> data = ft.data.from_tensors([(torch.eye(2), torch.ones(2))], names=["ward 7"])
        >>> averaging = lambda: ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))
        >>> configuration = SiteConfiguration(data, {"averaging": averaging})
        >>> folder = tempfile.TemporaryDirectory()
        >>> (hello,), ended = deliver(configuration, folder.name, opens=True, payloads=[])
        >>> wire.metadata(hello)["rows"], ended
        ([2], None)
        >>> folder.cleanup()
    """
    with alone_in(folder):
        site, began = Site(configuration, Path(folder)), Path(folder) / "began.safetensors"
        said = [site.hello()] if opens else []
        with released(site.watch):
            if began.exists():
                site.answer(bytes(checkpoint.read(began)["frame"].numpy()))
            for payload in payloads:
                before = site.begun
                answer = site.answer(payload)
                site.tidy()
                if answer is not None:
                    said.append(answer)
                if site.begun is not None and site.begun != before:
                    frame = torch.frombuffer(bytearray(site.begun), dtype=torch.uint8)
                    checkpoint.write(began, {"frame": frame}, private=True)
        if site.ended is not None:
            began.unlink(missing_ok=True)
        return said, site.ended


def _join(dial: Callable[[], Link], site: Site, timeout: Timeout) -> SiteSession:
    """Connect, again and again, until the site's part is over."""
    while True:
        try:
            link = dial()
            try:
                site.recording.connected()
                return drive(site.half(), partial(_say, link), partial(_next, link, site, timeout.seconds))
            finally:
                timeout.heard(link.heard)
                link.close()
        except (ConnectionError, TimeoutError) as error:
            _LOG.warning("no server, connecting again: %s", error)
            timeout.again(error)


def _next(link: Link, site: Site, seconds: float, wanted: Receive) -> bytes:
    """Return the server's next frame; where it has said that its run is without this site, however late that comes."""
    while True:
        try:
            return link.receive(seconds if wanted.seconds is None else wanted.seconds)
        except TimeoutError:
            if not site.unlisted:
                raise


def _say(link: Link, step: Send) -> None:
    """Send a frame; a server that does not take it is one that is lost."""
    try:
        link.send(encode(step))
    except TimeoutError as error:
        raise ConnectionResetError(str(error)) from error


class Site:
    """A site's side of the conversation, whatever carries it.

    Args:
        configuration: what the site brings.
        folder: where its states are kept, None for nowhere.
        identity: of the site, None where it signs nothing.
        record: what it is asked and answers, None for nowhere.
        ask: its people, see `join`; None where nobody is.

    Attributes:
        ended: the site's part in the run that is over, None before.
        begun: the frame that began the run in which it takes part, or would not.
        unlisted: whether the server has said that its run is without this site.
        log: lines about what it does.
        watch: over its policy.
    """

    def __init__(
        self,
        configuration: SiteConfiguration,
        folder: Path | None = None,
        identity: Identity | None = None,
        record: AuditRecord | None = None,
        ask: Ask | None = None,
    ) -> None:
        self.folder, self._identity = folder, identity
        self._names = Pseudonyms(identity.folder if folder is None and identity is not None else folder)
        self._past = PastSums(folder, configuration.policy.remember_sums)
        self._frame = SiteFrame(self._in_order(configuration), folder, self._in_order, self._past)
        self.configuration = self._frame.configuration
        self.watch = Watch(configuration.policy, folder, None if identity is None else identity.folder)
        self.recording, self.log = SiteRecording(record, configuration), SiteLog()
        self._recorded = self.recording.around(self._do, self._budget, self._leaves)
        self._consent = Consent(None if ask is None else partial(_while_others_work, ask), self.recording.note)
        self.ended: SiteSession | None = None
        self.begun: bytes | None = None
        self.unlisted = False
        self._session: SiteSession | None = None
        self._known: SiteSession | None = None  # the last that began, also where the server then wants something else
        self._why: str | None = None  # the last run was refused, None if none was begun

    def _in_order(self, configuration: SiteConfiguration) -> SiteConfiguration:
        """Return the configuration with the clients in an order that tells nothing of rows.

        Clients are numbered, and all that is said of each of them leaves, in one order. That of a frame is the order of
        its rows, which may be sorted by a patient's number or by an age. So clients of a frame stand in the order of
        their names, as they are told, and so do all clients of a site that tells pseudonyms. Where the policy does not
        count rows, and where a site brings clients whose names it tells, they stand as the site has them.
        """
        names = configuration.data.names
        told = self._names.told(names, _is_joined(configuration))
        if configuration.policy.minimum == 1 or (told == names and configuration.frame is None):
            return configuration
        ids = sorted(range(len(told)), key=told.__getitem__)
        held_out = None if configuration.validation is None else configuration.validation.select(ids)
        return replace(configuration, data=configuration.data.select(ids), validation=held_out)

    def hello(self, again: bool = False) -> bytes:
        """Return the first frame on every stream, which says who is here; `again` on one that has begun with it."""
        data = self.configuration.data
        schema, design = frames.described(data.rows), by_design(self.configuration)
        rows, joined = behind(self.configuration).counts_told(), _is_joined(self.configuration)
        if data.design is None and self.configuration.missing == "drop":  # else their number would be those left out
            rows = [0] * len(data)
        about = {"clients": list(self._names.told(data.names, joined)), "rows": rows, "schema": schema}
        about |= {**design, **({"joined": True} if joined else {})}
        return frames.encode("hello", protocol=PROTOCOL, **about, **({"again": True} if again else {}))

    def half(self, server: Name = 0) -> Half:
        """Say who is here, and answer the server's frames until its run is over; return the site's part in it."""
        yield Send(server, self.hello())
        self.log.connected(len(self.configuration.data), int(self.configuration.data.counts.sum()))
        while self.ended is None:
            answer = self.answer((yield Receive(server, lambda sender, payload: payload)))
            if answer is not None:
                yield Send(server, answer)
            self.tidy()
        return self.ended

    def tidy(self) -> None:
        """Forget what the server does not go back to; to be called when an answer has left."""
        if self._session is not None:
            try:
                self._session.forget()
            except OSError:
                _LOG.exception("old states could not be deleted")

    def answer(self, payload: bytes) -> bytes | None:
        """Answer a frame of the server; None for nothing."""
        sequence = 0
        try:
            frame = frames.read(payload, "the server")
            self.unlisted = frame.kind == "wait"
            if frame.kind == "wait":
                self.log.unlisted(frame.text("reason"))
                return None
            if frame.kind == "who":
                return self.hello(again=True)
            if frame.kind in ("begin", "over"):
                with TURNS.taken():
                    (self._begin if frame.kind == "begin" else self._end)(frame)
                return None
            sequence = frame.integer("sequence", 1)
            with TURNS.taken():
                return self._recorded(frame)
        except Refusal as error:
            return self._refuse(payload, sequence, str(error))
        except PayloadError as error:
            return self._refuse(payload, sequence, f"the site does not understand: {error}")
        except Exception as error:  # whatever happens here, the server hears no more of it than its kind
            _LOG.exception("this site could not answer")
            self.watch.failed()
            return self._refuse(payload, sequence, without_rows(error, "the site failed with "))

    def _begin(self, frame: Frame) -> None:
        before = self._known if self._known is not None and self._known.run == run_of(frame) else None
        if before is not None and before.goes_on_as(frame):
            self._session, self.begun = before, frame.payload
        else:
            self._session, self._why, self.begun = None, "the site could not begin", frame.payload
            versions = None if before is None else before.versions
            server: str | None = None
            try:
                server = self.recording.check_server(frame)
                if before is not None:
                    check_name(str(before.about["algorithm"]), frame.text("algorithm"))
                self.watch.check_failed()
                own = (self.folder, self._identity, self._past, versions, self._names)
                approve = partial(self._approve, frame)
                session = SiteSession(self.configuration, self.watch, frame, *own, approve=approve)
                self.recording.begin(frame, server, None)
                self._session = self._known = session
                self.log.begun(frame, session.first, len(self.configuration.data))
            except (Refusal, PayloadError) as error:
                self._why = str(error)
                _LOG.error("refused a run: %s", error)
            except Exception as error:
                self._why = f"the site could not begin: {without_rows(error)}"
                self.watch.failed()
                _LOG.exception("could not begin a run")
            release(self.watch, but=None if self._known is None else self._known.algorithm)
            if self._session is None:
                self.recording.begin(frame, server, self._why)

    def _approve(self, frame: Frame, session: SiteSession) -> None:
        """Ask the site's people about a run."""
        if self._consent.is_asked:
            clients = clients_of(frame, session.first, len(self.configuration.data))
            about = (session.run, frame.text("algorithm"), frame.names("settings"), clients)
            self._consent.to(f"the run {session.run[:SHOWN]}", of_run(*about, session.disclosed()))

    def _do(self, frame: Frame) -> bytes | None:
        if frame.kind == "agree":
            self.watch.check_failed()
            if self._consent.is_asked and (asked := formula_of(frame.names("question"))) is not None:
                self._consent.to(f"the formula {asked[0]!r}", of_formula(*asked, agreement()))
            answer = self._frame.answer(frame)
            self.configuration = self._frame.configuration
            return answer
        if self._session is None and self._why is None:
            return None  # the server has not heard this process's hello yet, and will ask again
        if self._session is None or self._session.run != run_of(frame):
            raise Refusal(self._why if self._session is None and self._why else "the site has begun another run")
        session = self._session
        within = {"keys": session.keys, "phase": session.phase}  # a round, of which the server does not know yet
        if frame.kind in within:
            return within[frame.kind](frame)
        answers: dict[str, Callable[[Frame], bytes]] = {
            "round": session.round,
            "total": session.total,
            "evaluate": session.evaluate,
            "ask": partial(session.ask, beside=self._frame.beside),
            "envelopes": session.envelopes,
        }
        if frame.kind not in answers:
            raise frame.refused(f"one of {sorted(answers)}", frame.kind)
        self.watch.check_failed()
        self.log.working()
        session.settle(frame)
        answer = answers[frame.kind](frame)
        self.log.answered(frame)
        return answer

    def _budget(self) -> Budget | None:
        """Return the budget of the algorithm that is run now."""
        return None if self._session is None else self._session.algorithm.budget

    def _leaves(self) -> list[Field]:
        """Return what leaves the site in rounds of the run that it is in."""
        return [] if self._session is None else self._session.leaves

    def _end(self, frame: Frame) -> None:
        if self._session is not None and self._session.run == run_of(frame):
            self._session.settle(frame)
            self._session.end(frame)
            self.recording.over(frame)
            self.log.over(frame)
            self.ended = self._session
            release(self.watch)

    def _refuse(self, payload: bytes, sequence: int, reason: str) -> bytes:
        _LOG.warning("refused: %s", reason)
        self.recording.refuse(payload, reason)
        return frames.encode("refusal", sequence=sequence, reason=reason[:1000])


def _is_joined(configuration: SiteConfiguration) -> bool:
    """Return whether a client has so few rows that clients are told pseudonyms and counts that are a mean."""
    rows = behind(configuration)
    return len(rows.few(rows.everybody)) > 0


class Turns:
    """Let so many threads work at once, and each of the others after a second at the latest.

    Every operation of torch lets other threads run and then waits for its turn again. Where many threads compute, each
    of these turns is a switch between threads, and all of them together take several times as long as one after the
    other. So of the sites of one process as many work at once as it has processors; the threads of the others sleep.

    >>> turns = Turns(at_once=1)
    >>> with turns.taken():
    ...     "answers"
    'answers'
    """

    def __init__(self, at_once: int) -> None:
        self._at_once, self._own = at_once, threading.local()
        self.renew()

    def renew(self) -> None:
        """Have all turns free, as in a process that was forked: the threads that work are not in it."""
        self._free = threading.Semaphore(self._at_once)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a turn, and have it until the end of the block."""
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Let others have this thread's turn until the end of the block, such as while a person thinks."""
        if not self._mine:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    @property
    def _mine(self) -> list[threading.Semaphore | None]:
        """Return the turns of this thread; None for one that it did not get in time."""
        mine: list[threading.Semaphore | None] = self._own.__dict__.setdefault("turns", [])
        return mine

    def _take(self) -> None:
        free = self._free
        self._mine.append(free if free.acquire(timeout=_LONGEST) else None)

    def _give(self) -> None:
        if (free := self._mine.pop()) is not None:
            free.release()


TURNS = Turns(os.cpu_count() or 1)  # of the sites of this process


def _while_others_work(ask: Ask, shown: str) -> bool:
    """Ask a person, and let the other sites of this process work until the answer."""
    with TURNS.given_back():
        return ask(shown)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TURNS.renew)
