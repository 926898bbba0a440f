"""Run a site: connect, announce its clients, and answer requests until the server ends the run.

A site reconnects when its connection breaks; one that was killed resumes from its own files.
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

TIMEOUT = 600.0  # seconds without a frame from the server
_LONGEST = 1.0  # seconds that a site waits for its turn, so that a slow or hanging site does not block the others
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
    """Answer a server's requests until it ends a run; return the site's part in the run.

    Args:
        dial: connects to the server, such as `lambda: transport.connect("server.example:9443", identity)`.
        configuration: the site's clients, algorithms and policy.
        folder: stores clients' states and the record of masked sums, see `past_sums`. Without a folder the site cannot
            resume after it was killed, and refuses masked sums unless its policy has `remember_sums=False`.
        identity: signs the site's keys for masked sums and sealed envelopes; without one the site refuses both.
        timeout: longest time without a frame from the server, in seconds.
        record: log of requests and answers; what cannot be recorded is not answered.
        ask: shows a text about what leaves in a run or for a formula, and returns whether a person at the site agrees.
            The site answers only afterwards; meanwhile a waiting server counts it as late. A refusal is sent to it.

    Raises:
        PermissionError: the server does not admit the site; the message gives its reason.
        TimeoutError: the server was silent or unreachable for longer than the timeout.
        FileExistsError: another process uses the folder.
    """
    with alone_in(folder):
        site = Site(configuration, None if folder is None else Path(folder), identity, record, ask)
        site.log.minimum(configuration.policy, behind(site.configuration))
        with released(site.watch):
            return _join(dial, site, Timeout(timeout))


def deliver(
    configuration: SiteConfiguration, folder: Path | str, opens: bool, payloads: Sequence[bytes]
) -> tuple[list[bytes], SiteSession | None]:
    """Answer frames in a process that ends after every delivery, so that all of the site's state is in its folder.

    Args:
        configuration: the site's clients, algorithms and policy.
        folder: stores clients' states and the frame that began the run.
        opens: whether these are the first frames of a stream.
        payloads: the server's frames in order.

    Returns:
        (frames for the server, the site's part in the run if that is over, else None).

    Raises:
        FileExistsError: another process uses the folder.

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
        answers = [site.hello()] if opens else []
        with released(site.watch):
            if began.exists():
                site.answer(bytes(checkpoint.read(began)["frame"].numpy()))
            for payload in payloads:
                before = site.begun
                answer = site.answer(payload)
                site.tidy()
                if answer is not None:
                    answers.append(answer)
                if site.begun is not None and site.begun != before:
                    frame = torch.frombuffer(bytearray(site.begun), dtype=torch.uint8)
                    checkpoint.write(began, {"frame": frame}, private=True)
        if site.ended is not None:
            began.unlink(missing_ok=True)
        return answers, site.ended


def _join(dial: Callable[[], Link], site: Site, timeout: Timeout) -> SiteSession:
    """Connect, and reconnect after failures, until the site's part is over."""
    while True:
        try:
            link = dial()
            try:
                site.recording.connected()
                return drive(site.half(), partial(_send, link), partial(_next, link, site, timeout.seconds))
            finally:
                timeout.heard(link.heard)
                link.close()
        except (ConnectionError, TimeoutError) as error:
            _LOG.warning("server not reachable, connecting again: %s", error)
            timeout.again(error)


def _next(link: Link, site: Site, seconds: float, wanted: Receive) -> bytes:
    """Return the server's next frame; without a time limit if the server's run does not include this site."""
    while True:
        try:
            return link.receive(seconds if wanted.seconds is None else wanted.seconds)
        except TimeoutError:
            if not site.unlisted:
                raise


def _send(link: Link, step: Send) -> None:
    """Send a frame; a timeout counts as a lost connection."""
    try:
        link.send(encode(step))
    except TimeoutError as error:
        raise ConnectionResetError(str(error)) from error


class Site:
    """A site's half of the protocol, independent of the transport.

    Args:
        configuration: the site's clients, algorithms and policy.
        folder: stores its states; None to store none.
        identity: signs the site's keys; None if it signs nothing.
        record: log of requests and answers; None for no log.
        ask: asks a person at the site, see `join`; None to ask nobody.

    Attributes:
        ended: the site's part in the finished run; None before.
        begun: the frame that began the last run, whether the site accepted or refused it.
        unlisted: whether the server's run does not include this site.
        log: log messages about the site's work.
        watch: enforces the policy.
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
        self._known: SiteSession | None = None  # last accepted session, even if the server has since begun another run
        self._why: str | None = None  # reason for refusing the last run; None if no run has been begun

    def _in_order(self, configuration: SiteConfiguration) -> SiteConfiguration:
        """Return the configuration with its clients in an order that discloses nothing about rows.

        The server numbers clients in the order in which the site lists them. In a frame this is the order of its rows,
        which may be sorted by a patient's number or age. So clients of a frame, and clients with pseudonyms, are sorted
        by the names that the server gets. The site's own order remains if the policy has a minimum of one, or if the
        site has no frame and sends its clients' own names.
        """
        names = configuration.data.names
        aliases = self._names.aliases(names, _is_joined(configuration))
        if configuration.policy.minimum == 1 or (aliases == names and configuration.frame is None):
            return configuration
        ids = sorted(range(len(aliases)), key=aliases.__getitem__)
        held_out = None if configuration.validation is None else configuration.validation.select(ids)
        return replace(configuration, data=configuration.data.select(ids), validation=held_out)

    def hello(self, again: bool = False) -> bytes:
        """Return the first frame of a stream, which announces the site; `again` repeats it on an open stream."""
        data = self.configuration.data
        schema, design = frames.described(data.rows), by_design(self.configuration)
        rows, joined = behind(self.configuration).reported_counts(), _is_joined(self.configuration)
        # A later, smaller count would disclose how many rows were left out for missing cells.
        if data.design is None and self.configuration.missing == "drop":
            rows = [0] * len(data)
        about = {"clients": list(self._names.aliases(data.names, joined)), "rows": rows, "schema": schema}
        about |= {**design, **({"joined": True} if joined else {})}
        return frames.encode("hello", protocol=PROTOCOL, **about, **({"again": True} if again else {}))

    def half(self, server: Name = 0) -> Half:
        """Announce the site, and answer the server's frames until the run is over; return the site's part in it."""
        yield Send(server, self.hello())
        self.log.connected(len(self.configuration.data), int(self.configuration.data.counts.sum()))
        while self.ended is None:
            answer = self.answer((yield Receive(server, lambda sender, payload: payload)))
            if answer is not None:
                yield Send(server, answer)
            self.tidy()
        return self.ended

    def tidy(self) -> None:
        """Delete versions of states that the server does not need any more; call this once an answer has been sent."""
        if self._session is not None:
            try:
                self._session.forget()
            except OSError:
                _LOG.exception("old states could not be deleted")

    def answer(self, payload: bytes) -> bytes | None:
        """Return the answer to a frame of the server; None if it needs no answer."""
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
        except Exception as error:  # the server gets only the error's kind, because messages may quote rows
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
                stored = (self.folder, self._identity, self._past, versions, self._names)
                approve = partial(self._approve, frame)
                session = SiteSession(self.configuration, self.watch, frame, *stored, approve=approve)
                self.recording.begin(frame, server, None)
                self._session = self._known = session
                self.log.begun(frame, session.first, len(self.configuration.data))
            except (Refusal, PayloadError) as error:
                self._why = str(error)
                _LOG.error("refused to begin a run: %s", error)
            except Exception as error:
                self._why = f"the site could not begin: {without_rows(error)}"
                self.watch.failed()
                _LOG.exception("could not begin a run")
            release(self.watch, but=None if self._known is None else self._known.algorithm)
            if self._session is None:
                self.recording.begin(frame, server, self._why)

    def _approve(self, frame: Frame, session: SiteSession) -> None:
        """Ask a person at the site about a run; raise `Refusal` if they decline."""
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
            return None  # the server has not received this process's hello yet, and will ask again
        if self._session is None or self._session.run != run_of(frame):
            raise Refusal(self._why if self._session is None and self._why else "the site has begun another run")
        session = self._session
        within = {"keys": session.keys, "phase": session.phase}  # parts of an unfinished round: no version to restore
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
        """Return the privacy budget of the current run's algorithm."""
        return None if self._session is None else self._session.algorithm.budget

    def _leaves(self) -> list[Field]:
        """Return the fields that have left the site in the current run."""
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
    """Return whether some client has too few rows, so that the server gets pseudonyms and mean row counts."""
    rows = behind(configuration)
    return len(rows.few(rows.everybody)) > 0


class Turns:
    """A semaphore for threads that compute; a thread that has waited a second goes ahead without it.

    Every operation of torch releases the interpreter's lock and takes it again. With many threads each of these is a
    switch between threads, and together they take several times as long as one after the other. So of the sites of a
    process only as many work at once as it has processors; the threads of the others sleep.

    >>> turns = Turns(at_once=1)
    >>> with turns.taken():
    ...     "answers"
    'answers'
    """

    def __init__(self, at_once: int) -> None:
        self._at_once, self._own = at_once, threading.local()
        self.renew()

    def renew(self) -> None:
        """Free all turns, for a forked process, in which the threads that hold turns do not exist."""
        self._free = threading.Semaphore(self._at_once)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a turn, and hold it until the end of the block."""
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


TURNS = Turns(os.cpu_count() or 1)  # shared by the sites of this process


def _while_others_work(ask: Ask, shown: str) -> bool:
    """Ask a person, and let the other sites of this process work until the answer."""
    with TURNS.given_back():
        return ask(shown)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TURNS.renew)
