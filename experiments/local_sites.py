"""Sites as processes of this machine: a server with an authority of its own, which enrols them on the spot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from fedtorch.sites import Hub, Roster, enrolment, identity, serve
from fedtorch.sites.enrolment import EnrolmentServer

TIMEOUT = 300.0  # seconds for processes to come up on a busy machine


def say(name: str, text: str) -> None:
    """A line of progress, in one piece though several processes write."""
    sys.stdout.write(f"[{name}] {text}\n")
    sys.stdout.flush()


class Server(NamedTuple):
    """A hub, and what invites to it."""

    folder: Path  # of the demo: the authority's, and one of each site
    hub: Hub
    enrols: int  # the port of enrolment

    def token(self, name: str) -> str:
        """What a site enrols with."""
        return str(enrolment.invite(self.folder / "authority", name, f"127.0.0.1:{self.enrols}"))


@contextmanager
def serving() -> Iterator[Server]:
    """A server in a temporary folder, on ports that are free."""
    with tempfile.TemporaryDirectory(prefix="fedtorch-") as temporary:
        folder = Path(temporary)
        own, roster = identity.make_server(folder / "authority"), Roster(folder / "roster.json")
        enrolling = EnrolmentServer(folder / "authority", "127.0.0.1:0", roster)
        try:
            hub = serve("127.0.0.1:0", own, roster)
            try:
                yield Server(folder, hub, enrolling.port)
            finally:
                hub.close()
        finally:
            enrolling.close()


@contextmanager
def processes(server: Server, module: str, names: Sequence[str], *arguments: str) -> Iterator[None]:
    """Processes of these names that call `take_part(name, folder, address, *arguments)` of a module.

    Their tokens come by standard input, where no list of processes shows them. All have to end well. One that fails
    ends this program, and whatever ends this program ends all of them.
    """
    # Imported, for server and sites compare the names of what they run, and the module that is run has another name.
    code = f"import sys, {module}; {module}.take_part(*sys.argv[1:])"
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    started: dict[str, subprocess.Popen[str]] = {}

    def check(number: int, frame: FrameType | None) -> None:
        codes = {name: site.poll() for name, site in started.items()}
        if any(codes.values()):
            raise RuntimeError(f"Expected all sites to end well, but got exit codes {codes}; see what they say")

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, do) for number, do in ((signal.SIGCHLD, check), (signal.SIGTERM, end))}
    try:
        for name in names:
            command = [sys.executable, "-c", code, name, str(server.folder), f"127.0.0.1:{server.hub.port}", *arguments]
            site = started[name] = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment)
            assert site.stdin is not None
            with site.stdin:
                site.stdin.write(f"{'' if (server.folder / name).exists() else server.token(name)}\n")
        yield
        for site in started.values():
            site.wait(TIMEOUT)
        check(0, None)
    finally:
        for number, do in before.items():
            signal.signal(number, do)
        for site in started.values():
            site.kill()
            site.wait()


def identified(folder: Path) -> Any:
    """A site's identity: by the token on standard input at first, and then the one in its folder."""
    token = sys.stdin.readline().strip()
    return enrolment.enrol(enrolment.Token.read(token), folder) if token else identity.read(folder)
