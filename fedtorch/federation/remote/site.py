"""What a site runs: it connects, says what it brings, and answers until the server says that the run is over.

A site whose connection breaks connects again; one that is killed and started anew goes on from its own files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedtorch import files
from fedtorch.federation.remote import frames
from fedtorch.federation.remote.frames import PROTOCOL, Frame
from fedtorch.federation.remote.offer import Offer
from fedtorch.federation.remote.terms import Refusal, Watch
from fedtorch.federation.remote.visit import Visit, run_of
from fedtorch.transport.hub import Link
from fedtorch.wire import PayloadError

PATIENCE = 600.0  # seconds without a word from the server
_PAUSES = (0.05, 5.0)  # seconds between attempts to connect, the first and the longest
_LOG = logging.getLogger(__name__)


def join(
    dial: Callable[[], Link], offer: Offer, folder: Path | str | None = None, *, patience: float = PATIENCE
) -> Visit:
    """Takes part in what a server asks, until it says that a run is over; returns the site's part in it.

    Args:
        dial: connects to the server, such as `lambda: transport.connect("server.example:443", identity)`.
        offer: what the site brings.
        folder: where the site keeps its clients' states; without one it cannot go on after it was killed.
        patience: the longest time without a word from the server, in seconds.

    Raises:
        PermissionError: the server does not let the site take part, and says why.
        TimeoutError: the server was silent, or not there, for longer than the patience.
        FileExistsError: another process works in the folder.
    """
    if folder is None:
        return _join(dial, Site(offer), patience)
    with _alone_in(Path(folder)):
        return _join(dial, Site(offer, Path(folder)), patience)


def deliver(
    offer: Offer, folder: Path | str, opens: bool, payloads: Sequence[bytes]
) -> tuple[list[bytes], Visit | None]:
    """What a site says whose process ends after every delivery of frames: all that it is lies in its folder.

    Args:
        offer: what the site brings.
        folder: where the site keeps its clients' states, and the frame that began the run.
        opens: whether these are the first frames of a stream.
        payloads: frames of the server, in their order.

    Returns:
        (frames for the server, the site's part in the run if it is over now).

    Raises:
        FileExistsError: another process works in the folder.
    """
    with _alone_in(Path(folder)):
        site, began = Site(offer, Path(folder)), Path(folder) / "began"
        said = [site.hello()] if opens else []
        if began.exists():
            site.answer(began.read_bytes())
        for payload in payloads:
            before = site.begun
            answer = site.answer(payload)
            if answer is not None:
                said.append(answer)
            if site.begun is not None and site.begun != before:
                files.replace(began, site.begun)
        if site.ended is not None:
            began.unlink(missing_ok=True)
        return said, site.ended


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            yield
    except Timeout as error:
        raise FileExistsError(
            f"Expected a folder in which no other process takes part, but one does in {folder}; end it, or choose "
            "another folder for another site"
        ) from error


def _join(dial: Callable[[], Link], site: Site, patience: float) -> Visit:
    """Connects, again and again, until the site's part is over."""
    heard, pause = time.monotonic(), _PAUSES[0]
    while True:
        try:
            link = dial()
        except (ConnectionError, TimeoutError) as error:
            if time.monotonic() - heard > patience:
                raise TimeoutError(f"Expected a server within {patience:g} s, but got none; {error}") from error
            _LOG.info("waiting for the server: %s", error)
        else:
            try:
                _say(link, site.hello())
                while site.ended is None:
                    payload = link.receive(patience)
                    heard, pause = time.monotonic(), _PAUSES[0]
                    _say(link, site.answer(payload))
                return site.ended
            except ConnectionError as error:
                _LOG.warning("lost the server, connecting again: %s", error)
            finally:
                link.close()
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


def _say(link: Link, frame: bytes | None) -> None:
    """Sends a frame, if there is one; a server that does not take it is one that is lost."""
    try:
        if frame is not None:
            link.send(frame)
    except TimeoutError as error:
        raise ConnectionResetError(str(error)) from error


class Site:
    """A site's side of the conversation, whatever carries it.

    Args:
        offer: what the site brings.
        folder: where its states are kept, None for nowhere.

    Attributes:
        ended: the site's part in the run that is over, None before.
        begun: the frame that began the run in which it takes part, or would not.
    """

    def __init__(self, offer: Offer, folder: Path | None = None) -> None:
        self.offer, self.folder, self._watch = offer, folder, Watch(offer.terms, folder)
        self.ended: Visit | None = None
        self.begun: bytes | None = None
        self._visit: Visit | None = None
        self._why: str | None = None  # the last run was refused, None if none was begun

    def hello(self) -> bytes:
        """Who is here: the first frame on every stream."""
        data = self.offer.data
        schema = frames.described(data.rows)
        about = {"clients": list(data.names), "rows": data.counts.tolist(), "schema": schema}
        return frames.encode("hello", protocol=PROTOCOL, **about)

    def answer(self, payload: bytes) -> bytes | None:
        """What the site has to say to a frame of the server; None for nothing."""
        sequence = 0
        try:
            frame = frames.read(payload, "the server")
            if frame.kind == "who":
                return self.hello()
            if frame.kind in ("begin", "over"):
                (self._begin if frame.kind == "begin" else self._end)(frame)
                return None
            sequence = frame.integer("sequence", 1)
            return self._do(frame)
        except Refusal as error:
            return self._refuse(sequence, str(error))
        except PayloadError as error:
            return self._refuse(sequence, f"the site does not understand: {error}")
        except Exception as error:  # whatever happens here, the server hears no more of it than its kind
            _LOG.exception("this site could not answer")
            return self._refuse(sequence, f"the site failed with {type(error).__name__}; see what it says itself")

    def _begin(self, frame: Frame) -> None:
        if self._visit is None or self._visit.run != run_of(frame):
            self._visit, self._why, self.begun = None, "the site could not begin", frame.payload
            try:
                self._visit = Visit(self.offer, self._watch, frame, self.folder)
            except (Refusal, PayloadError) as error:
                self._why = str(error)
                _LOG.error("refused a run: %s", error)
            except Exception as error:
                self._why = f"the site could not begin: {type(error).__name__}; see what it says itself"
                _LOG.exception("could not begin a run")

    def _do(self, frame: Frame) -> bytes | None:
        if self._visit is None and self._why is None:
            return None  # the server has not heard this process's hello yet, and will ask again
        if self._visit is None or self._visit.run != run_of(frame):
            raise Refusal(self._why if self._visit is None and self._why else "the site has begun another run")
        answers = {"round": self._visit.round, "total": self._visit.total, "evaluate": self._visit.evaluate}
        if frame.kind not in answers:
            raise frame.refused(f"one of {sorted(answers)}", frame.kind)
        self._visit.settle(frame)
        return answers[frame.kind](frame)

    def _end(self, frame: Frame) -> None:
        if self._visit is not None and self._visit.run == run_of(frame):
            self._visit.settle(frame)
            self._visit.end(frame)
            self.ended = self._visit

    def _refuse(self, sequence: int, reason: str) -> bytes:
        _LOG.warning("refused: %s", reason)
        return frames.encode("refusal", sequence=sequence, reason=reason[:1000])
